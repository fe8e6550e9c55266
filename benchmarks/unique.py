"""The idempotent task compared with plain Celery: the same job, in turns, in one run.

All messages are in the queue before the worker starts consuming, so sending is not measured. The result is a ratio of
medians, because absolute times on shared machines say little.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass

from rich.progress import track
from sqlalchemy import Engine, text

from . import jobs

_numbers = itertools.count()


@dataclass(frozen=True)
class Throughput:
    """Jobs per second, by round."""

    plain: list[float]
    unique: list[float]

    @property
    def ratio(self) -> float:
        """The idempotent task's median over that of the plain one."""
        return statistics.median(self.unique) / statistics.median(self.plain)


def measure(database: Engine, *, rounds: int, messages: int) -> Throughput:
    """Run both in turns; the first round is a warm-up and not counted."""
    rates: dict[str, list[float]] = {"plain": [], "unique": []}
    turns = [(round_, job) for round_ in range(rounds + 1) for job in ("plain", "unique")]
    for round_, job in track(turns, description="unique: plain and ours in turns"):
        rate = _one(database, job, messages if round_ else messages // 4)
        if round_:
            rates[job].append(rate)
    return Throughput(**rates)


def _one(database: Engine, job: str, messages: int) -> float:
    task = getattr(jobs, job)
    with jobs.app.producer_pool.acquire(block=True) as producer:
        for number in itertools.islice(_numbers, messages):
            task.apply_async((number,), producer=producer)
    before = _done(database, job)
    began = time.perf_counter()
    jobs.app.control.add_consumer(job, reply=True, timeout=30, limit=1)
    deadline = began + 300
    while _done(database, job) < before + messages:
        if time.perf_counter() > deadline:
            raise TimeoutError(f"{job}: {messages} jobs were not done within 300 s")
        time.sleep(0.01)
    took = time.perf_counter() - began
    jobs.app.control.cancel_consumer(job, reply=True, timeout=30, limit=1)
    return messages / took


def _done(database: Engine, job: str) -> int:
    with database.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM jobs WHERE job = :job"), {"job": job}).scalar_one())
