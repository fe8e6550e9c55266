"""What the thousandth step of a saga costs beside the tenth, and what it costs to resume a saga with so many."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from rich.progress import track
from sqlalchemy import Engine, text

from idempotency.application import runtime_of

from . import jobs, saga_tasks
from .round_trips import counted

FEW, MANY = 10, 1000
# Steps around the tenth, and before the last, that are compared.
AROUND = 10
# How often each saga is resumed.
TIMES = 20
_DUE = text("UPDATE idempotency.records SET available_at = clock_timestamp() WHERE key = :key")
_numbers = itertools.count(40_000_000)


@dataclass
class Costs:
    """Milliseconds, by step or by delivery; `trips`: round trips to Postgres of one delivery that resumes."""

    tenth: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    resumed_few: list[float] = field(default_factory=list)
    resumed_many: list[float] = field(default_factory=list)
    trips: dict[int, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """The median of the last steps over that of those around the tenth."""
        return statistics.median(self.last) / statistics.median(self.tenth)


def measure(database: Engine, *, rounds: int, many: int = MANY) -> Costs:
    """Run a saga of `many` steps in each round, the first of which is a warm-up; then resume it and one of ten steps."""
    costs = Costs()
    jobs.app.finalize()
    for round_ in track(range(rounds + 1), description=f"saga_length: a saga of {many} steps"):
        number = next(_numbers)
        _deliver(number, many)
        seconds = [1e3 * second for second in saga_tasks.step_seconds]
        if round_:
            costs.tenth += seconds[FEW - AROUND // 2 : FEW + AROUND // 2]
            costs.last += seconds[-AROUND:]
    short = next(_numbers)
    _deliver(short, FEW)
    runtime = runtime_of(jobs.app)
    for _ in range(TIMES):
        for saga, steps, taken in ((short, FEW, costs.resumed_few), (number, many, costs.resumed_many)):
            _due(database, saga)
            began = time.perf_counter()
            _deliver(saga, steps)
            taken.append(1e3 * (time.perf_counter() - began))
    for saga, steps in ((short, FEW), (number, many)):
        _due(database, saga)
        with counted([runtime.engine.connect, runtime.autocommit]) as trips:
            _deliver(saga, steps)
        costs.trips[steps] = sum(trips.values())
    return costs


def _deliver(number: int, steps: int) -> Any:
    return saga_tasks.deliver(saga_tasks.long, str(number), number, steps)


def _due(database: Engine, number: int) -> None:
    with database.connect() as connection:
        connection.execute(_DUE, {"key": str(number)})
