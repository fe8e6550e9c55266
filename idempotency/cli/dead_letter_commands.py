"""`idempotency dead-letters …`: what has ended without success.

Exit status 0: done. 1: something was refused, with one line each on stderr. 2: the command line is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any

import typer
from celery import Celery
from rich.progress import track
from sqlalchemy.exc import DBAPIError

from ..application import runtime_of
from ..checks.broker import require_broker_address
from ..errors import IdempotencyError
from ..letters.consumer import DeadLetterConsumer, consume_once
from ..operate import discard
from ..operate.change import Change, check_service
from ..operate.money import letters_move_money
from ..operate.people import authenticate
from ..operate.replay import ToConfirm, replay, to_confirm
from ..store import dead_letters, discards
from ..store.dead_letters import BULK_LIMIT, Group, Selection
from ..store.statements import describe, repeatable
from ..store.sweeps import is_row_error
from ..text import attempts_made, number_of
from ..upkeep import reports
from ..wire.keys import OperationId
from .options import ActorOption, AppOption, JsonOption, RequestOption, ServiceOption
from .proof import confirm, counted, proven_if, warnings
from .terminal import (
    application,
    check_known,
    console,
    errors,
    operators_token,
    plain,
    print_json,
    print_line,
    print_table,
    stopped_by_signals,
    task_named,
)

commands = typer.Typer()
letters = typer.Typer(no_args_is_help=True, help="What has ended without success and waits for a person.")
commands.add_typer(letters, name="dead-letters")


class Status(StrEnum):
    OPEN = "open"
    REPLAYED = "replayed"
    DISCARDED = "discarded"
    ALL = "all"


class By(StrEnum):
    SERVICE = "service"
    TASK = "task"
    REASON = "reason"
    QUEUE = "queue"
    STATUS = "status"


IdsArgument = Annotated[list[int] | None, typer.Argument(help="Dead letters by number.", metavar="[ID]...")]
TaskOption = Annotated[str | None, typer.Option(help="Only this task, by its name or the end of it after a dot.")]
ErrorOption = Annotated[str | None, typer.Option(help="Only this reason, as `list` shows it.")]
TenantOption = Annotated[str | None, typer.Option(help="Only this tenant.")]
LimitOption = Annotated[int, typer.Option(min=1, max=BULK_LIMIT, help="Refuse if the filters match more than this.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print which ones, and change nothing.")]
LetterArgument = Annotated[int, typer.Argument(metavar="ID")]


@letters.command("list")
def list_letters(
    by: Annotated[list[By] | None, typer.Option(help="Count by this, e.g. --by service --by task --by reason.")] = None,
    status: Status = Status.OPEN,
    task: TaskOption = None,
    error: ErrorOption = None,
    service: ServiceOption = None,
    tenant: TenantOption = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000)] = 100,
    app: AppOption = "",
    as_json: JsonOption = False,
) -> None:
    """The newest dead letters, or how many there are of each kind."""
    celery = application(app)
    task = task_named(celery, task)
    runtime = runtime_of(celery)
    shown = None if status is Status.ALL else status.value
    selection = Selection(shown, task, error, service or runtime.settings.service, tenant)
    groups: list[Group] = [group.value for group in by or ()]
    with runtime.autocommit() as connection:
        if groups:
            rows = dead_letters.group_letters(connection, selection, groups, limit=limit)
        else:
            rows = dead_letters.list_letters(connection, selection, limit=limit)
    if not rows:
        check_known(celery, task, f"{'' if status is Status.ALL else status.value + ' '}dead letter")
    found = [row._asdict() for row in rows]
    if as_json:
        print_json(found)
        return
    columns = (*groups, "letters", "oldest", "newest") if groups else _COLUMNS
    print_table(*columns, rows=([row[column] for column in columns] for row in found))


_COLUMNS = ("id", "consumer_service", "task", "key", "reason", "status", "failed_at")


@letters.command("show")
def show_letter(
    letter: LetterArgument, service: ServiceOption = None, app: AppOption = "", as_json: JsonOption = False
) -> None:
    """One dead letter with its errors, and who has asked to discard it; headers and payload only with --json."""
    celery = application(app)
    check_service(runtime_of(celery), [letter], service)
    with runtime_of(celery).autocommit() as connection:
        fields = dead_letters.show(connection, letter)._asdict()
        if (request := discards.pending_request(connection, letter)) is not None:
            fields |= {f"discard_{name}": value for name, value in request._asdict().items()}
    if as_json:
        print_json(fields)
        return
    fields["attempts"] = attempts_made(fields["attempts"] or 0, fields.pop("spent_at"))
    shown = {name: value for name, value in fields.items() if value is not None and name not in ("payload", "headers")}
    print_table("field", "value", rows=shown.items())


@letters.command("replay")
def replay_letters(
    actor: ActorOption,
    ids: IdsArgument = None,
    task: TaskOption = None,
    error: ErrorOption = None,
    service: ServiceOption = None,
    tenant: TenantOption = None,
    limit: LimitOption = 1000,
    dry_run: DryRunOption = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Also what was declined or cancelled, without being asked.")
    ] = False,
    reason: Annotated[str, typer.Option(help="Why; kept in the audit table.")] = "replay",
    request_id: RequestOption = None,
    app: AppOption = "",
    as_json: JsonOption = False,
) -> None:
    """Send dead letters again, each under the same key and in its own transaction.

    Of what was declined or cancelled, it says what a replay does, and asks. Where money is moved: your token, IDEMPOTENCY_TOKEN.
    """
    celery = application(app)
    chosen = _chosen(celery, ids, Selection("open", task_named(celery, task), error, service, tenant), limit)
    with runtime_of(celery).autocommit() as connection:
        unconfirmed = to_confirm(connection, chosen)
    by = Change(actor, reason)
    if not dry_run:
        what = "one of these dead letters" if (one := _single(ids)) is None else f"dead letter {one}"
        by = proven_if(celery, by, lambda own: letters_move_money(celery, own, chosen), action="replay", what=what)
        if unconfirmed:
            confirm(warnings(unconfirmed, len(chosen)), yes=yes)

    def replay_one(letter: int) -> dict[str, Any]:
        change = replace(by, request_id=None if request_id is None else f"{request_id}:{letter}")
        return _named(letter, "replayed", replay(celery, letter, change, confirmed=unconfirmed))

    _each(
        chosen, replay_one, "replayed", single=_single(ids), dry_run=dry_run, as_json=as_json, unconfirmed=unconfirmed
    )


@letters.command("discard")
def discard_letters(
    reason: Annotated[str, typer.Option(help="Why it is not needed; kept in the audit table.")],
    ids: IdsArgument = None,
    task: TaskOption = None,
    error: ErrorOption = None,
    service: ServiceOption = None,
    tenant: TenantOption = None,
    limit: LimitOption = 1000,
    dry_run: DryRunOption = False,
    app: AppOption = "",
    as_json: JsonOption = False,
) -> None:
    """Ask for dead letters to be discarded; another person, an approver or admin, has to approve. Your token: IDEMPOTENCY_TOKEN."""
    runtime = runtime_of(celery := application(app))
    person = authenticate(runtime, operators_token(), role="operator", action="discard", letter=_single(ids))

    def request(letter: int) -> dict[str, Any]:
        with runtime.engine.begin() as connection:
            discard.request(connection, person, letter, reason)
        return _named(letter, "requested", None)

    chosen = _chosen(celery, ids, Selection("open", task_named(celery, task), error, service, tenant), limit)
    _each(chosen, repeatable(request), "requested", single=_single(ids), dry_run=dry_run, as_json=as_json)


@letters.command("approve")
def approve_discards(
    ids: Annotated[list[int], typer.Argument(metavar="ID...")],
    service: ServiceOption = None,
    app: AppOption = "",
    as_json: JsonOption = False,
) -> None:
    """Discard what another operator has asked to discard. Needs the role approver or admin. Your token: IDEMPOTENCY_TOKEN."""
    celery = application(app)
    runtime = runtime_of(celery)
    person = authenticate(runtime, operators_token(), role="approver", action="approve", letter=_single(ids))

    def approve(letter: int) -> dict[str, Any]:
        with runtime.engine.begin() as connection:
            discard.approve(connection, person, letter, app=celery)
        return _named(letter, "discarded", None)

    check_service(runtime, ids, service)
    _each(ids, repeatable(approve), "discarded", single=_single(ids), dry_run=False, as_json=as_json)


@letters.command("report")
def report_letters(
    days: Annotated[int, typer.Option(min=1, max=366)] = reports.DAYS,
    mail: Annotated[bool, typer.Option("--mail", help="Mail it to idempotency_report_mail_to as well.")] = False,
    service: ServiceOption = None,
    app: AppOption = "",
    as_json: JsonOption = False,
) -> None:
    """Per service: what has become a dead letter, what was done about it, and what is open."""
    runtime = runtime_of(application(app))
    with runtime.autocommit() as connection:
        rows = dead_letters.report(connection, service or runtime.settings.service, days=days)
    if mail:
        reports.mail(runtime.settings, reports.text(rows, days), days=days)
    if as_json:
        print_json([row._asdict() for row in rows])
    else:
        columns = ("service", "new", "replayed", "discarded", "open", "oldest_open", "reasons")
        print_table(*columns, rows=(tuple(row) for row in rows), title=f"last {number_of(days, 'day')}")


@letters.command("consume")
def consume(
    once: Annotated[bool, typer.Option("--once", help="Stop when the queues are empty.")] = False,
    app: AppOption = "",
    as_json: JsonOption = False,
) -> None:
    """Store what the broker's dead-letter queues hold. The relay does so continuously."""
    celery = application(app)
    require_broker_address(celery)
    if not once:
        stop = stopped_by_signals()
        errors.print("consuming until stopped")
        DeadLetterConsumer(celery).run(stop)
        return
    consumed = consume_once(celery)
    if as_json:
        print_json({"consumed": consumed})
    else:
        console.print(f"consumed: {consumed}")


# ---------------------------------------------------------------- one, or many


def _chosen(app: Celery, ids: list[int] | None, selection: Selection, limit: int) -> list[int]:
    if ids:
        if len(ids) > limit:
            raise IdempotencyError(f"{len(ids)} dead letters named, --limit is {limit}")
        check_service(runtime_of(app), ids, selection.service)
        return ids
    if selection == Selection("open"):
        raise typer.BadParameter("name dead letters, or choose by --task, --error, --service or --tenant")
    runtime = runtime_of(app)
    with runtime.autocommit() as connection:
        own = replace(selection, service=selection.service or runtime.settings.service)
        chosen = dead_letters.select_ids(connection, own, limit=limit)
    if not chosen:
        check_known(app, selection.task, "open dead letter")
    return chosen


def _single(ids: list[int] | None) -> int | None:
    return ids[0] if ids is not None and len(ids) == 1 else None


def _named(letter: int, done: str, id: OperationId | None) -> dict[str, Any]:
    return {done: letter} | ({} if id is None else {"task": id.task, "key": id.key})


def _each(
    chosen: list[int],
    work: Callable[[int], dict[str, Any]],
    done: str,
    *,
    single: int | None,
    dry_run: bool,
    as_json: bool,
    unconfirmed: Sequence[ToConfirm] = (),
) -> None:
    """Do the work for each, in its own transaction; a refusal does not stop the others."""
    if dry_run:
        if as_json:
            kinds = {one.was: [each.letter for each in unconfirmed if each.was == one.was] for one in unconfirmed}
            print_json({"dry_run": True, done: chosen} | kinds)
        else:
            named = f" (dead letters {', '.join(map(str, chosen))})" if chosen else ""
            some = f"; of these, {counted(unconfirmed)}" if unconfirmed else ""
            console.print(f"would be {done}: {len(chosen)}{named}{some}", soft_wrap=True)
        return
    if single is not None:
        document = work(single)
        if as_json:
            print_json(document)
        else:
            named = " ".join(str(document[name]) for name in ("task", "key") if name in document)
            print_line(f"dead letter {single} {done} {named}".rstrip())
        return
    succeeded: list[int] = []
    refused: list[dict[str, Any]] = []
    bar: Iterable[int] = chosen
    if not as_json:
        bar = track(chosen, description=done, console=errors, transient=True)
    for letter in bar:
        try:
            work(letter)
            succeeded.append(letter)
        except (IdempotencyError, DBAPIError) as error:
            if isinstance(error, DBAPIError) and not is_row_error(error):
                raise
            why = describe(error) if isinstance(error, DBAPIError) else str(error)
            refused.append({"letter": letter, "why": why})
            errors.print(
                plain(f"idempotency: dead letter {letter}: {why}" if why != str(error) else f"idempotency: {why}"),
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    if as_json:
        print_json({done: succeeded, "refused": refused})
    else:
        console.print(f"{done}: {len(succeeded)}, refused: {len(refused)}")
    if refused:
        raise typer.Exit(1)
