"""`idempotency alive`: for a supervisor's probe. Exit status 1: a process has stopped signing, and lives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import SettingsError
from ..upkeep.sign_file import silence
from .terminal import console

commands = typer.Typer()


@commands.command()
def alive(
    file: Annotated[Path, typer.Argument(help="What the process has as idempotency_sign_of_life_file.")],
    within: Annotated[
        float,
        typer.Option(min=1, metavar="SECONDS", help="The longest time between two signs of a process that works."),
    ] = 180.0,
) -> None:
    """Check that the process with this file still signs. Exit status 1 if it hangs; Postgres and the broker are not asked."""
    try:
        seconds = silence(file)
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror or type(error).__name__}") from None
    if seconds is None:
        console.print("no sign is expected")
        return
    console.print(f"last sign {seconds:.0f} s ago")
    if seconds > within:
        raise typer.Exit(1)
