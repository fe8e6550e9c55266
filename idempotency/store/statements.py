"""Running our own statements on the driver directly, with SQLAlchemy's errors.

An attempt runs two of our statements, and SQLAlchemy's results cost more than psycopg needs to execute them.

`CheckedConnection` is the only place that decides whether an answer from Postgres counts, however it was requested.
"""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, Protocol, Self
from weakref import WeakSet

import psycopg
from psycopg import generators
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.rows import namedtuple_row
from sqlalchemy import Connection, Engine, ExceptionContext, event
from sqlalchemy.exc import DBAPIError, OperationalError, StatementError

from ..errors import NotConnected, SessionNotYours, SettingsError
from ..observe import outages
from ..text import without_values

# read_only_sql_transaction: a standby after a failover, or a server protecting a nearly full disk. For psycopg it is an
# internal error; here it means that Postgres is unavailable for a while.
READ_ONLY = "25006"
# insufficient_privilege, and what `idempotency.tenants()` says where no tenant is set.
NO_RIGHT = "42501"
NO_TENANT = "idempotency.tenant is not set"
# Classes of SQLSTATE: errors about data quote it; those about a statement have a hint that names columns, and quotes no row.
DATA, SYNTAX = "22", "42"
_QUOTED = re.compile('["«„“].*["»“”]', re.DOTALL)
# PgBouncer's answer to options, unless its ignore_startup_parameters names them.
REFUSED_OPTIONS = "unsupported startup parameter"
# The key in a connection's `info` for the cursor of our statements.
_CURSOR = "idempotency.cursor"
# The tenants that row-level security shows, until the end of the transaction or of the session.
SET_TENANTS = "SELECT set_config('idempotency.tenant', %(tenants)s, %(local)s)"
# Those whose connections ask for row-level security when they are opened.
_engines: WeakSet[Engine] = WeakSet()
# The first also forgets the role of the connection's options, which the second brings back.
_BEGIN = b"RESET SESSION AUTHORIZATION; RESET ROLE; RESET ALL; BEGIN"
_SETS_ROLE = re.compile(r"\bset\b.*\b(?:role|authorization)\b|\bset_config\W+role\b", re.IGNORECASE | re.DOTALL)
# Frames: enough to reach the application's code below those of a client library.
PLACES = 6
# Characters: enough for a sentence.
ERROR_LIMIT = 500


class Owner(Protocol):
    """An attempt's session, which alone may end the transaction of the connection that it works on."""

    def check_commit(self) -> None:
        """Raise `SessionNotYours` unless the attempt commits."""

    def check_statement(self, statement: str) -> None:
        """Raise `SessionNotYours` for a statement that would end the transaction."""


class OwnedConnection(psycopg.Connection[Any]):
    """A connection whose transaction only its owner commits. SQLAlchemy's events would cost each statement more."""

    owner: Owner | None = None
    # whether a statement of this transaction may have taken on another role
    may_have_role = False

    def commit(self) -> None:
        if self.owner is not None:
            self.owner.check_commit()
        super().commit()


class CheckedConnection(OwnedConnection):
    """A connection that rejects commits which a standby did not confirm, and does not wait forever for an answer.

    In both cases it raises `psycopg.OperationalError` and is closed, as if the answer was lost.
    """

    # Seconds until an answer counts as lost; None for bodies, whose statements may take as long as they need.
    patience: float | None = None
    # Whether a pooler is in between. Each transaction then begins with `set_local`: a session's settings would be lost,
    # or left on a backend that serves others.
    is_pooled = False
    set_local = ""
    # Whether row-level security shows this role only the tenants that are set, and which those are, one a line; None: it is
    # not known. Behind a pooler they, too, are set in each transaction.
    needs_tenant = False
    tenants: str | None = ""
    _warned = False

    def note_warning(self, notice: psycopg.errors.Diagnostic) -> None:
        """Notice the WARNING about a commit that is durable locally but was not confirmed by a synchronous standby.

        Its text depends on the server's language, so any warning counts; our own statements cause none.
        """
        self._warned |= notice.severity_nonlocalized == "WARNING"

    def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        self._warned = False
        try:
            answer = super().wait(gen if self.patience is None else self._with_deadline(gen), *args, **options)
        except psycopg.Error as error:
            leave_out_values(error)  # its text may be repeated in another error or a log
            raise
        if self._warned and self.pgconn.transaction_status == TransactionStatus.IDLE:
            self._fail("committed, but not confirmed by a synchronous standby")
        return answer

    def begin(self) -> None:
        """Begin a transaction as on a new connection: what a body has SET is undone, the connection's options stay.

        One round trip, and psycopg, which would begin with the first statement, finds that it has begun. A rollback brings
        back what was SET, until the next `begin`. Behind a pooler a RESET would meet another backend: what a body has SET
        there without LOCAL stays, and its backend serves other clients with it.
        """
        if self.pgconn.transaction_status != TransactionStatus.IDLE:
            return  # when it was taken from the pool
        with self.lock:
            self.pgconn.send_query(f"BEGIN; {self.set_local}".encode() if self.is_pooled else _BEGIN)
            for result in self.wait(generators.execute(self.pgconn)):
                if result.status == ExecStatus.FATAL_ERROR:
                    raise psycopg.OperationalError(result.get_error_message())
        self.may_have_role = False

    def _with_deadline(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        assert self.patience is not None
        deadline = time.monotonic() + self.patience
        wanted = next_ready = None
        try:
            wanted = next(gen)
            while True:
                next_ready = yield wanted
                if not next_ready and time.monotonic() > deadline:
                    self._fail(f"no answer within {self.patience:g} s")
                wanted = gen.send(next_ready)
        except StopIteration as end:
            return end.value

    def _fail(self, why: str) -> None:
        self.pgconn.finish()
        raise Unanswered(why)


class Unanswered(psycopg.OperationalError):
    """The connection was given up, because its answer did not come or was not enough."""


class OneStatement:
    """Mixed into a cursor, refuses several statements in one string, of which one could end the transaction.

    It always uses the protocol that has no place for a second one. Postgres refuses that as a syntax error.
    """

    def _execute_send(self, query: Any, **options: Any) -> None:
        super()._execute_send(query, **{**options, "force_extended": True})  # type: ignore[misc]


class OneStatementCursor(OneStatement, psycopg.Cursor[Any]):
    """What a body's session executes with."""

    def execute(self, query: Any, params: Any = None, **options: Any) -> Self:
        self._check(query)
        return super().execute(query, params, **options)

    def executemany(self, query: Any, params_seq: Any, **options: Any) -> None:
        self._check(query)
        super().executemany(query, params_seq, **options)

    def _check(self, query: Any) -> None:
        connection = self.connection
        if isinstance(query, str) and isinstance(connection, OwnedConnection):
            if connection.owner is not None:
                connection.owner.check_statement(query)
            connection.may_have_role = connection.may_have_role or takes_role(query)


class TransactionCursor(psycopg.Cursor[Any]):
    """Runs each statement in a transaction with our settings, for a connection in AUTOCOMMIT mode behind a pooler.

    This takes four round trips instead of one.
    """

    def execute(self, query: Any, params: Any = None, **options: Any) -> Self:
        connection = self.connection
        assert isinstance(connection, CheckedConnection)
        if connection.pgconn.transaction_status != TransactionStatus.IDLE:
            return super().execute(query, params, **options)
        with connection.transaction():
            psycopg.Cursor(connection).execute(connection.set_local)
            if connection.tenants:
                psycopg.Cursor(connection).execute(SET_TENANTS, {"tenants": connection.tenants, "local": True})
            return super().execute(query, params, **options)


def begin_on_clean_connections(engine: Engine) -> None:
    """Let the engine's transactions begin by `CheckedConnection.begin`, which undoes what an earlier one has SET.

    With `pool_pre_ping`, one begins as soon as a connection is taken from the pool. If its server has gone, the pool
    replaces it: nobody notices, and no round trip is spent on asking.
    """

    def begin(connection: Any) -> None:
        connection.dbapi_connection.begin()

    def ping(driver: Any) -> bool:
        driver.begin()
        return True

    engine.dialect.do_begin = begin  # type: ignore[method-assign, assignment]
    engine.dialect.do_ping = ping  # type: ignore[method-assign, assignment]
    invalidate_after_refused_commit(engine)


def invalidate_after_refused_commit(engine: Engine) -> None:
    """Give up a connection on which a commit was refused: a later one must not include this transaction's work."""

    @event.listens_for(engine, "handle_error")
    def _(context: ExceptionContext) -> None:
        if isinstance(context.original_exception, SessionNotYours) and context.statement is None:
            context.is_disconnect, context.invalidate_pool_on_disconnect = True, False


def reset_role(connection: Connection) -> None:
    """Drop a role that a body has taken on: it need not have rights on our tables, and SET LOCAL lasts until COMMIT."""
    driver: Any = connection.connection.driver_connection
    if getattr(driver, "may_have_role", False):
        driver.may_have_role = False
        connection.exec_driver_sql("RESET ROLE")


def takes_role(statement: str) -> bool:
    """Whether a statement may take on another role."""
    return _SETS_ROLE.search(statement) is not None


def use_checked_connections(engine: Engine, *, patience: float | None, set_local: str) -> None:
    """Make the engine open `CheckedConnection`s."""

    # the application's, on this engine alone; ours asks them
    theirs = [each for each in engine.dialect.dispatch.do_connect if event.contains(engine, "do_connect", each)]
    for listener in theirs:
        event.remove(engine, "do_connect", listener)

    @event.listens_for(engine, "do_connect")
    def _(dialect: Any, record: Any, args: Any, parameters: Any) -> Any:
        for listener in theirs:
            if (connected := _asked(listener, dialect, record, args, parameters)) is not None:
                return connected  # refused once it is connected
        connection = _connect(args, parameters)
        connection.patience = patience
        connection.set_local = set_local
        connection.add_notice_handler(connection.note_warning)
        return connection


def _asked(listener: Callable[..., Any], *arguments: Any) -> Any:
    """What the application's own listener returns. If it fails, there is no connection, as if Postgres was away."""
    try:
        return listener(*arguments)
    except (psycopg.Error, SettingsError):
        raise
    except Exception as error:
        raise psycopg.OperationalError(f"idempotency_engine: {type(error).__name__} in front of connecting") from error


def _connect(args: Any, parameters: dict[str, Any]) -> CheckedConnection:
    """Connect with options or, if a pooler refuses those, without."""
    try:
        return CheckedConnection.connect(*args, **parameters)
    except psycopg.OperationalError as error:
        if REFUSED_OPTIONS not in str(error):
            raise
        connection = CheckedConnection.connect(*args, **{**parameters, "options": ""})
        connection.is_pooled = True
        return connection


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
            kind = psycopg.Cursor if driver.cursor_factory is OneStatementCursor else driver.cursor_factory
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
    return not _is_outage(error) or outages.postgres.is_news()


def _is_outage(error: BaseException) -> bool:
    """Whether Postgres is away: nothing answered, or it is starting, stopping, full, or only a standby."""
    if not isinstance(error, OperationalError | psycopg.OperationalError):
        return False
    state = getattr(error.orig if isinstance(error, OperationalError) else error, "sqlstate", None)
    return state is None or state == READ_ONLY or state.startswith(("08", "53", "57P"))


def describe(error: BaseException) -> str:
    """Describe an error in one line for the record: type and message, without parameters or values of a row."""
    if (driver := driver_error(error)) is not None:
        said = _primary(driver)
        if said is None and not isinstance(driver, psycopg.OperationalError):
            said = str(driver).partition("\n")[0][:ERROR_LIMIT]  # the lines below have values
        return f"{type(driver).__name__}: {said or 'no answer from the database'}"
    return without_values(f"{type(error).__name__}: {error}")[:ERROR_LIMIT]


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
        errors += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]
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
    """Whether a new connection may be answered otherwise: the primary is elsewhere, or row-level security was turned on
    after this connection had asked for it."""
    if error.sqlstate == READ_ONLY:
        return True
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
        if context.is_pre_ping:
            return  # the pool replaces the connection
        if isinstance(error, psycopg.OperationalError) and context.connection is None:
            raise NotConnected(None, None, error, hide_parameters=True)


def _given_up(statement: str | None, error: psycopg.Error) -> OperationalError:
    """The error for a stale connection. Of those from before row-level security, the process closes all: an attempt that
    was claimed on a new one must not have to end on one of them."""
    if error.sqlstate == NO_RIGHT:
        for engine in list(_engines):
            engine.dispose()
    return OperationalError(statement, None, error, hide_parameters=True, connection_invalidated=True)
