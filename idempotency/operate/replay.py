"""Replay: send a dead letter again."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from celery import Celery
from sqlalchemy import Connection, Row

from ..application import runtime_of
from ..attempt.opening import open_record
from ..attempt.runtime import Runtime
from ..errors import NotAuthenticated, ReplayRefused, WrongCell
from ..reasons import ALTERED, CANCELLED, FOUND_BY_US, REVOKED, UNHANDLED, UNSIGNED
from ..settings import Settings
from ..store import (
    archive,
    dead_letters,
    discards,
    edits,
    erasure,
    letter_messages,
    letter_operations,
    operations,
    saga_changes,
    stream_letters,
    webhook_letters,
)
from ..store.statements import repeatable
from ..wire.keys import OperationId
from ..wire.signing import signed_at
from .change import MOVED, Change, audit, called, refused_by_constraint, repeated
from .money import NEEDS_TOKEN, letters_move_money
from .replay_stream import check_has_message, is_refused

BY_PERSON = (CANCELLED, REVOKED)


Was = Literal["declined", "cancelled", "to_be_edited"]


class NotConfirmed(ReplayRefused):
    """The message says what a replay does, which a person has to confirm. `was`: why, None as long as nobody says."""

    was: Was | None = None


@dataclass(frozen=True, slots=True)
class ToConfirm:
    """A dead letter whose operation was declined or cancelled, or whose message somebody has asked to edit, and what a replay does.

    What is `to_be_edited` is confirmed by a word of its own, and is never part of a bulk.
    """

    letter: int
    was: Was
    warning: str


def to_confirm(connection: Connection, letters: Sequence[int]) -> list[ToConfirm]:
    """Those of these letters that were declined or cancelled, or of which an edit waits. The others failed for a reason that may be over.

    Of a saga that has stopped, it is its failed undos, which are replayed first. One letter may be there for two reasons.
    """
    letters = [*letters, *letter_operations.letters_of_undos(connection, letters)]
    found = [each for row in letter_operations.failures(connection, letters) if (each := _to_confirm(row)) is not None]
    found += [_to_be_edited(row) for row in letter_operations.to_edit(connection, letters)]
    return sorted(found, key=lambda each: (each.letter, each.was != "to_be_edited"))


def _to_be_edited(row: Row[Any]) -> ToConfirm:
    other = "" if row.letter == row.id else f" of its dead letter {row.letter}"
    why = f"{row.edited_by!r} has asked at {row.edited_at:%F %T%z} to edit the message{other} (edit {row.edit}), and nobody has approved it"
    says = f"{called(OperationId(row.tenant, row.task, row.key))}: {why}; a replay sends the message without the edit"
    return ToConfirm(row.id, "to_be_edited", f"{says}, with the arguments that were found to be wrong")


def _to_confirm(row: Row[Any]) -> ToConfirm | None:
    id, at = OperationId(row.tenant, row.task, row.key), f"{row.failed_at:%F %T%z}"
    if row.code in BY_PERSON:
        why = f"was {row.code} by a person at {at}; a replay runs it all the same, under the same key"
        return ToConfirm(row.id, "cancelled", f"{called(id)}: {why}")
    if row.effect is not None:
        why = f"was declined by the provider as {row.refused_as} at {at}; a replay asks it again for {row.effect}, under a new key"
        return ToConfirm(row.id, "declined", f"{called(id)}: {why}, and what was declined may happen")
    if row.code not in FOUND_BY_US or json.loads(row.error).get("declined"):
        why = f"was refused for good as {row.code} at {at}; a replay runs it again, and what was refused may happen"
        return ToConfirm(row.id, "declined", f"{called(id)}: {why}")
    return None


@repeatable
def replay(app: Celery, letter: int, change: Change, *, confirmed: Collection[ToConfirm] | None = None) -> OperationId:
    """Send a dead letter again under the same key. Returns its operation. A saga that has stopped goes on.

    `confirmed`: what was declined or cancelled, or is to be edited, only if a person was shown it so by `to_confirm`, and has
    confirmed it; None: in any case. Raises `NotConfirmed`, `OperationNotFound`, `ChangeRefused`, `NotAuthenticated` and
    `ReplayRefused`, the last also for an operation whose end a saga has used, for a message of a stream that its letter does
    not have yet, for a webhook that was erased or redelivered, and for a message without a valid signature where one is
    required.
    """
    app.loader.import_default_modules()  # a letter whose operation is not known yet is named by its task
    runtime = runtime_of(app)
    with runtime.engine.begin() as connection, refused_by_constraint(f"dead letter {letter}", MOVED):
        if (done := repeated(connection, change, "replay", None, said={"dead_letter": letter})) is not None:
            return OperationId(done.tenant, done.task, done.key)
        if not change.is_verified and letters_move_money(app, connection, [letter]):
            raise NotAuthenticated(f"dead letter {letter}: {NEEDS_TOKEN}")
        service = runtime.settings.service
        check_signature(connection, letter, runtime.settings)
        _check_not_erased(connection, letter)
        _check_cell(connection, letter, runtime.settings)
        check_has_message(connection, letter, runtime.settings)
        _reopen_webhook(connection, letter)
        details: dict[str, Any] = {"dead_letter": letter}
        if (stopped := saga_changes.stopped_by(connection, letter)) is not None:
            _check_confirmed(connection, letter, confirmed)
            retried = saga_changes.retry(connection, stopped, service=service, app=app)
            for other, undo in retried.letters.items():
                audit(
                    connection, replace(change, request_id=None), "replay", undo, None, details={"dead_letter": other}
                )
            id, details = stopped, details | {"dead_letters": list(retried.letters), "waits_for": retried.waits_for}
        elif is_refused(row := dead_letters.show(connection, letter)):
            id = _open_refused(connection, runtime, row)
        else:
            caller = saga_changes.lock_caller(connection, letter)
            discards.lock(connection, letter)  # nobody asks for an edit between the look and the replay
            _check_confirmed(connection, letter, confirmed)
            used = _use_of(connection, letter)
            id = dead_letters.replay(connection, letter, service=service, app=app)
            if used is not None and not saga_changes.await_again(connection, id, caller):
                _check_only_finishes(letter, used)
                saga_changes.only_finish(connection, id)
        record = operations.read_locked(connection, id)
        audit(connection, change, "replay", id, record, details=details)
    return id


def _check_confirmed(connection: Connection, letter: int, confirmed: Collection[ToConfirm] | None) -> None:
    """Raise `NotConfirmed` for what `to_confirm` finds, unless a person has confirmed just that."""
    if confirmed is None:
        return
    for found in to_confirm(connection, [letter]):
        if found not in confirmed:
            refused = NotConfirmed(f"dead letter {letter}: {found.warning}")
            refused.was = found.was
            raise refused


@dataclass(frozen=True, slots=True)
class _Use:
    """What a saga has made of how the operation of a letter has ended. `has_happened`: all of it, as a person has found."""

    kind: str
    saga: str
    has_happened: bool


def _use_of(connection: Connection, letter: int) -> _Use | None:
    """The saga that has called the operation of a letter, or is undone without it.

    Raises `ReplayRefused` for a saga that was undone, except for what has no undo.
    """
    if left := saga_changes.left_done(connection, letter):
        raise ReplayRefused(
            f"dead letter {letter}: its saga was undone except for {', '.join(left)}, which would be done again; "
            "enqueue the saga under another key"
        )
    used = saga_changes.used_by(connection, letter)
    return None if used is None else _Use(used.kind, used.saga, saga_changes.has_happened(connection, letter))


def _check_only_finishes(letter: int, used: _Use) -> None:
    """Raise `ReplayRefused`, unless what a saga has gone on from was in doubt and has happened."""
    if used.kind == "undo":
        raise ReplayRefused(f"dead letter {letter}: the saga {used.saga} has been undone without it")
    if not used.has_happened:
        raise ReplayRefused(f"dead letter {letter}: the saga {used.saga} has called this and gone on from its failure")


def _check_not_erased(connection: Connection, letter: int) -> None:
    """Raise `ReplayRefused` for the letter of an operation whose data was erased: a late copy of its message, say."""
    row = dead_letters.show(connection, letter)
    if None in (row.tenant, row.task, row.key):
        return
    if (at := erasure.erased_at(connection, OperationId(row.tenant, row.task, row.key))) is not None:
        raise ReplayRefused(
            f"dead letter {letter}: the data of its operation was erased at {at:%F %T%z}; it never runs again"
        )


def _check_cell(connection: Connection, letter: int, settings: Settings) -> None:
    """Raise `ReplayRefused` for the letter of a tenant that is of another cell by now: what is spent is recorded there."""
    tenant = dead_letters.show(connection, letter).tenant
    try:
        if tenant is not None:
            settings.check_cell(tenant)
    except WrongCell as refused:
        raise ReplayRefused(
            f"dead letter {letter}: {refused}; call its task in that cell, or discard the letter"
        ) from None


def _open_refused(connection: Connection, runtime: Runtime, row: Row[Any]) -> OperationId:
    """Open the operation of a message that was refused, for its stream to run it from the letter.

    Raises `ReplayRefused` if the letter is not open, or the operation has a record: it has come by another message.
    """
    id = OperationId(row.tenant, row.task, row.key)
    if not open_record(connection, runtime, id, service=row.consumer_service, fingerprint=row.fingerprint):
        raise ReplayRefused(f"dead letter {row.id}: another message has begun its operation since; discard the letter")
    if (archived := archive.in_the_way(connection, row.id)) is not None:
        raise ReplayRefused(f"dead letter {row.id}: {archived}")
    if not stream_letters.adopt(connection, row.id):
        raise ReplayRefused(f"dead letter {row.id}: already {dead_letters.show(connection, row.id).status}")
    return id


def _reopen_webhook(connection: Connection, letter: int) -> None:
    """Let the webhook of a letter's operation wait again. Raises `ReplayRefused` for one that was erased or redelivered since."""
    webhook = webhook_letters.delivery_of(connection, letter)
    if webhook is None:
        return
    if webhook.is_erased:
        raise ReplayRefused(f"dead letter {letter}: the body of its webhook was erased; discard the letter")
    if webhook.is_past:
        raise ReplayRefused(f"dead letter {letter}: its webhook was redelivered since; discard the letter")
    webhook_letters.wait_again(connection, webhook.id)


def check_signature(connection: Connection, letter: int, settings: Settings) -> None:
    """Raise `ReplayRefused` for a message whose signature was not valid and still is not: a replay is signed."""
    row = dead_letters.show(connection, letter)
    is_doubted = row.reason in (UNSIGNED, ALTERED)
    if not settings.message_secrets:
        if is_doubted:
            why = "this process has no idempotency_message_secrets, and so cannot tell whether it is signed by now"
            raise ReplayRefused(f"dead letter {letter}: {row.reason}; {why}")
        return
    # nothing but the broker says that it is ours, and nothing has looked at its signature: its task was not known, or it was
    # stored unhandled by code that did not look
    is_strange = row.source == "broker" and (row.outbox_id is None or row.reason == UNHANDLED)
    in_transition = settings.unsigned_until is not None and datetime.now(UTC) < settings.unsigned_until
    if not is_doubted and (not is_strange or in_transition):
        return
    # of one that was edited, that of the message as it came: the edit was allowed by it
    payload = edits.first_payload(connection, letter) or row.payload
    message = letter_messages.stored_message(letter, payload)
    try:
        headers = json.loads(row.headers or "{}")
    except (ValueError, RecursionError):
        headers = {}
    if signed_at(headers, message.body, settings.message_secrets) is None:
        raise ReplayRefused(f"dead letter {letter}: {row.reason}; only what this application has signed is sent again")
