"""Eager calls: never inside a transaction that the calling thread has open on the same database, nor in a last look.

An eager task commits on another connection. Inside the caller's transaction it would not see the caller's rows, would
wait for the caller's locks until its lock time-out, and would stay committed if the caller rolls back.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import suppress
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import psycopg
from celery import Celery, current_task
from psycopg.pq import TransactionStatus
from sqlalchemy import URL, event
from sqlalchemy.pool import ConnectionPoolEntry, Pool

from ..attempt.attempt import Attempt
from ..attempt.runtime import Runtime
from ..attempt.sharing import SharingAttempt
from ..errors import CallRefused
from ..handle import Handle
from ..wire.keys import OperationId
from .deliveries import attempt_of

# A thread and, in an event loop, its task.
Taker: TypeAlias = tuple[int, "asyncio.Task[Any] | None"]
# Connections in use, of any engine and driver, and what took them.
_in_use: WeakKeyDictionary[Any, Taker] = WeakKeyDictionary()


# Under another host name, a socket or a second address it is the same server if that knows this session.
_OTHERS = ("psycopg2.", "asyncpg.")
_IS_HERE = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %(pid)s AND datname = current_database())"


def check_no_transaction(runtime: Runtime) -> None:
    """Raise `CallRefused` when this thread has a transaction open on the library's database.

    Sees the connections of all SQLAlchemy engines, async ones of the same asyncio task; not those opened without
    SQLAlchemy, nor one through a pooler that the library knows under another name.
    """
    if runtime.joins_transaction:
        return
    url = runtime.engine.url
    for reference in _in_use.keyrefs():  # a copy: other threads take and return connections meanwhile
        connection = reference()
        if connection is None or _in_use.get(connection) != _taker():
            continue
        if _is_in_transaction(connection) and _is_ours(runtime, url, connection):
            if isinstance(caller := _caller(), SharingAttempt):
                caller.leave()  # alone it may have none, and a body that catches the refusal would end without its call
            raise CallRefused(
                "eager call: this thread has a transaction open on the same database; commit it first, or use enqueue()"
            )


def check_may_begin(app: Celery, id: OperationId) -> None:
    """Raise what the calling body's operation ends with, if this is its last look: that begins no other operation."""
    caller = _caller()
    if caller is None or caller.ends_as is None:
        return
    stored = Handle(app, id).lookup()
    if stored is None or not stored.has_ended:
        caller.check_may_begin()


def _caller() -> Attempt | None:
    """The attempt whose body this thread is in."""
    return attempt_of(current_task.request) if current_task else None


def _is_in_transaction(connection: Any) -> bool:
    if hasattr(connection, "is_in_transaction"):  # asyncpg
        return bool(connection.is_in_transaction())
    return not connection.closed and connection.info.transaction_status != TransactionStatus.IDLE


def _is_ours(runtime: Runtime, url: URL, connection: Any) -> bool:
    if hasattr(connection, "get_server_pid"):  # asyncpg
        return _is_here(runtime, connection.get_server_pid())
    info = connection.info
    if info.dbname != url.database:
        return False
    return (info.host, info.port) == (url.host, url.port or 5432) or _is_here(runtime, info.backend_pid)


def _is_here(runtime: Runtime, pid: int) -> bool:
    with runtime.autocommit() as connection:
        return bool(connection.exec_driver_sql(_IS_HERE, {"pid": pid}).scalar_one())


def _taken(connection: Any, _record: Any, _proxy: Any) -> None:
    driver = getattr(connection, "driver_connection", connection)  # behind SQLAlchemy's face of an async one
    if isinstance(driver, psycopg.Connection | psycopg.AsyncConnection) or type(driver).__module__.startswith(_OTHERS):
        _in_use[driver] = _taker()


def _returned(connection: Any, _record: Any) -> None:
    with suppress(TypeError):  # of a driver whose connections are not tracked
        _in_use.pop(getattr(connection, "driver_connection", connection), None)


def _taker() -> Taker:
    """Who is running. Another task of this thread's event loop may be inside its own transaction."""
    try:
        return threading.get_ident(), asyncio.current_task()
    except RuntimeError:  # no event loop
        return threading.get_ident(), None


def watch_connections() -> None:
    """From now on, track which thread uses which connection, of any engine. Idempotent.

    A pool's connection that is in use already counts as this thread's until it is returned: a first eager call may be
    made inside its transaction.
    """
    if event.contains(Pool, "checkout", _taken):
        return
    event.listen(Pool, "checkout", _taken)
    event.listen(Pool, "checkin", _returned)
    for each in gc.get_objects():
        # by its type: isinstance would ask a lazy proxy for its class, and so evaluate it
        if issubclass(type(each), ConnectionPoolEntry) and each.in_use:
            _taken(each.dbapi_connection, None, None)
