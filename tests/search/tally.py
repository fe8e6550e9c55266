"""What a search has explored and found: counted per pair of actors, with the shortest schedule of each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from rich import box
from rich.console import Console
from rich.table import Table

from tests.search.exploration import KILL, Run


@dataclass(frozen=True)
class First:
    """The first schedule that showed a violation, and how many had been explored in its case by then."""

    name: str
    after: int
    lines: tuple[str, ...]


@dataclass
class Tally:
    schedules: Counter[str] = field(default_factory=Counter)  # by pair
    void: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    killed_waiting: int = 0  # of these, while they waited for a lock
    lost: int = 0  # answers of the database
    blocked: int = 0  # steps that waited for a lock
    seconds: float = 0.0
    met: Counter[str] = field(default_factory=Counter)  # by violation
    first: dict[str, First] = field(default_factory=dict)

    def add(self, done: Run) -> None:
        kinds = done.case.kinds
        pair = "+".join(kinds) if len(kinds) == 2 else f"{len(kinds)} actors"
        self.schedules[pair] += 1
        self.void[pair] += bool(done.void)
        self.wrong[pair] += bool(done.violations)
        self.kills += sum(choice.fault == KILL for choice in done.schedule)
        self.killed_waiting += sum("KILLED while it waits" in event.action for event in done.trace)
        self.lost += sum(
            "the answer is lost" in event.outcome for event in done.trace if "provider" not in event.action
        )
        self.blocked += sum("waits for a lock" in event.outcome for event in done.trace)
        for violation in map(str, done.violations):
            self.met[violation] += 1
            if violation not in self.first:
                self.first[violation] = First(done.name, self.schedules.total(), tuple(told(done)))

    def merge(self, other: Tally) -> list[First]:
        """Take over what another process has found; returns the schedules that show something new."""
        new = {other.first[each].name: other.first[each] for each in other.first if each not in self.first}
        for name in ("schedules", "void", "wrong", "met"):
            getattr(self, name).update(getattr(other, name))
        for name in ("kills", "killed_waiting", "lost", "blocked", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first = other.first | self.first
        return list(new.values())

    def as_dict(self) -> dict[str, Any]:
        """For a line of a log."""
        return {**vars(self), "first": {violation: asdict(first) for violation, first in self.first.items()}}

    @classmethod
    def of(cls, logged: dict[str, Any]) -> Self:
        """The opposite of `as_dict`."""
        counters: dict[str, Any] = {name: Counter(logged.pop(name)) for name in ("schedules", "void", "wrong", "met")}
        first = {
            violation: First(each["name"], each["after"], tuple(each["lines"]))
            for violation, each in logged.pop("first").items()
        }
        return cls(**counters, first=first, **logged)

    def show(self, console: Console) -> None:
        table = Table("actors", "schedules", "void", "wrong", box=box.SIMPLE)
        for pair, count in self.schedules.items():
            table.add_row(pair, str(count), str(self.void[pair] or ""), str(self.wrong[pair] or ""))
        console.print(table)
        if self.first:
            table = Table("what is wrong", "schedules", "first", "after", box=box.SIMPLE)
            for violation, first in self.first.items():
                table.add_row(violation, str(self.met[violation]), first.name, str(first.after))
            console.print(table)

    @property
    def line(self) -> str:
        return (
            f"schedules={self.schedules.total()} void={self.void.total()} kills={self.kills} "
            f"killed_waiting={self.killed_waiting} lost_answers={self.lost} blocked={self.blocked} "
            f"pairs={len(self.schedules)} violating={self.wrong.total()} kinds_of_violation={len(self.first)} "
            f"explored_for={self.seconds:.0f}s"
        )


def told(done: Run) -> Iterator[str]:
    """A schedule as a person reads it: who did what, in which order, and what is wrong then."""
    yield done.name
    for step, event in enumerate(done.trace):
        yield f"  {step:>3}  {event}"
    for violation in done.violations:
        yield f"  WRONG {violation}"
    if done.void:
        yield f"  void: {done.void}"
    yield f"  again: python -m tests.search --replay '{done.name}'"
