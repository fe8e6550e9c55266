"""`idempotency release, cancel, forget, rename-service, effects resolve`: what an operator changes.

Exit status 0: done. 1: refused or not found, with one line on stderr. 2: the command line is wrong.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any

import typer
from celery import Celery

from ..application import runtime_of
from ..attempt.effects import DidNotHappen, Happened
from ..errors import IdempotencyError, OperationNotFound
from ..framework import framework
from ..operate.cancel import cancel
from ..operate.change import Change, Shown, find, read
from ..operate.forget import forget_process
from ..operate.money import service_moves_money
from ..operate.release import release
from ..operate.rename import rename_service
from ..operate.resolve import resolve_effect, resolve_effect_of_saga
from ..operate.saga import is_saga
from ..store import dead_letters, operations, provider_keys
from .options import (
    ActorOption,
    AppOption,
    JsonOption,
    KeyArgument,
    ReasonOption,
    RequestOption,
    TaskOption,
    TenantOption,
)
from .proof import proven, proven_if
from .terminal import application, console, errors, print_json, print_line, print_table

commands = typer.Typer()
effects = typer.Typer(no_args_is_help=True, help="Calls outside whose outcome only a person can find out.")
commands.add_typer(effects, name="effects")

FenceOption = Annotated[int | None, typer.Option(help="Only if the record still has the fence that `show` printed.")]
WithoutTaskOption = Annotated[
    bool, typer.Option("--without-task", help="Even if the application has no such task: no undo, no on_failed.")
]


@commands.command("release")
def release_operation(
    key: KeyArgument,
    reason: ReasonOption,
    actor: ActorOption,
    app: AppOption = "",
    task: TaskOption = None,
    tenant: TenantOption = None,
    fence: FenceOption = None,
    request_id: RequestOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a started operation from its holder, and deliver it again now."""
    celery = application(app)
    shown = _shown(app, key, task, tenant, fence)
    release(celery, shown, proven(celery, shown.id, Change(actor, reason, request_id), action="release"))
    _print_change("released", shown, as_json)


@commands.command("cancel")
def cancel_operation(
    key: KeyArgument,
    reason: ReasonOption,
    actor: ActorOption,
    app: AppOption = "",
    task: TaskOption = None,
    tenant: TenantOption = None,
    fence: FenceOption = None,
    may_have_happened: Annotated[
        bool, typer.Option("--may-have-happened", help="Even if an effect has happened or may have.")
    ] = False,
    without_task: WithoutTaskOption = False,
    request_id: RequestOption = None,
    as_json: JsonOption = False,
) -> None:
    """End an operation that has not begun or waits for its next attempt: failed as cancelled, with a dead letter."""
    celery = application(app)
    shown = _shown(app, key, task, tenant, fence)
    change = proven(celery, shown.id, Change(actor, reason, request_id), action="cancel")
    error = cancel(celery, shown, change, may_have_happened=may_have_happened, without_task=without_task)
    _print_change("cancelled" if error.code == "cancelled" else "ended", shown, as_json, ended_as=error.code)
    _check_rows(celery, shown)


@commands.command("forget")
def forget(
    name: Annotated[str, typer.Argument(help="The process's name, as `status` prints it.")],
    reason: ReasonOption,
    actor: ActorOption,
    app: AppOption = "",
    as_json: JsonOption = False,
) -> None:
    """Forget a process that is silent and will not come back: its alarm ends."""
    forgotten = forget_process(application(app), name, Change(actor, reason))
    if as_json:
        print_json({"change": "forgotten", "name": name, "processes": forgotten})
    else:
        print_line(f"forgotten: {name}")


@commands.command("rename-service")
def rename(
    old: Annotated[str, typer.Argument(help="The application's old name, as `status` prints it.")],
    new: Annotated[str, typer.Argument(help="Its name now: that of the application given with -A.")],
    reason: ReasonOption,
    actor: ActorOption,
    app: AppOption = "",
    as_json: JsonOption = False,
) -> None:
    """Give what an application had under its old name to this one. Stop all processes of the old name first."""
    celery = application(app)
    change = proven_if(
        celery,
        Change(actor, reason),
        lambda connection: service_moves_money(celery, connection, old),
        action="rename-service",
        what=old,
    )
    renamed = rename_service(celery, old, new, change)
    if as_json:
        print_json({"change": "renamed", "old": old, "new": new} | renamed)
    else:
        counts = ", ".join(f"{table} {rows}" for table, rows in renamed.items())
        print_line(f"renamed: {old} is {new}: {counts}")


@effects.command("find")
def find_effect(
    provider_key: Annotated[
        str, typer.Argument(help="The idempotency key that the provider was given, as its dashboard shows it.")
    ],
    app: AppOption = "",
    as_json: JsonOption = False,
) -> None:
    """Find the operation that has called a provider under this key."""
    runtime = runtime_of(application(app))
    with runtime.autocommit() as connection:
        rows, are_all = provider_keys.with_provider_key(connection, runtime.settings.service, None, provider_key)
    if not rows:
        unasked = (
            "" if are_all else "; more wait or run than were looked at, or the database is at a schema before 0020"
        )
        raise OperationNotFound(f"provider's key {provider_key[:80]!r}: no operation has called under it{unasked}")
    if as_json:
        print_json([row._asdict() for row in rows])
        return
    print_table(
        "task",
        "key",
        "tenant",
        "effect",
        "state",
        rows=([row.task, row.key, row.tenant, row.effect, row.state] for row in rows),
    )


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
        bool, typer.Option("--not-happened", help="It did not, and can no longer happen under its key.")
    ] = False,
    end: Annotated[
        bool, typer.Option("--end", help="Do not go on: undo what the operation's end had to leave.")
    ] = False,
    app: AppOption = "",
    task: TaskOption = None,
    tenant: TenantOption = None,
    fence: FenceOption = None,
    without_task: WithoutTaskOption = False,
    request_id: RequestOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what became of an effect of unknown outcome, or correct it; then replay its dead letter, or --end it."""
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
    change = proven(celery, shown.id, Change(actor, reason, request_id), action="effects resolve")
    with runtime_of(celery).autocommit() as connection:
        of_saga = is_saga(celery, connection, shown.id)
    if of_saga:
        if end:
            raise IdempotencyError("--end: a saga that is being undone ends by itself")
        resolve_effect_of_saga(celery, shown.id, name, outcome, change, without_task=without_task)
        _print_change("resolved", shown, as_json, effect=name if as_json else f"{name}; the saga goes on")
        return
    code = resolve_effect(celery, shown, name, outcome, change, end=end, without_task=without_task)
    with runtime_of(celery).autocommit() as connection:
        letter = dead_letters.open_letter(connection, shown.id)
    if as_json:
        _print_change("resolved", shown, as_json, effect=name, ended_as=code, dead_letter=letter)
        _check_rows(celery, shown)
        return
    _print_change("resolved", shown, as_json, effect=f"{name}; the operation ended as {code}")
    if letter is not None and not end:
        console.print(f"to go on: {framework().command} dead-letters replay {letter}", highlight=False)
    _check_rows(celery, shown)


def _shown(app: str, key: str, task: str | None, tenant: str | None, fence: int | None) -> Shown:
    runtime = runtime_of(application(app))
    service = runtime.settings.service
    with runtime.autocommit() as connection:
        shown = read(connection, find(connection, key, service, task=task, tenant=tenant), service)
    # compared in the change's own transaction, once it is known not to be a repetition
    return shown if fence is None else replace(shown, fence=fence)


def _check_rows(celery: Celery, shown: Shown) -> None:
    """Exit with 1 if the operation has ended, and the application's rows do not say so."""
    runtime = runtime_of(celery)
    with runtime.autocommit() as connection:
        row = operations.lookup(connection, shown.id, runtime.settings.service)
    broken = None if row is None or row.error is None else json.loads(row.error).get("on_failed_error")
    if broken is not None:
        errors.print(f"done, but the application's rows were not written: {broken}", markup=False, soft_wrap=True)
        raise typer.Exit(1)


def _print_change(what: str, shown: Shown, as_json: bool, **more: Any) -> None:
    if as_json:
        id = shown.id
        print_json({"change": what, "tenant": id.tenant, "task": id.task, "key": id.key} | more)
    else:
        print_line(" ".join([f"{what}:", shown.id.task, shown.id.key, *more.values()]))
