"""Waiters for the end of an operation: one row per operation while there are any, so that its end sends a NOTIFY."""

from __future__ import annotations

from collections.abc import Collection
from hashlib import sha256

from sqlalchemy import Connection

from ..wire.keys import OperationId
from .record import all_named, named

# What an end notifies (migration 0013), with the operation's digest.
CHANNEL = "idempotency_ended"

_ADD = """
INSERT INTO idempotency.waiters (tenant, task, key, until)
VALUES (%(tenant)s, %(task)s, %(key)s, clock_timestamp() + make_interval(secs => %(seconds)s))
ON CONFLICT (tenant, task, key) DO UPDATE SET until = greatest(waiters.until, excluded.until)
"""

_ASKED = "unnest(%(tenants)s::text[], %(tasks)s::text[], %(keys)s::text[]) asked(tenant, task, key)"

_REMOVE = f"""
DELETE FROM idempotency.waiters w USING {_ASKED}
WHERE (w.tenant, w.task, w.key) = (asked.tenant, asked.task, asked.key)
"""

_ENDED = f"""
SELECT tenant, task, key FROM {_ASKED}
WHERE EXISTS (SELECT FROM idempotency.records r
              WHERE (r.tenant, r.task, r.key) = (asked.tenant, asked.task, asked.key)
                AND r.status IN ('completed', 'failed'))
"""

_FORGET = """
DELETE FROM idempotency.waiters WHERE (tenant, task, key) IN (
    SELECT tenant, task, key FROM idempotency.waiters WHERE until < clock_timestamp() FOR UPDATE SKIP LOCKED)
"""


def add(connection: Connection, id: OperationId, seconds: float) -> None:
    """Ask for a NOTIFY at the operation's end, for so many seconds."""
    connection.exec_driver_sql(_ADD, named(id) | {"seconds": seconds})


def remove(connection: Connection, ids: Collection[OperationId]) -> None:
    """Delete the rows of these operations, which have ended."""
    connection.exec_driver_sql(_REMOVE, all_named(ids))


def ended(connection: Connection, ids: Collection[OperationId]) -> list[OperationId]:
    """Those of these operations that have ended."""
    return [OperationId(*row) for row in connection.exec_driver_sql(_ENDED, all_named(ids))]


def forget(connection: Connection) -> None:
    """Delete the rows of waits whose time is over."""
    connection.exec_driver_sql(_FORGET)


def digest(id: OperationId) -> str:
    """How a NOTIFY names the operation: its payload has a limit, and a key may tell listeners too much."""
    return sha256("\n".join((id.tenant, id.task, id.key)).encode()).hexdigest()
