"""Running our own statements on the driver directly, with SQLAlchemy's errors.

An attempt runs two of our statements, and SQLAlchemy's results cost more than psycopg needs to execute them.
"""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from weakref import WeakSet

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import namedtuple_row
from sqlalchemy import Connection, Engine, ExceptionContext, event
from sqlalchemy.exc import DBAPIError, OperationalError, StatementError

from ..errors import NotConnected
from ..observe import outages
from ..text import without_values

if TYPE_CHECKING:  # which imports this module
    from .callers import Executes

P = ParamSpec("P")
Answer = TypeVar("Answer")

# read_only_sql_transaction: a standby after a failover, or a server protecting a nearly full disk. For psycopg it is an
# internal error; here it means that Postgres is unavailable for a while.
READ_ONLY = "25006"
# serialization_failure: a record that this waited for has moved to another partition. A second try finds it there: a record
# moves once in a period. So often a change is tried in all.
MOVED, TRIES = "40001", 3
# deadlock_detected: two transactions that wait for each other, of which Postgres has ended this one.
DEADLOCK = "40P01"
# Seconds before the next try after a deadlock. A try made at once may take the row that the other transaction waits for, before
# that one has been woken (Postgres does not queue a newcomer behind it once the row's last owner is gone), and both would
# deadlock again.
PAUSE = 0.1
# query_canceled, by statement_timeout.
TIMED_OUT = "57014"
# insufficient_privilege, and what `idempotency.tenants()` says where no tenant is set.
NO_RIGHT = "42501"
NO_TENANT = "idempotency.tenant is not set"
# invalid_column_reference: ON CONFLICT by an index that is gone.
NO_UNIQUE_INDEX = "42P10"
# feature_not_supported, raised here: a table has another column since a statement was prepared with `*`. The text depends on the
# language.
OTHER_COLUMNS, CHECKS_PLAN = "0A000", "RevalidateCachedQuery"
# Classes of SQLSTATE: errors about data quote it; those about a statement have a hint that names columns, and quotes no row.
DATA, SYNTAX = "22", "42"
# Those of errors that come again as long as nobody changes something: of the data, of a constraint, of a statement or a right,
# of a view's check, of a trigger.
_LASTING = (DATA, "23", SYNTAX, "44", "P0")
_QUOTED = re.compile('["«„“].*["»“”]', re.DOTALL)
# The key in a connection's `info` for the cursor of our statements.
_CURSOR = "idempotency.cursor"
# Those whose connections ask for row-level security when they are opened.
_engines: WeakSet[Engine] = WeakSet()
# Frames: enough to reach the application's code below those of a client library.
PLACES = 6
# Characters: enough for a sentence.
ERROR_LIMIT = 500


def execute(connection: Connection, statement: str, parameters: Mapping[str, Any] | None = None) -> Any:
    """Run a statement in the connection's transaction and return a cursor of named tuples.

    All calls share one cursor, so read its rows before the next statement. Raises what SQLAlchemy would.
    """
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    if not (driver.autocommit or connection.in_transaction()):
        connection.begin()  # or SQLAlchemy's commit() would do nothing
    try:
        cursor: Any = connection.info.get(_CURSOR)
        if cursor is None:
            # bodies' statements are checked, not ours
            kind: Any = getattr(driver.cursor_factory, "unchecked", driver.cursor_factory)
            cursor = connection.info[_CURSOR] = kind(driver, row_factory=namedtuple_row)
        return cursor.execute(statement, parameters)
    except psycopg.Error as error:
        if _is_stale(driver, error):
            connection.invalidate()
            raise _given_up(statement, error) from error
        if driver.closed:
            connection.invalidate()
        raise DBAPIError.instance(
            statement,
            None,  # errors must not show parameters
            error,
            psycopg.Error,
            hide_parameters=True,
            connection_invalidated=connection.invalidated,
            dialect=connection.dialect,
        ) from error
    except BaseException:
        if driver.info.transaction_status is TransactionStatus.ACTIVE:
            connection.invalidate()  # interrupted in the middle of a statement, whose answer would be the next one's
        raise


def repeatable(change: Callable[P, Answer]) -> Callable[P, Answer]:
    """Make a change, one transaction, again if Postgres has ended it for the sake of another one.

    A record that it has waited for was moved to another partition meanwhile; or a body and the change's `on_failed` wait for each
    other's rows. Nothing of it is committed then.
    """

    @wraps(change)
    def repeated(*args: P.args, **kwargs: P.kwargs) -> Answer:
        left = TRIES
        while True:
            left -= 1
            try:
                return change(*args, **kwargs)
            except DBAPIError as error:
                state = sqlstate(error)
                if not left or state not in (MOVED, DEADLOCK):
                    raise
            if state == DEADLOCK:
                time.sleep(PAUSE)

    return repeated


# A condition that is always met, and has the answer wait for a synchronous standby as a commit does: it writes to the log.
# After a crash Postgres shows what was still waiting for one, and an answer that only read it would be lost with the next
# promotion.
IS_CONFIRMED = "(SELECT pg_catalog.pg_logical_emit_message(true, 'idempotency', ''::text)) IS NOT NULL"


def confirm(connection: Executes) -> None:
    """Wait, as a commit does, until a synchronous standby has everything that this connection could read."""
    connection.exec_driver_sql(f"SELECT {IS_CONFIRMED}", {})


def sqlstate(error: DBAPIError) -> str | None:
    """Postgres' code for what it refused; None if it did not answer."""
    return getattr(error.orig, "sqlstate", None)


def driver_error(error: BaseException) -> BaseException | None:
    """The driver's error behind one of SQLAlchemy or an ORM (which copies its arguments), if it is one."""
    if isinstance(error, DBAPIError):
        return error.orig
    cause = error.__cause__
    if isinstance(cause, psycopg.Error) and cause.args == error.args:
        return cause
    return error if isinstance(error, psycopg.Error) else None


def is_news(error: BaseException) -> bool:
    """Whether to log a failure: not if it is one more of an outage that this process has logged. Call it for each."""
    return not is_outage(error) or outages.postgres.is_news()


def is_outage(error: BaseException) -> bool:
    """Whether Postgres is away: nothing answered, or it is starting, stopping, full, or only a standby."""
    if not isinstance(error, OperationalError | psycopg.OperationalError):
        return False
    state = getattr(error.orig if isinstance(error, OperationalError) else error, "sqlstate", None)
    return state is None or state == READ_ONLY or state.startswith(("08", "53", "57P"))


def is_refusal(error: BaseException) -> bool:
    """Whether Postgres has answered, and would answer the same again: it is no outage, and waiting alone does not help."""
    return (
        isinstance(error, DBAPIError)
        and not error.connection_invalidated
        and (sqlstate(error) or "").startswith(_LASTING)
    )


def describe(error: BaseException) -> str:
    """Describe an error in one line for the record: type and message, without parameters or values of a row."""
    if (driver := driver_error(error)) is not None:
        said = _primary(driver)
        if said is None and not isinstance(driver, psycopg.OperationalError):
            said = str(driver).partition("\n")[0][:ERROR_LIMIT]  # the lines below have values
        return f"{type(driver).__name__}: {said or 'no answer from the database'}"
    return without_values(f"{type(error).__name__}: {said_by(error)}")[:ERROR_LIMIT]


def said_by(error: BaseException) -> str:
    """What an error says of itself, even if its class is an application's whose `__str__` raises."""
    try:
        return str(error)
    except Exception:
        return "(its text cannot be produced)"


def leave_out_values(error: BaseException | None) -> None:
    """Take the values of rows and parameters out of the texts of an error and of those that led to it.

    They are in Postgres' DETAIL and CONTEXT, in what it quotes of data that it refuses and of a statement (where a client has
    put values into it), and in what SQLAlchemy adds. They stay in the driver's `diag` for code that asks for them.
    """
    errors, found = [error], dict[int, BaseException]()
    while errors:
        each = errors.pop()
        if each is None or id(each) in found:
            continue
        found[id(each)] = each
        errors += [each.__cause__, each.__context__, *(each.exceptions if isinstance(each, BaseExceptionGroup) else ())]
        # of SQLAlchemy's, and of Celery's Retry
        errors += [inner for name in ("orig", "exc") if isinstance(inner := getattr(each, name, None), BaseException)]
    # An ORM's error is a copy of the driver's. Found first: afterwards their texts differ.
    copies = [
        (each, driver)
        for each in found.values()
        if isinstance(driver := each.__cause__, psycopg.Error) and driver.args == each.args
    ]
    for each in sorted(found.values(), key=lambda each: not isinstance(each, psycopg.Error)):
        if isinstance(each, StatementError):
            each.hide_parameters = True
        if isinstance(each, psycopg.Error) and each.sqlstate:
            hint = each.diag.message_hint if each.sqlstate.startswith(SYNTAX) else None
            each.args = ("\nHINT:  ".join(filter(None, (_primary(each), hint))), *each.args[1:])
        elif isinstance(each, StatementError) and isinstance(each.orig, psycopg.Error):
            each.args = (f"({type(each.orig).__module__}.{type(each.orig).__name__}) {each.orig}", *each.args[1:])
        else:
            each.args = tuple(without_values(given) if isinstance(given, str) else given for given in each.args)
    for copy, driver in copies:
        copy.args = driver.args


def _primary(driver: Any) -> str | None:
    """The first part of what Postgres says, which names tables, columns and constraints. It quotes data of a wrong form."""
    diag = getattr(driver, "diag", None)
    said: str | None = getattr(diag, "message_primary", None)
    if said is not None and (getattr(diag, "sqlstate", None) or "").startswith(DATA):
        said = _QUOTED.sub('"…"', said)
    return said


def where(error: BaseException) -> str | None:
    """The innermost calls of an error's traceback, innermost first: `gateway.py:17 < tasks.py:42`."""
    frames = traceback.extract_tb(error.__traceback__)[-PLACES:]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames)) or None


def _is_stale(driver: Any, error: psycopg.Error) -> bool:
    """Whether a new connection may be answered otherwise: the primary is elsewhere, or row-level security was turned on,
    the records were partitioned, or a table got another column, after this connection had asked for it."""
    if error.sqlstate == READ_ONLY:
        return True
    if error.sqlstate == OTHER_COLUMNS:
        return error.diag.source_function == CHECKS_PLAN
    if error.sqlstate == NO_UNIQUE_INDEX:
        return getattr(driver, "is_partitioned", None) is False
    return error.sqlstate == NO_RIGHT and not getattr(driver, "needs_tenant", True) and NO_TENANT in str(error)


def _driver(connection: Connection | None) -> Any:
    if connection is None or connection.closed or connection.invalidated:
        return None
    return connection.connection.driver_connection


def treat_stale_as_unavailable(engine: Engine) -> None:
    """Turn a refusal that a new connection may not get into an `OperationalError`, and drop the connections."""
    _engines.add(engine)

    @event.listens_for(engine, "handle_error")
    def _(context: ExceptionContext) -> None:
        error = context.original_exception
        if isinstance(error, psycopg.Error) and _is_stale(_driver(context.connection), error):
            context.is_disconnect = True
            raise _given_up(context.statement, error)
        if isinstance(error, psycopg.OperationalError) and context.connection is None:
            raise NotConnected(None, None, error, hide_parameters=True)


def _given_up(statement: str | None, error: psycopg.Error) -> OperationalError:
    """The error for a stale connection. Of those from before row-level security, partitions or a column, the process closes all:
    an attempt that was claimed on a new one must not have to end on one of them."""
    if error.sqlstate in (NO_RIGHT, NO_UNIQUE_INDEX, OTHER_COLUMNS):
        for engine in list(_engines):
            engine.dispose()
    return OperationalError(statement, None, error, hide_parameters=True, connection_invalidated=True)
