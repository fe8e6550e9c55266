"""Each point that a branch passes is struck once by a kill and once by a takeover. The points are those that an undisturbed
run has passed, and its books are what every other run has to come to.

One run strikes every delivery of a branch once, each at another point in the next run. What goes wrong is struck again
alone, to find what it was; so is what was not met, because another fault had come first.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sandbox import process
from tests.saga_crashes import orders, returns
from tests.saga_crashes.shop import KILL, TAKEOVER, StruckReturns
from tests.sagas.programs import faults
from tests.sagas.programs.faults import Fault
from tests.support import bank


@dataclass(frozen=True)
class Flow:
    """A process of the application: its branches, and what carries one out."""

    branches: tuple[str, ...]
    run: Callable[[StruckReturns, str], tuple[Any, list[str]]]


FLOWS = {
    "orders": Flow(tuple(orders.BRANCHES), orders.run),
    "returns": Flow(tuple(returns.BRANCHES), returns.run),
}


class Kill(NamedTuple):
    """One fault in one branch."""

    branch: str
    delivery: str  # a task, and the number of its delivery
    point: str
    number: int
    action: str

    @property
    def fault(self) -> Fault:
        return Fault(self.action, f"{self.delivery} {self.point}", self.number)

    def __str__(self) -> str:
        return "/".join(map(str, self))


@dataclass(frozen=True)
class Undisturbed:
    """What a branch passes, and what it comes to, when nothing happens."""

    passed: Counter[str]
    books: Any
    wrong: list[str]


def undisturbed(shop: StruckReturns, flow: Flow, branch: str, *, times: int = 2) -> Undisturbed:
    """So many runs, which have to be the same: a branch that is not the same each time shows nothing."""
    seen = []
    for _ in range(times):
        with shop.struck_by() as strike:
            books, wrong = flow.run(shop, branch)
        seen.append(Undisturbed(strike.passed, books, wrong))
    first, *others = seen
    differ = [
        f"not the same each time: {what}"
        for other in others
        for what in (*_differences(first.books, other.books), *_differences(first.passed, other.passed))
    ]
    return Undisturbed(first.passed, first.books, first.wrong + differ)


def kills_of(branch: str, passed: Counter[str]) -> list[Kill]:
    """All that can be struck in a branch."""
    return [
        Kill(branch, delivery, point, number, action)
        for (delivery, _, point), times in ((at.partition(" "), times) for at, times in passed.items())
        for number in range(1, times + 1)
        for action in (KILL, TAKEOVER)
    ]


def rounds_of(kills: list[Kill]) -> list[list[Kill]]:
    """The kills of a branch in rounds, each with at most one of a delivery, and all of one kind."""
    rounds: list[list[Kill]] = []
    for action in (KILL, TAKEOVER):
        of: dict[str, list[Kill]] = {}
        for kill in kills:
            if kill.action == action:
                of.setdefault(kill.delivery, []).append(kill)
        longest = max(map(len, of.values()), default=0)
        # from the last point on for every other one, so that neighbours do not die at the same point
        lists = [each if number % 2 else each[::-1] for number, each in enumerate(of.values())]
        rounds += [[each[number] for each in lists if number < len(each)] for number in range(longest)]
    return rounds


@dataclass(frozen=True)
class Struck:
    """What has become of a branch. `missed`: the points that it did not come to."""

    missed: list[Kill]
    wrong: list[str]


def strike(shop: StruckReturns, flow: Flow, kills: list[Kill], clean: Undisturbed) -> Struck:
    """Carry out a branch with these faults, and compare its books."""
    (branch,) = {kill.branch for kill in kills}
    with shop.struck_by(*(kill.fault for kill in kills)) as planned:
        try:
            books, wrong = flow.run(shop, branch)
            wrong = [*wrong, *_differences(clean.books, books)]
        except Exception as error:
            wrong = [f"it came to no end: {type(error).__name__}: {str(error)[:300]}"]
    return Struck([kill for kill in kills if kill.fault in planned.left], wrong)


def _differences(expected: Any, found: Any) -> list[str]:
    return [
        f"{name}: undisturbed {expected.get(name)}, now {found.get(name)}"
        for name in {**expected, **found}
        if expected.get(name) != found.get(name)
    ]


@contextmanager
def opened(database: str, directory: Path) -> Iterator[StruckReturns]:
    """The shop in an empty database, whose attempts may die, and its carrier. One at a time in a process."""
    from tests.orders.conftest import opened as opened_shop

    bank.prepare(database)
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            process.running("carrier", directory, "--faults", "hold_ms=1") as carrier,
            faults.possible(),
            pytest.MonkeyPatch.context() as patch,
            opened_shop(database, "memory://", patch, StruckReturns) as shop,
        ):
            shop.use(carrier, patch)
            yield shop
    finally:
        logging.disable(before)
