"""`python -m tests.saga_deploy`: sagas that wait across a deploy, a bad one and a repaired one.

Exit status 0: each has gone the way that its code and its rows say. 1: one has not. 2: nothing was shown, because
some code never ran.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from tests.saga_deploy.application import NEW, OLD, REPAIRED
from tests.saga_deploy.run import opened, run

command = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@command.command()
def main(
    sagas: Annotated[int, typer.Option(min=40, max=100_000, help="Begun before the deploy.")] = 1000,
) -> None:
    """Begin sagas with old code, deploy new code beside it and then alone, repair it, and check every saga's path."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    started = time.monotonic()
    with opened() as (environment, database), Progress(console=console, transient=True) as progress:
        bar = progress.add_task("", total=sagas)
        said: list[str] = []

        def tell(what: str, ended: int) -> None:
            progress.update(bar, completed=ended, description=what)
            if not console.is_terminal and what not in said:
                said.append(what)
                console.print(f"{what}: {ended} sagas have ended")

        result = run(environment, database, sagas, tell)
    for each in result.wrong[:50]:
        console.print(f"WRONG {each}", style="red")
    ended = result.ended
    console.print(
        f"RESULT sagas={result.sagas} begun_later={result.begun_later} "
        f"stopped_by_mismatch={result.stopped_by_mismatch} old_code={ended[OLD]} new_code={ended[NEW]} "
        f"repaired_code={ended[REPAIRED]} wrong={len(result.wrong)} seconds={time.monotonic() - started:.0f}"
    )
    raise typer.Exit(1 if result.wrong else 0 if result.has_shown_all else 2)


if __name__ == "__main__":
    command()
