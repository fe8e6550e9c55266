"""`idempotency operators …`: who may change what moves money and discard dead letters, and who may approve it."""

from __future__ import annotations

import secrets
from enum import StrEnum
from typing import Annotated, Any

import typer

from .. import identities
from ..application import runtime_of
from ..errors import IdempotencyError
from ..operate import people as operate
from ..operate.change import Change
from ..settings import Settings
from ..store import people as known
from .options import AppOption, JsonOption, this_user
from .terminal import application, console, errors, operators_token, print_json, print_table

commands = typer.Typer()
people = typer.Typer(
    no_args_is_help=True, help="Who may change what moves money and discard dead letters, and who may approve it."
)
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
        bool, typer.Option("--as-owner", help="Needed once there has been an admin: you are the owner of the tables.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Add an operator and print the token, once. By a login that owns the library's tables; no admin may, who also approves."""
    runtime = runtime_of(application(app))
    actor = operate.check_may_add(runtime, user=this_user(), as_owner=as_owner)
    with runtime.engine.begin() as connection:
        token = operate.add_operator(connection, Change(actor, f"operators add {name}"), name, role.value, days=days)
    if as_json:
        print_json({"name": name, "role": role.value, "days": days, "token": token})
    else:
        errors.print(f"{name} is {role.value} for {days} days; the token is shown only once:", markup=False)
        print(token)  # noqa: T201


@people.command("list")
def list_operators(app: AppOption = "", as_json: JsonOption = False) -> None:
    """Who has a token, and until when."""
    runtime = runtime_of(application(app))
    if identities.are_outside(runtime.settings):
        rows = _known_outside(runtime.settings)
    else:
        with runtime.autocommit() as connection:
            rows = [row._asdict() for row in known.operators(connection)]
    if as_json:
        print_json(rows)
    else:
        columns = ("name", "role", "expires_at", "expired", "created_at")
        print_table(*columns, rows=([row[column] for column in columns] for row in rows))


def _known_outside(settings: Settings) -> list[dict[str, Any]]:
    if settings.people_file is None:
        raise IdempotencyError("operators list: the company knows people, by idempotency_oidc_issuer")
    found = identities.known_people(settings.people_file)
    return [
        {"name": name, "role": person.role, "expires_at": person.until, "expired": person.is_over, "created_at": None}
        for name, person in found.items()
    ]


@people.command("token")
def make_token(as_json: JsonOption = False) -> None:
    """Print a token of your own, once, and its hash, which the owner of idempotency_people_file adds with your name."""
    token = secrets.token_urlsafe(operate.TOKEN_BYTES)
    if as_json:
        print_json({"token": token, "token_sha256": identities.token_hash(token)})
    else:
        errors.print(f'token_sha256 = "{identities.token_hash(token)}"', highlight=False, soft_wrap=True)
        print(token)  # noqa: T201


@people.command("remove")
def remove_operator(
    name: str,
    app: AppOption = "",
    as_owner: Annotated[
        bool, typer.Option("--as-owner", help="Without a token, by a login that owns the library's tables.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove an operator; their token stops working. Your token, an admin's: IDEMPOTENCY_TOKEN."""
    runtime = runtime_of(application(app))
    actor = operate.check_may_remove(runtime, operators_token(), user=this_user(), as_owner=as_owner)
    with runtime.engine.begin() as connection:
        operate.remove_operator(connection, Change(actor, f"operators remove {name}"), name)
    if as_json:
        print_json({"removed": name})
    else:
        console.print(f"{name} removed", markup=False)
