"""The archive of dead letters: what nobody means to decide now leaves the lists, and stays open.

An archived letter blocks what it has blocked, is never purged, and is not decided before it is restored.
"""

from __future__ import annotations

from celery import Celery
from sqlalchemy import Connection

from ..application import runtime_of
from ..attempt import conclusions
from ..errors import ChangeRefused, NotAuthenticated, SettingsError
from ..store import archive as archived
from ..store import dead_letters, discards, edits, letter_operations, operations, saga_changes
from ..store.statements import repeatable
from ..wire.keys import OperationId
from .change import Change, audit, called, repeated
from .discard import is_same_request
from .money import NEEDS_TOKEN, letters_move_money


@repeatable
def archive(app: Celery, letter: int, change: Change) -> None:
    """Take an open dead letter off the lists, with a reason, until somebody restores it.

    Raises `OperationNotFound`, `NotAuthenticated`, and `ChangeRefused` for the reason and for a letter that is closed or
    archived, that somebody has asked to discard, whose operation has a call in doubt, or whose saga has stopped, or cannot be
    undone without it: those wait for a decision, and without their letter nobody would see that. Refused is as well a request
    that was carried out before, of a letter that was restored since.
    """
    with runtime_of(app).engine.begin() as connection:
        said = {"dead_letter": letter}
        if repeated(connection, change, "archive", None, said=said) is not None:
            _check_still(connection, letter, is_archived=True)
            return
        id = _checked(app, connection, letter, change)
        if (saga := saga_changes.stopped_by(connection, letter)) is not None:
            raise ChangeRefused(
                f"dead letter {letter}: the saga {called(saga)} has stopped; see to it by `saga retry` or `saga cancel`"
            )
        if (saga := letter_operations.undo_of(connection, letter)) is not None:
            raise ChangeRefused(
                f"dead letter {letter}: the saga {called(saga)} cannot be undone without it; see to it by `saga retry`"
            )
        if (row := discards.lock(connection, letter)) is None:
            raise ChangeRefused(f"dead letter {letter}: already {dead_letters.show(connection, letter).status}")
        if (asked := discards.pending_request(connection, letter)) is not None:
            raise ChangeRefused(
                f"dead letter {letter}: {asked.requested_by!r} has asked to discard it; another person, an approver or admin, can approve"
            )
        if edits.is_there(connection) and (edit := edits.waiting(connection, letter)) is not None:
            raise ChangeRefused(
                f"dead letter {letter}: {edit.edited_by!r} has asked for an edit; another person can approve it"
            )
        record = None if id is None else operations.read_locked(connection, id)
        if record is not None and is_same_request(row, record) and conclusions.is_open(record.effects):
            raise ChangeRefused(
                f"dead letter {letter}: an effect of its operation was begun and its outcome is not known; "
                "resolve it first with `effects resolve`"
            )
        if not archived.archive(connection, letter, by=change.actor, because=change.reason):
            raise ChangeRefused(f"dead letter {letter}: archived already")
        audit(connection, change, "archive", id, record, details=said)


@repeatable
def restore(app: Celery, letter: int, change: Change) -> None:
    """Bring an archived dead letter back to the lists.

    Raises `OperationNotFound`, `NotAuthenticated`, and `ChangeRefused` for the reason and for a letter that is not archived, or
    that this request has restored before and somebody has archived since.
    """
    with runtime_of(app).engine.begin() as connection:
        said = {"dead_letter": letter}
        if repeated(connection, change, "restore", None, said=said) is not None:
            _check_still(connection, letter, is_archived=False)
            return
        id = _checked(app, connection, letter, change)
        if discards.lock(connection, letter) is None:
            raise ChangeRefused(f"dead letter {letter}: already {dead_letters.show(connection, letter).status}")
        if not archived.restore(connection, letter):
            raise ChangeRefused(f"dead letter {letter}: not archived")
        record = None if id is None else operations.read_locked(connection, id)
        audit(connection, change, "restore", id, record, details=said)


def _check_still(connection: Connection, letter: int, *, is_archived: bool) -> None:
    """Raise `ChangeRefused` for an open letter that is not any more as this request has left it: nothing is done a second time."""
    row = dead_letters.show(connection, letter)
    if row.status == "open" and (row.archived_at is not None) is not is_archived:
        did, since = ("archived", "restored") if is_archived else ("restored", "archived")
        raise ChangeRefused(f"dead letter {letter}: {did} by this request before, and {since} since; look again")


def _checked(app: Celery, connection: Connection, letter: int, change: Change) -> OperationId | None:
    """The operation of a letter, for somebody who may change it."""
    if not archived.is_there(connection):
        raise SettingsError("database schema: the archive needs 0021; migrate it")
    row = dead_letters.show(connection, letter)
    if not change.is_verified and letters_move_money(app, connection, [letter]):
        raise NotAuthenticated(f"dead letter {letter}: {NEEDS_TOKEN}")
    return None if None in (row.tenant, row.task, row.key) else OperationId(row.tenant, row.task, row.key)
