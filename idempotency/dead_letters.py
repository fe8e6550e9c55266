"""Dead letters: what has ended without success and waits for a person.

Stored in the transaction that makes the operation fail, so that neither exists without the other. Replay keeps the
key: one transaction marks the letter, opens a new generation of the record and writes the outbox row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row

from .delivery import Delivery
from .errors import IdempotencyError, OperationNotFound
from .keys import OperationId
from .records import Claimed

_STORE = """
INSERT INTO idempotency.dead_letters
    (source, tenant, operation, key, generation, fingerprint, queue, task, reason, first_error, last_error, attempts,
     payload)
SELECT 'operation', %(tenant)s, %(operation)s, %(key)s, %(generation)s, %(fingerprint)s, %(queue)s, %(operation)s,
       %(reason)s, coalesce((SELECT first_error FROM idempotency.records WHERE tenant = %(tenant)s
                             AND operation = %(operation)s AND key = %(key)s
                             AND fingerprint = %(fingerprint)s), %(last_error)s),
       %(last_error)s, %(attempts)s, %(message)s
ON CONFLICT (tenant, operation, key, generation, reason, fingerprint) DO NOTHING
"""

_LIST = """
SELECT id, source, tenant, operation, key, generation, queue, reason, attempts, status, last_error, failed_at
FROM idempotency.dead_letters
WHERE (%(status)s::text IS NULL OR status = %(status)s) AND (%(operation)s::text IS NULL OR operation = %(operation)s)
ORDER BY id DESC LIMIT %(limit)s
"""

_SHOW = "SELECT * FROM idempotency.dead_letters WHERE id = %(id)s"

_MARK_REPLAYED = """
UPDATE idempotency.dead_letters SET status = 'replayed', settled_at = clock_timestamp()
WHERE id = %(id)s AND status = 'open'
RETURNING tenant, operation, key, generation, fingerprint, payload
"""

# failed → released: the generation is the proof that a person asked for another run. Effects and steps are kept.
_REOPEN = """
UPDATE idempotency.records
SET status = 'released', generation = generation + 1, attempts = 0, token = NULL, locked_by = NULL,
    available_at = clock_timestamp(), completed_at = NULL, expires_at = NULL, response_code = NULL,
    error = NULL, first_error = NULL, opened_at = clock_timestamp(), updated_at = clock_timestamp()
WHERE tenant = %(tenant)s AND operation = %(operation)s AND key = %(key)s
  AND fingerprint = %(fingerprint)s AND status = 'failed' AND generation = %(generation)s
RETURNING 1
"""

_DELIVER = """
INSERT INTO idempotency.outbox (event_id, tenant, operation, key, fingerprint, message, origin)
VALUES (gen_random_uuid()::text, %(tenant)s, %(operation)s, %(key)s, %(fingerprint)s, %(payload)s, 'replay')
"""

_STATUS = (
    "SELECT status FROM idempotency.records WHERE tenant = %(tenant)s AND operation = %(operation)s AND key = %(key)s"
)


class ReplayRefused(IdempotencyError):
    """This dead letter cannot be replayed; the message says why. Nothing was changed."""


def store_failure(
    connection: Connection,
    id: OperationId,
    delivery: Delivery,
    claim: Claimed,
    *,
    reason: str,
    last_error: str,
) -> None:
    """Store the dead letter of a failing operation, in the failing transaction."""
    _store(connection, id, delivery, claim.generation, reason, last_error, claim.attempts)


def store_refusal(
    connection: Connection, id: OperationId, delivery: Delivery, *, generation: int, reason: str, error: str
) -> None:
    """Store a delivery that was refused while the record under its key stays as it is (another fingerprint)."""
    _store(connection, id, delivery, generation, reason, error, 0)


def _store(
    connection: Connection,
    id: OperationId,
    delivery: Delivery,
    generation: int,
    reason: str,
    last_error: str,
    attempts: int,
) -> None:
    connection.exec_driver_sql(
        _STORE,
        {
            "tenant": id.tenant,
            "operation": id.operation,
            "key": id.key,
            "generation": generation,
            "fingerprint": delivery.fingerprint,
            "queue": delivery.queue,
            "reason": reason,
            "last_error": last_error,
            "attempts": attempts,
            "message": delivery.message,
        },
    )


def list_letters(
    connection: Connection, *, status: str | None = "open", operation: str | None = None, limit: int = 100
) -> Sequence[Row[Any]]:
    """The newest dead letters, of one status and operation or of all."""
    return connection.exec_driver_sql(_LIST, {"status": status, "operation": operation, "limit": limit}).all()


def show(connection: Connection, letter: int) -> Row[Any]:
    """One dead letter, whole. Raises `OperationNotFound`."""
    row = connection.exec_driver_sql(_SHOW, {"id": letter}).one_or_none()
    if row is None:
        raise OperationNotFound(f"dead letter {letter}: not found")
    return row


def replay(connection: Connection, letter: int) -> OperationId:
    """Send a dead letter again under the same key: one transaction, which the caller commits.

    Two replays, or a replay and a late original, give one result: the letter is marked only while it is open, and
    the record is reopened only while it is failed. Raises `OperationNotFound` and `ReplayRefused`.
    """
    row = connection.exec_driver_sql(_MARK_REPLAYED, {"id": letter}).one_or_none()
    if row is None:
        status = show(connection, letter).status
        raise ReplayRefused(f"dead letter {letter}: already {status}")
    fields = row._asdict()
    if connection.exec_driver_sql(_REOPEN, fields).one_or_none() is None:
        status = connection.exec_driver_sql(_STATUS, fields).scalar_one_or_none()
        if status is not None:
            raise ReplayRefused(f"dead letter {letter}: the operation is {status}, not failed in this generation")
    connection.exec_driver_sql(_DELIVER, fields)
    return OperationId(row.tenant, row.operation, row.key)
