"""Reveal: show a person the arguments and results of an operation, which may be a customer's data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from celery import Celery
from sqlalchemy import Connection, Row

from ..application import runtime_of
from ..errors import OperationNotFound
from ..store import dead_letters, letter_operations, operations
from ..wire.keys import OperationId
from .change import Change, audit, read, repeated


def reveal(app: Celery, id: OperationId, change: Change) -> dict[str, Any]:
    """A whole operation with its messages, results and letters, for a person who says why; the look is audited.

    The audit row is committed before anything is returned: what nobody has recorded, nobody sees. Raises `OperationNotFound`,
    `ChangeRefused` for another application's, and `NotAllowed` for another tenant's.
    """
    runtime = runtime_of(app)
    with runtime.engine.begin() as connection:
        _find(connection, id, runtime.settings.service)
        row = operations.lookup(connection, id, runtime.settings.service)
        audit(connection, _each_look(change, repeated(connection, change, "reveal", id)), "reveal", id, row)
    with runtime.autocommit() as connection:
        return operations.operation(connection, id, with_payload=True)


def _each_look(change: Change, done: Row[Any] | None) -> Change:
    """A request that is sent again is another look, at what is there now: it has a row of its own."""
    return change if done is None else replace(change, request_id=None)


def _find(connection: Connection, id: OperationId, service: str) -> None:
    """Raise `OperationNotFound` for what has neither a record, a message that waits nor a letter of this application."""
    try:
        read(connection, id, service)
    except OperationNotFound:
        if not letter_operations.with_letter(connection, id, service):
            raise


def reveal_letter(app: Celery, letter: int, change: Change) -> dict[str, Any]:
    """The message and the headers of one dead letter, whose operation may not be known; the look is audited.

    Raises `OperationNotFound`, and `NotAllowed` for another tenant's.
    """
    with runtime_of(app).engine.begin() as connection:
        row = dead_letters.show(connection, letter)
        if row.consumer_service not in (None, runtime_of(app).settings.service):
            raise OperationNotFound(f"dead letter {letter}: not found")
        id = None if None in (row.tenant, row.task, row.key) else OperationId(row.tenant, row.task, row.key)
        said = {"dead_letter": letter}
        done = repeated(connection, change, "reveal", id, said=said)
        audit(connection, _each_look(change, done), "reveal", id, None, details=said)
    return {"headers": row.headers, "payload": row.payload}
