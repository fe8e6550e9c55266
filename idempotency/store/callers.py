"""The caller's transaction: what turns a session or a connection of any driver into something that runs our INSERT.

The message has to leave with the caller's commit, so a connection without a transaction is refused: there, it would
leave at once, whatever happened to the caller's own work.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, Union

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, text
from sqlalchemy.orm import Session, scoped_session

from ..errors import InvalidArguments
from .home import IDENTITY, Address, Home, address_of
from .refused import explained

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

_ACCEPTED = "a Session or Connection of SQLAlchemy, or a connection of psycopg or psycopg 2"
_ACCEPTED_ASYNC = "an AsyncSession or AsyncConnection of SQLAlchemy, or an AsyncConnection of psycopg"
_PARAMETER = re.compile(r"%\((\w+)\)s")


class Executes(Protocol):
    """Runs a statement in a transaction that its owner commits. SQLAlchemy's `Connection` is one."""

    def exec_driver_sql(self, statement: str, parameters: Any, /) -> Any: ...


class DriverConnection(Protocol):
    """A connection of psycopg or psycopg 2."""

    autocommit: Any

    def cursor(self) -> Any: ...


Caller: TypeAlias = Union[Session, scoped_session[Any], Connection, DriverConnection, "Pending"]
AsyncCaller: TypeAlias = Union[
    "AsyncSession", "AsyncConnection", "async_scoped_session[Any]", psycopg.AsyncConnection[Any]
]


def is_caller(value: Any) -> bool:
    """Whether a value is a transaction to write in, and not a task's argument."""
    kinds = (Pending, Session, scoped_session, Connection, psycopg.Connection)
    return isinstance(value, kinds) or _is_psycopg2(value) or hasattr(value, "driver_connection")


def is_async_caller(value: Any) -> bool:
    """Whether a value is a transaction that is written in by an event loop."""
    return hasattr(value, "run_sync") or isinstance(value, psycopg.AsyncConnection)


def in_transaction_of(caller: Any, home: Home) -> Executes:
    """What runs our statements in the caller's transaction.

    Accepts a SQLAlchemy Session, scoped_session or Connection with any Postgres driver, a psycopg Connection and a
    psycopg 2 connection. Raises `InvalidArguments` for anything else, for a connection in AUTOCOMMIT mode, and for one
    to another database.
    """
    if isinstance(caller, Pending):
        caller.home = home
        return caller
    if isinstance(caller, Session | scoped_session):
        caller = caller.connection()
    if isinstance(caller, Connection):
        return _of_sqlalchemy(caller, home)
    driver = getattr(caller, "driver_connection", caller)  # of SQLAlchemy's raw_connection()
    if isinstance(driver, psycopg.Connection) or _is_psycopg2(driver):
        _check_transaction(driver)
        if not home.knows(address := _address_of(driver)):
            with driver.cursor() as cursor:
                cursor.execute(IDENTITY)
                home.compare(address, cursor.fetchone()[0])
        return _Driver(driver)
    raise InvalidArguments(f"session: must be {_ACCEPTED}; got {_described(caller)}")


class Pending:
    """Statements that wait for an event loop. Any number of calls may add to it before it is sent once."""

    # where they belong; set by what adds the first
    home: Home

    def __init__(self) -> None:
        self._statements: list[tuple[str, Mapping[str, Any]]] = []

    def exec_driver_sql(self, statement: str, parameters: Mapping[str, Any], /) -> None:
        self._statements.append((statement, parameters))

    async def send(self, caller: Any) -> None:
        """Run the statements in the transaction of an async caller. Raises `InvalidArguments` as `in_transaction_of`."""
        from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

        if isinstance(caller, async_scoped_session):
            caller = caller()
        with explained():
            if isinstance(caller, AsyncSession | AsyncConnection):
                await caller.run_sync(self._replay)
            elif isinstance(caller, psycopg.AsyncConnection):
                _check_transaction(caller)
                if not self.home.knows(address := _address_of(caller)):
                    row = await (await caller.execute(IDENTITY)).fetchone()
                    self.home.compare(address, row[0] if row else None)
                for statement, parameters in self._statements:
                    await caller.execute(statement, parameters)
            else:
                raise InvalidArguments(f"session: must be {_ACCEPTED_ASYNC}; got {_described(caller)}")

    def _replay(self, caller: Session | Connection) -> None:
        connection = in_transaction_of(caller, self.home)
        for statement, parameters in self._statements:
            connection.exec_driver_sql(statement, parameters)


class _Driver:
    """A DB-API connection whose parameters are written `%(name)s`."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def exec_driver_sql(self, statement: str, parameters: Mapping[str, Any], /) -> None:
        with self._connection.cursor() as cursor:
            cursor.execute(statement, parameters)


class _Translated:
    """A SQLAlchemy connection whose driver writes parameters in another way, such as asyncpg's `$1`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def exec_driver_sql(self, statement: str, parameters: Mapping[str, Any], /) -> None:
        self._connection.execute(text(_PARAMETER.sub(r":\1", statement)), parameters)


def _of_sqlalchemy(connection: Connection, home: Home) -> Executes:
    if (database := connection.dialect.name) != "postgresql":
        raise InvalidArguments(f"session: must be connected to the library's Postgres; got {database}")
    driver: Any = connection.connection.dbapi_connection
    _check_transaction(driver)
    if hasattr(driver, "info") and not driver.closed:
        address = _address_of(driver)  # whatever the URL says: it may be of several hosts, or have a name behind them
    else:
        url = connection.engine.url
        address = address_of(url.host or url.query.get("host"), url.port or url.query.get("port"), url.database)
    if not home.knows(address):
        home.compare(address, connection.execute(text(IDENTITY)).scalar_one())
    return connection if connection.dialect.paramstyle == "pyformat" else _Translated(connection)


def _address_of(driver: Any) -> Address:
    info = driver.info
    return address_of(info.host, info.port, info.dbname)


def _check_transaction(driver: Any) -> None:
    if not driver.autocommit:
        return
    # psycopg's `with connection.transaction()` begins one on a connection in AUTOCOMMIT mode, too
    info = getattr(driver, "info", None)
    # ACTIVE is a pipeline, whose next sync would commit the message alone
    if info is None or info.transaction_status not in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
        raise InvalidArguments(
            "session: its connection is in AUTOCOMMIT mode, where the message would leave at once and not with your "
            "commit; begin a transaction"
        )


def _is_psycopg2(driver: Any) -> bool:
    extensions: Any = sys.modules.get("psycopg2.extensions")  # a caller with such a connection has imported it
    return extensions is not None and isinstance(driver, extensions.connection)


def _described(caller: Any) -> str:
    if caller is None:
        return "None"
    name = f"the class {caller.__name__}" if isinstance(caller, type) else type(caller).__name__
    if is_async_caller(caller):
        return f"{name}: `await` aenqueue or apublish with it, or `await session.run_sync(...)` for anything else"
    if isinstance(caller, Session | scoped_session | Connection | psycopg.Connection) or _is_psycopg2(caller):
        return f"{name}: call enqueue or publish with it"
    if hasattr(caller, "begin") and not hasattr(caller, "execute"):  # a sessionmaker or an engine
        return f"{name}: `with {name}.begin() as session` makes one"
    return name
