"""`python -m tests.search`: explore the schedules of pairs of actors, and of all of them under seeds.

Exit status 0: no schedule broke a rule. 1: one did. 2: a wrong option, or nothing was explored.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.search.actors import KINDS
from tests.search.exploration import SCENARIOS, Case, Run, exhaustive, parse_schedule, run, under_seed
from tests.search.server import database
from tests.search.world import World, opened

# Who acts under a seed: two attempts, and some of the others.
CROWD = 4


@dataclass
class Tally:
    """What has been explored so far."""

    schedules: int = 0
    void: int = 0
    wrong: int = 0
    kills: int = 0
    by_case: Counter[str] = field(default_factory=Counter)
    wrong_by_pair: Counter[str] = field(default_factory=Counter)
    first: dict[str, tuple[Run, int]] = field(default_factory=dict)  # by what is wrong: its shortest schedule
    met: Counter[str] = field(default_factory=Counter)

    def add(self, done: Run) -> list[str]:
        """Count a run; returns what it is the first to show."""
        self.schedules += 1
        self.void += bool(done.void)
        self.wrong += bool(done.violations)
        self.kills += sum(choice.kill for choice in done.schedule)
        self.by_case["+".join(done.case.kinds)] += 1
        self.wrong_by_pair["+".join(done.case.kinds)] += bool(done.violations)
        new = []
        for violation in map(str, done.violations):
            self.met[violation] += 1
            if violation not in self.first:
                self.first[violation] = done, self.schedules
                new.append(violation)
        return new


def main(
    pairs: Annotated[str, typer.Option(help="Pairs such as attempt+cancel, comma-separated; a kind alone: its pairs.")] = "",
    scenarios: Annotated[str, typer.Option(help=f"Some of: {', '.join(SCENARIOS)}")] = "",
    preemptions: Annotated[int, typer.Option(min=0, max=4, help="Preemptions and kills in one schedule, at most.")] = 2,
    seeds: Annotated[str, typer.Option(help="Seeds of everybody together, such as 1-500; empty: none.")] = "",
    most: Annotated[int | None, typer.Option(help="Schedules per pair and scenario, at most.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Stop after so long.")] = None,
    replay: Annotated[str, typer.Option(help="One schedule, as a violation prints it.")] = "",
) -> None:
    """Search, and print each kind of violation with its shortest schedule and the command that replays it."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.width = max(console.width, 160)
    chosen = _named(scenarios.split(",") if scenarios else list(SCENARIOS), SCENARIOS)
    cases = [] if pairs == "none" else list(_cases(pairs, chosen))
    tally, started = Tally(), time.monotonic()
    with database() as url, opened(url) as world:
        if replay:
            case, _, schedule = replay.partition("@")
            name, _, kinds = case.partition("/")
            done = run(world, Case(SCENARIOS[name], kinds.split("+")), parse_schedule(schedule))
            _show(console, done)
            raise typer.Exit(1 if done.violations else 0)
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("", total=None)
            for done in _runs(world, cases, chosen, seeds, preemptions, most):
                for _ in tally.add(done):
                    progress.console.print(f"\n[{tally.schedules}] ", end="")
                    _show(progress.console, done)
                    break
                progress.update(bar, advance=1, description=f"{done.case} {tally.wrong} wrong")
                if seconds is not None and time.monotonic() - started > seconds:
                    break
    _summary(console, tally)
    console.print(
        f"RESULT schedules={tally.schedules} void={tally.void} kills={tally.kills} violating={tally.wrong} "
        f"kinds_of_violation={len(tally.first)} cases={len(cases)} seconds={time.monotonic() - started:.0f}"
    )
    raise typer.Exit(2 if not tally.schedules else 1 if tally.wrong else 0)


def _cases(pairs: str, scenarios: Iterable[str]) -> Iterator[Case]:
    every = list(itertools.combinations_with_replacement(KINDS, 2))
    wanted = [set(pair.split("+")) for pair in pairs.split(",") if pair]
    for kinds in wanted:
        _named(kinds, KINDS)
    for name in scenarios:
        for pair in every:
            if not wanted or any(set(pair) == kinds or (len(kinds) == 1 and kinds <= set(pair)) for kinds in wanted):
                yield Case(SCENARIOS[name], pair)


def _runs(
    world: World, cases: Iterable[Case], scenarios: list[str], seeds: str, preemptions: int, most: int | None
) -> Iterator[Run]:
    for case in cases:
        yield from exhaustive(world, case, preemptions=preemptions, most=most)
    first, _, last = seeds.partition("-")
    for seed in range(int(first), int(last or first) + 1) if seeds else ():
        yield under_seed(world, scenarios, seed, CROWD)


def _named(names: Iterable[str], known: Iterable[str]) -> list[str]:
    names = list(names)
    if unknown := sorted(set(names) - set(known)):
        raise typer.BadParameter(f"no {unknown[0]!r}; there are: {', '.join(known)}")
    return names


def _show(console: Console, done: Run) -> None:
    console.print(done.name)
    for step, event in enumerate(done.trace):
        console.print(f"  {step:>3} {event}")
    for violation in done.violations:
        console.print(f"  WRONG {violation}", style="red")
    if done.void:
        console.print(f"  void: {done.void}")
    console.print(f"  replay: python -m tests.search --replay '{done.name}'")


def _summary(console: Console, tally: Tally) -> None:
    table = Table("actors", "schedules", "wrong", box=box.SIMPLE)
    for pair, count in tally.by_case.items():
        table.add_row(pair, str(count), str(tally.wrong_by_pair[pair] or ""))
    console.print(table)
    table = Table("what is wrong", "schedules", "first", "found as", box=box.SIMPLE)
    for violation, (done, after) in tally.first.items():
        table.add_row(violation, str(tally.met[violation]), done.name, f"schedule {after}")
    console.print(table)


if __name__ == "__main__":
    application = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    application.command()(main)
    application()
