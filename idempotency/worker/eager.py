"""Eager calls: never inside a transaction that the calling thread has open on the same database, nor in a last look.

An eager task commits on another connection. Inside the caller's transaction it would not see the caller's rows, would
wait for the caller's locks until its lock time-out, and would stay committed if the caller rolls back.
"""

from __future__ import annotations

import gc
import threading
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from celery import Celery, current_task
from psycopg.pq import TransactionStatus
from sqlalchemy import event
from sqlalchemy.pool import ConnectionPoolEntry, Pool

from ..attempt.attempt import Attempt
from ..attempt.runtime import Runtime
from ..errors import CallRefused
from ..handle import Handle
from ..wire.keys import OperationId

# Connections in use, of any engine, and the thread that took them.
_in_use: WeakKeyDictionary[psycopg.Connection[Any], int] = WeakKeyDictionary()


# Under another host name, a socket or a second address it is the same server if that knows this session.
_IS_HERE = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %(pid)s AND datname = current_database())"


def check_no_transaction(runtime: Runtime) -> None:
    """Raise `CallRefused` when this thread has a transaction open on the library's database.

    Sees the connections of all SQLAlchemy engines; not those opened without SQLAlchemy, nor one through a pooler that
    the library knows under another name.
    """
    if runtime.joins_transaction:
        return
    url = runtime.engine.url
    for reference in _in_use.keyrefs():  # a copy: other threads take and return connections meanwhile
        connection = reference()
        if connection is None or connection.closed or _in_use.get(connection) != threading.get_ident():
            continue
        info = connection.info
        if info.transaction_status == TransactionStatus.IDLE or info.dbname != url.database:
            continue
        if (info.host, info.port) == (url.host, url.port or 5432) or _is_here(runtime, info.backend_pid):
            raise CallRefused(
                "eager call: this thread has a transaction open on the same database; commit it first, or use enqueue()"
            )


def check_may_begin(app: Celery, id: OperationId) -> None:
    """Raise what the calling body's operation ends with, if this is its last look: that begins no other operation."""
    caller: Attempt | None = getattr(current_task.request, "attempt", None) if current_task else None
    if caller is None or caller.ends_as is None:
        return
    stored = Handle(app, id).lookup()
    if stored is None or not stored.has_ended:
        caller.check_may_begin()


def _is_here(runtime: Runtime, pid: int) -> bool:
    with runtime.autocommit() as connection:
        return bool(connection.exec_driver_sql(_IS_HERE, {"pid": pid}).scalar_one())


def _taken(connection: Any, _record: Any, _proxy: Any) -> None:
    if isinstance(connection, psycopg.Connection):
        _in_use[connection] = threading.get_ident()


def _returned(connection: Any, _record: Any) -> None:
    if isinstance(connection, psycopg.Connection):
        _in_use.pop(connection, None)


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
