"""Dead letters of streams: they keep the message itself, because nothing else can bring it back once the position is beyond it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row

from ..wire.keys import OperationId
from .record import is_open, named
from .statements import execute

# Operations that a person has opened again, with what their letters have kept of the message.
_REOPENED = """
SELECT r.tenant, r.key, r.available_at, letter.headers FROM idempotency.records r CROSS JOIN LATERAL (
    SELECT headers, status, generation FROM idempotency.dead_letters d
    WHERE (d.tenant, d.task, d.key) = (r.tenant, r.task, r.key) AND d.source = 'operation' ORDER BY d.id DESC LIMIT 1
) letter
WHERE r.queue = %(task)s AND r.available_at <= clock_timestamp() AND r.service = %(service)s AND r.task = %(task)s
  AND letter.status = 'replayed' AND letter.generation < r.generation
  AND r.available_at >= %(since)s::timestamptz AND (r.available_at, r.tenant, r.key) > (%(since)s, %(tenant)s, %(key)s)
ORDER BY r.available_at, r.tenant, r.key LIMIT %(limit)s
"""

_NEWEST = """
SELECT id, headers FROM idempotency.dead_letters
WHERE (tenant, task, key) = (%(tenant)s, %(task)s, %(key)s) AND source = 'operation' ORDER BY id DESC LIMIT 1
"""
_KEPT = f"SELECT headers FROM ({_NEWEST}) newest WHERE headers <> %(without)s"
_KEEP = f"""
UPDATE idempotency.dead_letters SET headers = %(headers)s
WHERE id = (SELECT id FROM ({_NEWEST}) newest) AND headers = %(without)s AND status <> 'discarded'
"""
# The letter of a message that was refused without touching its operation becomes that of the operation, before its first run:
# what is opened again is found by it.
_ADOPT = f"""
UPDATE idempotency.dead_letters SET source = 'operation', generation = 0, status = 'replayed', closed_at = clock_timestamp()
WHERE id = %(letter)s AND {is_open()} RETURNING 1
"""
# The headers of the letter of a message that a person has cancelled, and that has not failed before.
WITHOUT_MESSAGE = "{}"

_LETTER = """
SELECT bool_or(status = 'open') AS is_open FROM idempotency.dead_letters
WHERE digest = %(digest)s AND starts_with(queue, 'stream.')
"""


def reopened(
    connection: Connection, service: str, task: str, *, after: Row[Any] | None = None, limit: int
) -> Sequence[Row[Any]]:
    """Tenant, key and kept message of operations that a person has opened again, the oldest first. `after`: a row that was last."""
    since = ("-infinity", "", "") if after is None else (after.available_at, after.tenant, after.key)
    fields = {
        "service": service,
        "task": task,
        "limit": limit,
        **dict(zip(("since", "tenant", "key"), since, strict=True)),
    }
    rows: Sequence[Row[Any]] = execute(connection, _REOPENED, fields).fetchall()
    return rows


def kept_message(connection: Connection, id: OperationId) -> str | None:
    """What the newest letter of an operation has kept of its message; None: nothing, or there is no letter."""
    return connection.exec_driver_sql(_KEPT, named(id) | {"without": WITHOUT_MESSAGE}).scalar_one_or_none()


def keep_message(connection: Connection, id: OperationId, headers: str) -> None:
    """Add its message to the letter of an operation that a person has cancelled, which only the stream has."""
    execute(connection, _KEEP, named(id) | {"without": WITHOUT_MESSAGE, "headers": headers})


def adopt(connection: Connection, letter: int) -> bool:
    """Close the letter of a refused message, as that of an operation which is open and has not run. False: it is not open."""
    return connection.exec_driver_sql(_ADOPT, {"letter": letter}).one_or_none() is not None


def has_open_letter(connection: Connection, digest: str) -> bool | None:
    """Whether the dead letter of the message with this digest waits for a person; None: it has none."""
    found: bool | None = execute(connection, _LETTER, {"digest": digest}).fetchone().is_open
    return found
