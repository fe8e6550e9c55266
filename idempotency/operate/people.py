"""Operators: adding and removing them, and what their tokens prove.

A token is 256 random bits and is shown once; only its hash is kept. Each change leaves its audit row in its own
transaction, and so does each refused token. Not promised: anyone who can write to these tables needs no token.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import Connection

from ..attempt.runtime import Runtime
from ..errors import ChangeRefused, NotAllowed, NotAuthenticated, OperationNotFound
from ..framework import framework
from ..store import people
from .change import Change, audit

Role = Literal["operator", "admin"]
TOKEN_BYTES = 32
# Where commands read the token: an argument would be in the shell's history and in the list of processes.
TOKEN_VARIABLE = "IDEMPOTENCY_TOKEN"  # noqa: S105


@dataclass(frozen=True, slots=True)
class Person:
    """An operator who has proved who they are."""

    name: str
    role: Role


def add_operator(connection: Connection, change: Change, name: str, role: Role, *, days: int) -> str:
    """Add an operator; returns the token, which is stored nowhere. One transaction, which the caller commits.

    Raises `ChangeRefused` for a name that is taken or too long, or a token that would be valid for over a year.
    """
    if not 0 < len(name.strip()) <= 255:
        raise ChangeRefused(f"name: 1 to 255 characters, got {len(name)}")
    if not 0 < days <= 366:
        raise ChangeRefused(f"days: a token is valid for 1 to 366 days, got {days}")
    token = secrets.token_urlsafe(TOKEN_BYTES)
    if not people.add(connection, name, role, token_hash=_hash(token), days=days):
        raise ChangeRefused(f"operator {name!r}: exists already; remove it first")
    audit(connection, change, "operator_added", None, None, details={"name": name, "role": role})
    return token


def remove_operator(connection: Connection, change: Change, name: str) -> None:
    """Remove an operator; their token stops working. One transaction, which the caller commits.

    Raises `OperationNotFound`.
    """
    if not people.remove(connection, name):
        raise OperationNotFound(f"operator {name!r}: not found")
    audit(connection, change, "operator_removed", None, None, details={"name": name})


def authenticate(
    runtime: Runtime,
    token: str | None,
    *,
    role: Role,
    action: str,
    letter: int | None = None,
    said: Callable[[str], str | None] = lambda why: why,
) -> Person:
    """Check whose token this is, and that they may do this: an admin may do what an operator may.

    Raises `NotAllowed`, as `NotAuthenticated` if it is no valid token. The refusal's audit row is committed by itself,
    whatever becomes of the caller's transaction. `said`: what it says of the reason; None: there is no row.
    """
    refusal: type[NotAllowed] = NotAuthenticated
    with runtime.autocommit() as connection:
        row = people.who(connection, _hash(token or ""))
        if row is None:
            why = (
                f"{TOKEN_VARIABLE}: not set; `{framework().command} operators add` prints one"
                if not token
                else f"{TOKEN_VARIABLE}: no operator has this token"
            )
        elif row.expired:
            why = f"{TOKEN_VARIABLE}: the token of {row.name!r} has expired"
        elif role == "admin" and row.role != "admin":
            why, refusal = f"{action}: needs the role admin, {row.name!r} is {row.role}", NotAllowed
        else:
            return Person(row.name, row.role)
        if (reason := said(why)) is not None:
            audit_refusal(connection, row.name if row is not None else "unknown", reason, action=action, letter=letter)
    raise refusal(why)


def audit_refusal(connection: Connection, who: str, why: str, *, action: str, letter: int | None = None) -> None:
    """Record a refusal in the audit table."""
    details = {"attempted": action} | ({} if letter is None else {"dead_letter": letter})
    audit(connection, Change(who, why), "refused", None, None, details=details)


def authenticate_admin(runtime: Runtime, token: str | None, *, action: str, user: str, as_owner: bool = False) -> str:
    """Who adds or removes operators: an admin or, until there has been one, `user`, who sets up the database.

    `as_owner`: the owner of the tables, who needs no token: after the last admin's has expired, say. Raises `NotAllowed`,
    as `authenticate` does.
    """
    with runtime.autocommit() as connection:
        if as_owner:
            if people.owns_tables(connection):
                return f"{user}, as the owner of the tables"
            why = f"{action}: this login does not own the library's tables"
            audit_refusal(connection, user, why, action=action)
            raise NotAllowed(why)
        if not people.had_admin(connection):
            return user
    return authenticate(runtime, token, role="admin", action=action).name


def _hash(token: str) -> str:
    # 256 random bits need no salt and no slow hash
    return hashlib.sha256(token.encode()).hexdigest()
