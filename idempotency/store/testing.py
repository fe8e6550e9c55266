"""Statements for the tests of an application, for a test database only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection, Row

from ..wire.keys import OperationId
from .record import ROW, all_named, named

_RIPEN = f"""
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


# By id: the order in which rows were enqueued. Delays are not waited for, except those of a saga, whose time begins when
# it goes on, and of what a provider has not decided.
_WAITING = """
status = 'pending' AND NOT (available_at > clock_timestamp() AND (
    (tenant, task, key) IN (SELECT * FROM unnest(%(tenants)s::text[], %(tasks)s::text[], %(keys)s::text[]))
    OR EXISTS (
        SELECT FROM idempotency.records r
        WHERE (r.tenant, r.task, r.key) = (outbox.tenant, outbox.task, outbox.key) AND r.opened_at > clock_timestamp())))
ORDER BY id
"""

_TAKE = f"""
UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp(), relayed_until = NULL
WHERE id = (SELECT id FROM idempotency.outbox WHERE {_WAITING} LIMIT 1)
RETURNING message_id, tenant, task, key, message, origin, generation
"""

_AGE = """
WITH waits AS (
    UPDATE idempotency.saga_steps SET due_at = due_at - make_interval(secs => %(seconds)s) WHERE state = 'begun'
), records AS (
    UPDATE idempotency.records
    SET available_at = available_at - make_interval(secs => %(seconds)s),
        opened_at = least(opened_at, greatest(opened_at - make_interval(secs => %(seconds)s), clock_timestamp()))
    WHERE status = 'released'
)
UPDATE idempotency.outbox
SET available_at = CASE WHEN status = 'pending' THEN available_at - make_interval(secs => %(seconds)s) ELSE available_at END,
    published_at = published_at - make_interval(secs => %(seconds)s)
"""

# Whether a saga has called this operation; and of one that is itself a saga, why it has stopped.
_OF_SAGAS = """
SELECT EXISTS (
    SELECT FROM idempotency.saga_steps WHERE (tenant, call_task, call_key) = (%(tenant)s, %(task)s, %(key)s)
) AS is_called, (
    SELECT d.last_error FROM idempotency.sagas g
    JOIN idempotency.dead_letters d ON (d.tenant, d.task, d.key) = (g.tenant, g.task, g.key) AND d.reason = g.stopped
    WHERE (g.tenant, g.task, g.key) = (%(tenant)s, %(task)s, %(key)s) AND d.status = 'open' ORDER BY d.id DESC LIMIT 1
) AS stopped
"""


def pending_rows(connection: Connection, undecided: Collection[OperationId]) -> Sequence[Row[Any]]:
    """The outbox rows that wait to be published, in the order in which they were enqueued; of those undecided, what is due."""
    query = f"SELECT task, key, message FROM idempotency.outbox WHERE {_WAITING}"
    return connection.exec_driver_sql(query, all_named(undecided)).all()


def take_row(connection: Connection, undecided: Collection[OperationId]) -> Row[Any] | None:
    """Mark the first of these rows as published, and return it."""
    return connection.exec_driver_sql(_TAKE, all_named(undecided)).one_or_none()


def forget_all(connection: Connection) -> list[OperationId]:
    """Delete all operations, outbox rows and dead letters. Returns the operations."""
    for table in ("outbox", "lanes", "dead_letters", "sagas", "saga_events"):
        connection.exec_driver_sql(f"DELETE FROM idempotency.{table}")
    rows = connection.exec_driver_sql("DELETE FROM idempotency.records RETURNING tenant, task, key")
    return [OperationId(*row) for row in rows]


def ripen(connection: Connection, id: OperationId) -> None:
    """Make an operation's lease run out, or its next delivery due. What a saga waits for is left as it is."""
    connection.exec_driver_sql(_RIPEN, named(id))


def pass_time(connection: Connection, seconds: float) -> None:
    """Bring the deadline of every wait, and every delivery that is not due, nearer by so many seconds."""
    connection.exec_driver_sql(_AGE, {"seconds": seconds})


def of_sagas(connection: Connection, id: OperationId) -> Row[Any]:
    """Whether a saga has called an operation, and why it has stopped if it is one."""
    return connection.exec_driver_sql(_OF_SAGAS, named(id)).one()


def outcome(connection: Connection, id: OperationId) -> Row[Any] | None:
    """Status, result, error and effects of an operation."""
    query = f"SELECT status, result, error, effects FROM idempotency.records WHERE {ROW}"
    return connection.exec_driver_sql(query, named(id)).one_or_none()
