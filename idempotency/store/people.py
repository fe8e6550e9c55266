"""The table of operators: people, their roles, and hashes of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row

_ADD = """
INSERT INTO idempotency.operators (name, role, token_hash, expires_at)
VALUES (%(name)s, %(role)s, %(hash)s, clock_timestamp() + pg_catalog.make_interval(days => %(days)s))
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

# Also one whose token has expired, or who was removed: the audit table keeps that.
_HAD_ADMIN = """
SELECT EXISTS (SELECT FROM idempotency.operators WHERE role = 'admin')
    OR EXISTS (SELECT FROM idempotency.audit WHERE action = 'operator_added' AND details ->> 'role' = 'admin')
"""

_IS_VALID = "SELECT EXISTS (SELECT FROM idempotency.operators WHERE expires_at > clock_timestamp())"
_MAY_LOOK = "SELECT has_table_privilege('idempotency.operators', 'SELECT')"

_OWNS = (
    "SELECT pg_has_role(current_user, relowner, 'USAGE') FROM pg_class WHERE oid = 'idempotency.operators'::regclass"
)


def add(connection: Connection, name: str, role: str, *, token_hash: str, days: int) -> bool:
    """Add a person whose token is valid for `days`. False: the name is taken."""
    fields = {"name": name, "role": role, "hash": token_hash, "days": days}
    return connection.exec_driver_sql(_ADD, fields).one_or_none() is not None


def remove(connection: Connection, name: str) -> bool:
    """Remove a person. False: there is none with this name."""
    return connection.exec_driver_sql(_REMOVE, {"name": name}).one_or_none() is not None


def operators(connection: Connection) -> Sequence[Row[Any]]:
    """List the people, expired tokens included, without their tokens."""
    return connection.exec_driver_sql(_OPERATORS).all()


def who(connection: Connection, token_hash: str) -> Row[Any] | None:
    """The person whose token has this hash, and whether the token has expired."""
    return connection.exec_driver_sql(_WHO, {"hash": token_hash}).one_or_none()


def has_any(connection: Connection) -> bool | None:
    """Whether anyone's token is valid. None: this role may not look."""
    if not connection.exec_driver_sql(_MAY_LOOK).scalar_one():
        return None
    return bool(connection.exec_driver_sql(_IS_VALID).scalar_one())


def had_admin(connection: Connection) -> bool:
    """Whether there has ever been an admin."""
    return bool(connection.exec_driver_sql(_HAD_ADMIN).scalar_one())


def owns_tables(connection: Connection) -> bool:
    """Whether this login owns the library's tables, which alone writes an operator into them (migration 0015)."""
    return bool(connection.exec_driver_sql(_OWNS).scalar_one())
