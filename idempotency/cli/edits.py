"""`idempotency dead-letters edit`, `approve-edit` and `edits`: correcting the arguments of a message, and who has."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..application import runtime_of
from ..errors import ChangeRefused, IdempotencyError
from ..letters.editing import difference_shown
from ..operate.change import Change, check_service
from ..operate.edit import approve_edit, edit
from ..operate.money import letters_move_money
from ..operate.people import Person, authenticate
from ..operate.reveal import reveal_letter
from ..store import dead_letters, edits
from .options import ActorOption, AppOption, JsonOption, ReasonOption, RequestOption, ServiceOption
from .terminal import application, operators_token, print_json, print_line, print_table

LetterArgument = Annotated[int, typer.Argument(metavar="ID")]


def edit_letter(
    letter: LetterArgument,
    actor: ActorOption,
    reason: ReasonOption,
    payload: Annotated[
        str, typer.Option(metavar="FILE", help='A file with {"args": [...], "kwargs": {...}} as JSON; - reads stdin.')
    ],
    service: ServiceOption = None,
    request_id: RequestOption = None,
    app: AppOption = "",
    as_json: JsonOption = False,
) -> None:
    """Correct the arguments of a dead letter's message, to be replayed afterwards; key and tenant stay.

    Where money is moved, it is asked for, and another person approves: your token, IDEMPOTENCY_TOKEN.
    """
    celery = application(app)
    runtime = runtime_of(celery)
    check_service(runtime, [letter], service)
    corrected = _read(payload)
    with runtime.autocommit() as connection:
        moves_money = letters_move_money(celery, connection, [letter])
    person: Person | None = None
    change = Change(actor, reason, request_id)
    if moves_money:
        person = authenticate(runtime, operators_token(), role="operator", action="edit", letter=letter)
        change = Change(person.name, reason, request_id, is_verified=True, check_person=person.check)
    is_done = edit(celery, letter, corrected, change, person=person)
    if as_json:
        print_json({"edited" if is_done else "requested": letter})
    elif is_done:
        print_line(f"dead letter {letter} edited; `dead-letters replay {letter}` sends it")
    else:
        print_line(
            f"dead letter {letter}: edit asked for; another person has to approve: `dead-letters edits {letter}`"
        )


def approve_letter_edit(
    letter: LetterArgument,
    asked_for: Annotated[int, typer.Argument(metavar="EDIT", help="The edit, by the number that `edits` shows.")],
    service: ServiceOption = None,
    app: AppOption = "",
    as_json: JsonOption = False,
) -> None:
    """Make the edit that another person has asked for, once you have looked at it. Needs the role approver or admin. Your token: IDEMPOTENCY_TOKEN."""
    celery = application(app)
    runtime = runtime_of(celery)
    person = authenticate(runtime, operators_token(), role="approver", action="approve-edit", letter=letter)
    check_service(runtime, [letter], service)
    approve_edit(celery, person, letter, asked_for)
    if as_json:
        print_json({"edited": letter})
    else:
        print_line(f"dead letter {letter} edited; `dead-letters replay {letter}` sends it")


def list_edits(
    letter: LetterArgument,
    actor: ActorOption,
    reveal: Annotated[bool, typer.Option("--reveal", help="With the values; the look is audited.")] = False,
    reason: Annotated[str, typer.Option(help="Why, with --reveal; kept in the audit table.")] = "",
    service: ServiceOption = None,
    app: AppOption = "",
    as_json: JsonOption = False,
) -> None:
    """Who has edited a dead letter's message, when and why, and which arguments; their values only with --reveal."""
    celery = application(app)
    runtime = runtime_of(celery)
    check_service(runtime, [letter], service)
    if reveal:
        reveal_letter(celery, letter, Change(actor, reason))
    with runtime.autocommit() as connection:
        dead_letters.show(connection, letter)
        rows = [_shown(row, reveal) for row in edits.history(connection, letter)]
    if as_json:
        print_json(rows)
        return
    columns = ("id", "edited_at", "edited_by", "approved_by", "applied_at", "reason", "changed")
    print_table(*columns, rows=([row[column] for column in columns] for row in rows))


def _shown(row: Any, reveal: bool) -> dict[str, Any]:
    changed = difference_shown(row.before, row.after, with_values=reveal)
    names = ("id", "edited_at", "edited_by", "approved_by", "applied_at", "reason")
    return {name: getattr(row, name) for name in names} | {
        "changed": {name: {"before": before, "after": after} for name, before, after in changed}
    }


def _read(name: str) -> str:
    """The text of a file, or of stdin. Raises `IdempotencyError`."""
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text("utf-8")
    except UnicodeDecodeError:
        raise ChangeRefused("--payload: not UTF-8") from None
    except OSError as error:
        raise IdempotencyError(f"--payload: {type(error).__name__}") from None
