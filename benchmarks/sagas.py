"""A saga of ten database steps beside a DBOS workflow of ten, in turns, on the same database.

Both run in threads of this process, accepted in a commit first: ours is written to the outbox and then delivered as Celery
hands a message to a thread of its pool; DBOS is called, which begins with its own commit, and with which it has its
highest throughput. So neither the relay and the broker nor DBOS's queue is measured. Both insert the same rows under the
same isolation level, each in one commit with what is recorded of the step.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rich.progress import track
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from idempotency.application import close_runtime, runtime_of

from . import jobs, saga_dbos, saga_tasks

THREADS = 4
_numbers = itertools.count(30_000_000)


@dataclass(frozen=True)
class Rates:
    """Sagas per second, by round."""

    ours: list[float] = field(default_factory=list)
    dbos: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Our median over that of DBOS."""
        return statistics.median(self.ours) / statistics.median(self.dbos)


def measure(database: Engine, *, rounds: int, sagas: int) -> Rates:
    """Run `sagas` each way in each round; the first round is a warm-up and not counted."""
    rates = Rates()
    jobs.app.finalize()
    address = database.url.render_as_string(hide_password=False)
    with saga_dbos.launched(address) as workflow, ThreadPoolExecutor(THREADS) as pool:
        sides = [(_saga, rates.ours, "saga"), (workflow, rates.dbos, "dbos")]
        for round_ in track(range(rounds + 1), description="sagas: ours and DBOS in turns"):
            for run, of_side, job in sides if round_ % 2 else reversed(sides):
                rate = _one(database, pool, run, job, sagas)
                if round_:
                    of_side.append(rate)
    close_runtime(jobs.app)
    with database.connect() as connection:
        connection.execute(
            text("DELETE FROM idempotency.outbox WHERE task = :task"), {"task": saga_tasks.ten_steps.name}
        )
    return rates


def _one(database: Engine, pool: ThreadPoolExecutor, run: Callable[[int], Any], job: str, sagas: int) -> float:
    numbers = list(itertools.islice(_numbers, sagas))
    began = time.perf_counter()
    results = list(pool.map(run, numbers))
    took = time.perf_counter() - began
    with database.connect() as connection:
        count = text("SELECT count(*) FROM jobs WHERE job = :job AND number BETWEEN :first AND :last")
        rows = connection.execute(count, {"job": job, "first": numbers[0], "last": numbers[-1]}).scalar_one()
    if (results, rows) != (numbers, sagas * saga_tasks.STEPS):
        raise RuntimeError(f"{job}: {rows} rows of {sagas} sagas, each of which has {saga_tasks.STEPS} steps")
    return sagas / took


def _saga(number: int) -> Any:
    task = saga_tasks.ten_steps
    with Session(runtime_of(task.app).engine) as session, session.begin():
        task.enqueue(session, number)
    return saga_tasks.deliver(task, str(number), number)
