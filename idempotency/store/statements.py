"""Our own statements, handed to the driver past SQLAlchemy's result machinery, with SQLAlchemy's errors.

An attempt runs two statements of ours; SQLAlchemy's cursor results cost more than psycopg's whole execution of them.

`Wire` is the one place that decides whether an answer of Postgres may be believed, whichever way it was asked.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import namedtuple_row
from sqlalchemy import Connection, Engine, ExceptionContext, event
from sqlalchemy.exc import DBAPIError, OperationalError

from ..errors import NotConnected

# read_only_sql_transaction: a standby after a failover, or a disk that is kept from filling up. psycopg counts it
# among the internal errors; here it is a Postgres that is away, and comes back.
READ_ONLY = "25006"
# Under this name a connection keeps the cursor of our statements.
_CURSOR = "idempotency.cursor"
# Enough to find the line of the application's code, below a client library's own.
PLACES = 6
# Enough for a sentence; a record is not a log file.
ERROR_LIMIT = 500


class Wire(psycopg.Connection[Any]):
    """A connection that believes no commit which Postgres itself doubts, and waits for no answer for ever.

    Raises `psycopg.OperationalError` in both cases, and is closed: to its user the answer was lost.
    """

    # Seconds until an answer counts as lost; None: the body's own statements may take as long as they do.
    patience: float | None = None
    _doubted = False

    def doubt(self, notice: psycopg.errors.Diagnostic) -> None:
        """Note the WARNING of a commit that is durable here and was not confirmed by a synchronous standby.

        It comes in the language of the server, so any warning counts; our own statements cause none.
        """
        self._doubted |= notice.severity_nonlocalized == "WARNING"

    def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        self._doubted = False
        answer = super().wait(gen if self.patience is None else self._patiently(gen), *args, **options)
        if self._doubted and self.pgconn.transaction_status == psycopg.pq.TransactionStatus.IDLE:
            self._lose("committed, and not confirmed by a synchronous standby")
        return answer

    def _patiently(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        assert self.patience is not None
        deadline = time.monotonic() + self.patience
        wanted = next_ready = None
        try:
            wanted = next(gen)
            while True:
                next_ready = yield wanted
                if not next_ready and time.monotonic() > deadline:
                    self._lose(f"no answer within {self.patience:g} s")
                wanted = gen.send(next_ready)
        except StopIteration as end:
            return end.value

    def _lose(self, why: str) -> None:
        self.pgconn.finish()
        raise psycopg.OperationalError(why)


def wire(engine: Engine, *, patience: float | None = None) -> None:
    """Let the engine connect by `Wire`."""

    @event.listens_for(engine, "do_connect")
    def _(dialect: Any, record: Any, args: Any, parameters: Any) -> Wire:
        connection = Wire.connect(*args, **parameters)
        connection.patience = patience
        connection.add_notice_handler(connection.doubt)
        return connection


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


def where(error: BaseException) -> str | None:
    """The last calls that led to an error, innermost first, without any value: `gateway.py:17 < tasks.py:42`."""
    frames = traceback.extract_tb(error.__traceback__)[-PLACES:]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames)) or None


def treat_read_only_as_away(engine: Engine) -> None:
    """A refusal to write is an `OperationalError`; its connections are not used again, since the primary is elsewhere."""

    @event.listens_for(engine, "handle_error")
    def _(context: ExceptionContext) -> None:
        error = context.original_exception
        if isinstance(error, psycopg.Error) and error.sqlstate == READ_ONLY:
            context.is_disconnect = True
            raise _away(context.statement, error)
        if isinstance(error, psycopg.OperationalError) and context.connection is None:
            raise NotConnected(None, None, error, hide_parameters=True)


def _away(statement: str | None, error: psycopg.Error) -> OperationalError:
    return OperationalError(statement, None, error, hide_parameters=True, connection_invalidated=True)
