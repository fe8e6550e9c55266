"""Discarding a dead letter: one operator asks, with a reason, and another person, an approver or admin, approves."""

from __future__ import annotations

from typing import Any

from celery import Celery
from sqlalchemy import Connection, Row

from ..attempt import conclusions
from ..errors import DiscardRefused, NotAllowed
from ..identities import looks_like, may
from ..store import archive, dead_letters, discards, edits, operations, saga_changes, webhook_letters
from ..wire import keys
from ..wire.keys import OperationId
from .change import Change, audit, called, repeated
from .people import Person


def request(connection: Connection, person: Person, letter: int, reason: str, *, request_id: str | None = None) -> None:
    """Ask for a dead letter to be discarded; it stays open until another person approves.

    Repeated under the same `request_id`, it is asked for once. One transaction, which the caller commits. Raises
    `OperationNotFound`, `ChangeRefused` for the reason, and `DiscardRefused`, also while an effect of the operation has an
    unknown outcome.
    """
    change = Change(person.name, reason, request_id, check_person=person.check)
    said = {"dead_letter": letter}
    if repeated(connection, change, "discard_requested", None, said=said) is not None:
        return
    row = _locked(connection, letter)
    if not discards.request(connection, letter, by=person.name, known_by=person.known_by, reason=reason):
        asked = discards.requested(connection, letter)
        assert asked is not None  # the letter is open, so only an earlier request was in the way
        raise DiscardRefused(
            f"dead letter {letter}: {asked.requested_by!r} has asked already; another person, an approver or admin, can approve"
        )
    id, record = _operation(connection, row)
    _check_no_open_effect(row, record)
    _check_not_stopped(connection, letter)
    audit(connection, change, "discard_requested", id, record, details=said)


def approve(connection: Connection, person: Person, letter: int, *, app: Celery) -> None:
    """Discard a dead letter that another person has asked to discard; its operation can be purged from now on.

    One transaction, which the caller commits. Raises `OperationNotFound`, `NotAllowed`, and `DiscardRefused`, also
    while the operation is running, while only a replay would bring it to its end, and for an accepted operation that has
    not begun, if its task has an `on_failed` to tell, or if its message was edited.
    """
    if not may(person.role, "approver"):
        raise NotAllowed(f"approve: needs the role approver, {person.name!r} is {person.role}")
    webhook = webhook_letters.delivery_of(connection, letter)
    row = _locked(connection, letter)
    asked, reason = discards.requested(connection, letter), None
    if asked is not None and looks_like(asked.requested_by) != looks_like(person.name):
        reason = discards.approve(
            connection, letter, asked=asked.requested_by, by=person.name, known_by=person.known_by
        )
    if reason is None:
        if asked is None:
            raise DiscardRefused(f"dead letter {letter}: no one has asked to discard it")
        if asked.known_by != person.known_by:
            raise DiscardRefused(
                f"dead letter {letter}: {asked.requested_by!r}, who asked for it, was known in another way than people are now, and may be "
                "the same person; ask again"
            )
        if (asked.letter_reason, asked.letter_generation) != (row.reason, row.generation):
            raise DiscardRefused(
                f"dead letter {letter}: {asked.requested_by!r} asked for it as {asked.letter_reason!r}, and it is {row.reason!r} "
                "by now; ask again"
            )
        raise DiscardRefused(
            f"dead letter {letter}: {asked.requested_by!r} asked for it, so another person, an approver or admin, has to approve"
        )
    id, record = _operation_to_discard(connection, letter, row)
    if webhook is None and id is not None and record is None and row.outbox_id is not None:
        _check_not_forgotten(app, connection, row, id)
    discards.discard(connection, letter)
    if webhook is not None:
        webhook_letters.give_up(connection, webhook.id)
    change = Change(person.name, reason, check_person=person.check)
    audit(connection, change, "discard_approved", id, record, details={"dead_letter": letter})


def _locked(connection: Connection, letter: int) -> Row[Any]:
    """An open letter, locked after its record. Raises `OperationNotFound` and `DiscardRefused`."""
    # before the lock: a saga that goes on closes its letter only after it has locked its record
    _check_not_stopped(connection, letter)
    row = discards.lock(connection, letter)
    if row is None:
        raise DiscardRefused(f"dead letter {letter}: already {dead_letters.show(connection, letter).status}")
    if (archived := archive.in_the_way(connection, letter)) is not None:
        raise DiscardRefused(f"dead letter {letter}: {archived}")
    return row


def _operation_to_discard(connection: Connection, letter: int, row: Row[Any]) -> tuple[OperationId | None, Any]:
    """The operation of a letter, and its record. Raises `DiscardRefused` if it would then never end."""
    id, record = _operation(connection, row)
    _check_no_open_effect(row, record)
    _check_not_stopped(connection, letter)
    if id is not None and record is None and (saga := saga_changes.waiting_for(connection, id)) is not None:
        raise DiscardRefused(
            f"dead letter {letter}: the saga {called(saga)} waits for this operation; replay the letter, or cancel the "
            "operation first"
        )
    if id is None or record is None or not is_same_request(row, record) or record.status in ("completed", "failed"):
        return id, record
    if record.status == "started":
        raise DiscardRefused(f"dead letter {letter}: the operation is running; look again when it has stopped")
    # only its end would keep it from being sent
    if edits.is_waiting_for_person(connection, id):
        raise DiscardRefused(
            f"dead letter {letter}: an edit has opened the operation, which has not begun; replay the letter, or cancel the "
            "operation first"
        )
    if not discards.will_be_delivered(connection, id, record.fingerprint, service=record.service):
        raise DiscardRefused(
            f"dead letter {letter}: the operation has not ended and nothing else will deliver it; replay the letter, "
            "or cancel the operation first"
        )
    return id, record


def _check_not_forgotten(app: Celery, connection: Connection, letter: Row[Any], id: OperationId) -> None:
    """Raise `DiscardRefused` if this letter is all that is left of an accepted operation, and its `on_failed` would never run."""
    app.loader.import_default_modules()
    is_told = getattr(app.tasks.get(id.task), "on_failed", None) is not None
    if is_told and discards.is_last_delivery(connection, id, letter.outbox_id):
        raise DiscardRefused(
            f"dead letter {letter.id}: the operation has not begun and nothing else will deliver it; replay the letter, or "
            "cancel the operation first"
        )


def _check_no_open_effect(letter: Row[Any], record: Any) -> None:
    """Raise `DiscardRefused` if an effect of the letter's operation has an unknown outcome."""
    if record is not None and is_same_request(letter, record) and conclusions.is_open(record.effects):
        raise DiscardRefused(
            f"dead letter {letter.id}: an effect of its operation was begun and its outcome is not known; "
            "resolve it first with `effects resolve`"
        )


def _check_not_stopped(connection: Connection, letter: int) -> None:
    """Raise `DiscardRefused` for the letter of a saga that has stopped: without it, no one would see that it has."""
    if (saga := saga_changes.stopped_by(connection, letter)) is not None:
        raise DiscardRefused(
            f"dead letter {letter}: the saga {called(saga)} has stopped; see to it by `saga retry` or `saga cancel`"
        )


def is_same_request(letter: Row[Any], record: Any) -> bool:
    """Whether letter and record may be of the same request. Fingerprints made by different rules cannot be compared."""
    if None not in (letter.consumer_service, record.service) and letter.consumer_service != record.service:
        return False
    mine, its = letter.fingerprint, record.fingerprint
    return mine in (None, its) or keys.fingerprint_version(mine) != keys.fingerprint_version(its)


def _operation(connection: Connection, letter: Row[Any]) -> tuple[OperationId | None, Any]:
    """The operation that a letter names, and its record, locked."""
    if None in (letter.tenant, letter.task, letter.key):
        return None, None
    id = OperationId(letter.tenant, letter.task, letter.key)
    return id, operations.read_locked(connection, id)
