"""Discarding a dead letter: the request, its approval, and what becomes of the letter's rows."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row

from ..wire.keys import OperationId
from .outbox import refresh_lanes

_REQUEST = """
INSERT INTO idempotency.discards (letter, requested_by, reason)
SELECT id, %(by)s, %(reason)s FROM idempotency.dead_letters WHERE id = %(letter)s AND status = 'open'
ON CONFLICT (letter) DO NOTHING RETURNING letter
"""

_APPROVE = """
UPDATE idempotency.discards SET approved_by = %(by)s, approved_at = clock_timestamp()
WHERE letter = %(letter)s AND approved_by IS NULL AND requested_by <> %(by)s
RETURNING reason
"""

_REQUESTED = "SELECT requested_by, approved_by FROM idempotency.discards WHERE letter = %(letter)s"

_LOCK = "SELECT * FROM idempotency.dead_letters WHERE id = %(letter)s AND status = 'open' FOR UPDATE"

# What would still bring an operation to its end: its published rows, which this discard gives back, and those to come.
_WILL_BE_DELIVERED = """
SELECT EXISTS (SELECT FROM idempotency.outbox
               WHERE tenant = %(tenant)s AND task = %(task)s AND key = %(key)s
                 AND fingerprint = %(fingerprint)s AND settled_at IS NULL AND status <> 'failed')
"""

# The outbox must not send again what a person has given up; with a record, the record's end says so already. All other
# rows of the operation are given back to resend, `taken` or not: it may be about to mark one for this very letter.
_DISCARD = """
WITH discarded AS (
    UPDATE idempotency.dead_letters SET status = 'discarded', closed_at = clock_timestamp()
    WHERE id = %(letter)s AND status = 'open'
    RETURNING outbox_id, tenant, task, key, fingerprint
), given_back AS (
    UPDATE idempotency.outbox o SET taken = false, settled_at = CASE
        WHEN EXISTS (SELECT FROM idempotency.records r
                     WHERE (r.tenant, r.task, r.key, r.fingerprint)
                         = (o.tenant, o.task, o.key, o.fingerprint)) THEN NULL
        -- a message without a row of its own: whatever would deliver the operation was given up with it
        WHEN o.id = d.outbox_id OR d.outbox_id IS NULL AND o.fingerprint = d.fingerprint THEN clock_timestamp()
    END
    FROM discarded d
    WHERE o.status = 'published' AND o.settled_at IS NULL
      AND (o.id = d.outbox_id OR (o.tenant, o.task, o.key) = (d.tenant, d.task, d.key))
), unblocked AS (
    -- without a place the row holds back nothing of its ordering key
    UPDATE idempotency.outbox o SET place = NULL FROM discarded d
    WHERE o.id = d.outbox_id AND o.status = 'failed' AND o.ordering_key IS NOT NULL
    RETURNING o.task, o.ordering_key
)
SELECT unblocked.task, unblocked.ordering_key FROM discarded LEFT JOIN unblocked ON true
"""


def request(connection: Connection, letter: int, *, by: str, reason: str) -> bool:
    """Note that a person asks for an open letter to be discarded. False: it is not open, or one has asked already."""
    fields = {"letter": letter, "by": by, "reason": reason}
    return connection.exec_driver_sql(_REQUEST, fields).one_or_none() is not None


def approve(connection: Connection, letter: int, *, by: str) -> str | None:
    """Note that another person approves. Returns the reason that was given; None: there is no request of another person."""
    reason: str | None = connection.exec_driver_sql(_APPROVE, {"letter": letter, "by": by}).scalar_one_or_none()
    return reason


def requested(connection: Connection, letter: int) -> Row[Any] | None:
    """By whom a letter was asked to be discarded, and approved."""
    return connection.exec_driver_sql(_REQUESTED, {"letter": letter}).one_or_none()


def lock(connection: Connection, letter: int) -> Row[Any] | None:
    """Lock a letter while it is open."""
    return connection.exec_driver_sql(_LOCK, {"letter": letter}).one_or_none()


def will_be_delivered(connection: Connection, id: OperationId, fingerprint: str) -> bool:
    """Whether an operation has a row that would still bring it to its end once the letter is discarded."""
    fields = {"tenant": id.tenant, "task": id.task, "key": id.key, "fingerprint": fingerprint}
    return bool(connection.exec_driver_sql(_WILL_BE_DELIVERED, fields).scalar_one())


def discard(connection: Connection, letter: int) -> None:
    """Discard an open letter, and with it its row; the operation's other rows go back to resend, its lane goes on."""
    lane = connection.exec_driver_sql(_DISCARD, {"letter": letter}).one()
    if lane.ordering_key is not None:
        refresh_lanes(connection, [(lane.task, lane.ordering_key)])
