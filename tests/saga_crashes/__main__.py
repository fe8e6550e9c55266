"""`python -m tests.saga_crashes`: strike every consumer and saga of a process of the application at every moment.

Exit status 0: every run has come to the books of its undisturbed run. 1: one has not. 2: a moment was never reached.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from tests.saga_crashes.run import FLOWS, Kill, kills_of, opened, rounds_of, strike, undisturbed
from tests.search.server import databases

command = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@command.command()
def main(
    flow: Annotated[str, typer.Option(help=f"One of {', '.join(FLOWS)}.")] = "orders",
    only: Annotated[
        str, typer.Option("-k", help="Only what has this in branch/task:delivery/point/number/action.")
    ] = "",
) -> None:
    """Record each branch undisturbed; then strike it at each point that it has passed, and compare its books."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    if flow not in FLOWS:
        raise typer.BadParameter(f"must be one of {', '.join(FLOWS)}, got {flow}", param_hint="--flow")
    counted: Counter[str] = Counter()
    points: set[str] = set()
    met: set[Kill] = set()
    started = time.monotonic()
    with (
        databases() as (url,),
        TemporaryDirectory() as data,
        opened(url, Path(data)) as shop,
        Progress(console=console, transient=True) as progress,
    ):
        branches = _asked_for(flow, only)
        bar = progress.add_task("", total=len(branches))
        for branch in branches:
            clean = undisturbed(shop, FLOWS[flow], branch)
            for what in clean.wrong:
                counted["wrong"] += 1
                console.print(f"WRONG {branch}, undisturbed: {what}", style="red")
            kills = [kill for kill in kills_of(branch, clean.passed) if only in str(kill)]
            points |= {f"{kill.delivery.partition(':')[0]} {kill.point}" for kill in kills}
            rounds = rounds_of(kills)
            while rounds:
                struck = strike(shop, FLOWS[flow], together := rounds.pop(0), clean)
                if len(together) > 1:
                    rounds += [[kill] for kill in (together if struck.wrong else struck.missed)]
                elif struck.wrong or struck.missed:
                    _show(progress.console, flow, together[0], struck.wrong or ["was never reached"])
                    counted.update(missed=len(struck.missed))
                if struck.wrong and len(together) > 1:
                    progress.console.print(f"{len(together)} at once in {branch}: {struck.wrong}", style="yellow")
                counted.update(wrong=bool(struck.wrong), runs=1)
                met.update(kill for kill in together if kill not in struck.missed)
                progress.update(bar, description=f"{branch}, {len(rounds)} runs, {counted['wrong']} wrong")
            counted["branches"] += 1
            progress.update(bar, advance=1)
            if not console.is_terminal:
                console.print(f"{branch}: {len(kills)} kills, {counted['wrong']} wrong")
    console.print(
        f"RESULT flow={flow} branches={counted['branches']} points={len(points)} kills={len(met)} runs={counted['runs']} "
        f"wrong={counted['wrong']} seconds={time.monotonic() - started:.0f}"
    )
    raise typer.Exit(1 if counted["wrong"] else 2 if counted["missed"] or not met else 0)


def _asked_for(flow: str, only: str) -> list[str]:
    """The branches in which something may be asked for."""
    branch, slash, _ = only.partition("/")
    return [each for each in FLOWS[flow].branches if not slash or each.endswith(branch)]


def _show(console: Console, flow: str, kill: Kill, wrong: list[str]) -> None:
    console.print(f"WRONG: make saga-crashes FLOW={flow} ARGS='-k {kill}'", style="bold")
    for what in wrong:
        console.print(f"  {what}", style="red")


if __name__ == "__main__":
    command()
