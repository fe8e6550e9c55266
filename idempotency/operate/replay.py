"""Replay: send a dead letter again."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from celery import Celery
from sqlalchemy import Connection

from ..application import runtime_of
from ..errors import ReplayRefused
from ..letters.examine import ALTERED, UNSIGNED
from ..settings import Settings
from ..store import dead_letters, operations, saga_changes
from ..wire.keys import OperationId
from ..wire.signing import signed_at
from .change import Change, audit, repeated


def replay(app: Celery, letter: int, change: Change) -> OperationId:
    """Send a dead letter again under the same key. Returns its operation. A saga that has stopped goes on.

    Raises `OperationNotFound`, `ChangeRefused` and `ReplayRefused`, the last also for an operation whose end a saga has used, and for
    a message without a valid signature where one is required.
    """
    app.loader.import_default_modules()  # a letter whose operation is not known yet is named by its task
    runtime = runtime_of(app)
    with runtime.engine.begin() as connection:
        if (done := repeated(connection, change, "replay", None, said={"dead_letter": letter})) is not None:
            return OperationId(done.tenant, done.task, done.key)
        service = runtime.settings.service
        _check_signature(connection, letter, runtime.settings)
        details: dict[str, Any] = {"dead_letter": letter}
        if (stopped := saga_changes.stopped_by(connection, letter)) is not None:
            retried = saga_changes.retry(connection, stopped, service=service, app=app)
            for other, undo in retried.letters.items():
                audit(
                    connection, replace(change, request_id=None), "replay", undo, None, details={"dead_letter": other}
                )
            id, details = stopped, details | {"dead_letters": list(retried.letters), "waits_for": retried.waits_for}
        else:
            is_used = _check_unused(connection, letter)
            id = dead_letters.replay(connection, letter, service=service, app=app)
            if is_used:
                saga_changes.only_finish(connection, id)
        row = operations.read_locked(connection, id)
        audit(connection, change, "replay", id, row, details=details)
    return id


def _check_unused(connection: Connection, letter: int) -> bool:
    """Raise `ReplayRefused` for an operation that a saga has called and whose end it has used.

    Unless a person has found that what was in doubt has happened: then it returns True, and the replay may only finish the task.
    """
    if left := saga_changes.left_done(connection, letter):
        raise ReplayRefused(
            f"dead letter {letter}: its saga was undone except for {', '.join(left)}, which would be done again; "
            "enqueue the saga under another key"
        )
    used = saga_changes.used_by(connection, letter)
    if used is not None and used.kind == "call" and not saga_changes.has_happened(connection, letter):
        raise ReplayRefused(f"dead letter {letter}: the saga {used.saga} has called this and gone on from its failure")
    if used is not None and used.kind == "undo":
        raise ReplayRefused(f"dead letter {letter}: the saga {used.saga} has been undone without it")
    return used is not None


def _check_signature(connection: Connection, letter: int, settings: Settings) -> None:
    """Raise `ReplayRefused` for a message that this application does not believe, unless it does by now: a replay is signed."""
    row = dead_letters.show(connection, letter)
    if row.reason not in (UNSIGNED, ALTERED) or not settings.message_secrets:
        return
    message = dead_letters.stored_message(letter, row.payload)
    try:
        headers = json.loads(row.headers)
    except (ValueError, RecursionError):
        headers = {}
    if signed_at(headers, message.body, settings.message_secrets) is None:
        raise ReplayRefused(f"dead letter {letter}: {row.reason}; only what this application has signed is sent again")
