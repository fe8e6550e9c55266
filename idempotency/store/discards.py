"""Discarding a dead letter: request, approval, and what happens to the operation's outbox rows."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row

from ..wire.keys import OperationId
from . import dead_letters, letters
from .outbox import refresh_lanes
from .record import ROW, is_open, named, unsettled

_REQUEST = f"""
INSERT INTO idempotency.discards AS d (letter, requested_by, reason, known_by, letter_reason, letter_generation)
SELECT id, %(by)s, %(reason)s, %(known_by)s, l.reason, l.generation
FROM idempotency.dead_letters l WHERE id = %(letter)s AND {is_open("l")}
-- a name that is known elsewhere may be another person's, or another one of the same person; and a letter may become another
ON CONFLICT (letter) DO UPDATE SET requested_by = excluded.requested_by, reason = excluded.reason, known_by = excluded.known_by,
    letter_reason = excluded.letter_reason, letter_generation = excluded.letter_generation, requested_at = clock_timestamp()
WHERE d.approved_by IS NULL AND (d.known_by, d.letter_reason, d.letter_generation)
    IS DISTINCT FROM (excluded.known_by, excluded.letter_reason, excluded.letter_generation)
RETURNING letter
"""

_APPROVE = """
UPDATE idempotency.discards d SET approved_by = %(by)s, approved_at = clock_timestamp()
FROM idempotency.dead_letters l
WHERE d.letter = %(letter)s AND l.id = d.letter AND approved_by IS NULL AND requested_by = %(asked)s AND requested_by <> %(by)s
  AND known_by IS NOT DISTINCT FROM %(known_by)s
  AND (letter_reason, letter_generation) IS NOT DISTINCT FROM (l.reason, l.generation)
RETURNING d.reason
"""

_REQUESTED = """
SELECT requested_by, approved_by, known_by, letter_reason, letter_generation
FROM idempotency.discards WHERE letter = %(letter)s
"""

_MAY_LOOK = "SELECT has_table_privilege('idempotency.discards', 'SELECT')"
# A request for what the letter was before it became another no longer counts.
_PENDING = """
SELECT requested_by, requested_at, d.reason FROM idempotency.discards d JOIN idempotency.dead_letters l ON l.id = d.letter
WHERE d.letter = %(letter)s AND approved_by IS NULL
  AND (letter_reason, letter_generation) IS NOT DISTINCT FROM (l.reason, l.generation)
"""

_LOCK = f"SELECT * FROM idempotency.dead_letters WHERE id = %(letter)s AND {is_open()} FOR UPDATE"

# Rows that would still deliver the operation: pending ones, and published ones, which the discard returns to resend.
_WILL_BE_DELIVERED = f"""
SELECT EXISTS (SELECT FROM idempotency.outbox
               WHERE tenant = %(tenant)s AND task = %(task)s AND key = %(key)s
                 AND (service = %(service)s) IS NOT FALSE
                 AND fingerprint = %(fingerprint)s AND {unsettled()} AND status <> 'failed')
"""

# The row of a letter, if it has not been settled, and no other row would deliver the operation.
_IS_LAST_DELIVERY = f"""
SELECT EXISTS (SELECT FROM idempotency.outbox WHERE id = %(row)s AND {ROW} AND ({unsettled()} OR status = 'failed'))
   AND NOT EXISTS (SELECT FROM idempotency.outbox WHERE id <> %(row)s AND {ROW} AND {unsettled()} AND status <> 'failed')
"""

# What a person has given up must not be resent; if there is a record, its end ensures that. All other rows of the
# operation are returned to resend, `taken` or not, since a pass may just be marking one because of this letter.
_DISCARD = f"""
WITH discarded AS (
    UPDATE idempotency.dead_letters SET status = 'discarded', closed_at = clock_timestamp()
    WHERE id = %(letter)s AND {is_open()}
    RETURNING outbox_id, tenant, task, key, fingerprint, consumer_service
), given_back AS (
    UPDATE idempotency.outbox o SET taken = false, settled_at = CASE
        WHEN EXISTS (SELECT FROM idempotency.records r
                     WHERE (r.tenant, r.task, r.key, r.fingerprint)
                         = (o.tenant, o.task, o.key, o.fingerprint)
                       AND (r.service = o.service) IS NOT FALSE) THEN NULL
        -- for a message without its own row, everything that would deliver the operation is given up
        WHEN o.id = d.outbox_id OR d.outbox_id IS NULL AND o.fingerprint = d.fingerprint THEN clock_timestamp()
    END
    FROM discarded d
    WHERE o.status = 'published' AND {unsettled("o")}
      AND (o.id = d.outbox_id OR (o.tenant, o.task, o.key) = (d.tenant, d.task, d.key)
                                 AND (o.service = d.consumer_service) IS NOT FALSE)
), unblocked AS (
    -- without a place, the row no longer blocks its ordering key
    UPDATE idempotency.outbox o SET place = NULL FROM discarded d
    WHERE o.id = d.outbox_id AND o.status NOT IN ('pending', 'published') AND o.ordering_key IS NOT NULL
    RETURNING o.task, o.ordering_key
)
SELECT unblocked.task, unblocked.ordering_key FROM discarded LEFT JOIN unblocked ON true
"""

_UNBLOCK = f"""
UPDATE idempotency.outbox SET place = NULL WHERE {ROW} AND status NOT IN ('pending', 'published') AND place IS NOT NULL
RETURNING task, ordering_key
"""


def request(connection: Connection, letter: int, *, by: str, known_by: str | None = None, reason: str) -> bool:
    """Record a request to discard an open letter. False: it is not open, or there is a request already.

    `known_by`: what the person is known by. A request by a person who is known otherwise is replaced, and one for a letter
    that has become another since. The letter is locked (`lock`).
    """
    fields = {"letter": letter, "by": by, "known_by": known_by, "reason": reason}
    return connection.exec_driver_sql(_REQUEST, fields).one_or_none() is not None


def approve(connection: Connection, letter: int, *, asked: str, by: str, known_by: str | None) -> str | None:
    """Record another person's approval of what `asked` has asked for. Returns the request's reason; None: there is no such request.

    `known_by`: what the person is known by; it has to be the same for the one who asked. The letter is locked (`lock`).
    """
    fields = {"letter": letter, "asked": asked, "by": by, "known_by": known_by}
    reason: str | None = connection.exec_driver_sql(_APPROVE, fields).scalar_one_or_none()
    return reason


def requested(connection: Connection, letter: int) -> Row[Any] | None:
    """Who requested and approved the discarding of a letter, and what it was then; None without a request."""
    return connection.exec_driver_sql(_REQUESTED, {"letter": letter}).one_or_none()


def pending_request(connection: Connection, letter: int) -> Row[Any] | None:
    """Who has asked to discard a letter as it is now, when and why; None if nobody has, or another person has approved."""
    return connection.exec_driver_sql(_PENDING, {"letter": letter}).one_or_none()


def shown_request(connection: Connection, letter: int) -> Row[Any] | None:
    """The same for whoever looks at the letter; None, too, for a role that may not see requests."""
    return pending_request(connection, letter) if connection.exec_driver_sql(_MAY_LOOK).scalar_one() else None


def lock(connection: Connection, letter: int) -> Row[Any] | None:
    """Lock a letter's operation, and the letter, and return it; None if it is not open."""
    dead_letters.lock_record(connection, letter)
    return connection.exec_driver_sql(_LOCK, {"letter": letter}).one_or_none()


def will_be_delivered(connection: Connection, id: OperationId, fingerprint: str, *, service: str | None) -> bool:
    """Whether an outbox row will still deliver the operation after the letter is discarded."""
    fields = {"tenant": id.tenant, "task": id.task, "key": id.key, "fingerprint": fingerprint, "service": service}
    return bool(connection.exec_driver_sql(_WILL_BE_DELIVERED, fields).scalar_one())


def is_last_delivery(connection: Connection, id: OperationId, row: int) -> bool:
    """Whether an operation that has not begun would never be delivered if this outbox row was given up."""
    return bool(connection.exec_driver_sql(_IS_LAST_DELIVERY, named(id) | {"row": row}).scalar_one())


def discard(connection: Connection, letter: int) -> None:
    """Discard an open letter and settle its row; return the operation's other rows to resend and unblock its lane."""
    lane = connection.exec_driver_sql(_DISCARD, {"letter": letter}).one()
    if lane.ordering_key is not None:
        refresh_lanes(connection, [(lane.task, lane.ordering_key)])


def supersede(connection: Connection, id: OperationId, reason: str | None) -> None:
    """Close what an operation's message has died of (None: whatever it is) and free its lane: it ends without that message."""
    letters.close(connection, id, reason)
    refresh_lanes(connection, [(task, lane) for task, lane in connection.exec_driver_sql(_UNBLOCK, named(id))])
