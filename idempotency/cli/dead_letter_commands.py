"""`idempotency dead-letters …`: what has ended without success.

Exit status 0: done. 1: something was refused, with one line each on stderr. 2: the command line is wrong.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any

import typer

from ..application import runtime_of
from ..checks.broker import require_broker_address
from ..letters.consumer import DeadLetterConsumer, consume_once
from ..operate import discard
from ..operate.change import Change, check_service
from ..operate.money import letters_move_money
from ..operate.people import authenticate
from ..operate.replay import NotConfirmed, replay, to_confirm
from ..store import dead_letters, discards
from ..store.dead_letters import Group, Selection
from ..store.statements import repeatable
from ..streams.message import kept_at
from ..text import attempts_made, number_of
from ..upkeep import reports
from .archive import archive_letters, restore_letters
from .edits import approve_letter_edit, edit_letter, list_edits
from .many import (
    DryRunOption,
    ErrorOption,
    IdsArgument,
    LimitOption,
    TaskOption,
    TenantOption,
    choose,
    document_of,
    each_of,
    single_of,
)
from .options import ActorOption, AppOption, JsonOption, RequestOption, ServiceOption
from .proof import confirm, proven_if, warnings
from .terminal import (
    application,
    check_known,
    console,
    errors,
    operators_token,
    print_json,
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


ArchivedOption = Annotated[bool, typer.Option("--archived", help="Of open ones, those that were archived.")]
LetterArgument = Annotated[int, typer.Argument(metavar="ID")]


@letters.command("list")
def list_letters(
    by: Annotated[list[By] | None, typer.Option(help="Count by this, e.g. --by service --by task --by reason.")] = None,
    status: Status = Status.OPEN,
    archived: ArchivedOption = False,
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
    selection = Selection(shown, task, error, service or runtime.settings.service, tenant, archived=archived)
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
        fields |= kept_at(fields["headers"])
        if (request := discards.shown_request(connection, letter)) is not None:
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
    unedited: Annotated[
        bool,
        typer.Option("--unedited", help="Also what somebody has asked to edit, without the edit. Name the letters."),
    ] = False,
    reason: Annotated[str, typer.Option(help="Why; kept in the audit table.")] = "replay",
    request_id: RequestOption = None,
    app: AppOption = "",
    as_json: JsonOption = False,
) -> None:
    """Send dead letters again, each under the same key and in its own transaction.

    Of what was declined or cancelled, it says what a replay does, and asks. What waits for an edit is left out without
    --unedited. Where money is moved: your token, IDEMPOTENCY_TOKEN.
    """
    if unedited and not ids:
        raise typer.BadParameter("--unedited: name the dead letters; filters leave out what somebody has asked to edit")
    celery = application(app)
    chosen = choose(celery, ids, Selection("open", task_named(celery, task), error, service, tenant), limit)
    with runtime_of(celery).autocommit() as connection:
        found = to_confirm(connection, chosen)
    to_edit = [each for each in found if each.was == "to_be_edited"]
    left = [] if unedited else to_edit
    out = {each.letter for each in left}
    unconfirmed = [each for each in found if each not in to_edit and each.letter not in out]
    by = Change(actor, reason)
    if not dry_run:
        what = "one of these dead letters" if (one := single_of(ids)) is None else f"dead letter {one}"
        by = proven_if(celery, by, lambda own: letters_move_money(celery, own, chosen), action="replay", what=what)
        if unconfirmed:
            left_over = len(chosen) - len(out)
            confirm(warnings(unconfirmed, left_over), left_over, yes=yes)

    def replay_one(letter: int) -> dict[str, Any]:
        change = replace(by, request_id=None if request_id is None else f"{request_id}:{letter}")
        try:
            id = replay(celery, letter, change, confirmed=unconfirmed if left else [*unconfirmed, *to_edit])
        except NotConfirmed as refused:
            if refused.was != "to_be_edited":
                raise
            raise NotConfirmed(f"{refused}; to do so, name it and give --unedited") from None
        return document_of(letter, "replayed", id)

    each_of(
        chosen, replay_one, "replayed", single=single_of(ids), dry_run=dry_run, as_json=as_json, unconfirmed=unconfirmed,
        left=left,
    )  # fmt: skip


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
    person = authenticate(runtime, operators_token(), role="operator", action="discard", letter=single_of(ids))

    def request(letter: int) -> dict[str, Any]:
        with runtime.engine.begin() as connection:
            discard.request(connection, person, letter, reason)
        return document_of(letter, "requested", None)

    chosen = choose(celery, ids, Selection("open", task_named(celery, task), error, service, tenant), limit)
    each_of(chosen, repeatable(request), "requested", single=single_of(ids), dry_run=dry_run, as_json=as_json)


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
    person = authenticate(runtime, operators_token(), role="approver", action="approve", letter=single_of(ids))

    def approve(letter: int) -> dict[str, Any]:
        with runtime.engine.begin() as connection:
            discard.approve(connection, person, letter, app=celery)
        return document_of(letter, "discarded", None)

    check_service(runtime, ids, service)
    each_of(ids, repeatable(approve), "discarded", single=single_of(ids), dry_run=False, as_json=as_json)


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


letters.command("archive")(archive_letters)
letters.command("restore")(restore_letters)
letters.command("edit")(edit_letter)
letters.command("approve-edit")(approve_letter_edit)
letters.command("edits")(list_edits)
