"""`idempotency audit verify`: whether the audit is what was recorded.

Exit status 0: it is. 1: it is not, with one line on stderr. 2: the command line is wrong.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Annotated

import typer

from ..application import runtime_of
from ..store import audit as audits
from .options import AppOption, JsonOption
from .terminal import application, errors, plain, print_json, print_table

commands = typer.Typer()
audit = typer.Typer(no_args_is_help=True, help="What people have changed, and whether it is still what was recorded.")
commands.add_typer(audit, name="audit")


@audit.callback()
def _group() -> None:
    """Keeps `verify` a subcommand."""


@audit.command("verify")
def verify(
    expect: Annotated[
        str | None,
        typer.Option(metavar="ROWS:HASH", help="A head that you have kept elsewhere; it must be in the chain."),
    ] = None,
    app: AppOption = "",
    as_json: JsonOption = False,
) -> None:
    """Compute the hashes of all audit rows anew. Keep the head that it prints where the database's owner cannot write."""
    expected = None
    if expect is not None:
        if re.fullmatch(r"0:|[1-9]\d{0,17}:[0-9a-f]{64}", expect) is None:
            raise typer.BadParameter("--expect: must be a head as `audit verify` prints it: ROWS:HASH")
        rows, _, digest = expect.partition(":")
        expected = (int(rows), digest)
    with runtime_of(application(app)).autocommit() as connection:
        found = audits.verify(connection, expected)
    if as_json:
        print_json({"intact": found.why is None} | asdict(found))
    else:
        print_table("rows", "head", "intact", rows=[(found.rows, found.head, "yes" if found.why is None else "no")])
    if found.why is not None:
        where = "audit" if found.audit_id is None else f"audit row {found.audit_id}"
        errors.print(plain(f"idempotency: {where}: {found.why}"), markup=False, soft_wrap=True)
        raise typer.Exit(1)
