"""Replay: send a dead letter again."""

from __future__ import annotations

from celery import Celery

from ..application import runtime_of
from ..store import dead_letters, operations
from ..wire.keys import OperationId
from .change import Change, audit, repeated


def replay(app: Celery, letter: int, change: Change) -> OperationId:
    """Send a dead letter again under the same key. Returns its operation.

    Raises `OperationNotFound` and `ReplayRefused`.
    """
    app.loader.import_default_modules()  # a letter whose operation is not known yet is named by its task
    runtime = runtime_of(app)
    with runtime.engine.begin() as connection:
        if (done := repeated(connection, change, "replay", None, said={"dead_letter": letter})) is not None:
            return OperationId(done.tenant, done.task, done.key)
        id = dead_letters.replay(connection, letter, service=runtime.settings.service, app=app)
        row = operations.read_locked(connection, id)
        audit(connection, change, "replay", id, row, details={"dead_letter": letter})
    return id
