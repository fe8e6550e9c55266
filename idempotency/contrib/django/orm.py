"""The ORM inside an attempt: while a body runs, Django's connection *is* the attempt's.

What a body writes through the ORM is committed or rolled back with the operation's record. For Django, the
body is one atomic block: `transaction.atomic()` is a savepoint, and what marks the block for rollback keeps the attempt
from committing. `transaction.rollback()` ends the transaction in front of an effect; only the attempt commits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import psycopg
from billiard.exceptions import SoftTimeLimitExceeded
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from django.db.transaction import Atomic
from django.db.utils import DatabaseError
from django.db.utils import OperationalError as DatabaseUnavailable
from psycopg.adapt import AdaptersMap
from psycopg.pq import TransactionStatus
from psycopg.sql import Composable
from sqlalchemy import event
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session, SessionTransaction

from ...attempt.session import refuse_end_of_transaction
from ...errors import SessionNotYours, SettingsError
from ...observe.logs import log
from ...store.driver import OneStatement, OwnedConnection, takes_role
from ...store.statements import READ_ONLY, leave_out_values

_NOT_YOURS = "the connection's transaction belongs to the attempt, which commits it with the result"


class Face(OwnedConnection):
    """A second face of a connection: the same session of Postgres, with other types or rules. Its owner closes it."""

    def __init__(self, owner: psycopg.Connection[Any]) -> None:
        handlers = owner.pgconn.notice_handler, owner.pgconn.notify_handler
        super().__init__(owner.pgconn)
        owner.pgconn.notice_handler, owner.pgconn.notify_handler = handlers  # a new face takes them over
        self.prepare_threshold = None  # the names of prepared statements are the owner's

    def __del__(self, *_: Any) -> None:
        """Psycopg would warn of a connection that was not closed."""


class BorrowedConnection(Face):
    """A face of a connection that SQLAlchemy has opened, with Django's types and cursors.

    It never ends the transaction, and cannot be used once that has ended, when the connection may be another attempt's.
    """

    def __init__(self, owner: psycopg.Connection[Any], adapters: AdaptersMap, cursor_factory: Any) -> None:
        super().__init__(owner)
        self._types = adapters
        self.cursor_factory = cursor_factory
        self.is_returned = False

    @property
    def adapters(self) -> AdaptersMap:
        return self._types

    def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        if self.is_returned:
            raise psycopg.InterfaceError("the transaction of this cursor has ended")
        try:
            return super().wait(gen, *args, **options)
        except psycopg.Error as error:
            leave_out_values(error)  # before Django copies its texts
            raise

    def commit(self) -> None:
        raise SessionNotYours(_NOT_YOURS)

    def rollback(self) -> None:
        raise SessionNotYours(_NOT_YOURS)

    def close(self) -> None:
        raise SessionNotYours(_NOT_YOURS)

    def _set_autocommit(self, value: bool) -> None:
        raise SessionNotYours(_NOT_YOURS)


class AttemptWrapper(BaseDatabaseWrapper):
    """What Django's wrapper of a connection does differently on an attempt's: mixed into the project's own backend."""

    def borrow_from(self, own: BaseDatabaseWrapper, open_session: Callable[[], Session], *, ends: bool) -> None:
        """Work on this session's transaction. `ends`: its commit is final, and `on_commit` functions follow it."""
        self.own, self._open_session, self._ends = own, open_session, ends
        self._watched: Session | None = None
        self._committed: list[Any] = []
        self.connection: BorrowedConnection | None = None
        self.run_on_commit: list[Any] = []
        self.execute_wrappers.append(self._execute)
        self.autocommit = False
        self.in_atomic_block = self.commit_on_exit = True
        # a durable block inside it, which commits by itself, is refused by Django
        self.atomic_blocks = [Atomic(self.alias, savepoint=False, durable=False)]

    @property
    def session(self) -> Session:
        """The attempt's session, opened on first use. Raises `LeaseLost`."""
        session = self._open_session()
        if session is not self._watched:
            self._watched = session
            event.listen(session, "after_commit", self._note_commit)
            event.listen(session, "after_transaction_end", self._give_back)
        return session

    def connect(self) -> None:
        """Borrow the connection of the session's transaction; it begins here unless it has begun."""
        owner: Any = self.session.connection().connection.driver_connection
        parameters = self.get_connection_params()
        if "service" not in parameters and owner.info.dbname != parameters.get("dbname"):
            raise SettingsError(
                f"idempotency_database_url: is {owner.info.dbname!r}, and DATABASES[{self.alias!r}] is "
                f"{self.settings_dict['NAME']!r}: what the ORM writes in a body would not be committed with its record"
            )
        cursors = _cursor_class(parameters["cursor_factory"])
        self.connection = BorrowedConnection(owner, AdaptersMap(parameters["context"]), cursors)
        self._configure_connection(self.connection)
        # as for one that Django opens: receivers register types, or set what policies on rows need
        connection_created.send(sender=type(self), connection=self)

    def on_commit(self, func: Callable[[], object], robust: bool = False) -> None:
        """Call `func` once the attempt has committed. A process that dies in between never calls it: enqueue instead."""
        if not self._ends:
            raise SessionNotYours("on_commit: an undo or on_failed is committed later, with the end; enqueue a task")
        if not callable(func):
            raise TypeError("on_commit()'s callback must be a callable.")
        self.ensure_connection()
        self.run_on_commit.append((set(self.savepoint_ids), func, robust))

    def run_after_commit(self) -> None:
        """Call what waited for the commit, on Django's own connection, as after any commit.

        An error is logged: the operation has ended, or goes on, without it.
        """
        if not self._committed:
            return
        waited, self._committed = self._committed, []
        connections[self.alias] = self.own
        try:
            for _, func, _ in waited:
                try:
                    func()
                except SoftTimeLimitExceeded:
                    raise
                except Exception:
                    log.exception("on_commit_failed", function=getattr(func, "__qualname__", type(func).__name__))
        finally:
            connections[self.alias] = self

    @property
    def is_open(self) -> bool:
        """Whether a query or an atomic block has begun something that the body has not ended."""
        borrowed = self.connection
        has_queried = (
            borrowed is not None
            and not borrowed.is_returned
            and borrowed.info.transaction_status != TransactionStatus.IDLE
        )
        return has_queried or self._is_in_own_block

    def is_of(self, session: Session) -> bool:
        """Whether this wrapper works on the transaction of this session."""
        return session is self._watched

    @property
    def _is_in_own_block(self) -> bool:
        return len(self.atomic_blocks) > 1  # the first one is the body

    @property
    def _was_closed_in_block(self) -> bool:
        """Whether the transaction was rolled back inside a block that has been left."""
        return self.closed_in_transaction and not self._is_in_own_block

    @property
    def needs_rollback(self) -> bool:
        return self._needs_rollback and not self._was_closed_in_block

    @needs_rollback.setter
    def needs_rollback(self, value: bool) -> None:
        self._needs_rollback = value

    def validate_no_atomic_block(self) -> None:
        if self._is_in_own_block:
            super().validate_no_atomic_block()

    def ensure_connection(self) -> None:
        if self._was_closed_in_block:
            self._begin_anew()
        super().ensure_connection()

    def close(self) -> None:
        if self.connection is not None:
            raise SessionNotYours(_NOT_YOURS)

    def close_if_unusable_or_obsolete(self) -> None:
        """Django's `close_old_connections` leaves an open transaction alone, and so this connection."""

    @contextmanager
    def temporary_connection(self) -> Iterator[Any]:
        with self.cursor() as cursor:
            yield cursor

    def _execute(self, execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: Any) -> Any:
        statement = sql.as_string(self.connection) if isinstance(sql, Composable) else str(sql)
        refuse_end_of_transaction(statement)
        if self._watched is not None and takes_role(statement):
            driver: Any = self._watched.connection().connection.driver_connection
            driver.may_have_role = True
        try:
            return execute(sql, params, many, context)
        except DatabaseError as error:
            if getattr(error.__cause__, "sqlstate", None) == READ_ONLY:
                self.session.invalidate()  # the primary is elsewhere: the next attempt must not find this connection
            raise

    def _configure_role(self, _: Any) -> bool:
        return False  # an option of the attempt's connection has it

    def _commit(self) -> None:
        raise SessionNotYours(_NOT_YOURS)

    def _rollback(self) -> None:
        self.session.rollback()

    def _set_autocommit(self, autocommit: bool) -> None:
        raise SessionNotYours(_NOT_YOURS)

    def _note_commit(self, session: Session) -> None:
        if not session.in_nested_transaction():
            self._committed += self.run_on_commit
            self.run_on_commit = []

    def _give_back(self, _: Session, transaction: SessionTransaction) -> None:
        """The session's transaction has ended: the next query borrows its next one."""
        if transaction.parent is not None or self.connection is None:
            return
        self.connection.is_returned = True
        self.run_on_commit = []
        if self._is_in_own_block:
            self.closed_in_transaction = True
        else:
            self._begin_anew()

    def _begin_anew(self) -> None:
        self.connection = None
        self.closed_in_transaction = self.needs_rollback = self.errors_occurred = False


def own_wrapper(alias: str) -> BaseDatabaseWrapper:
    """Django's own wrapper of this thread, also while a body runs."""
    wrapper = connections[alias]
    return wrapper.own if isinstance(wrapper, AttemptWrapper) else wrapper


@cache
def _attempt_class(backend: type[BaseDatabaseWrapper]) -> type[AttemptWrapper]:
    return type(f"Attempt{backend.__name__}", (AttemptWrapper, backend), {})


@cache
def _cursor_class(cursors: type[psycopg.Cursor[Any]]) -> type[psycopg.Cursor[Any]]:
    return type(cursors.__name__, (OneStatement, cursors), {})


@contextmanager
def joined(alias: str, open_session: Callable[[], Session], *, ends: bool) -> Iterator[None]:
    """While entered, `connections[alias]` of this thread is the session's connection."""
    outer = connections[alias]
    own = own_wrapper(alias)
    backend: Any = type(own)
    wrapper = _attempt_class(backend)(own.settings_dict, alias)
    wrapper.borrow_from(own, open_session, ends=ends)
    connections[alias] = wrapper
    try:
        yield
        if not ends:
            wrapper.validate_no_broken_transaction()
    except DatabaseUnavailable as error:
        if ends:
            raise  # the body's own error, as it expects it
        raise OperationalError(None, None, error.__cause__ or error, hide_parameters=True) from error
    finally:
        connections[alias] = outer
