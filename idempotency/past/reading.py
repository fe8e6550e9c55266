"""A connection that can only read: one transaction with time limits, which refuses to be shown a part of the rows as if it were all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import Connection, IsolationLevel, errors
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from ..errors import IdempotencyError
from ..observe.unreachable import reason
from ..store.statements import describe

# Seconds to connect in, and to wait for a table that is being altered: whoever waits behind an ALTER TABLE holds up all others.
CONNECT_TIMEOUT, LOCK_TIMEOUT = 10, 5
_DRIVER = "postgresql+psycopg"
_SCHEMES = ("postgresql", "postgres")
# What a statement that takes longer than its limit ends with is the same as for one that a person cancels.
_ADVICE: dict[type[psycopg.Error], str] = {
    errors.QueryCanceled: "no answer within --timeout; give it more, or count fewer rows with --where",
    errors.LockNotAvailable: f"the table was locked for {LOCK_TIMEOUT} s; is it being altered? Try again later",
    errors.SerializationFailure: "a standby cancelled it to go on replaying; try again, or ask the primary",
    errors.UndefinedFunction: "--key: a column is of a type whose values Postgres cannot compare",
    errors.DiskFull: "Postgres has no room left to sort; count fewer rows with --where",
    errors.ConfigurationLimitExceeded: "temp_file_limit is too low to sort the table; count fewer rows with --where",
}


def connect_parameters(address: str) -> dict[str, Any]:
    """What psycopg connects with, from the address of a database as SQLAlchemy or libpq writes it.

    Raises `IdempotencyError` for what is none, without a part of it: it may have the password.
    """
    try:
        url = make_url(address)
        if url.drivername.partition("+")[0] not in _SCHEMES:
            raise ValueError
        url = url.set(drivername=_DRIVER)
        _, parameters = url.get_dialect()().create_connect_args(url)
    except (ArgumentError, ValueError, TypeError):
        raise IdempotencyError("--database: must be an address like postgresql://user@host/name") from None
    return dict(parameters)


@contextmanager
def reading(parameters: dict[str, Any], timeout: float) -> Iterator[Connection[Any]]:
    """A read-only transaction that sees one state of the database and is rolled back. `timeout`: seconds for each statement.

    Raises `IdempotencyError` for whatever Postgres refuses, without values of rows. A role to which row-level security shows a
    part of the rows is refused: "none" would be the answer for what it may see.
    """
    try:
        # an option of libpq's would not pass a pooler
        with psycopg.connect(**{"connect_timeout": CONNECT_TIMEOUT, **parameters}) as connection:
            connection.isolation_level = IsolationLevel.REPEATABLE_READ
            connection.read_only = True
            connection.prepare_threshold = None
            for name, value in (
                ("statement_timeout", f"{max(int(timeout * 1000), 1)}ms"),
                ("lock_timeout", f"{LOCK_TIMEOUT}s"),
                ("row_security", "off"),
            ):
                connection.execute("SELECT pg_catalog.set_config(%s, %s, true)", (name, value))
            yield connection
            connection.rollback()
    except psycopg.OperationalError as error:
        if error.sqlstate is None:
            raise IdempotencyError(f"--database: {reason(error)}") from None
        raise IdempotencyError(_said(error)) from None
    except psycopg.Error as error:
        raise IdempotencyError(_said(error)) from None


def _said(error: psycopg.Error) -> str:
    if isinstance(error, errors.InsufficientPrivilege) and "row-level security" in describe(error):
        return "row-level security would hide rows from this role; log in as one that sees all of them"
    advice = next((text for kind, text in _ADVICE.items() if isinstance(error, kind)), None)
    return advice or f"the database refused: {describe(error)}"
