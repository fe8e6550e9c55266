"""`python -m tests.sagas.programs`: run random saga programs under faults, and compare each with the oracle.

Exit status 0: all ended as they must. 1: one did not. 2: nothing was shown, because no fault struck.
"""

from __future__ import annotations

import time
from collections import Counter
from pprint import pformat
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from tests.sagas.programs.run import Run, opened, run
from tests.search.server import databases

# The programs of a seed: 1,000,001 is the first of seed 10.
EACH = 100_000
# So many without a fault, and the faults are drawn badly.
MOST_VOID = 0.5
# Without a terminal: a line for so many programs.
LINE_EVERY = 200

command = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@command.command()
def main(
    programs: Annotated[int, typer.Option(min=1, max=EACH // 2, help="Programs in which a fault strikes.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Draws the programs and their faults.")] = 1,
    only: Annotated[
        int | None, typer.Option(help="One program, by the number that a wrong one is printed with.")
    ] = None,
) -> None:
    """Run programs until so many have been struck; print each that ends wrong, with the command that runs it again."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    counted: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    started, first = time.monotonic(), seed * EACH + 1 if only is None else only
    with databases() as (url,), opened(url) as world, Progress(console=console, transient=True) as progress:
        bar = progress.add_task("", total=1 if only is not None else programs)
        for number in range(first, first + (1 if only is not None else EACH)):
            done = run(world, number)
            counted.update(
                programs=not done.is_void, void=done.is_void, faults=len(done.struck), wrong=bool(done.wrong)
            )
            kinds.update(fault.action for fault in done.struck)
            if done.wrong or only is not None:
                _show(progress.console, done)
            described = f"{counted['faults']} faults, {counted['wrong']} wrong"
            progress.update(bar, completed=counted["programs"], description=described)
            if not console.is_terminal and (number - first + 1) % LINE_EVERY == 0:
                console.print(f"{counted['programs']} of {programs}: {described}")
            if counted["programs"] >= programs or counted["void"] > MOST_VOID * programs + 10:
                break
    console.print("faults: " + ", ".join(f"{kind} {number}" for kind, number in kinds.most_common()))
    console.print(
        f"RESULT programs={counted['programs']} faults={counted['faults']} void={counted['void']} wrong={counted['wrong']} "
        f"seed={seed} seconds={time.monotonic() - started:.0f}"
    )
    is_shown = only is not None or counted["programs"] >= programs
    raise typer.Exit(1 if counted["wrong"] else 0 if is_shown else 2)


def _show(console: Console, done: Run) -> None:
    console.print(f"{'WRONG' if done.wrong else 'right'}: make saga-programs ARGS='--only {done.seed}'", style="bold")
    console.print(f"  struck: {', '.join(map(str, done.struck)) or 'nothing'}")
    for what in done.wrong:
        console.print(f"  {what}", style="red")
    console.print(pformat(done.program, width=120))


if __name__ == "__main__":
    command()
