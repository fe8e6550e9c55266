"""Latency from commit to the start of the task, compared with `delay()`, without load, in turns."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass

from rich.progress import track
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from . import jobs

_numbers = itertools.count(20_000_000)
# Seconds between messages, so that the worker and the relay are idle again.
PAUSE = 0.05


@dataclass(frozen=True)
class Latencies:
    """Seconds until the body begins."""

    direct: list[float]
    outbox: list[float]

    @property
    def ratio(self) -> float:
        """The median over that of `delay()`."""
        return statistics.median(self.outbox) / statistics.median(self.direct)


def measure(database: Engine, *, messages: int) -> Latencies:
    """Send one message at a time, by each way in turn; needs a running worker and relay."""
    latencies = Latencies([], [])
    with Session(database.execution_options(isolation_level="READ COMMITTED")) as session:
        for _ in track(range(messages), description="latency: delay() and the outbox in turns"):
            number = next(_numbers)
            began = time.time()
            jobs.timed.delay(number)
            latencies.direct.append(_started(database, number) - began)
            time.sleep(PAUSE)
            number = next(_numbers)
            jobs.timed.enqueue(session, number)
            began = time.time()
            session.commit()
            latencies.outbox.append(_started(database, number) - began)
            time.sleep(PAUSE)
    return latencies


def _started(database: Engine, number: int) -> float:
    """When the body began, by this machine's clock, which both processes use."""
    deadline = time.monotonic() + 30
    query = text("SELECT started FROM timed WHERE number = :number")
    with database.connect() as connection:
        while (started := connection.execute(query, {"number": number}).scalar_one_or_none()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError("a task did not start within 30 s")
            time.sleep(0.002)
    return float(started)
