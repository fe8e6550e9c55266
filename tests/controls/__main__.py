"""`python -m tests.controls`: each safeguard is removed once, and its oracle must report it."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import services
from tests.controls.run import Outcome, run
from tests.controls.scenarios import CONTROLS, Control


def main(
    only: Annotated[
        list[str] | None, typer.Option(help=f"Which ones: {', '.join(control.name for control in CONTROLS)}")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Run every control with its safeguard and without it; exit status 1 unless each is green and then red."""
    names = {control.name for control in CONTROLS}
    if unknown := sorted(set(only or ()) - names):
        raise typer.BadParameter(f"no control {', '.join(unknown)}; there are: {', '.join(sorted(names))}")
    chosen = [control for control in CONTROLS if not only or control.name in only]
    console = Console(stderr=as_json)
    started = time.monotonic()
    outcomes: list[Outcome] = []
    problems: dict[str, list[str]] = {}
    with services.running() as servers:
        if servers.broker == "redis":
            raise typer.BadParameter("the controls need RabbitMQ: they remove what only it can do")
        for control in chosen:
            with console.status(f"{control.name}: {control.safeguard}"):
                try:
                    outcomes.append(outcome := run(servers, control))
                    problems[control.name] = outcome.problems
                except Exception as error:  # one that breaks must not hide the others
                    problems[control.name] = [f"did not get to its end: {type(error).__name__}: {error}"]
                    traceback.print_exc()
    seconds = time.monotonic() - started
    if as_json:
        typer.echo(json.dumps([_as_dict(outcome) for outcome in outcomes], indent=2))
    else:
        show(console, chosen, outcomes, problems)
    for name, found in problems.items():
        for problem in found:
            console.print(f"[red]{name}:[/] {problem}", highlight=False)
    failed = sum(bool(found) for found in problems.values())
    result = f"RESULT controls={len(chosen)} proven={len(chosen) - failed} failed={failed} seconds={seconds:.0f}"
    typer.echo(result, err=as_json)
    raise typer.Exit(1 if failed else 0)


def show(
    console: Console, chosen: Sequence[Control], outcomes: Sequence[Outcome], problems: dict[str, list[str]]
) -> None:
    """A few lines for each control: what its oracle said without its safeguard, and with it."""
    table = Table("control", "safeguard, and what its oracle says without it", "with it", "seconds", box=box.SIMPLE)
    by_name = {outcome.control.name: outcome for outcome in outcomes}
    for control in chosen:
        outcome = by_name.get(control.name)
        said = "[red]nothing[/]"
        if outcome is not None and outcome.told:
            said = f"[green]{outcome.told[0].invariant}: {escape(outcome.told[0].what)}[/]"
        table.add_row(
            control.name,
            f"{control.safeguard}\n{said}" + (f"\n[dim]also off: {control.also_off}[/]" if control.also_off else ""),
            "[green]silent[/]" if outcome is not None and not outcome.with_it else "[red]not silent[/]",
            "" if outcome is None else f"{outcome.seconds_with:.1f} + {outcome.seconds_without:.1f}",
        )
    console.print(table)


def _as_dict(outcome: Outcome) -> dict[str, Any]:
    return {
        "control": outcome.control.name,
        "oracle": outcome.control.invariant,
        "also_off": outcome.control.also_off,
        "with": [str(violation) for violation in outcome.with_it],
        "without": [str(violation) for violation in outcome.without_it],
        "seconds": {"with": round(outcome.seconds_with, 1), "without": round(outcome.seconds_without, 1)},
        "proven": not outcome.problems,
    }


if __name__ == "__main__":
    typer.run(main)
