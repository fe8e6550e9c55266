"""Our own statements, handed to the driver past SQLAlchemy's result machinery, with SQLAlchemy's errors.

An attempt runs two statements of ours; SQLAlchemy's cursor results cost more than psycopg's whole execution of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg.rows import namedtuple_row
from sqlalchemy import Connection, Engine, ExceptionContext, event
from sqlalchemy.exc import DBAPIError, OperationalError

# read_only_sql_transaction: a standby after a failover, or a disk that is kept from filling up. psycopg counts it
# among the internal errors; to everybody here it is a Postgres that is away, and comes back.
READ_ONLY = "25006"
# Under this name a connection keeps the cursor of our statements.
_CURSOR = "idempotency.cursor"
# Enough for a sentence; a record is not a log file.
ERROR_LIMIT = 500


def execute(connection: Connection, statement: str, parameters: Mapping[str, Any] | None = None) -> Any:
    """Run a statement in the connection's transaction, and return a cursor of named tuples: the same for every call.

    So its rows are read before the next statement. Raises what SQLAlchemy would.
    """
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    if not (driver.autocommit or connection.in_transaction()):
        connection.begin()  # or SQLAlchemy would not know what its commit() has to commit
    try:
        cursor: Any = connection.info.get(_CURSOR)
        if cursor is None:
            cursor = connection.info[_CURSOR] = driver.cursor(row_factory=namedtuple_row)
        return cursor.execute(statement, parameters)
    except psycopg.Error as error:
        if error.sqlstate == READ_ONLY:
            connection.invalidate()
            raise _away(statement, error) from error
        if driver.closed:
            connection.invalidate()
        raise DBAPIError.instance(
            statement,
            None,  # an error never shows parameters
            error,
            psycopg.Error,
            hide_parameters=True,
            connection_invalidated=connection.invalidated,
            dialect=connection.dialect,
        ) from error


def describe(error: BaseException) -> str:
    """An error in one line for the record: type and message, without the statement's parameters or a row's values."""
    if isinstance(error, DBAPIError):
        diagnosis = getattr(error.orig, "diag", None)
        primary = getattr(diagnosis, "message_primary", None)
        return f"{type(error.orig).__name__}: {primary or 'no answer from the database'}"
    return f"{type(error).__name__}: {error}"[:ERROR_LIMIT]


def storable(value: Any) -> Any:
    """What a jsonb column takes: NUL and half a surrogate pair are JSON, and no text to Postgres."""
    return value.replace("\0", "\ufffd").encode("utf-8", "replace").decode() if isinstance(value, str) else value


def treat_read_only_as_away(engine: Engine) -> None:
    """A refusal to write is an `OperationalError`; its connections are not used again, since the primary is elsewhere."""

    @event.listens_for(engine, "handle_error")
    def _(context: ExceptionContext) -> None:
        error = context.original_exception
        if isinstance(error, psycopg.Error) and error.sqlstate == READ_ONLY:
            context.is_disconnect = True
            raise _away(context.statement, error)


def _away(statement: str | None, error: psycopg.Error) -> OperationalError:
    return OperationalError(statement, None, error, hide_parameters=True, connection_invalidated=True)
