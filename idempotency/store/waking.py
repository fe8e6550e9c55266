"""Waking an operation that waits for a provider's decision: what it waits for is known by now."""

from __future__ import annotations

from ..wire.keys import OperationId
from .callers import Executes
from .inserting import moving_lock_of
from .record import OWN, ROW, named

# Row-level security shows the transaction its tenants alone. The lock keeps the record in its partition until the caller
# commits: to meet one that moves is an error, after which only the caller could begin again.
_ABOUT = f"""
SELECT idempotency.about(%(tenant)s), pg_advisory_xact_lock_shared({moving_lock_of("%(tenant)s", "%(task)s", "%(key)s")})
"""

# One that is running may have asked the provider before this was known: its release heeds the note.
_WAKE = f"""
UPDATE idempotency.records
SET available_at = CASE WHEN status = 'released' THEN least(available_at, clock_timestamp()) END,
    woken = status = 'started', updated_at = clock_timestamp()
WHERE {ROW} AND {OWN} AND status IN ('started', 'released')
"""

_SEND_NOW = f"""
WITH due AS (
    UPDATE idempotency.outbox SET available_at = clock_timestamp()
    WHERE {ROW} AND {OWN} AND status = 'pending' AND available_at > clock_timestamp() RETURNING 1
)
SELECT pg_notify('idempotency_outbox', '') FROM due
WHERE EXISTS (SELECT FROM idempotency.relay_sleep WHERE until > clock_timestamp()) LIMIT 1
"""


def wake(caller: Executes, id: OperationId, service: str) -> None:
    """Make an operation of `service` due now, in the caller's transaction. One that has ended stays as it is."""
    names = named(id) | {"service": service}
    caller.exec_driver_sql(_ABOUT, names)
    caller.exec_driver_sql(_WAKE, names)
    caller.exec_driver_sql(_SEND_NOW, names)
