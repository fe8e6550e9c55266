"""`idempotency status, list, show`: what an operator looks at.

Exit status 0: done. 1: refused or not found, with one line on stderr. 2: the command line is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.bar import Bar

from ..application import runtime_of, settings_of
from ..framework import framework
from ..operate.change import find
from ..store import operations, saga_reading
from ..store import overview as stored
from ..text import attempts_made, number_of
from ..upkeep import overview
from .options import MAX_AGE, AppOption, JsonOption, KeyArgument, ServiceOption, TaskOption, TenantOption
from .terminal import application, check_known, console, plain, print_json, print_line, print_table, task_named

commands = typer.Typer()


class Status(StrEnum):
    ACCEPTED = "accepted"
    STARTED = "started"
    RELEASED = "released"
    COMPLETED = "completed"
    FAILED = "failed"


@commands.command("status")
def print_status(app: AppOption = "", as_json: JsonOption = False) -> None:
    """Queues, processes, operations by status, and what has waited longest; other applications in the database."""
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
        console.print(f"no relay is running; {waiting}; start `{framework().command} relay`", soft_wrap=True)
    for other in seen["other_services"]:
        print_line(_shared_with(other))
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
        for row in (row for row in seen["processes"] if row["is_silent"]):
            where = f" in {row['directory']}" if row["directory"] else ""
            print_line(f"{row['kind']} {row['name']} is silent; start it again on {row['host']}{where}: {row['start']}")
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
            ("dead letters archived", letters["archived"]),
        ],
    )  # fmt: skip


@commands.command("list")
def list_operations(
    app: AppOption = "",
    task: Annotated[str | None, typer.Option(help="Only this task, by its name or the end of it after a dot.")] = None,
    status: Annotated[Status | None, typer.Option(help="Only this status.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    service: ServiceOption = None,
    older_than: Annotated[
        float | None,
        typer.Option(min=0, max=MAX_AGE, help="Only those accepted or first claimed more than this many seconds ago."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000)] = 100,
    as_json: JsonOption = False,
) -> None:
    """The newest operations, without arguments and results. The accepted ones have no record yet."""
    celery = application(app)
    task = task_named(celery, task)
    settings = settings_of(celery)
    with stored.monitoring_connection(settings) as connection:
        rows = stored.list_operations(
            connection,
            service or settings.service,
            task=task,
            status=status,
            tenant=tenant,
            older_than=older_than,
            limit=limit,
        )
    if not rows:
        check_known(celery, task, "operation")
    if as_json:
        print_json([row._asdict() | {"error": row.error and json.loads(row.error)} for row in rows])
        return
    print_table(
        "task", "key", "status", "tried", "created", "error",
        rows=[
            (row.task, row.key, row.status, attempts_made(row.attempts, row.spent_at), row.created_at,
             " ".join(filter(None, [_refused(row.refusals, row.first_refused_at), _error_of(row)])))
            for row in rows
        ],
    )  # fmt: skip


@commands.command("show")
def show_operation(
    key: KeyArgument,
    app: AppOption = "",
    task: TaskOption = None,
    tenant: TenantOption = None,
    service: ServiceOption = None,
    with_payload: Annotated[bool, typer.Option("--with-payload", help="Also arguments and results.")] = False,
    as_json: JsonOption = False,
) -> None:
    """One operation: its record, effects, deliveries, dead letters, and what people have changed."""
    runtime = runtime_of(application(app))
    with runtime.autocommit() as connection:
        id = find(connection, key, service or runtime.settings.service, task=task, tenant=tenant)
        shown = operations.operation(connection, id, with_payload=with_payload)
        row = saga_reading.saga(connection, id)
        shown["is_saga"] = row is not None and not row.observed
    if as_json:
        print_json(shown)
        return
    console.print(f"{plain(id.task)} {plain(id.key)} (tenant {plain(id.tenant)})", markup=False, highlight=False)
    if shown["is_saga"]:
        print_line(f"a saga; its timeline: {framework().command} saga show {id.key}")
    record = shown["record"]
    if record is None:
        waiting = [row for row in shown["outbox"] if row["settled_at"] is None and row["status"] != "failed"]
        refused = [row for row in waiting if row["refusals"]]
        console.print("accepted: it has not begun" if waiting else "no record: it has not begun or has been purged")
        if refused:
            last = max(refused, key=lambda row: row["refusals"])
            why = last["last_error"] if isinstance(last["last_error"], dict) else {"message": "no worker can run it"}
            text = f"{_refused(last['refusals'], last['first_refused_at'])}: {why['message']}"
            print_line(text)
    else:
        # what an attempt of a completed operation has ended with is over
        over = {"error"} if record["status"] == "completed" else set()
        fields = [name for name, value in record.items() if value is not None and name not in {*shown, *over}]
        made = attempts_made(record["attempts"], record["spent_at"])
        shown_as = record | {"attempts": made.removesuffix(" attempts").removesuffix(" attempt")}
        print_table("record", "", rows=[(name, shown_as[name]) for name in fields])
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


def _print_rows(title: str, rows: list[dict[str, Any]], *columns: str) -> None:
    if rows:
        columns = tuple(column for column in columns if column in rows[0])
        # to publish it, by the relay
        names = ["failed tries" if column == "attempts" else column for column in columns]
        print_table(*names, rows=[[row[column] for column in columns] for row in rows], title=title)


def _shared_with(other: dict[str, Any]) -> str:
    due = f"{number_of(other['due'], 'row')} due, {other['lease_over']:,} begun whose lease is over"
    if other["service"] is None:
        return f"rows without a service, whose tasks this application does not know: {other['due']:,}"
    relay = "its relay is running" if other["has_relay"] else "no relay of it is running"
    return f"the application {other['service']} shares the database: {relay}, {due}"


def _refused(refusals: int, since: Any) -> str:
    times = "once, at" if refusals == 1 else f"{number_of(refusals, 'time')} since"
    return f"refused {times} {plain(since)}" if refusals else ""


def _error_of(row: Any) -> str | None:
    """Why it is not completed; a completed operation keeps the error of an earlier attempt, which `show` prints."""
    return None if row.error is None or row.status == "completed" else str(json.loads(row.error)["code"])


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
    ready, consumers = queue["ready"], queue["consumers"]
    of_them = "? consumers" if consumers is None else number_of(consumers, "consumer")
    yield f"{'?' if ready is None else f'{ready:,}'} ready, {of_them}"
    yield number("running") + (f", {number('lease_over')} lease over" if queue["lease_over"] else "")
    when = "" if due is None else f", next due in {_age(due)}" if due > 0 else f", due for {_age(-due)}"
    yield number("released") + when


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
