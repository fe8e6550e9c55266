"""Discarding a dead letter: one person asks, with a reason, another one with the role admin approves.

People prove who they are with a token: 256 random bits, shown once, of which only the hash is kept. Every step is in
the audit table in the transaction of the change, every refused proof by itself. What is not promised: whoever may
write to these tables needs no token.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, Row

from ..attempt import conclusions
from ..attempt.runtime import Runtime
from ..errors import IdempotencyError, OperationNotFound
from ..store import dead_letters, records
from ..store.outbox import refresh_lanes
from ..wire import keys
from ..wire.keys import OperationId
from . import operators
from .operators import REASON_LIMIT, Change

Role = Literal["operator", "admin"]
TOKEN_BYTES = 32
# Where commands read the token: an argument would be in the shell's history and in the list of processes.
TOKEN_VARIABLE = "IDEMPOTENCY_TOKEN"  # noqa: S105

_ADD = """
INSERT INTO idempotency.operators (name, role, token_hash, expires_at)
VALUES (%(name)s, %(role)s, %(hash)s, clock_timestamp() + make_interval(days => %(days)s))
ON CONFLICT (name) DO NOTHING RETURNING name
"""

_REMOVE = "DELETE FROM idempotency.operators WHERE name = %(name)s RETURNING role"

_OPERATORS = """
SELECT name, role, expires_at, created_at, expires_at < clock_timestamp() AS expired
FROM idempotency.operators ORDER BY name
"""

_WHO = """
SELECT name, role, expires_at < clock_timestamp() AS expired
FROM idempotency.operators WHERE token_hash = %(hash)s
"""

_HAS_ADMIN = """
SELECT EXISTS (SELECT FROM idempotency.operators WHERE role = 'admin' AND expires_at > clock_timestamp())
"""

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
               WHERE tenant = %(tenant)s AND operation = %(operation)s AND key = %(key)s
                 AND fingerprint = %(fingerprint)s AND settled_at IS NULL AND status <> 'failed')
"""

# The outbox must not send again what a person has given up; with a record, the record's end says so already. All other
# rows of the operation are given back to reconcile, `taken` or not: it may be about to mark one for this very letter.
_DISCARD = """
WITH discarded AS (
    UPDATE idempotency.dead_letters SET status = 'discarded', settled_at = clock_timestamp()
    WHERE id = %(letter)s AND status = 'open'
    RETURNING outbox_id, tenant, operation, key, fingerprint
), given_back AS (
    UPDATE idempotency.outbox o SET taken = false, settled_at = CASE
        WHEN EXISTS (SELECT FROM idempotency.records r
                     WHERE (r.tenant, r.operation, r.key, r.fingerprint)
                         = (o.tenant, o.operation, o.key, o.fingerprint)) THEN NULL
        -- a message without a row of its own: whatever would deliver the operation was given up with it
        WHEN o.id = d.outbox_id OR d.outbox_id IS NULL AND o.fingerprint = d.fingerprint THEN clock_timestamp()
    END
    FROM discarded d
    WHERE o.status = 'published' AND o.settled_at IS NULL
      AND (o.id = d.outbox_id OR (o.tenant, o.operation, o.key) = (d.tenant, d.operation, d.key))
), unblocked AS (
    -- without a place the row holds back nothing of its ordering key
    UPDATE idempotency.outbox o SET place = NULL FROM discarded d
    WHERE o.id = d.outbox_id AND o.status = 'failed' AND o.ordering_key IS NOT NULL
    RETURNING o.operation, o.ordering_key
)
SELECT unblocked.operation, unblocked.ordering_key FROM discarded LEFT JOIN unblocked ON true
"""


class NotAllowed(IdempotencyError):
    """No token, a wrong or an expired one, or a role that may not do this. Nothing was changed, and it was noted."""


class DiscardRefused(IdempotencyError):
    """This dead letter cannot be discarded; the message says why. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Person:
    """Somebody who has proved who they are."""

    name: str
    role: Role


# ---------------------------------------------------------------- people


def add_operator(connection: Connection, change: Change, name: str, role: Role, *, days: int) -> str:
    """Add a person; returns the token, which is kept nowhere. Raises `DiscardRefused` for a name that is taken."""
    if not 0 < len(name.strip()) <= 255:
        raise DiscardRefused(f"name: 1 to 255 characters, got {len(name)}")
    if not 0 < days <= 366:
        raise DiscardRefused(f"days: a token is valid for 1 to 366 days, got {days}")
    token = secrets.token_urlsafe(TOKEN_BYTES)
    fields = {"name": name, "role": role, "hash": _hash(token), "days": days}
    if connection.exec_driver_sql(_ADD, fields).one_or_none() is None:
        raise DiscardRefused(f"operator {name!r}: exists already; remove it first")
    operators.audit(connection, change, "operator_added", None, None, details={"name": name, "role": role})
    return token


def remove_operator(connection: Connection, change: Change, name: str) -> None:
    """Remove a person; their token stops working. Raises `OperationNotFound`."""
    if connection.exec_driver_sql(_REMOVE, {"name": name}).one_or_none() is None:
        raise OperationNotFound(f"operator {name!r}: not found")
    operators.audit(connection, change, "operator_removed", None, None, details={"name": name})


def list_operators(connection: Connection) -> Sequence[Row[Any]]:
    """Everybody who has a token, valid or not; never the token."""
    return connection.exec_driver_sql(_OPERATORS).all()


def has_admin(connection: Connection) -> bool:
    """Whether anybody has the role admin and a valid token. Until then the first one may be added without."""
    return bool(connection.exec_driver_sql(_HAS_ADMIN).scalar_one())


def authenticate(runtime: Runtime, token: str | None, *, role: Role, action: str, letter: int | None = None) -> Person:
    """Say who has this token and may do this: an admin may do what an operator may.

    Raises `NotAllowed`; the refusal is in the audit table, whatever becomes of the caller's transaction.
    """
    with runtime.autocommit() as connection:
        row = connection.exec_driver_sql(_WHO, {"hash": _hash(token or "")}).one_or_none()
        if row is None:
            why = (
                f"{TOKEN_VARIABLE}: not set; `idempotency operators add` prints one"
                if not token
                else f"{TOKEN_VARIABLE}: no operator has this token"
            )
        elif row.expired:
            why = f"{TOKEN_VARIABLE}: the token of {row.name!r} has expired"
        elif role == "admin" and row.role != "admin":
            why = f"{action}: needs the role admin, {row.name!r} is {row.role}"
        else:
            return Person(row.name, row.role)
        who = row.name if row is not None else "unknown"
        details = {"attempted": action} | ({} if letter is None else {"dead_letter": letter})
        operators.audit(connection, Change(who, why), "refused", None, None, details=details)
    raise NotAllowed(why)


def _hash(token: str) -> str:
    # 256 random bits need no salt and no slow hash
    return hashlib.sha256(token.encode()).hexdigest()


# ---------------------------------------------------------------- the two steps


def request(connection: Connection, person: Person, letter: int, reason: str) -> None:
    """Ask for a dead letter to be discarded; it stays open until somebody else approves.

    One transaction, which the caller commits. Raises `OperationNotFound` and `DiscardRefused`.
    """
    if not 0 < len(reason.strip()) <= REASON_LIMIT:
        raise DiscardRefused(f"--reason: 1 to {REASON_LIMIT} characters, got {len(reason.strip())}")
    fields = {"letter": letter, "by": person.name, "reason": reason}
    if connection.exec_driver_sql(_REQUEST, fields).one_or_none() is None:
        row = dead_letters.show(connection, letter)
        if row.status != "open":
            raise DiscardRefused(f"dead letter {letter}: already {row.status}")
        by = connection.exec_driver_sql(_REQUESTED, fields).one().requested_by
        raise DiscardRefused(f"dead letter {letter}: {by!r} has asked already; another admin can approve")
    _audit(connection, Change(person.name, reason), "discard_requested", letter)


def approve(connection: Connection, person: Person, letter: int) -> None:
    """Discard a dead letter that somebody else has asked to discard; its operation can be purged from now on.

    One transaction, which the caller commits. Raises `OperationNotFound` and `DiscardRefused`, also while the operation
    is running, or has not ended and nothing but a replay would deliver it.
    """
    if person.role != "admin":
        raise NotAllowed(f"approve: needs the role admin, {person.name!r} is {person.role}")
    fields = {"letter": letter, "by": person.name}
    approved = connection.exec_driver_sql(_APPROVE, fields).one_or_none()
    if approved is None:
        row = dead_letters.show(connection, letter)
        asked = connection.exec_driver_sql(_REQUESTED, fields).one_or_none()
        if row.status != "open":
            raise DiscardRefused(f"dead letter {letter}: already {row.status}")
        if asked is None:
            raise DiscardRefused(f"dead letter {letter}: nobody has asked to discard it")
        raise DiscardRefused(f"dead letter {letter}: {person.name!r} asked for it, so somebody else has to approve")
    _check_nothing_is_left_undelivered(connection, letter)
    lane = connection.exec_driver_sql(_DISCARD, fields).one()
    if lane.ordering_key is not None:
        refresh_lanes(connection, [(lane.operation, lane.ordering_key)])
    _audit(connection, Change(person.name, approved.reason), "discard_approved", letter)


def _check_nothing_is_left_undelivered(connection: Connection, letter: int) -> None:
    """Lock the letter and its record. Raises `DiscardRefused` where the operation would be left without an end."""
    row = connection.exec_driver_sql(_LOCK, {"letter": letter}).one_or_none()
    if row is None:
        raise DiscardRefused(f"dead letter {letter}: already {dead_letters.show(connection, letter).status}")
    _, record = _operation(connection, row)
    if record is None or not _is_its_request(row, record):
        return
    if conclusions.is_open(record.effects):
        raise DiscardRefused(
            f"dead letter {letter}: an effect of its operation was begun and its outcome is not known; "
            "settle it first with `effects resolve`"
        )
    if record.status in ("completed", "failed"):
        return
    if record.status == "started":
        raise DiscardRefused(f"dead letter {letter}: the operation is running; look again when it has stopped")
    if not connection.exec_driver_sql(_WILL_BE_DELIVERED, record._asdict()).scalar_one():
        raise DiscardRefused(
            f"dead letter {letter}: the operation has not ended and nothing else will deliver it; replay the letter, "
            "or cancel the operation first"
        )


def _is_its_request(letter: Row[Any], record: Any) -> bool:
    """Whether a record is of the letter's own request, as far as fingerprints tell: those of two rules tell nothing."""
    mine, its = letter.fingerprint, record.fingerprint
    return mine in (None, its) or keys.fingerprint_version(mine) != keys.fingerprint_version(its)


def _operation(connection: Connection, letter: Row[Any]) -> tuple[OperationId | None, Any]:
    """The operation that a letter names, and its record, locked."""
    if None in (letter.tenant, letter.operation, letter.key):
        return None, None
    id = OperationId(letter.tenant, letter.operation, letter.key)
    return id, records.read_locked(connection, id)


def _audit(connection: Connection, change: Change, action: str, letter: int) -> None:
    id, record = _operation(connection, dead_letters.show(connection, letter))
    operators.audit(connection, change, action, id, record, details={"dead_letter": letter})
