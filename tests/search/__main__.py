"""`python -m tests.search`: explore the schedules of every pair of actors, and of crowds of them under seeds.

Exit status 0: no schedule broke a rule. 1: one did. 2: a wrong option, or nothing was explored.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from tests.search import exploring
from tests.search.actors import KINDS, RUNNERS
from tests.search.exploration import SCENARIOS, Case, parse_case, parse_schedule, run
from tests.search.server import databases
from tests.search.tally import Tally, told
from tests.search.world import opened

# Seeds that one process takes at a time.
SEEDS_AT_ONCE = 20

# Without a terminal: a line for so many cases.
LINE_EVERY = 25

command = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@command.command()
def main(
    pairs: Annotated[str, typer.Option(help="attempt+cancel,…; one kind: all its pairs; none: only seeds.")] = "",
    scenarios: Annotated[str, typer.Option(help=f"Some of {', '.join(SCENARIOS)}.")] = "",
    preemptions: Annotated[int, typer.Option(min=0, max=4, help="Preemptions and kills per schedule, at most.")] = 2,
    faults: Annotated[int, typer.Option(min=0, max=4, help="Of these, kills and lost answers, at most.")] = 1,
    seeds: Annotated[str, typer.Option(help="Crowds of actors under these seeds, such as 1-500.")] = "",
    most: Annotated[int | None, typer.Option(min=1, help="Schedules per pair and scenario, at most.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes, each with a database.")] = 1,
    fitting: Annotated[
        bool, typer.Option(help="Each pair in the scenario only that gives both something to do.")
    ] = False,
    log: Annotated[
        Path | None,
        typer.Option(help="A line for each case; what it holds is not explored again, so remove it after a change."),
    ] = None,
    replay: Annotated[str, typer.Option(help="One schedule, as a violation prints it.")] = "",
) -> None:
    """Search; print each kind of violation once, with its shortest schedule and the command that runs it again."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 200
    if replay:
        name, _, schedule = replay.partition("@")
        with databases() as (url,), opened(url) as world:
            done = run(world, parse_case(name), parse_schedule(schedule))
        _print(console, told(done))
        raise typer.Exit(1 if done.violations else 0)
    chosen = _known(scenarios.split(",") if scenarios else list(SCENARIOS), SCENARIOS)
    tally, started = Tally(), time.monotonic()
    logged = {line.pop("of"): line for line in map(json.loads, log.open())} if log is not None and log.exists() else {}
    for line in logged.values():
        tally.merge(Tally.of(line))
    work: dict[str, tuple[Any, ...]] = {}
    if pairs != "none":
        for case in sorted(_cases(pairs, chosen), key=_rank):
            if not fitting or case.scenario.name == _fitting(case.kinds):
                bounds = preemptions, faults, most
                work[f"{case} {','.join(map(str, bounds))}"] = (exploring.explore_case, case, *bounds)
    numbers = _numbers(seeds)
    for start in range(0, len(numbers), SEEDS_AT_ONCE):
        some = numbers[start : start + SEEDS_AT_ONCE]
        work[f"seeds {some[0]}-{some[-1]} {scenarios}"] = (exploring.explore_seeds, some, chosen)
    left = {name: each for name, each in work.items() if name not in logged}
    with databases(jobs) as urls:
        context = multiprocessing.get_context("spawn")
        waiting: Any = context.Queue()
        for url in urls:
            waiting.put(url)
        with (
            ProcessPoolExecutor(jobs, context, initializer=exploring.open_world, initargs=(waiting,)) as pool,
            Progress(console=console, transient=True) as progress,
        ):
            bar = progress.add_task("", total=len(work), completed=len(work) - len(left))
            futures = {pool.submit(*each): name for name, each in left.items()}
            for finished, future in enumerate(as_completed(futures), start=len(work) - len(left) + 1):
                found = future.result()
                if log is not None:
                    with log.open("a") as file:
                        file.write(json.dumps({"of": futures[future], **found.as_dict()}) + "\n")
                for first in tally.merge(found):
                    _print(progress.console, first.lines)
                described = f"{tally.schedules.total()} schedules, {tally.wrong.total()} wrong"
                progress.update(bar, advance=1, description=described)
                if not console.is_terminal and finished % LINE_EVERY == 0:
                    console.print(f"{finished} of {len(work)}: {described}")
    tally.show(console)
    console.print(f"RESULT {tally.line} cases={len(work)} seconds={time.monotonic() - started:.0f}")
    raise typer.Exit(2 if not tally.schedules else 1 if tally.wrong.total() else 0)


def _print(console: Console, lines: Iterable[str]) -> None:
    for n, line in enumerate(lines):
        console.print(line, style="bold" if n == 0 else "red" if line.startswith("  WRONG") else "")


# ---------------------------------------------------------------- what is asked for


def _fitting(kinds: Sequence[str]) -> str:
    """The scenario in which both have something to do."""
    if RUNNERS & set(kinds):
        return "lost"
    return "unknown" if {"replay", "resolve", "resolve_effect", "discard"} & set(kinds) else "open"


def _cases(pairs: str, scenarios: Iterable[str]) -> Iterator[Case]:
    """Every pair in every scenario that is one for it: faults of the provider need an actor that calls it."""
    wanted = [set(_known(pair.split("+"), KINDS)) for pair in pairs.split(",") if pair]
    for name in scenarios:
        scenario = SCENARIOS[name]
        for pair in itertools.combinations_with_replacement(KINDS, 2):
            if wanted and not any(set(pair) == kinds or (len(kinds) == 1 and kinds <= set(pair)) for kinds in wanted):
                continue
            if not scenario.plan or scenario.before or RUNNERS & set(pair):
                yield Case(scenario, pair)


def _rank(case: Case) -> int:
    """Those with an attempt first; last those in which the body runs in another way."""
    return 0 if "attempt" in case.kinds else 2 if RUNNERS & set(case.kinds) else 1


def _known(names: Iterable[str], known: Iterable[str]) -> list[str]:
    names = list(names)
    if unknown := sorted(set(names) - set(known)):
        raise typer.BadParameter(f"no {unknown[0]!r}; there are: {', '.join(known)}")
    return names


def _numbers(seeds: str) -> list[int]:
    if not seeds:
        return []
    first, _, last = seeds.partition("-")
    try:
        return list(range(int(first), int(last or first) + 1))
    except ValueError:
        raise typer.BadParameter(f"seeds: a number, or first-last, got {seeds!r}") from None


if __name__ == "__main__":
    command()
