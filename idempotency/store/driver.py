"""psycopg's connections and cursors, as the library opens them.

`CheckedConnection` is the only place that decides whether an answer from Postgres counts, however it was requested.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import cache
from typing import Any, Protocol, Self

import psycopg
from psycopg import generators
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.sql import as_string
from sqlalchemy import Connection, Engine, ExceptionContext, event

from ..errors import SessionNotYours, SettingsError
from .statements import TRIES, leave_out_values

# PgBouncer's answer to options, unless its ignore_startup_parameters names them.
REFUSED_OPTIONS = "unsupported startup parameter"
# Seconds for the request to cancel a statement, and again until that has ended.
CANCELLED_WITHIN = 2.0
# The tenants that row-level security shows, until the end of the transaction or of the session.
SET_TENANTS = "SELECT set_config('idempotency.tenant', %(tenants)s, %(local)s)"
# The first RESET also forgets the role of the connection's options, which the second brings back. Committed first, because a
# transaction takes its isolation level, and whether it is read-only, from what is set when it begins.
_BEGIN = b"BEGIN; RESET SESSION AUTHORIZATION; RESET ROLE; RESET ALL; COMMIT; BEGIN"
# Times are read as psycopg can: with another style, it reads none that has a time zone. This keeps the order of day and month.
ISO = "SET LOCAL datestyle = ISO"
_SETS_ROLE = re.compile(r"\bset\b.*\b(?:role|authorization)\b|\bset_config\W+role\b", re.IGNORECASE | re.DOTALL)


class Owner(Protocol):
    """An attempt's session, which alone may end the transaction of the connection that it works on."""

    def check_commit(self) -> None:
        """Raise `SessionNotYours` unless the attempt commits."""

    def check_statement(self, statement: str, parameters: Any) -> None:
        """Raise `SessionNotYours` for a statement that would end the transaction, or another reason to refuse it."""


class OwnedConnection(psycopg.Connection[Any]):
    """A connection whose transaction only its owner commits. SQLAlchemy's events would cost each statement more."""

    owner: Owner | None = None
    # how often it was rolled back, by whomever
    rollbacks = 0
    # whether a statement of this transaction may have taken on another role
    may_have_role = False

    def commit(self) -> None:
        if self.owner is not None:
            self.owner.check_commit()
        super().commit()

    def rollback(self) -> None:
        self.rollbacks += 1
        super().rollback()


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
    # Whether the records are in partitions; None: nobody has asked.
    is_partitioned: bool | None = None
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
            answer = super().wait(
                gen if self.patience is None else self._with_deadline(gen, self.patience), *args, **options
            )
        except psycopg.Error as error:
            leave_out_values(error)  # its text may be repeated in another error or a log
            raise
        except BaseException:
            self._cancel()
            raise
        if self._warned and self.pgconn.transaction_status == TransactionStatus.IDLE:
            self._fail("committed, but not confirmed by a synchronous standby")
        return answer

    def begin(self) -> None:
        """Begin a transaction as on a new connection: what a body has SET is undone, the connection's options stay.

        One round trip, and psycopg, which would begin with the first statement, finds that it has begun. Behind a pooler a
        RESET would meet another backend: what a body has SET there without LOCAL stays, and its backend serves other clients
        with it.
        """
        if self.autocommit or self.pgconn.transaction_status != TransactionStatus.IDLE:
            return  # begun when it was taken from the pool
        with self.lock:
            begin = f"BEGIN; {self.set_local}".encode() if self.is_pooled else _BEGIN
            self.pgconn.send_query(begin + b"; " + ISO.encode())
            for result in self.wait(generators.execute(self.pgconn)):
                if result.status == ExecStatus.FATAL_ERROR:
                    # as by a time-out of a millisecond that an earlier body has set: it would stay so
                    self._fail("no transaction could begin")
        self.may_have_role = False

    def _cancel(self) -> None:
        """End one of our statements that a signal has interrupted: Postgres would go on, and commit it after others have looked."""
        if self.patience is None or self.pgconn.transaction_status != TransactionStatus.ACTIVE:
            return
        with suppress(Exception):  # the connection is given up all the same
            self.cancel_safe(timeout=CANCELLED_WITHIN)
            super().wait(self._with_deadline(generators.execute(self.pgconn), CANCELLED_WITHIN))

    def _with_deadline(self, gen: Generator[Any, Any, Any], seconds: float) -> Generator[Any, Any, Any]:
        deadline = time.monotonic() + seconds
        wanted = next_ready = None
        try:
            wanted = next(gen)
            while True:
                next_ready = yield wanted
                if not next_ready and time.monotonic() > deadline:
                    self._fail(f"no answer within {seconds:g} s")
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

    # what the library's own statements are executed with
    unchecked = psycopg.Cursor

    def execute(self, query: Any, params: Any = None, **options: Any) -> Self:
        _check(self.connection, query, params)
        return super().execute(query, params, **options)

    def executemany(self, query: Any, params_seq: Any, **options: Any) -> None:
        _check(self.connection, query, params_seq)
        super().executemany(query, params_seq, **options)

    def stream(self, query: Any, params: Any = None, **options: Any) -> Iterator[Any]:
        _check(self.connection, query, params)
        return super().stream(query, params, **options)

    def copy(self, statement: Any, params: Any = None, **options: Any) -> Any:
        _check(self.connection, statement, params)
        return super().copy(statement, params, **options)


class StreamingCursor(psycopg.ServerCursor[Any]):
    """What a body's session executes with if it asks for `stream_results`."""

    def execute(self, query: Any, params: Any = None, **options: Any) -> Self:
        _check(self.connection, query, params)
        return super().execute(query, params, **options)


def _check(connection: psycopg.Connection[Any], query: Any, params: Any) -> None:
    if not isinstance(connection, OwnedConnection):
        return
    if not isinstance(query, str):  # by the driver itself
        query = query.decode(errors="replace") if isinstance(query, bytes) else as_string(query, connection)
    if connection.owner is not None:
        connection.owner.check_statement(query, params)
    connection.may_have_role = connection.may_have_role or takes_role(query)


class Repeating:
    """Mixed into a cursor, runs a statement that is a transaction of its own again if a record that it waited for has moved.

    To another partition: it is found there.
    """

    def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
        left = TRIES
        while True:
            left -= 1
            try:
                return super().execute(query, params, **options)  # type: ignore[misc]
            except psycopg.errors.SerializationFailure:
                if not left or self.connection.pgconn.transaction_status != TransactionStatus.IDLE:  # type: ignore[attr-defined]
                    raise  # of a longer transaction, whoever has begun it begins again


@cache
def repeating(cursor: type[psycopg.Cursor[Any]]) -> type[psycopg.Cursor[Any]]:
    """A kind of cursor with `Repeating` mixed in; that of an application's own engine stays one."""
    return type(cursor.__name__, (Repeating, cursor), {})


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

    With `pool_pre_ping`, one begins as soon as a connection is taken from the pool, which replaces a connection whose server
    has gone. The check is that BEGIN, and no further round trip.
    """

    @event.listens_for(engine, "connect")
    def _(driver: CheckedConnection, _: Any) -> None:
        driver.server_cursor_factory = StreamingCursor

    def begin(connection: Any) -> None:
        connection.dbapi_connection.begin()

    def ping(driver: Any) -> bool:
        try:
            driver.begin()
        except psycopg.OperationalError:
            if driver.closed:
                return False  # the pool replaces it
            raise
        return True

    dialect = engine.dialect
    set_isolation_level = dialect.set_isolation_level

    def end_and_set(driver: Any, level: Any) -> None:
        driver.rollback()  # nothing has been done in it
        set_isolation_level(driver, level)

    dialect.do_begin, dialect.do_ping = begin, ping  # type: ignore[method-assign, assignment]
    dialect.set_isolation_level = end_and_set  # type: ignore[method-assign, assignment]
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
        for statement in ("RESET SESSION AUTHORIZATION", "RESET ROLE"):
            connection.exec_driver_sql(statement)


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
