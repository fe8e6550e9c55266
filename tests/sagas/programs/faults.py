"""Faults, drawn from a program's seed, and where they strike: at a crash point, or between any two statements.

The hook is in the driver, below SQLAlchemy and the library's own cursor. An attempt that dies raises at once, and no
statement of it reaches the server any more; what it had not committed is rolled back, as the server does.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Engine, event
from sqlalchemy.pool import Pool

from idempotency.observe import crash_points
from idempotency.store.driver import CheckedConnection

# What an attempt meets. `kill` and `exit` end its process; `takeover`, `copy` and `cancel` happen beside it while it stands
# still; `disconnect` takes its connections; `lost` takes the answer of a statement or a commit that was carried out.
ACTIONS = {"kill": 10, "lost": 3, "takeover": 2, "copy": 2, "disconnect": 2, "exit": 1}
STATEMENT = "statement"
POINTS = (
    "claimed",
    "body.entered",
    "step.recorded",
    "step.committed",
    "effect.begun",
    "effect.called",
    "effect.recorded",
    "saga.waits",
    "saga.waiting",
    "wait.decided",
    "saga.compensating",
    "finish.written",
    "finish.committed",
    "released",
)
# A program has about so many statements.
STATEMENTS = 150


class Killed(BaseException):
    """The process of an attempt has died."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`number`: at which passing of the point, counted through the whole program."""

    action: str
    at: str
    number: int

    def __str__(self) -> str:
        return f"{self.action} at {self.at} {self.number}"


def draw(seed: int) -> list[Fault]:
    """The faults of a seed's program. Few enough that no attempts are used up."""
    drawn = random.Random(f"faults {seed}")
    faults = []
    for _ in range(drawn.randint(1, 4)):
        action = drawn.choices(list(ACTIONS), list(ACTIONS.values()))[0]
        if action == "lost" or drawn.random() < 0.5:
            faults.append(Fault(action, STATEMENT, 1 + int(STATEMENTS * drawn.random() ** 2)))
        else:
            faults.append(Fault(action, drawn.choice(POINTS), drawn.randint(1, 4)))
    faults.append(Fault(drawn.choice(("kill", "lost")), STATEMENT, drawn.randint(2, 25)))
    if drawn.random() < 0.25:
        faults.append(Fault("cancel", STATEMENT, 1 + int(STATEMENTS * drawn.random())))
    return faults


@dataclass(slots=True)
class Life:
    """The process of one attempt."""

    is_dead: bool = False
    loses_answer: bool = False
    connections: set[Any] = field(default_factory=set)  # in use


class Striking:
    """The faults of one program that have not struck, and those that have."""

    def __init__(self, faults: list[Fault], beside: Callable[[str], bool]) -> None:
        self.left, self.struck = list(faults), list[Fault]()
        self.passed: Counter[str] = Counter()
        self._beside = beside

    def reach(self, point: str) -> None:
        """The attempt has come to a point."""
        life = _life()
        if life is None or life.is_dead:
            return
        self.passed[point] += 1
        for fault in [each for each in self.left if (each.at, each.number) == (point, self.passed[point])]:
            self.left.remove(fault)
            self._strike(fault, life)

    def _strike(self, fault: Fault, life: Life) -> None:
        match fault.action:
            case "kill" | "exit":
                self.struck.append(fault)
                if fault.action == "exit":
                    raise SystemExit(0)
                life.is_dead = True
                raise Killed
            case "lost":
                life.loses_answer = True
                self.struck.append(fault)
            case "disconnect":
                if life.connections:
                    self.struck.append(fault)
                for connection in life.connections:
                    connection.die()
                    connection.close()
                life.connections.clear()
            case action:
                if self._beside(action):
                    self.struck.append(fault)


_local = threading.local()
_striking: Striking | None = None


def _life() -> Life | None:
    return getattr(_local, "life", None)


@contextmanager
def alive() -> Iterator[Life]:
    """What this thread does meanwhile is the work of one process, which may die."""
    before, _local.life = _life(), Life()
    try:
        yield _local.life
    finally:
        _local.life = before


def use(striking: Striking | None) -> None:
    """Let these faults strike."""
    global _striking
    _striking = striking


def reach(point: str) -> None:
    if _striking is not None:
        _striking.reach(point)


class _Cursor(psycopg.Cursor[Any]):
    connection: Any  # a `_Connection`

    def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
        self.connection.before_it_is_sent()
        result = super().execute(query, params, **options)
        self.connection.lose_answer()
        return result


class _Connection(CheckedConnection):
    def before_it_is_sent(self) -> None:
        if (life := _life()) is None:
            return
        life.connections.add(self)
        reach(STATEMENT)
        if life.is_dead:
            raise Killed

    def lose_answer(self) -> None:
        if (life := _life()) is None or not life.loses_answer:
            return
        life.loses_answer = False
        self.die()
        self.close()
        raise psycopg.OperationalError("server closed the connection unexpectedly")

    def die(self) -> None:
        """What the server does when the process at the other end is gone."""
        with suppress(psycopg.OperationalError):  # closed before
            super().rollback()

    def commit(self) -> None:
        if self.info.transaction_status != TransactionStatus.INTRANS:
            super().commit()
            return
        self.before_it_is_sent()
        super().commit()
        self.lose_answer()


def _connect(_dialect: Any, _record: Any, arguments: Any, options: Any) -> _Connection:
    connection = _Connection.connect(*arguments, **options)
    connection.cursor_factory = _Cursor
    connection.add_notice_handler(connection.note_warning)
    return connection


def _returned(connection: Any, _record: Any) -> None:
    if (life := _life()) is not None:
        life.connections.discard(connection)


@contextmanager
def possible() -> Iterator[None]:
    """Let faults strike every connection that SQLAlchemy opens meanwhile."""
    event.listen(Engine, "do_connect", _connect)
    event.listen(Pool, "checkin", _returned)
    crash_points.install(reach)
    try:
        yield
    finally:
        crash_points.install(None)
        event.remove(Pool, "checkin", _returned)
        event.remove(Engine, "do_connect", _connect)
