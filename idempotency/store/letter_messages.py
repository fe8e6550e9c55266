"""What a replay of a dead letter sends: its message, and the operation that this is for. No statement: a letter is given as its row."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from sqlalchemy import Row

from ..errors import CallRefused, ReplayRefused
from ..reasons import BEYOND_LIMIT, FINGERPRINT_MISMATCH, SERVICE_MISMATCH
from ..wire import keys
from ..wire.delivery import NamesItsOperation
from ..wire.keys import OperationId
from ..wire.limits import beyond_limits
from ..wire.message import Message

if TYPE_CHECKING:
    from celery import Celery

# Letters that can never be replayed, and why.
NEVER = {
    BEYOND_LIMIT: "beyond a limit, so only its beginning is kept; discard it",
    FINGERPRINT_MISMATCH: "its key was used with other arguments, so it can never run; discard it",
    SERVICE_MISMATCH: "its key is used by another application, so it can never run; discard it",
}


def sent_for(app: Celery | None, letter: int, row: Row[Any]) -> tuple[OperationId, str, str | None]:
    """The operation that a replay of a letter is for, its fingerprint, and the message that is sent, if the letter has one.

    `row`: of the letter. Raises `ReplayRefused` for one whose message can never be sent, whatever has become of its operation.
    """
    if row.reason == BEYOND_LIMIT and row.fingerprint is None:  # or an operation has ended by an error with that code
        raise ReplayRefused(f"dead letter {letter}: {NEVER[BEYOND_LIMIT]}")
    named = OperationId(row.tenant, row.task, row.key), row.fingerprint
    id, fingerprint = _operation_of(app, letter, row) if row.fingerprint is None else named
    return id, fingerprint, _message_for(id, letter, row.payload) if row.payload else None


def stored_message(letter: int, payload: str | None) -> Message:
    """The message of a dead letter. Raises `ReplayRefused` for what is none, and for headers beyond a limit."""
    try:
        message = Message.from_text(payload or "")
    except ValueError as error:
        raise ReplayRefused(f"dead letter {letter}: what is stored is not a message: {error}; discard it") from None
    if (beyond := beyond_limits(message.headers, None, body_limit=0)) is not None:
        raise ReplayRefused(f"dead letter {letter}: {beyond}; discard it")
    return message


def _message_for(id: OperationId, letter: int, payload: str | None) -> str:
    """The message of a letter, as it is sent for its operation. Raises `ReplayRefused` for a message of another task."""
    message = stored_message(letter, payload)
    task = message.headers.get("task")
    if task not in (None, id.task):
        raise ReplayRefused(f"dead letter {letter}: its message is for another task than its operation; discard it")
    return (message if task is None else message.naming(id)).to_text()  # without a task: an event for others


def _operation_of(app: Celery | None, letter: int, row: Row[Any]) -> tuple[OperationId, str]:
    """The operation and fingerprint of a stored message, according to the task's current code."""
    message = stored_message(letter, row.payload)
    name = message.headers.get("task")
    task = None if app is None or not isinstance(name, str) else app.tasks.get(name)
    if task is None:
        raise ReplayRefused(f"dead letter {letter}: {row.reason}, and no task of this application can run it")
    if not isinstance(task, NamesItsOperation):
        raise ReplayRefused(f"dead letter {letter}: {task.name} is not an idempotent task; it could run twice")
    try:
        args, kwargs, _ = json.loads(message.body)
        named = task.named_by(args, kwargs, message.headers)
        fingerprint = keys.fingerprint(named.arguments)
    except Exception as error:  # including errors of the application's key function
        why = str(error) if isinstance(error, CallRefused) else f"not a task message ({type(error).__name__})"
        raise ReplayRefused(f"dead letter {letter}: {row.reason}, {why}") from None
    if any(said not in (None, known) for said, known in ((row.tenant, named.id.tenant), (row.key, named.id.key))):
        raise ReplayRefused(
            f"dead letter {letter}: its message is for another operation than the letter shows; discard it"
        )
    return named.id, fingerprint
