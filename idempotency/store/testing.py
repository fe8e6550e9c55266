"""Statements for the tests of an application, for a test database only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row

from ..wire.keys import OperationId
from .record import ROW, named

_RIPEN = f"""
WITH waits AS (
    UPDATE idempotency.saga_steps SET due_at = clock_timestamp() - interval '1 second'
    WHERE state = 'begun' AND saga_id = (SELECT id FROM idempotency.sagas WHERE {ROW})
)
UPDATE idempotency.records
SET locked_until = CASE WHEN status = 'started' THEN clock_timestamp() - interval '1 second' END,
    available_at = CASE WHEN status = 'released' THEN clock_timestamp() - interval '1 second' END
WHERE {ROW} AND status IN ('started', 'released')
"""


def forget(connection: Connection, id: OperationId) -> None:
    """Delete an operation's record, its rows and its dead letters."""
    for table in ("records", "outbox", "dead_letters"):
        connection.exec_driver_sql(f"DELETE FROM idempotency.{table} WHERE {ROW}", named(id))


def newest_row(connection: Connection) -> int:
    """The id of the newest row of the outbox; 0 while there is none."""
    return int(connection.exec_driver_sql("SELECT coalesce(max(id), 0) FROM idempotency.outbox").scalar_one())


def forget_rows_after(connection: Connection, newest: int) -> None:
    """Delete outbox rows newer than that one, so that they are not sent."""
    connection.exec_driver_sql("DELETE FROM idempotency.outbox WHERE id > %(newest)s", {"newest": newest})


def rows_after(connection: Connection, newest: int) -> Sequence[Row[Any]]:
    """The operations and messages of outbox rows newer than that one."""
    query = "SELECT tenant, task, key, message FROM idempotency.outbox WHERE id > %(newest)s ORDER BY id"
    return connection.exec_driver_sql(query, {"newest": newest}).all()


# By id: the order in which rows were enqueued. Delays are not waited for.
_WAITING = "status = 'pending' ORDER BY id"

_TAKE = f"""
UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp(), relayed_until = NULL
WHERE id = (SELECT id FROM idempotency.outbox WHERE {_WAITING} LIMIT 1)
RETURNING message_id, tenant, task, key, message, origin, generation
"""


def pending_rows(connection: Connection) -> Sequence[Row[Any]]:
    """The outbox rows that wait to be published, in the order in which they were enqueued."""
    query = f"SELECT task, key, message FROM idempotency.outbox WHERE {_WAITING}"
    return connection.exec_driver_sql(query).all()


def take_row(connection: Connection) -> Row[Any] | None:
    """Mark the first of these rows as published, and return it."""
    return connection.exec_driver_sql(_TAKE).one_or_none()


def forget_all(connection: Connection) -> list[OperationId]:
    """Delete all operations, outbox rows and dead letters. Returns the operations."""
    for table in ("outbox", "lanes", "dead_letters", "sagas", "saga_events"):
        connection.exec_driver_sql(f"DELETE FROM idempotency.{table}")
    rows = connection.exec_driver_sql("DELETE FROM idempotency.records RETURNING tenant, task, key")
    return [OperationId(*row) for row in rows]


def ripen(connection: Connection, id: OperationId) -> None:
    """Make an operation's lease run out, or its next delivery due."""
    connection.exec_driver_sql(_RIPEN, named(id))


def outcome(connection: Connection, id: OperationId) -> Row[Any] | None:
    """Status, result, error and effects of an operation."""
    query = f"SELECT status, result, error, effects FROM idempotency.records WHERE {ROW}"
    return connection.exec_driver_sql(query, named(id)).one_or_none()
