"""Every statement, commit and rollback of an actor is a place to stop: psycopg's own connections, with a stop in front.

The hook is in the driver, below SQLAlchemy and the library's own cursor, so that the library, the application and
whatever they use later are all seen without a word in their code.
"""

from __future__ import annotations

import os
import pkgutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Engine, event
from sqlalchemy.pool import Pool

import idempotency
from idempotency.store.driver import CheckedConnection
from tests.search import footprints
from tests.search.scheduler import EVERYTHING, current, note, stop_before, touched

# What the finishing statements set, so that nothing waits for long behind a frozen holder.
EVICTION = "idle_in_transaction_session_timeout"


class Cursor(psycopg.Cursor[Any]):
    connection: Any  # a `Connection` of this module

    def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
        if (actor := current()) is None or not self.connection.is_taken:
            return super().execute(query, params, **options)
        pid = self.connection.info.backend_pid
        actor.connections[pid] = self.connection
        stop_before(named(query), pid)
        if EVICTION in str(query):
            self.connection.is_finishing = True
        footprint = footprints.of_statement(str(query))
        touched(*footprint)
        result = super().execute(query, params, **options)
        if self.connection.info.transaction_status == TransactionStatus.IDLE:
            touched(*footprints.committed(footprint))
        else:
            self.connection.written.update(footprint)
        note(f"{self.rowcount} row{'' if self.rowcount == 1 else 's'}")
        _lose_answer(self.connection)
        return result


class Connection(CheckedConnection):
    is_taken = False  # out of its pool, its set-up done
    written: set[str]  # what its transaction has to do with others
    is_finishing = False  # behind a statement that has the server end a transaction which idles

    def die(self) -> None:
        """What the server does when the process at the other end is gone."""
        with suppress(psycopg.OperationalError):  # which has ended its session before
            super().rollback()

    def leave(self) -> None:
        """The process at this end is gone, and the server has not looked yet: a statement of ours waits for a lock."""
        with socket.socket(fileno=os.dup(self.pgconn.socket)) as ours:
            ours.shutdown(socket.SHUT_RDWR)

    def _touch_what_was_written(self) -> None:
        touched(*footprints.committed(self.written))
        self.written = set()

    def commit(self) -> None:
        if self._in_transaction():
            stop_before("COMMIT", self.info.backend_pid)
        self._touch_what_was_written()
        self.is_finishing = False
        super().commit()
        _lose_answer(self)

    def rollback(self) -> None:
        # A dead process sends nothing: its connection is closed already, and psycopg says so itself.
        if self._in_transaction() and (actor := current()) is not None and not actor.doomed:
            stop_before("ROLLBACK")
        self._touch_what_was_written()
        self.is_finishing = False
        super().rollback()

    def _in_transaction(self) -> bool:
        return self.is_taken and self.info.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.INERROR)


def _lose_answer(connection: Any) -> None:
    """The connection breaks between the server's work and its answer, if the scheduler says so."""
    if (actor := current()) is not None and actor.loses_answer:
        actor.loses_answer = False
        note("the answer is lost")
        touched(EVERYTHING)
        connection.die()
        connection.close()
        raise psycopg.OperationalError("server closed the connection unexpectedly")


@contextmanager
def stopping() -> Iterator[None]:
    """Make every connection that SQLAlchemy opens meanwhile one that stops."""
    _names.clear()
    event.listen(Engine, "do_connect", _connect)
    event.listen(Pool, "checkout", _taken)
    event.listen(Pool, "checkin", _returned)
    try:
        yield
    finally:
        event.remove(Engine, "do_connect", _connect)
        event.remove(Pool, "checkout", _taken)
        event.remove(Pool, "checkin", _returned)


# Whose connections are opened by a thread that is no actor's.
opening = "the world"


def _connect(_dialect: Any, _record: Any, arguments: Any, options: Any) -> Connection:
    # so that the database's own witness can tell whose write it was
    writer = opening if (actor := current()) is None else actor.process.holder
    connection = Connection.connect(*arguments, **options | {"application_name": writer})
    connection.cursor_factory, connection.written = Cursor, set()
    connection.add_notice_handler(connection.note_warning)
    return connection


def _taken(connection: Any, _record: Any, _proxy: Any) -> None:
    if isinstance(connection, Connection):
        connection.is_taken = True


def _returned(connection: Any, _record: Any) -> None:
    if isinstance(connection, Connection):
        connection.is_taken = False
        if (actor := current()) is not None:
            actor.connections.pop(connection.info.backend_pid if not connection.closed else -1, None)


# ---------------------------------------------------------------- what a statement is called in a trace

_names: dict[str, str] = {}


def named(query: Any) -> str:
    """The library's own name for a statement, or how it begins."""
    if not _names:
        for module in pkgutil.walk_packages(idempotency.__path__, "idempotency."):
            # commands and frameworks have no statements, and migrations are run by Alembic alone
            if module.name.startswith(("idempotency.cli", "idempotency.contrib", "idempotency.store.migrations")):
                continue
            for name, value in vars(import_module(module.name)).items():
                if isinstance(value, str) and name.startswith("_") and name[1:2].isupper():
                    _names[value] = f"{module.name.rpartition('.')[2]}.{name[1:].lower()}"
    text = str(query)
    return _names.get(text) or " ".join(text.split())[:60]
