"""What a run did and what its ledgers say: a line for programs, tables for people, an exit status for both."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.chaos.checker import Counts, Violation
from tests.chaos.monitor import Ended, explanation
from tests.chaos.plan import WEIGHTS

# Less than this, and the run has shown nothing: faults per second that took place.
PROVEN_RATE = 20 / 60
# In a short run, a fault may come when there is nothing to hit: so many kinds.
LONG, SHORT_MISSES = 120.0, 3
# Nor do all rare events come: a slow machine brings few returns of the shop as far as a person's hand in a minute.
SHORT_UNSEEN = 8
# Histories on the screen; the kept file has all of them.
SHOWN = 5


@dataclass
class Report:
    """`inflicted` and `missed` are faults by kind; `problems` are reasons why the run proves nothing.

    `struck` is what else had to happen, with how often it did. `counters` are the sums of all processes' metrics, `traffic` is what the submitter knows, `phases` are seconds,
    `ended_by_themselves` is each process that ended without having been told to.
    """

    seed: int
    seconds: float
    inflicted: Mapping[str, int]
    missed: Mapping[str, int]
    counts: Counts
    violations: list[Violation]
    problems: list[str]
    struck: Mapping[str, int] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    traffic: Mapping[str, int] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    ended_by_themselves: list[Ended] = field(default_factory=list)
    histories: dict[str, list[str]] = field(default_factory=dict)
    logs: Path | None = None
    is_cluster: bool = False
    # a control, in which promotions lose what was answered
    is_asynchronous: bool = False

    @property
    def faults(self) -> int:
        return sum(self.inflicted.values())

    @property
    def status(self) -> int:
        """0: every promise was kept; 1: one was not; 2: nothing was proved."""
        if self.violations:
            return 1
        return 2 if self.problems else 0

    @property
    def line(self) -> str:
        counts = asdict(self.counts)
        names = ("accepted", "completed", "failed", "dead", "duplicated", "takeovers", "fenced", "lost", "doubled")
        shown = {"seed": self.seed, "seconds": f"{self.seconds:g}", "faults": self.faults, "kinds": len(self.inflicted)}
        if self.is_cluster:
            shown["cluster"] = 1
        if self.is_asynchronous:
            shown["control"] = "asynchronous"
        shown |= {name: counts[name] for name in names} | {"violations": len(self.violations)}
        return "RESULT " + " ".join(f"{name}={value}" for name, value in shown.items())

    def as_json(self) -> str:
        """The run in one line, for the record of all runs."""
        return json.dumps(
            {
                "seed": self.seed,
                "seconds": self.seconds,
                "cluster": self.is_cluster,
                "control": "asynchronous" if self.is_asynchronous else None,
                "status": self.status,
                "faults": self.faults,
                "inflicted": dict(sorted(self.inflicted.items())),
                "missed": dict(sorted(self.missed.items())),
                "counts": asdict(self.counts),
                "violations": [asdict(violation) for violation in self.violations],
                "problems": self.problems,
                "struck": dict(self.struck),
                "ended": [[ended.name, ended.status, explanation(ended)] for ended in self.ended_by_themselves],
                "traffic": dict(self.traffic),
                "phases": dict(self.phases),
                "versions": dict(self.versions),
            }
        )

    def show(self, console: Console) -> None:
        """Print everything but the last line."""
        table = Table("fault", "took place", "missed", title=f"{self.faults} faults of {len(self.inflicted)} kinds")
        for kind in sorted({*self.inflicted, *self.missed}):
            table.add_row(kind, str(self.inflicted.get(kind, 0)), str(self.missed.get(kind) or ""))
        console.print(table)
        short = {
            name.removeprefix("idempotency_").removesuffix("_total"): value
            for name, value in self.counters.items()
            if value
        }
        figures_shown = (
            ("struck", self.struck),
            ("counted", short),
            ("traffic", self.traffic),
            ("seconds", self.phases),
        )
        for title, figures in figures_shown:
            console.print(f"{title}: " + ", ".join(f"{name} {value}" for name, value in figures.items()))
        for ended in self.ended_by_themselves:
            _print(console, f"{ended.name} ended by itself with status {ended.status}: {explanation(ended) or '?'}")
            if explanation(ended) is None:
                for line in ended.tail:
                    _print(console, f"  {line}")
        for problem in self.problems:
            _print(console, f"proves nothing: {problem}")
        for violation in self.violations:
            _print(console, f"VIOLATION {violation}")
        for key, history in list(self.histories.items())[:SHOWN]:
            _print(console, f"history of {key}:")
            for entry in history:
                _print(console, f"  {entry}")
        if self.logs is not None:
            lines = [str(violation) for violation in self.violations]
            for key, history in self.histories.items():
                lines += [f"history of {key}:", *(f"  {entry}" for entry in history)]
            (self.logs / "violations.txt").write_text("\n".join(lines) + "\n")
            _print(console, f"logs: {self.logs}")


def unproved(
    seconds: float,
    inflicted: Mapping[str, int],
    counts: Counts,
    struck: Mapping[str, int] | None = None,
    kinds: Collection[str] = WEIGHTS,
) -> list[str]:
    """Why a run without a violation would prove nothing: too little went wrong, or no attempt had to be held off."""
    problems = []
    if (number := sum(inflicted.values())) < seconds * PROVEN_RATE:
        problems.append(f"only {number} faults in {seconds:g} s")
    allowed, unseen = (SHORT_MISSES, SHORT_UNSEEN) if seconds < LONG else (0, 0)
    if len(never := [kind for kind in kinds if not inflicted.get(kind)]) > allowed:
        problems.append(f"never hit: {', '.join(never)}")
    if len(missing := [name for name, times in (struck or {}).items() if not times]) > unseen:
        problems.append(f"never seen: {', '.join(missing)}")
    if not counts.takeovers:
        problems.append("no takeover")
    if not counts.fenced:
        problems.append("no fenced write")
    if not counts.accepted or not counts.completed:
        problems.append(f"{counts.accepted} operations accepted, {counts.completed} completed")
    return problems


def _print(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False)
