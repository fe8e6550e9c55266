"""The options that several commands have."""

from __future__ import annotations

import getpass
import os
from typing import Annotated

import typer


def this_user() -> str:
    """The name of the user at the keyboard, or the number if the system knows no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


# Seconds: a century, which is before everything and within what Postgres knows times for.
MAX_AGE = 100 * 365 * 86400.0

AppOption = Annotated[
    str,
    typer.Option(
        "--app",
        "-A",
        envvar="CELERY_APP",
        show_default=False,
        help="The Celery application, as for celery -A; required.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
KeyArgument = Annotated[str, typer.Argument(help="The idempotency key.")]
TaskOption = Annotated[
    str | None, typer.Option(help="The task's name or its end after a dot, if several tasks have the key.")
]
TenantOption = Annotated[str | None, typer.Option(help="The tenant, if several have the key.")]
ServiceOption = Annotated[
    str | None, typer.Option(help="Those of another application in the same database. Default: this application's.")
]
ReasonOption = Annotated[str, typer.Option(help="Why; kept in the audit table.")]
ActorOption = Annotated[str, typer.Option("--as", help="Who does it.", default_factory=this_user, show_default="you")]
RequestOption = Annotated[
    str | None, typer.Option(help="A name for this change: repeated under the same one, it is made once.")
]
