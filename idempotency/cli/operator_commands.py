"""`idempotency status, list, show, release, cancel, forget, effects resolve`: an operator's view and hands.

Exit status 0: done. 1: refused or not found, with one line on stderr. 2: the command line is wrong.
"""

from __future__ import annotations

import getpass
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.bar import Bar

from ..application import runtime_of, settings_of
from ..attempt.effects import DidNotHappen, Happened
from ..errors import ChangeRefused
from ..operate import operators
from ..operate.operators import Change, Shown
from ..store import dead_letters, operations, processes
from ..store import overview as stored
from ..upkeep import overview
from .terminal import AppOption, JsonOption, application, console, plain, print_json, print_table

commands = typer.Typer()
effects = typer.Typer(no_args_is_help=True, help="Calls outside whose outcome only a person can find out.")
commands.add_typer(effects, name="effects")


class Status(StrEnum):
    ACCEPTED = "accepted"
    STARTED = "started"
    RELEASED = "released"
    COMPLETED = "completed"
    FAILED = "failed"


def this_user() -> str:
    """The name of the user at the keyboard, or the number where the system knows no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


KeyArgument = Annotated[str, typer.Argument(help="The idempotency key.")]
TaskOption = Annotated[
    str | None, typer.Option(help="The task's name or its end after a dot, where several have the key.")
]
TenantOption = Annotated[str | None, typer.Option(help="The tenant, where several have the key.")]
ReasonOption = Annotated[str, typer.Option(help="Why; kept in the audit table.")]
ActorOption = Annotated[str, typer.Option("--as", help="Who does it.", default_factory=this_user, show_default="you")]
FenceOption = Annotated[int | None, typer.Option(help="Only if the record still has the fence that `show` printed.")]
RequestOption = Annotated[
    str | None, typer.Option(help="A name for this change: repeated under the same one, it is made once.")
]
WithoutTaskOption = Annotated[
    bool, typer.Option("--without-task", help="Also when the application has no such task: no undo, no on_failed.")
]


@commands.command("status")
def print_status(app: AppOption = "tasks", as_json: JsonOption = False) -> None:
    """What waits in which queue, who works on it, how many operations are where, and what is getting old."""
    celery = application(app)
    given = settings_of(celery)
    with stored.monitoring_connection(given) as connection:
        seen = overview.status(connection, celery, given)
    if as_json:
        print_json(seen)
        return
    print_table(
        "queue", "accepted, not begun", "in the broker", "running", "released",
        rows=[(name, *_queue_cells(queue)) for name, queue in seen["queues"].items()],
    )  # fmt: skip
    if not seen["broker_answered"]:
        console.print("the broker does not answer: ready and consumers are unknown")
    if seen["outbox"]["due"] and not seen["relay_is_running"]:
        waiting = f"rows due: {seen['outbox']['due']:,}, for {_age(seen['outbox']['oldest_due_seconds'])}"
        console.print(f"no relay is running; {waiting}; start `idempotency relay`", soft_wrap=True)
    if seen["processes"]:
        print_table(
            "process", "name", "host", "last sign", "queues", "version",
            rows=[
                (row["kind"], row["name"], f"{row['host']} {row['pid']}",
                 f"{_age(row['silent_seconds'])} ago{', silent' if row['is_silent'] else ''}",
                 ", ".join(row["queues"]), row["version"])
                for row in seen["processes"]
            ],
        )  # fmt: skip
    most = max((n for by_status in seen["operations"].values() for n in by_status.values()), default=1)
    about = "about " if seen["operations_are_estimated"] else ""
    print_table(
        "task", "status", "operations", "",
        rows=[
            (name, status, f"{about if status in ('completed', 'failed') else ''}{count}", Bar(most, 0, count, width=24))
            for name, by_status in seen["operations"].items()
            for status, count in by_status.items()
        ],
    )  # fmt: skip
    oldest, outbox, letters = seen["oldest_seconds"], seen["outbox"], seen["dead_letters"]
    print_table(
        "what", "now",
        rows=[
            ("oldest started", _age(oldest["started"])),
            ("oldest released", _age(oldest["released"])),
            ("started, lease over", seen["lease_over"]),
            ("effects unknown", seen["unknown_effects"]),
            ("outbox pending", outbox["pending"]),
            ("outbox oldest due", _age(outbox["oldest_due_seconds"])),
            ("outbox failed", outbox["failed"]),
            ("dead letters open", letters["open"]),
            *((f"  {row['task'] or '-'} {row['reason']}", row["letters"]) for row in letters["by_reason"]),
        ],
    )  # fmt: skip


@commands.command("list")
def list_operations(
    app: AppOption = "tasks",
    task: Annotated[str | None, typer.Option(help="Only this task name.")] = None,
    status: Annotated[Status | None, typer.Option(help="Only this status.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    older_than: Annotated[
        float | None, typer.Option(min=0, help="Only accepted or first claimed so many seconds ago.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000)] = 100,
    as_json: JsonOption = False,
) -> None:
    """The oldest operations, without their arguments and results. Those accepted have no record yet."""
    with stored.monitoring_connection(settings_of(application(app))) as connection:
        rows = stored.list_operations(
            connection, task=task, status=status, tenant=tenant, older_than=older_than, limit=limit
        )
    if as_json:
        print_json([row._asdict() | {"error": row.error and json.loads(row.error)} for row in rows])
        return
    print_table(
        "task", "key", "status", "attempts", "created", "error",
        rows=[
            (row.task, row.key, row.status, row.attempts, row.created_at,
             _refused(row.refusals, row.first_refused_at) or (row.error and json.loads(row.error)["code"]))
            for row in rows
        ],
    )  # fmt: skip


@commands.command("show")
def show_operation(
    key: KeyArgument,
    app: AppOption = "tasks",
    task: TaskOption = None,
    tenant: TenantOption = None,
    with_payload: Annotated[bool, typer.Option("--with-payload", help="Also arguments and results.")] = False,
    as_json: JsonOption = False,
) -> None:
    """One operation: its record, effects, deliveries, dead letters and what people did to it."""
    with runtime_of(application(app)).autocommit() as connection:
        id = operators.find(connection, key, task=task, tenant=tenant)
        shown = operations.operation(connection, id, with_payload=with_payload)
    if as_json:
        print_json(shown)
        return
    console.print(f"{plain(id.task)} {plain(id.key)} (tenant {plain(id.tenant)})", markup=False, highlight=False)
    record = shown["record"]
    if record is None:
        waiting = [row for row in shown["outbox"] if row["settled_at"] is None and row["status"] != "failed"]
        refused = [row for row in waiting if row["refusals"]]
        console.print("accepted: it has not begun" if waiting else "no record: it has not begun, or is purged")
        if refused:
            last = max(refused, key=lambda row: row["refusals"])
            console.print(
                f"{_refused(last['refusals'], last['first_refused_at'])}: no worker that got its message knows its task, or "
                "the version of the message",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
    else:
        fields = [name for name, value in record.items() if value is not None and name not in shown]
        print_table("record", "", rows=[(name, record[name]) for name in fields])
    if shown["effects"]:
        print_table(
            "name", "kind", "state", "key number", "idempotency key", *(["result"] if with_payload else []),
            rows=[
                (name, effect["kind"], effect["state"], effect.get("number", ""), effect.get("key", ""),
                 *([effect.get("result")] if with_payload else []))
                for name, effect in shown["effects"].items()
            ],
        )  # fmt: skip
    _print_rows(
        "outbox", shown["outbox"],
        "id", "origin", "status", "attempts", "refusals", "first_refused_at", "available_at", "message",
    )  # fmt: skip
    _print_rows("dead letters", shown["dead_letters"], "id", "generation", "reason", "status", "failed_at", "payload")
    _print_rows("audit", shown["audit"], "at", "actor", "action", "fence_before", "fence_after", "reason", "details")


@commands.command()
def release(
    key: KeyArgument,
    reason: ReasonOption,
    actor: ActorOption,
    app: AppOption = "tasks",
    task: TaskOption = None,
    tenant: TenantOption = None,
    fence: FenceOption = None,
    request_id: RequestOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a started operation from its holder, and deliver it again now."""
    celery = application(app)
    shown = _shown(app, key, task, tenant, fence)
    operators.release(celery, shown, Change(actor, reason, request_id))
    _print_change("released", shown, as_json)


@commands.command()
def cancel(
    key: KeyArgument,
    reason: ReasonOption,
    actor: ActorOption,
    app: AppOption = "tasks",
    task: TaskOption = None,
    tenant: TenantOption = None,
    fence: FenceOption = None,
    may_have_happened: Annotated[
        bool, typer.Option("--may-have-happened", help="Also when an effect has happened or may have.")
    ] = False,
    without_task: WithoutTaskOption = False,
    request_id: RequestOption = None,
    as_json: JsonOption = False,
) -> None:
    """End an operation that has not begun, or waits for its next attempt: failed as cancelled, with a dead letter."""
    celery = application(app)
    shown = _shown(app, key, task, tenant, fence)
    change = Change(actor, reason, request_id)
    error = operators.cancel(celery, shown, change, may_have_happened=may_have_happened, without_task=without_task)
    _print_change("cancelled" if error.code == "cancelled" else "ended", shown, as_json, ended_as=error.code)


@commands.command("forget")
def forget_process(
    name: Annotated[str, typer.Argument(help="The process's name, as `status` prints it.")],
    reason: ReasonOption,
    actor: ActorOption,
    app: AppOption = "tasks",
    as_json: JsonOption = False,
) -> None:
    """Forget a worker, relay or beat that is silent and will not come back: its alarm ends."""
    runtime = runtime_of(application(app))
    with runtime.engine.begin() as connection:
        forgotten = processes.forget(connection, name, runtime.settings.alarm_silence)
        if not forgotten:
            raise ChangeRefused(f"{name}: no process of this name is silent")
        for row in forgotten:
            details = {"kind": row.kind, "name": name, "host": row.host, "pid": row.pid}
            operators.audit(connection, Change(actor, reason), "forget", None, None, details=details)
    if as_json:
        print_json({"change": "forgotten", "name": name, "processes": len(forgotten)})
    else:
        console.print(plain(f"forgotten: {name}"), markup=False, highlight=False, soft_wrap=True)


@effects.command("resolve")
def resolve(
    key: KeyArgument,
    name: Annotated[str, typer.Argument(help="The effect's name, as `show` prints it.")],
    reason: ReasonOption,
    actor: ActorOption,
    happened: Annotated[
        str | None, typer.Option(metavar="RESULT_JSON", help="It happened, and this is what the call returns.")
    ] = None,
    not_happened: Annotated[
        bool, typer.Option("--not-happened", help="It did not, and under its key it cannot happen any more.")
    ] = False,
    end: Annotated[
        bool, typer.Option("--end", help="The operation is not to go on: undo what its end had to leave.")
    ] = False,
    app: AppOption = "tasks",
    task: TaskOption = None,
    tenant: TenantOption = None,
    fence: FenceOption = None,
    without_task: WithoutTaskOption = False,
    request_id: RequestOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what became of an effect whose outcome was unknown, or correct it; then replay its dead letter, or --end it."""
    if (happened is None) != not_happened:
        raise typer.BadParameter("give one of --happened RESULT_JSON and --not-happened")
    outcome: Happened | DidNotHappen = DidNotHappen()
    if happened is not None:
        try:
            outcome = Happened(json.loads(happened))
        except ValueError as error:
            raise typer.BadParameter(f"--happened: must be JSON: {error}") from None
    celery = application(app)
    shown = _shown(app, key, task, tenant, fence)
    change = Change(actor, reason, request_id)
    code = operators.resolve_effect(celery, shown, name, outcome, change, end=end, without_task=without_task)
    with runtime_of(celery).autocommit() as connection:
        letter = dead_letters.open_letter(connection, shown.id)
    if as_json:
        _print_change("resolved", shown, as_json, effect=name, ended_as=code, dead_letter=letter)
        return
    _print_change("resolved", shown, as_json, effect=f"{name}; the operation ended as {code}")
    if letter is not None and not end:
        console.print(f"to go on: idempotency dead-letters replay {letter}", highlight=False)


def _shown(app: str, key: str, task: str | None, tenant: str | None, fence: int | None) -> Shown:
    with runtime_of(application(app)).autocommit() as connection:
        shown = operators.read(connection, operators.find(connection, key, task=task, tenant=tenant))
    # compared in the change's own transaction, after it is known not to be a repetition
    return shown if fence is None else replace(shown, fence=fence)


def _print_change(what: str, shown: Shown, as_json: bool, **more: Any) -> None:
    if as_json:
        id = shown.id
        print_json({"change": what, "tenant": id.tenant, "task": id.task, "key": id.key} | more)
    else:
        text = " ".join([f"{what}:", shown.id.task, shown.id.key, *more.values()])
        console.print(plain(text), markup=False, highlight=False, soft_wrap=True)


def _print_rows(title: str, rows: list[dict[str, Any]], *columns: str) -> None:
    if rows:
        columns = tuple(column for column in columns if column in rows[0])
        print_table(*columns, rows=[[row[column] for column in columns] for row in rows], title=title)


def _refused(refusals: int, since: Any) -> str:
    return f"refused {refusals} times since {plain(since)}" if refusals else ""


def _queue_cells(queue: dict[str, Any]) -> Iterator[str]:
    def number(name: str) -> str:
        return f"{queue[name]:,}{'+' if name in queue['at_least'] else ''}"

    oldest, due = queue["oldest_accepted_seconds"], queue["next_due_seconds"]
    yield "".join(
        [
            number("accepted"),
            "" if oldest is None else f", oldest {_age(oldest)}",
            f", {number('scheduled')} not due yet" if queue["scheduled"] else "",
        ]
    )
    ready, consumers = ("?" if queue[name] is None else f"{queue[name]:,}" for name in ("ready", "consumers"))
    yield f"{ready} ready, {consumers} consumers"
    yield number("running") + (f", {number('lease_over')} lease over" if queue["lease_over"] else "")
    when = "" if due is None else f", next due in {_age(due)}" if due > 0 else f", due for {_age(-due)}"
    yield number("released") + when


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
