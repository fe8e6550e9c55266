"""`python -m tests.rollout`: a release to running processes, one zone at a time, a bad one, and the way back.

Exit status 0: nothing was lost, doubled, or under way for longer than a lease. 1: something was, or a release never came to
work. 2: nothing was shown, because some code never ended anything. 3: this machine or this clone lacks what the run needs. A
control ends with 0 if what it brings about was seen, else with 2.
"""

from __future__ import annotations

import signal
import time
from typing import Annotated, Literal, NoReturn

import typer
from rich.console import Console

from idempotency.store import schema
from services import ServiceError
from tests.rollout.releases import NoHistory
from tests.rollout.run import NotReady, Options, run, shown

command = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
Control = Literal["delayed", "lost"]
# Of violations and of delayed operations, on the screen.
SHOWN = 50


@command.command()
def main(
    since: Annotated[
        str, typer.Option("--from", help="A commit, or a revision of the schema: the last commit that had it.")
    ] = schema.OLDEST_SCHEMA,
    seed: int = 1,
    rate: Annotated[float, typer.Option(min=0.1, max=1000, help="Accepted operations per second.")] = 10.0,
    lease: Annotated[float, typer.Option(min=5, max=600, help="Seconds; the default is the library's.")] = 60.0,
    seconds: Annotated[float, typer.Option(min=1, max=600, help="How long each part goes on under load.")] = 8.0,
    control: Annotated[
        Control | None,
        typer.Option(
            help="delayed: workers die, and are away for longer than a lease. lost: a release deletes what waits to be published."
        ),
    ] = None,
) -> None:
    """Run older code, migrate, deploy the newest code and a bad one, go back, and check every operation."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    # However this process is asked to end, everything it started ends with it.
    signal.signal(signal.SIGTERM, _interrupt)
    started = time.monotonic()
    try:
        result = run(Options(since, seed, rate, lease, seconds, control or ""), console)
    except NotReady as error:
        Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(f"rollout: {error}")
        raise typer.Exit(1) from None
    except (NoHistory, ServiceError, TimeoutError) as error:
        Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(f"rollout: {error}")
        raise typer.Exit(3) from None
    for title, text in shown(result).items():
        console.print(f"{title}: {text}")
    for each in result.delayed[:SHOWN]:
        console.print(f"DELAYED {each}")
    for violation in result.violations[:SHOWN]:
        console.print(f"VIOLATION {violation}")
    for problem in result.problems:
        console.print(f"proves nothing: {problem}")
    if result.logs is not None:
        console.print(f"logs: {result.logs}")
    console.print(result.line(time.monotonic() - started))
    raise typer.Exit(result.status)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    command()
