"""What a search has explored and found: counted per pair of actors, with the shortest schedule of each kind."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table

from tests.search.exploration import KILL, Run


@dataclass(frozen=True)
class First:
    """The first schedule that showed a violation, and how many had been explored in its case by then."""

    run: Run
    after: int


@dataclass
class Tally:
    schedules: Counter[str] = field(default_factory=Counter)  # by pair
    void: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    lost: int = 0  # answers of the database
    blocked: int = 0  # steps that waited for a lock
    met: Counter[str] = field(default_factory=Counter)  # by violation
    first: dict[str, First] = field(default_factory=dict)

    def add(self, done: Run) -> None:
        kinds = done.case.kinds
        pair = "+".join(kinds) if len(kinds) == 2 else f"{len(kinds)} actors"
        self.schedules[pair] += 1
        self.void[pair] += bool(done.void)
        self.wrong[pair] += bool(done.violations)
        self.kills += sum(choice.fault == KILL for choice in done.schedule)
        self.lost += sum(
            "the answer is lost" in event.outcome for event in done.trace if "provider" not in event.action
        )
        self.blocked += sum("waits for a lock" in event.outcome for event in done.trace)
        for violation in map(str, done.violations):
            self.met[violation] += 1
            self.first.setdefault(violation, First(done, self.schedules.total()))

    def merge(self, other: Tally) -> list[First]:
        """Take over what another process has found; returns the schedules that show something new."""
        new = {other.first[each].run.name: other.first[each] for each in other.first if each not in self.first}
        for name in ("schedules", "void", "wrong", "met"):
            getattr(self, name).update(getattr(other, name))
        self.kills += other.kills
        self.lost += other.lost
        self.blocked += other.blocked
        self.first = other.first | self.first
        return list(new.values())

    def show(self, console: Console) -> None:
        table = Table("actors", "schedules", "void", "wrong", box=box.SIMPLE)
        for pair, count in self.schedules.items():
            table.add_row(pair, str(count), str(self.void[pair] or ""), str(self.wrong[pair] or ""))
        console.print(table)
        if self.first:
            table = Table("what is wrong", "schedules", "first", "after", box=box.SIMPLE)
            for violation, first in self.first.items():
                table.add_row(violation, str(self.met[violation]), first.run.name, str(first.after))
            console.print(table)

    @property
    def line(self) -> str:
        return (
            f"schedules={self.schedules.total()} void={self.void.total()} kills={self.kills} lost_answers={self.lost} blocked={self.blocked} "
            f"pairs={len(self.schedules)} violating={self.wrong.total()} kinds_of_violation={len(self.first)}"
        )


def show(console: Console, done: Run) -> None:
    """A schedule as a person reads it: who did what, in which order, and what is wrong then."""
    console.print(done.name, style="bold")
    for step, event in enumerate(done.trace):
        console.print(f"  {step:>3}  {event}")
    for violation in done.violations:
        console.print(f"  WRONG {violation}", style="red")
    if done.void:
        console.print(f"  void: {done.void}")
    console.print(f"  again: python -m tests.search --replay '{done.name}'", style="dim")
