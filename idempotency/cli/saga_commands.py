"""`idempotency saga list, show, cancel, signal, retry`: sagas, for an operator.

Exit status 0: done. 1: refused or not found, with one line on stderr. 2: the command line is wrong.
"""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import Annotated, Any

import typer

from ..application import runtime_of, settings_of
from ..events import keeps
from ..framework import framework
from ..operate import saga as operate
from ..operate.change import Change
from ..store import overview as stored
from ..store import saga_reading
from ..wire.keys import OperationId
from . import timeline
from .options import (
    MAX_AGE,
    ActorOption,
    AppOption,
    JsonOption,
    KeyArgument,
    ReasonOption,
    RequestOption,
    ServiceOption,
)
from .proof import proven
from .terminal import application, check_known, errors, print_json, print_line, print_table, task_named

commands = typer.Typer()
sagas = typer.Typer(
    no_args_is_help=True, help="Operations that wait for events, call others, and are undone if they fail."
)
commands.add_typer(sagas, name="saga")


class Status(StrEnum):
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    COMPENSATING = "COMPENSATING"


TypeOption = Annotated[
    str | None, typer.Option("--type", help="The saga's type or its end after a dot, if several have the key.")
]
TenantOption = Annotated[str | None, typer.Option(help="The tenant, if several have the key.")]


@sagas.command("list")
def list_sagas(
    app: AppOption = "",
    status: Annotated[Status | None, typer.Option(case_sensitive=False, help="Only this status.")] = None,
    type: Annotated[
        str | None, typer.Option("--type", help="Only this type, by its name or the end of it after a dot.")
    ] = None,
    waits_for: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only what waits for this event, or for this task's end.")
    ] = None,
    stopped: Annotated[
        bool, typer.Option("--stopped", help="Only what goes no further without a deploy or a person.")
    ] = False,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    service: ServiceOption = None,
    older_than: Annotated[
        float | None, typer.Option(min=0, max=MAX_AGE, help="Only those begun more than this many seconds ago.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000)] = 100,
    as_json: JsonOption = False,
) -> None:
    """The newest sagas, what each waits for, and why one has stopped. Sagas that have not begun: `idempotency list`."""
    celery = application(app)
    type, settings = task_named(celery, type), settings_of(celery)
    only = saga_reading.Filter(
        service=service or settings.service,
        status=status and status.value,
        type=type,
        tenant=tenant,
        older_than=older_than,
        waits_for=waits_for,
        stopped=stopped,
    )
    with stored.monitoring_connection(settings) as connection:
        rows = saga_reading.list_sagas(connection, only, limit=limit)
    found = [_listed(row._asdict()) for row in rows]
    if not found and type is not None and not saga_like(celery, type):
        check_known(celery, type, "saga")
    if as_json:
        print_json(found)
        return
    print_table(
        "type", "key", "entity", "status", "waits for", "stopped", "created", "error",
        rows=[
            (row["type"], row["key"], row["entity_id"], row["status"], "; ".join(map(timeline.waited_for, row["waits"])),
             _stopped(row), row["created_at"], row["error"] and row["error"]["code"])
            for row in found
        ],
    )  # fmt: skip
    if not found:
        errors.print(
            f"none that has begun; what was accepted and has not: {framework().command} list --status accepted"
        )


@sagas.command("show")
def show_saga(
    key: KeyArgument,
    app: AppOption = "",
    type: TypeOption = None,
    tenant: TenantOption = None,
    mermaid: Annotated[
        bool, typer.Option("--mermaid", help="Print the timeline as a Mermaid sequence diagram.")
    ] = False,
    with_payload: Annotated[bool, typer.Option("--with-payload", help="Also results, and the data of events.")] = False,
    as_json: JsonOption = False,
) -> None:
    """One saga's timeline: what it did, called and waited for, what was undone, and what people have changed."""
    celery = application(app)
    with runtime_of(celery).autocommit() as connection:
        id = operate.find(celery, connection, key, type=type, tenant=tenant)
        shown = saga_reading.show(connection, id, with_payload=with_payload)
    shown["dropped"] = _dropped(celery, shown)
    if as_json:
        print_json(shown)
        return
    if mermaid:
        print(timeline.mermaid(shown))  # noqa: T201
        return
    print_line(f"{id.task} {id.key} (tenant {id.tenant})")
    saga = shown["saga"]
    if saga is None:
        print_line("accepted: it has not begun")
        return
    print_line(", ".join(timeline.summary(shown)))
    if shown["dropped"]:
        print_line(
            f"no module that is imported here waits for {', '.join(shown['dropped'])}: published here, it is dropped"
        )
    columns = ("time", "what", "state", "took", "details", *(["result"] if with_payload else []))
    print_table(
        *columns,
        rows=[
            (entry.at, entry.what, entry.state, entry.took, entry.details, *([entry.result] if with_payload else []))
            for entry in timeline.entries(shown)
        ],
    )


@sagas.command("cancel")
def cancel_saga(
    key: KeyArgument,
    reason: ReasonOption,
    actor: ActorOption,
    app: AppOption = "",
    type: TypeOption = None,
    tenant: TenantOption = None,
    request_id: RequestOption = None,
    as_json: JsonOption = False,
) -> None:
    """Undo a saga that has not ended; then it has failed as cancelled. One that has not begun never runs."""
    celery, id = _found(app, key, type, tenant)
    change = proven(celery, id, Change(actor, reason, request_id), action="saga cancel")
    operate.cancel_saga(celery, id, change)
    _print_change("cancelled", id, as_json, "it is undone from now on")


@sagas.command("signal")
def signal_saga(
    key: KeyArgument,
    event_type: Annotated[str, typer.Argument(metavar="TYPE", help="The event's type.")],
    reason: ReasonOption,
    actor: ActorOption,
    data: Annotated[str, typer.Option(metavar="JSON", help="The event's data; - reads them from stdin.")] = "{}",
    match: Annotated[
        str | None, typer.Option(help="Send it ahead of the wait that is compared with this. Default: the wait of now.")
    ] = None,
    app: AppOption = "",
    type: TypeOption = None,
    tenant: TenantOption = None,
    request_id: RequestOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give a saga, and no other, an event that it waits for."""
    try:
        payload = json.loads(sys.stdin.read() if data == "-" else data)
    except ValueError as error:
        raise typer.BadParameter(f"--data: must be JSON: {error}") from None
    celery, id = _found(app, key, type, tenant)
    change = proven(celery, id, Change(actor, reason, request_id), action="saga signal")
    given = operate.signal_saga(celery, id, event_type, payload, change, match=match)
    said = "it goes on" if given.is_awaited else "kept for a wait to come"
    more = {"event_type": given.event_type, "match": given.match, "event_id": given.event_id}
    _print_change("signalled", id, as_json, said, is_awaited=given.is_awaited, **more)


@sagas.command("retry")
def retry_saga(
    key: KeyArgument,
    actor: ActorOption,
    reason: Annotated[str, typer.Option(help="Why; kept in the audit table.")] = "retry",
    undone: Annotated[
        str | None, typer.Option(metavar="NAME", help="You have undone this by hand: its undo never runs again.")
    ] = None,
    app: AppOption = "",
    type: TypeOption = None,
    tenant: TenantOption = None,
    request_id: RequestOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a saga that has stopped go on now. An undo that has failed is replayed first."""
    celery, id = _found(app, key, type, tenant)
    change = proven(celery, id, Change(actor, reason, request_id), action="saga retry")
    if undone is not None:
        operate.mark_undone(celery, id, undone, change)
        _print_change("undone by hand", id, as_json, f"{undone}; it goes on", undone=undone)
        return
    retried = operate.retry_saga(celery, id, change)
    said = f"it goes on after: {', '.join(retried.waits_for)}" if retried.waits_for else "it goes on"
    replayed = list(retried.letters)
    _print_change("retried", id, as_json, said, dead_letters=replayed, waits_for=retried.waits_for)


def saga_like(app: Any, type: str) -> bool:
    """Whether the application has a saga of this type."""
    return hasattr(app.tasks.get(type), "saga_entity")


def _found(app: str, key: str, type: str | None, tenant: str | None) -> tuple[Any, OperationId]:
    celery = application(app)
    with runtime_of(celery).autocommit() as connection:
        return celery, operate.find(celery, connection, key, type=type, tenant=tenant)


def _dropped(celery: Any, shown: dict[str, Any]) -> list[str]:
    """The events that a saga waits for, and that this application would not keep for it."""
    return [
        f"{row['event_type']} {row['match']}"
        for row in shown["steps"]
        if row["kind"] == "wait"
        and row["state"] == "begun"
        and row["generation"] == shown["saga"]["generation"]
        and not keeps(celery, row["event_type"], row["match"])
    ]


def _listed(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the list, with its errors and times read."""
    errors = {name: row[name] and json.loads(row[name]) for name in ("error", "why")}
    return row | errors | {"waits": row["waits"] or []}


def _stopped(row: dict[str, Any]) -> str | None:
    return row["stopped"] and f"{row['stopped']}: {row['why']['message']}" if row["why"] else row["stopped"]


def _print_change(what: str, id: OperationId, as_json: bool, said: str, **more: Any) -> None:
    if as_json:
        print_json({"change": what, "tenant": id.tenant, "task": id.task, "key": id.key} | more)
    else:
        print_line(f"{what}: {id.task} {id.key}: {said}")
