"""`idempotency api-key …`: which clients may call, as which tenant, and what they may do."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from ..application import runtime_for, runtime_of
from ..operate import api_keys as operate
from ..operate.change import Change
from ..store import tenants
from .options import ActorOption, AppOption, JsonOption, TenantOption
from .terminal import application, console, errors, print_json, print_table

commands = typer.Typer()
api_keys = typer.Typer(no_args_is_help=True, help="Which clients may call, as which tenant, and what they may do.")
commands.add_typer(api_keys, name="api-key")
COLUMNS = ("id", "tenant", "name", "scopes", "created_at", "expires_at", "revoked_at")


@api_keys.command("create")
def create(
    tenant: Annotated[str, typer.Argument(help="Whose key it is.")],
    name: Annotated[str, typer.Option(help="What it is for, for people.")],
    scope: Annotated[
        list[str], typer.Option(help="What it allows, payments:write, say; repeat it for more; * is all.")
    ],
    actor: ActorOption,
    expires: Annotated[
        datetime | None,
        typer.Option(help="Until when it is valid, in UTC. Default: until it is revoked.", show_default=False),
    ] = None,
    app: AppOption = "",
    as_json: JsonOption = False,
) -> None:
    """Make an API key and print it, once."""
    with runtime_for(application(app), tenant).engine.begin() as connection:
        change = Change(actor, f"api-key create {tenant}"[:500])
        key = operate.create_api_key(connection, change, tenant, name=name, scopes=scope, expires_at=expires)
    if as_json:
        print_json(
            {"id": key.id, "tenant": tenant, "name": name, "scopes": scope, "expires_at": expires, "key": key.text}
        )
    else:
        errors.print(f"key {key.id} of {tenant}; it is shown only once:", markup=False, highlight=False)
        print(key.text)  # noqa: T201


@api_keys.command("list")
def list_keys(tenant: TenantOption = None, app: AppOption = "", as_json: JsonOption = False) -> None:
    """The API keys, including revoked and expired ones; never a secret."""
    with runtime_of(application(app)).autocommit() as connection:
        rows = [row._asdict() for row in tenants.api_keys(connection, tenant)]
    if as_json:
        print_json(rows)
    else:
        shown = ({**row, "scopes": ", ".join(row["scopes"])} for row in rows)
        print_table(*COLUMNS, rows=([row[column] for column in COLUMNS] for row in shown))


@api_keys.command("revoke")
def revoke(
    id: Annotated[str, typer.Argument(metavar="ID|KEY", help="The key's id, or the whole key.")],
    actor: ActorOption,
    app: AppOption = "",
    as_json: JsonOption = False,
) -> None:
    """Revoke an API key. Servers that remember it accept it for a few more seconds."""
    id = tenants.id_of(id) or id
    with runtime_of(application(app)).engine.begin() as connection:
        tenant = operate.revoke_api_key(connection, Change(actor, "api-key revoke"), id)
    if as_json:
        print_json({"revoked": id, "tenant": tenant})
    else:
        console.print(f"{id} of {tenant} revoked", markup=False, highlight=False)
