"""Operators: adding and removing them, and what their tokens prove.

A token is 256 random bits and is shown once; only its hash is kept. Each change leaves its audit row in its own
transaction, and so does each refused token. Only the owner of the tables adds people, which the database checks, so that no
approver makes a second identity. Who people are can also be known outside (`identities`): then this table counts for
nothing. Not promised: a person who logs in as the owner and also approves can do both.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from sqlalchemy import Connection

from .. import identities
from ..attempt.runtime import Runtime
from ..errors import ChangeRefused, NotAllowed, NotAuthenticated, OperationNotFound
from ..framework import framework
from ..identities import Role as Role
from ..store import people
from ..text import storable
from ..wire.keys import OperationId
from .change import REASON_LIMIT, Change, CheckPerson, audit

TOKEN_BYTES = 32
# Where commands read the token: an argument would be in the shell's history and in the list of processes.
TOKEN_VARIABLE = "IDEMPOTENCY_TOKEN"  # noqa: S105


@dataclass(frozen=True, slots=True)
class Person:
    """An operator who has proved who they are."""

    name: str
    role: Role
    known_by: str | None = None  # the company's issuer or a file; None: the database
    # for each of their changes, in its transaction: raises `NotAuthenticated` if they are not this person any more
    check: CheckPerson | None = field(default=None, repr=False, compare=False)
    tenants: frozenset[str] | None = None  # whose operations they may change; None: all
    # until when the token counts, in seconds since 1970; None: it does not say so itself
    ends_at: float | None = field(default=None, repr=False, compare=False)


def add_operator(connection: Connection, change: Change, name: str, role: Role, *, days: int) -> str:
    """Add an operator; returns the token, which is stored nowhere. One transaction of the tables' owner, which the caller commits.

    Raises `ChangeRefused` for a name that is taken, looks like another or cannot be one, or a token that would be valid for
    over a year.
    """
    if not identities.is_name(name):
        raise ChangeRefused(f"name: {identities.NAME}, got {len(name)}")
    if not 0 < days <= 366:
        raise ChangeRefused(f"days: a token is valid for 1 to 366 days, got {days}")
    for row in people.operators(connection):
        if row.name != name and identities.looks_like(row.name) == identities.looks_like(name):
            raise ChangeRefused(f"operator {name!r}: looks like {row.name!r}; one person has one name")
    token = secrets.token_urlsafe(TOKEN_BYTES)
    if not people.add(connection, name, role, token_hash=identities.token_hash(token), days=days):
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
    called: str = TOKEN_VARIABLE,
    said: Callable[[str], str | None] = lambda why: why,
) -> Person:
    """Check whose token this is, and that they may do this: an admin may do what an operator may.

    Raises `NotAllowed`, as `NotAuthenticated` if it is no valid token. The refusal's audit row is committed by itself, whatever
    becomes of the caller's transaction. `called`: the token, in a refusal. `said`: what it says of the reason; None: there is
    no row.
    """
    outside = _known_outside(runtime, token) if identities.are_outside(runtime.settings) else None
    with runtime.autocommit() as connection:
        person, why = outside or _known(connection, token)
        refusal: NotAllowed | None = None if why is None else NotAuthenticated(f"{called}: {why}")
        if person is not None and refusal is None:
            if identities.may(person.role, role):
                return replace(person, check=partial(_check_again, runtime, token, person))
            refusal = NotAllowed(f"{action}: needs the role {role}, {person.name!r} is {person.role}")
        if (reason := said(str(refusal))) is not None:
            audit_refusal(connection, person.name if person else "unknown", reason, action=action, letter=letter)
    assert refusal is not None
    raise refusal


def check_tenant(person: Person, id: OperationId | None) -> None:
    """Raise `NotAllowed` if a change is about a tenant that is not this person's, or about none while they have only some."""
    if person.tenants is not None and (id is None or id.tenant not in person.tenants):
        raise NotAllowed(f"{person.name!r} may not change operations of this tenant")


def _check_again(
    runtime: Runtime, token: str | None, person: Person, connection: Connection, id: OperationId | None
) -> None:
    """Raise `NotAuthenticated` if a token no longer proves what it did. What an ID token says holds for the whole command."""
    check_tenant(person, id)
    if runtime.settings.people_file is not None:
        found, why = _known_outside(runtime, token)
    elif identities.are_outside(runtime.settings):
        return
    else:
        found, why = _known(connection, token)
    if why is not None or found != person:
        raise NotAuthenticated(
            f"{TOKEN_VARIABLE}: {person.name!r} was removed or changed meanwhile, or the token has expired"
        )


def _known_outside(runtime: Runtime, token: str | None) -> tuple[Person | None, str | None]:
    """Whose token it is, and why it counts for nothing, if so. The issuer may be slow: no connection is held meanwhile."""
    if not token:
        return None, "not set"
    try:
        found = identities.identify(runtime.settings, token)
        known_by = identities.known_by(runtime.settings)
        return Person(found.name, found.role, known_by, tenants=found.tenants, ends_at=found.ends_at), None
    except NotAuthenticated as refusal:
        return None, str(refusal)


def _known(connection: Connection, token: str | None) -> tuple[Person | None, str | None]:
    """The operator in the database whose token it is, and why it counts for nothing, if so."""
    row = people.who(connection, identities.token_hash(token or ""))
    if row is not None:
        return Person(row.name, row.role), f"the token of {row.name!r} has expired" if row.expired else None
    return None, "no operator has this token" if token else f"not set; `{framework().command} operators add` prints one"


def audit_refusal(connection: Connection, who: str, why: str, *, action: str, letter: int | None = None) -> None:
    """Record a refusal in the audit table, of names and reasons of any length their beginning."""
    details = {"attempted": storable(action)} | ({} if letter is None else {"dead_letter": letter})
    change = Change(storable(who).strip()[:255] or "unknown", storable(why)[:REASON_LIMIT])
    audit(connection, change, "refused", None, None, details=details)


def check_may_add(runtime: Runtime, *, user: str, as_owner: bool) -> str:
    """Who adds operators: the owner of the tables alone, and not an admin, who could then approve as two. Returns the actor.

    `as_owner` has to be given once there has been an admin, so that it is done on purpose. Raises `NotAllowed`, always
    where people are known by a file or by their company.
    """
    action = "operators add"
    with runtime.autocommit() as connection:
        _check_in_database(connection, runtime, user, action)
        why = None
        if not people.owns_tables(connection):
            why = f"{action}: only a login that owns the library's tables makes identities; this one does not"
        elif not as_owner and people.had_admin(connection):
            why = f"{action}: only the owner of the tables makes identities, an admin does not; as the owner, give --as-owner"
        if why is not None:
            audit_refusal(connection, user, why, action=action)
            raise NotAllowed(why)
    return f"{user}, as the owner of the tables"


def check_may_remove(runtime: Runtime, token: str | None, *, user: str, as_owner: bool) -> str:
    """Who removes operators: an admin, or the owner of the tables. Returns the actor. Raises `NotAllowed`, as `authenticate` does."""
    action = "operators remove"
    with runtime.autocommit() as connection:
        _check_in_database(connection, runtime, user, action)
        if as_owner:
            if people.owns_tables(connection):
                return f"{user}, as the owner of the tables"
            why = f"{action}: this login does not own the library's tables"
            audit_refusal(connection, user, why, action=action)
            raise NotAllowed(why)
    return authenticate(runtime, token, role="admin", action=action).name


def _check_in_database(connection: Connection, runtime: Runtime, user: str, action: str) -> None:
    """Raise `NotAllowed` where the table of operators counts for nothing."""
    if identities.are_outside(runtime.settings):
        why = f"{action}: people are known by {identities.source(runtime.settings)}, and not by the database"
        audit_refusal(connection, user, why, action=action)
        raise NotAllowed(why)
