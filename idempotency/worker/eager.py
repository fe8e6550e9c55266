"""Eager calls: never inside a transaction that the calling thread has open on the same database.

An eager task commits on a connection of its own. Inside the caller's transaction it would not see the caller's rows,
would wait for the caller's locks until its lock time-out, and would stay committed when the caller rolls back.
"""

from __future__ import annotations

import gc
import threading
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import event
from sqlalchemy.pool import Pool

from ..attempt.runtime import Runtime
from ..errors import CallRefused

# Connections in use, of any engine, and the thread that took them.
_in_use: WeakKeyDictionary[psycopg.Connection[Any], int] = WeakKeyDictionary()


# By another name of the host, a socket or a second address it is the same server if that has this very session.
_IS_HERE = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %(pid)s AND datname = current_database())"


def check_no_transaction(runtime: Runtime) -> None:
    """Raise `CallRefused` when this thread has a transaction open on the library's database.

    Sees the connections of SQLAlchemy's engines, whoever made them; not those opened past SQLAlchemy, nor one through
    a pooler under another name than the library's.
    """
    url = runtime.engine.url
    for reference in _in_use.keyrefs():  # a list, made in one go: other threads take and return connections meanwhile
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
    """Know from now on which thread uses which connection, of any engine. Any number of times.

    A connection that is in a transaction by now counts as this thread's: a first eager call is made inside one.
    """
    if event.contains(Pool, "checkout", _taken):
        return
    event.listen(Pool, "checkout", _taken)
    event.listen(Pool, "checkin", _returned)
    for each in gc.get_objects():
        # by its type: a proxy would be asked for its class, and perhaps be evaluated
        if issubclass(type(each), psycopg.Connection) and not each.closed:
            _taken(each, None, None)
