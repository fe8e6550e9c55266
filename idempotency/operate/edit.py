"""Editing the message of a dead letter: its arguments were wrong, and a person corrects them; a replay then sends that.

It stays the same operation: key and tenant come out as before. Only what has done nothing yet is edited, because whatever was
recorded, or told to a provider, was so with the earlier arguments. Of what moves money, one person asks for it and another
approves.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from celery import Celery
from sqlalchemy import Connection, Row

from ..application import runtime_of
from ..attempt.opening import open_record
from ..errors import ChangeRefused, NotAllowed, NotAuthenticated, ReplayRefused, SettingsError
from ..identities import looks_like, may
from ..letters.editing import arguments_of, edited
from ..reasons import ALTERED, EXPIRED_EARLY, OTHER_CELL, UNSIGNED
from ..store import archive, dead_letters, discards, edits, erasure, operations
from ..store.letter_messages import NEVER, stored_message
from ..store.outbox import EXTERNAL
from ..store.statements import repeatable
from ..streams.declaring import TASK_PREFIX
from ..wire import encoding, keys
from ..wire.headers import FINGERPRINT_HEADER
from ..wire.keys import HTTP_TASK, OperationId
from ..worker.calls import KeyedTask
from .change import MOVED, Change, audit, refused_by_constraint, repeated
from .money import NEEDS_TOKEN, letters_move_money
from .people import Person
from .replay import check_signature

# Letters whose message is not this application's to correct, or of which nobody knows what has become.
NOT_OURS = (
    UNSIGNED, ALTERED, EXPIRED_EARLY, OTHER_CELL, "other_service", "stale", "unknown_version", "unknown_task", "missing_task",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Editable:
    """A locked letter whose message may be edited, what it is now, and the message that it becomes."""

    row: Row[Any]
    id: OperationId
    record: Any
    was: str | None
    after: str
    fingerprint: str


@repeatable
def edit(
    app: Celery, letter: int, corrected: str, change: Change, *, person: Person | None = None, shown: str | None = None
) -> bool:
    """Give an open dead letter other arguments, `{"args": [...], "kwargs": {...}}` as JSON, to be replayed afterwards.

    Returns whether it is done; of what moves money, it is asked for, and another person approves by `approve_edit`. `person`:
    who has proved who they are. `shown`: the `digest` of the message that they have looked at, if they have. Raises
    `OperationNotFound`, `NotAuthenticated`, and `ChangeRefused`, which names no value: for arguments that the task does not
    take or that name another operation, and for a letter whose operation has done something, runs, has ended well, is a saga or
    was called by one.
    """
    app.loader.import_default_modules()
    with runtime_of(app).engine.begin() as connection:
        said = {"dead_letter": letter, "payload": digest(corrected)}
        moves_money = letters_move_money(app, connection, [letter])
        action = "edit_requested" if moves_money else "edit"
        if repeated(connection, change, action, None, said=said) is not None:
            return not moves_money
        if moves_money and (not change.is_verified or person is None):
            raise NotAuthenticated(f"dead letter {letter}: {NEEDS_TOKEN}")
        row = _locked(app, connection, letter)
        if shown not in (None, digest(row.payload)):
            raise ChangeRefused(f"dead letter {letter}: its message is another one than was shown; look again")
        asked = edits.waiting(connection, letter)
        known_by = None if person is None else person.known_by
        # nobody may approve one by a person who is known otherwise, or of what the message was: it is replaced
        if (
            asked is not None
            and (asked.known_by, asked.before) == (known_by, row.payload)
            and looks_like(asked.edited_by) != looks_like(change.actor)
        ):
            raise ChangeRefused(
                f"dead letter {letter}: {asked.edited_by!r} has asked for an edit already; another person can approve"
            )
        found = _checked(app, connection, row, corrected)
        if found.after == row.payload:
            raise ChangeRefused(f"dead letter {letter}: its message has these arguments already")
        edits.add(
            connection, found.id, row, after=found.after, was=found.was, fingerprint=found.fingerprint, by=change.actor,
            known_by=known_by, reason=change.reason, applied=not moves_money,
        )  # fmt: skip
        if not moves_money:
            _apply(app, connection, found)
        audit(connection, change, action, found.id, found.record, details=said)
    return not moves_money


@repeatable
def approve_edit(app: Celery, person: Person, letter: int, asked_for: int) -> None:
    """Make the edit of this number, which another person has asked for: what they have asked for since is another one.

    Raises `OperationNotFound`, `NotAllowed` and `ChangeRefused`.
    """
    if not may(person.role, "approver"):
        raise NotAllowed(f"approve-edit: needs the role approver, {person.name!r} is {person.role}")
    app.loader.import_default_modules()
    with runtime_of(app).engine.begin() as connection:
        row = _locked(app, connection, letter)
        asked = edits.waiting(connection, letter)
        if asked is None:
            raise ChangeRefused(f"dead letter {letter}: no one has asked for an edit")
        if asked.id != asked_for:
            raise ChangeRefused(
                f"dead letter {letter}: the edit that waits is {asked.id}, not {asked_for}; look at that one"
            )
        if looks_like(asked.edited_by) == looks_like(person.name):
            raise ChangeRefused(
                f"dead letter {letter}: {asked.edited_by!r} asked for it, so another person has to approve"
            )
        if asked.known_by != person.known_by:
            raise ChangeRefused(
                f"dead letter {letter}: {asked.edited_by!r}, who asked for it, was known in another way than people are now, "
                "and may be the same person; ask again"
            )
        if asked.before != row.payload:
            raise ChangeRefused(
                f"dead letter {letter}: its message is another one since {asked.edited_by!r} asked; ask again"
            )
        id, record = _operation(app, connection, row)
        _check_still(app, row, id, asked)
        found = _Editable(row, id, record, _fingerprint_of(row), asked.after, asked.fingerprint_after)
        if not edits.approve(connection, asked.id, by=person.name):
            raise ChangeRefused(f"dead letter {letter}: another person has to approve")
        _apply(app, connection, found)
        change = Change(person.name, asked.reason, is_verified=True, check_person=person.check)
        audit(connection, change, "edit_approved", id, record, details={"dead_letter": letter})


def digest(payload: str) -> str:
    """What identifies a letter's message, so that nobody edits another one than they were shown."""
    return sha256(payload.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def why_not(app: Celery, connection: Connection, letter: int) -> str | None:
    """Why the message of a letter is not edited; None: it may be. Locks nothing, and is asked again by the edit itself."""
    row = dead_letters.show(connection, letter)
    if row.status != "open":
        return f"it is {row.status}"
    try:
        _check_kind(app, connection, row)
        _operation(app, connection, row, locks=False)
    except (ChangeRefused, SettingsError) as refused:
        return str(refused).partition(": ")[2]
    return None


# ---------------------------------------------------------------- what may be edited


def _locked(app: Celery, connection: Connection, letter: int) -> Row[Any]:
    """An open letter, locked after its record, whose message may be a task's. Raises `OperationNotFound` and `ChangeRefused`."""
    if not edits.is_there(connection):
        raise SettingsError("database schema: edits need 0021; migrate it")
    row = discards.lock(connection, letter)
    if row is None:
        raise ChangeRefused(f"dead letter {letter}: already {dead_letters.show(connection, letter).status}")
    if (archived := archive.in_the_way(connection, letter)) is not None:
        raise ChangeRefused(f"dead letter {letter}: {archived}")
    if (asked := discards.pending_request(connection, letter)) is not None:
        raise ChangeRefused(f"dead letter {letter}: {asked.requested_by!r} has asked to discard it")
    _check_kind(app, connection, row)
    return row


def _check_kind(app: Celery, connection: Connection, row: Row[Any]) -> None:
    """Raise `ChangeRefused` for a message that is no task's of this application, or that nobody may send."""
    task = row.task or row.header_task or ""
    what = None
    if row.reason in NEVER:
        what = NEVER[row.reason]
    elif row.reason in NOT_OURS:
        what = f"{row.reason}, so its message is not this application's to correct"
    elif task.startswith(TASK_PREFIX):
        what = "it is of a stream, whose message has no arguments of a task"
    elif task == HTTP_TASK or task.startswith(EXTERNAL):
        what = "it is of no task"
    elif not isinstance(app.tasks.get(task), KeyedTask):
        what = f"this application has no idempotent task {task!r} that could check its arguments"
    elif not row.payload:
        what = "no message of it is kept"
    elif None in (row.tenant, row.key):
        what = "it does not say which operation it is for; enqueue the work instead"
    if what is not None:
        raise ChangeRefused(f"dead letter {row.id}: {what}")
    try:
        check_signature(connection, row.id, runtime_of(app).settings)
    except ReplayRefused as refused:
        raise ChangeRefused(str(refused)) from None


def _operation(app: Celery, connection: Connection, row: Row[Any], *, locks: bool = True) -> tuple[OperationId, Any]:
    """The operation of a letter, and its record, locked. Raises `ChangeRefused` if other arguments would not be right for it."""
    id = OperationId(row.tenant, row.task or row.header_task, row.key)
    record = (
        operations.read_locked(connection, id)
        if locks
        else operations.lookup(connection, id, runtime_of(app).settings.service)
    )
    if locks:
        edits.lock_row(connection, row)
    what = edits.obstacle(connection, id, row)
    if record is None:
        if row.generation is not None:
            what = "its operation is purged"
    elif row.generation is None and edits.is_waiting_for_person(connection, id):
        pass
    elif record.status != "failed":
        what = f"its operation is {record.status}; only what has failed, or has not begun, is edited"
    elif row.generation != record.generation or row.fingerprint != record.fingerprint:
        what = "it is of another request, or another generation, than its operation is of now"
    elif record.effects:
        what = "its operation has recorded calls or steps, which were made with its arguments as they are"
    elif erasure.erased_at(connection, id) is not None:
        what = "the data of its operation was erased"
    if what is not None:
        raise ChangeRefused(f"dead letter {row.id}: {what}")
    return id, record


def _checked(app: Celery, connection: Connection, row: Row[Any], corrected: str) -> _Editable:
    id, record = _operation(app, connection, row)
    task = app.tasks[id.task]
    try:
        message = stored_message(row.id, row.payload)
    except ReplayRefused as refused:
        raise ChangeRefused(str(refused)) from None
    after, fingerprint = edited(task, message, corrected, id)
    return _Editable(row, id, record, _fingerprint_of(row), after, fingerprint)


def _check_still(app: Celery, row: Row[Any], id: OperationId, asked: Row[Any]) -> None:
    """Raise `ChangeRefused` for what was asked for before a deploy, if the task of today makes something else of it, or refuses it."""
    found = arguments_of(stored_message(row.id, asked.after))
    args, kwargs, _ = found if found is not None else ([], {}, None)
    text = encoding.dumps({"args": args, "kwargs": kwargs})
    _, fingerprint = edited(app.tasks[id.task], stored_message(row.id, row.payload), text, id)
    if fingerprint != asked.fingerprint_after:
        raise ChangeRefused(f"dead letter {row.id}: its task has changed since {asked.edited_by!r} asked; ask again")


def _fingerprint_of(row: Row[Any]) -> str | None:
    """What callers who used the earlier arguments have been told apart by; None: nothing says."""
    if row.fingerprint is not None:
        return str(row.fingerprint)
    given = stored_message(row.id, row.payload).headers.get(FINGERPRINT_HEADER)
    return str(given) if keys.is_fingerprint(given) else None


def _apply(app: Celery, connection: Connection, found: _Editable) -> None:
    with refused_by_constraint(f"dead letter {found.row.id}", MOVED):
        _change(app, connection, found)


def _change(app: Celery, connection: Connection, found: _Editable) -> None:
    row = found.row
    if found.record is None:
        _open_record(app, connection, found)
    elif row.generation is None and not edits.apply_to_opened(
        connection, found.id, row, after=found.after, was=found.was, fingerprint=found.fingerprint
    ):
        raise ChangeRefused(f"dead letter {row.id}: its operation has changed meanwhile; look again")
    if not edits.apply(connection, found.id, row, after=found.after, was=found.was, fingerprint=found.fingerprint):
        raise ChangeRefused(f"dead letter {row.id}: its operation has changed meanwhile; look again")


def _open_record(app: Celery, connection: Connection, found: _Editable) -> None:
    """Give an operation that has not begun its record, under its new fingerprint: a request with the earlier arguments would begin it otherwise.

    It is released, and nothing delivers it before a replay. It has the message for a cancel, which tells `on_failed` the
    arguments and leaves a letter that can be replayed.
    """
    row = found.row
    if not open_record(
        connection, runtime_of(app), found.id, service=row.consumer_service, fingerprint=found.fingerprint,
        message=found.after, queue=row.queue or "",
    ):  # fmt: skip
        raise ChangeRefused(f"dead letter {row.id}: its operation has begun meanwhile; look again")
