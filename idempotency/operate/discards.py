"""Discarding a dead letter: one person asks, with a reason, another one with the role admin approves.

People prove who they are with a token: 256 random bits, shown once, of which only the hash is kept. Every step is in
the audit table in the transaction of the change, every refused proof by itself. What is not promised: whoever may
write to these tables needs no token.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, Row

from ..attempt import conclusions
from ..attempt.runtime import Runtime
from ..errors import DiscardRefused, NotAllowed, OperationNotFound
from ..store import dead_letters, operations, people
from ..store import discards as stored
from ..wire import keys
from ..wire.keys import OperationId
from . import operators
from .operators import REASON_LIMIT, Change

Role = Literal["operator", "admin"]
TOKEN_BYTES = 32
# Where commands read the token: an argument would be in the shell's history and in the list of processes.
TOKEN_VARIABLE = "IDEMPOTENCY_TOKEN"  # noqa: S105


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
    if not people.add(connection, name, role, token_hash=_hash(token), days=days):
        raise DiscardRefused(f"operator {name!r}: exists already; remove it first")
    operators.audit(connection, change, "operator_added", None, None, details={"name": name, "role": role})
    return token


def remove_operator(connection: Connection, change: Change, name: str) -> None:
    """Remove a person; their token stops working. Raises `OperationNotFound`."""
    if not people.remove(connection, name):
        raise OperationNotFound(f"operator {name!r}: not found")
    operators.audit(connection, change, "operator_removed", None, None, details={"name": name})


def authenticate(runtime: Runtime, token: str | None, *, role: Role, action: str, letter: int | None = None) -> Person:
    """Say who has this token and may do this: an admin may do what an operator may.

    Raises `NotAllowed`; the refusal is in the audit table, whatever becomes of the caller's transaction.
    """
    with runtime.autocommit() as connection:
        row = people.who(connection, _hash(token or ""))
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
    if not stored.request(connection, letter, by=person.name, reason=reason):
        row = dead_letters.show(connection, letter)
        if row.status != "open":
            raise DiscardRefused(f"dead letter {letter}: already {row.status}")
        asked = stored.requested(connection, letter)
        assert asked is not None  # the letter is open, so its request is what was in the way
        raise DiscardRefused(
            f"dead letter {letter}: {asked.requested_by!r} has asked already; another admin can approve"
        )
    _audit(connection, Change(person.name, reason), "discard_requested", letter)


def approve(connection: Connection, person: Person, letter: int) -> None:
    """Discard a dead letter that somebody else has asked to discard; its operation can be purged from now on.

    One transaction, which the caller commits. Raises `OperationNotFound` and `DiscardRefused`, also while the operation
    is running, or has not ended and nothing but a replay would deliver it.
    """
    if person.role != "admin":
        raise NotAllowed(f"approve: needs the role admin, {person.name!r} is {person.role}")
    reason = stored.approve(connection, letter, by=person.name)
    if reason is None:
        row = dead_letters.show(connection, letter)
        asked = stored.requested(connection, letter)
        if row.status != "open":
            raise DiscardRefused(f"dead letter {letter}: already {row.status}")
        if asked is None:
            raise DiscardRefused(f"dead letter {letter}: nobody has asked to discard it")
        raise DiscardRefused(f"dead letter {letter}: {person.name!r} asked for it, so somebody else has to approve")
    _check_nothing_is_left_undelivered(connection, letter)
    stored.discard(connection, letter)
    _audit(connection, Change(person.name, reason), "discard_approved", letter)


def _check_nothing_is_left_undelivered(connection: Connection, letter: int) -> None:
    """Lock the letter and its record. Raises `DiscardRefused` where the operation would be left without an end."""
    row = stored.lock(connection, letter)
    if row is None:
        raise DiscardRefused(f"dead letter {letter}: already {dead_letters.show(connection, letter).status}")
    id, record = _operation(connection, row)
    if id is None or record is None or not _is_its_request(row, record):
        return
    if conclusions.is_open(record.effects):
        raise DiscardRefused(
            f"dead letter {letter}: an effect of its operation was begun and its outcome is not known; "
            "resolve it first with `effects resolve`"
        )
    if record.status in ("completed", "failed"):
        return
    if record.status == "started":
        raise DiscardRefused(f"dead letter {letter}: the operation is running; look again when it has stopped")
    if not stored.will_be_delivered(connection, id, record.fingerprint):
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
    if None in (letter.tenant, letter.task, letter.key):
        return None, None
    id = OperationId(letter.tenant, letter.task, letter.key)
    return id, operations.read_locked(connection, id)


def _audit(connection: Connection, change: Change, action: str, letter: int) -> None:
    id, record = _operation(connection, dead_letters.show(connection, letter))
    operators.audit(connection, change, action, id, record, details={"dead_letter": letter})
