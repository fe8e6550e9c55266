"""Contenders take turns on the same servers: A B A B ..., the order reversed in each round, after a warm-up round."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.progress import track
from sqlalchemy import Engine

from .. import jobs
from . import processor, rows, tasks
from .celery_side import CeleryTask, Workers
from .contender import Contender, Layout
from .dbos_side import Dbos
from .procrastinate_side import Procrastinate

# Numbers that no other benchmark uses: a key of ours is spent for good.
FIRST = 1_000_000_000
TIMEOUT = 300.0
# Two jiffies of the kernel's clock: reading the times of a process may round.
IDLE = 0.02

# Jobs, or calls, per second by round.
Rates = dict[str, list[float]]


class Contest:
    """The contenders of one run, each with the layout in which it was fastest."""

    def __init__(self, database: Engine, directory: Path) -> None:
        self.database = database
        self.settings: dict[str, dict[str, object]] = {}
        self._directory = directory
        self._workers = Workers(directory)
        # milliseconds of the processor for a job of each, by kind of process and round
        self.processor: dict[str, dict[str, list[float]]] = {}
        self._numbers = itertools.count(FIRST)
        self._layouts: dict[str, Layout] = {}

    def numbers(self, count: int) -> list[int]:
        """So many that were not used before."""
        return list(itertools.islice(self._numbers, count))

    def celery(self, name: str, like: str = "") -> CeleryTask:
        """One of Celery's tasks."""
        task = getattr(tasks if hasattr(tasks, name) else jobs, name)
        return CeleryTask(self._workers, task, name, like or name)

    @contextmanager
    def others(self) -> Iterator[tuple[Procrastinate, Dbos]]:
        """Those with a queue of their own in Postgres, ready to take jobs."""
        procrastinate, dbos = Procrastinate(self.database, self._directory), Dbos(self.database, self._directory)
        try:
            yield procrastinate, dbos
        finally:
            procrastinate.close()
            dbos.close()

    @contextmanager
    def started(self, *sides: Contender, messages: int) -> Iterator[None]:
        """All of them, idle, each in its fastest layout."""
        for side in sides:
            if side.like not in self._layouts:
                self._layouts[side.like] = self._fastest(
                    side if side.like == side.name else self.celery(side.like), messages
                )
        self._workers.keep([self._layouts[side.like].concurrency for side in sides if isinstance(side, CeleryTask)])
        begun: list[Contender] = []
        try:
            for side in sides:
                begun.append(side)
                side.start(self._layouts[side.like])
            yield
            rows.check_all(self.database, FIRST)
        finally:
            for side in begun:
                side.stop()

    def turn(self, side: Contender, numbers: Sequence[int], idle: Sequence[Contender] = ()) -> float:
        """Let one of them do a job for each number. Returns jobs per second, without the time to send them."""
        since = rows.mark(self.database)
        side.send(numbers)
        if rows.mark(self.database) != since:
            raise RuntimeError(f"{side.name}: jobs were done before the turn began")
        with _idle(idle):
            before, began = processor.used(), time.perf_counter()
            side.begin()
            rows.wait(self.database, since, len(numbers), TIMEOUT)
            took, after = time.perf_counter() - began, processor.used()
            side.end()
        for kind in processor.KINDS:
            spent = 1e3 * (after[kind] - before[kind]) / len(numbers)
            self.processor.setdefault(side.name, {}).setdefault(kind, []).append(spent)
        rows.check(self.database, since, side.name, numbers)
        return len(numbers) / took

    def race(self, sides: Sequence[Contender], *, rounds: int, messages: int, description: str) -> Rates:
        """Let each do so many jobs in each round, and a quarter of them to warm up, while the others are idle."""

        self.processor.clear()

        def run(side: Contender, round_: int) -> float:
            if round_ == 1:
                self.processor.pop(side.name, None)  # of the warm-up
            numbers = self.numbers(messages if round_ else max(messages // 4, 1))
            return self.turn(side, numbers, [other for other in sides if other is not side])

        return in_turns(sides, rounds, run, description)

    def close(self) -> None:
        """End all workers of Celery."""
        self._workers.keep(())

    def _fastest(self, side: Contender, messages: int) -> Layout:
        """Try the layouts, once to warm up and twice for the figure, of which other programs can only lower each."""
        best = {}
        for layout in side.layouts:
            try:
                side.start(layout)
                tries = [self.turn(side, self.numbers(max(messages // part, 1))) for part in (8, 4, 4)]
            finally:
                side.stop()
            best[layout] = max(tries[1:])
        fastest = max(best, key=lambda layout: best[layout])
        tried = "; ".join(f"{layout}: {rate:.0f} jobs/s" for layout, rate in best.items())
        print(f"{side.name}: processes x concurrency {fastest} (tried {tried})", flush=True)
        self.settings[side.name] = {
            "layout": str(fastest),
            "tried": {str(layout): round(rate, 1) for layout, rate in best.items()},
            **side.settings,
        }
        return fastest


def in_turns(
    sides: Sequence[Contender], rounds: int, run: Callable[[Contender, int], float], description: str
) -> Rates:
    """Let each take its turn in each round. `run` is given the round; 0 is the warm-up, which is not counted."""
    rates: Rates = {side.name: [] for side in sides}
    turns = [(round_, side) for round_ in range(rounds + 1) for side in (sides if round_ % 2 else sides[::-1])]
    for round_, side in track(turns, description=description):
        rate = run(side, round_)
        if round_:
            rates[side.name].append(rate)
    return rates


@contextmanager
def _idle(sides: Sequence[Contender]) -> Iterator[None]:
    """Raise `RuntimeError` if processes that should be stopped have used the processor in the meantime."""
    before = {side.name: side.processor_seconds() for side in sides}
    yield
    for side in sides:
        then, now = before[side.name], side.processor_seconds()
        if then is not None and now is not None and now - then > IDLE:
            raise RuntimeError(f"{side.name} used {now - then:.2f} s of the processor in the turn of another")
