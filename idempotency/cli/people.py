"""`idempotency operators …`: who may discard dead letters, and who may approve it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from ..application import runtime_of
from ..operate import people as operate
from ..operate.change import Change
from ..store import people as known
from .options import AppOption, JsonOption, this_user
from .terminal import application, console, errors, operators_token, print_json, print_table

commands = typer.Typer()
people = typer.Typer(no_args_is_help=True, help="Who may discard dead letters, and who may approve it.")
commands.add_typer(people, name="operators")


class Role(StrEnum):
    OPERATOR = "operator"
    ADMIN = "admin"


@people.command("add")
def add_operator(
    name: str,
    role: Role = Role.OPERATOR,
    days: Annotated[int, typer.Option(min=1, max=366, help="How long the token is valid.")] = 90,
    app: AppOption = "",
    as_owner: Annotated[
        bool, typer.Option("--as-owner", help="Without a token, by a login that owns the library's tables.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Add an operator and print the token, once. After the first admin, only an admin may (IDEMPOTENCY_TOKEN), or the owner."""
    runtime, token = runtime_of(application(app)), operators_token()
    actor = operate.authenticate_admin(runtime, token, action="operators add", user=this_user(), as_owner=as_owner)
    with runtime.engine.begin() as connection:
        token = operate.add_operator(connection, Change(actor, f"operators add {name}"), name, role.value, days=days)
    if as_json:
        print_json({"name": name, "role": role.value, "days": days, "token": token})
    else:
        errors.print(f"{name} is {role.value} for {days} days; the token is shown only once:")
        print(token)  # noqa: T201


@people.command("list")
def list_operators(app: AppOption = "", as_json: JsonOption = False) -> None:
    """Who has a token, and until when."""
    with runtime_of(application(app)).autocommit() as connection:
        rows = [row._asdict() for row in known.operators(connection)]
    if as_json:
        print_json(rows)
    else:
        columns = ("name", "role", "expires_at", "expired", "created_at")
        print_table(*columns, rows=([row[column] for column in columns] for row in rows))


@people.command("remove")
def remove_operator(name: str, app: AppOption = "", as_json: JsonOption = False) -> None:
    """Remove an operator; their token stops working. After the first admin, only an admin may: IDEMPOTENCY_TOKEN."""
    runtime = runtime_of(application(app))
    actor = operate.authenticate_admin(runtime, operators_token(), action="operators remove", user=this_user())
    with runtime.engine.begin() as connection:
        operate.remove_operator(connection, Change(actor, f"operators remove {name}"), name)
    if as_json:
        print_json({"removed": name})
    else:
        console.print(f"{name} removed", markup=False)
