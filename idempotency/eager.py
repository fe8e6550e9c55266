"""Eager calls: never inside a transaction that the calling thread has open on the same database.

An eager task commits on a connection of its own. Inside the caller's transaction it would not see the caller's rows,
would wait for the caller's locks until its lock time-out, and would stay committed when the caller rolls back.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import URL, event
from sqlalchemy.pool import Pool

from .errors import CallRefused

# Connections in use, of any engine, and the thread that took them.
_in_use: WeakKeyDictionary[psycopg.Connection[Any], int] = WeakKeyDictionary()


def check_no_transaction(url: URL) -> None:
    """Raise `CallRefused` when this thread has a transaction open on the database of this address.

    Sees the connections of SQLAlchemy's engines, whoever made them; not those opened past SQLAlchemy.
    """
    for reference in _in_use.keyrefs():  # a list, made in one go: other threads take and return connections meanwhile
        connection = reference()
        if connection is None or connection.closed or _in_use.get(connection) != threading.get_ident():
            continue
        info = connection.info
        if info.transaction_status != TransactionStatus.IDLE and (info.host, info.port, info.dbname) == (
            url.host,
            url.port or 5432,
            url.database,
        ):
            raise CallRefused(
                "eager call: this thread has a transaction open on the same database; commit it first, or use enqueue()"
            )


def _taken(connection: Any, _record: Any, _proxy: Any) -> None:
    if isinstance(connection, psycopg.Connection):
        _in_use[connection] = threading.get_ident()


def _returned(connection: Any, _record: Any) -> None:
    if isinstance(connection, psycopg.Connection):
        _in_use.pop(connection, None)


event.listen(Pool, "checkout", _taken)
event.listen(Pool, "checkin", _returned)
