"""Whose transaction a message may leave with: sessions and connections of every driver, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, closing, contextmanager
from typing import Any
from uuid import uuid4

import psycopg
import psycopg2
import pytest
import sqlmodel
from celery import Celery
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

import services
from idempotency import InvalidArguments, SettingsError
from idempotency.application import close_runtime
from idempotency.events import apublish, publish
from tests.support import bank as b

ROW = "INSERT INTO entries (account, amount) VALUES ('business', 1)"
Rows = Callable[[], list[tuple[str, str]]]


@pytest.fixture
def rows(connection: Connection) -> Rows:
    """What can be seen from outside: the business rows, and the keys in the outbox."""

    def read() -> list[tuple[str, str]]:
        found = "SELECT 'entry', account FROM entries UNION ALL SELECT 'outbox', key FROM idempotency.outbox ORDER BY 1"
        return [(kind, name) for kind, name in connection.execute(text(found))]

    return read


@pytest.fixture
def other_database(servers: services.Services, template: str) -> Iterator[str]:
    """Another one with the library's tables."""
    name = f"other_{uuid4().hex[:8]}"
    admin = create_engine(servers.database_url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template}"))
    yield make_url(servers.database_url).set(database=name).render_as_string(hide_password=False)
    servers.drop_database(name)


# ---------------------------------------------------------------- sync


def plain(database: str) -> str:
    return make_url(database).set(drivername="postgresql").render_as_string(hide_password=False)


def sqlalchemy_engine(database: str, driver: str = "psycopg") -> Engine:
    return create_engine(make_url(database).set(drivername=f"postgresql+{driver}"), poolclass=NullPool)


@contextmanager
def a_session(database: str) -> Iterator[Any]:
    with Session(sqlalchemy_engine(database)) as session:
        yield session


@contextmanager
def a_scoped_session(database: str) -> Iterator[Any]:
    sessions = scoped_session(sessionmaker(sqlalchemy_engine(database)))
    yield sessions
    sessions.remove()


@contextmanager
def a_sqlmodel_session(database: str) -> Iterator[Any]:
    with sqlmodel.Session(sqlalchemy_engine(database)) as session:
        yield session


@contextmanager
def a_connection(database: str) -> Iterator[Any]:
    with sqlalchemy_engine(database).connect() as connection:
        yield connection


@contextmanager
def a_connection_by_psycopg2(database: str) -> Iterator[Any]:
    with sqlalchemy_engine(database, "psycopg2").connect() as connection:
        yield connection


@contextmanager
def a_raw_connection(database: str) -> Iterator[Any]:
    connection = sqlalchemy_engine(database).raw_connection()
    yield connection
    connection.close()


@contextmanager
def psycopg_3(database: str) -> Iterator[Any]:
    with psycopg.connect(plain(database)) as connection:
        yield connection


@contextmanager
def psycopg_2(database: str) -> Iterator[Any]:
    connection = psycopg2.connect(plain(database))
    yield connection
    connection.close()


SYNC = [
    a_session,
    a_scoped_session,
    a_sqlmodel_session,
    a_connection,
    a_connection_by_psycopg2,
    a_raw_connection,
    psycopg_3,
    psycopg_2,
]


def execute(caller: Any, statement: str) -> None:
    """As the caller's own code would, with any of them."""
    if isinstance(caller, Session | scoped_session | Connection):
        caller.execute(text(statement))
    else:
        caller.cursor().execute(statement)


@pytest.mark.parametrize("open_caller", SYNC, ids=lambda each: each.__name__)
def test_a_message_leaves_with_the_commit_of_its_caller_or_not_at_all(
    bank: Celery, database: str, rows: Rows, open_caller: Callable[[str], AbstractContextManager[Any]]
) -> None:
    with open_caller(database) as caller:
        execute(caller, ROW)
        b.deposit.enqueue(caller, "rolled back", countdown=5)
        caller.rollback()
        assert rows() == []
        execute(caller, ROW)
        handle = b.deposit.enqueue(caller, "a1", ordering_key="one after another")
        assert rows() == []
        caller.commit()
        assert rows() == [("entry", "business"), ("outbox", "a1")]
    assert handle.status() == "accepted"


@pytest.mark.parametrize("open_caller", SYNC, ids=lambda each: each.__name__)
def test_an_event_leaves_with_the_commit_of_its_caller_or_not_at_all(
    bank: Celery, database: str, rows: Rows, open_caller: Callable[[str], AbstractContextManager[Any]]
) -> None:
    with open_caller(database) as caller:
        publish(caller, "order.paid", {}, exchange="shop", app=bank)
        caller.rollback()
        event_id = publish(caller, "order.paid", {"order": 17}, exchange="shop", app=bank)
        assert rows() == []
        caller.commit()
    assert rows() == [("outbox", event_id)]


def test_psycopg_s_own_transaction_block_is_one_on_an_autocommit_connection(
    bank: Celery, database: str, rows: Rows
) -> None:
    with psycopg.connect(plain(database), autocommit=True) as connection:
        with connection.transaction():
            b.deposit.enqueue(connection, "a1")
            assert rows() == []
        assert rows() == [("outbox", "a1")]


# ---------------------------------------------------------------- async


@asynccontextmanager
async def _session(database: str, driver: str) -> AsyncIterator[Any]:
    engine = create_async_engine(make_url(database).set(drivername=f"postgresql+{driver}"))
    async with async_sessionmaker(engine)() as session:
        yield session
    await engine.dispose()


@asynccontextmanager
async def _connection(database: str, driver: str) -> AsyncIterator[Any]:
    engine = create_async_engine(make_url(database).set(drivername=f"postgresql+{driver}"))
    async with engine.connect() as connection:
        yield connection
    await engine.dispose()


def async_session_by_psycopg(database: str) -> AbstractAsyncContextManager[Any]:
    return _session(database, "psycopg")


def async_session_by_asyncpg(database: str) -> AbstractAsyncContextManager[Any]:
    return _session(database, "asyncpg")


def async_connection_by_psycopg(database: str) -> AbstractAsyncContextManager[Any]:
    return _connection(database, "psycopg")


def async_connection_by_asyncpg(database: str) -> AbstractAsyncContextManager[Any]:
    return _connection(database, "asyncpg")


@asynccontextmanager
async def scoped_async_session(database: str) -> AsyncIterator[Any]:
    engine = create_async_engine(make_url(database).set(drivername="postgresql+asyncpg"))
    sessions = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)
    yield sessions
    await sessions.remove()
    await engine.dispose()


@asynccontextmanager
async def async_psycopg(database: str) -> AsyncIterator[Any]:
    async with await psycopg.AsyncConnection.connect(plain(database)) as connection:
        yield connection


ASYNC = [
    async_session_by_psycopg,
    async_session_by_asyncpg,
    async_connection_by_psycopg,
    async_connection_by_asyncpg,
    scoped_async_session,
    async_psycopg,
]


@pytest.mark.parametrize("open_caller", ASYNC, ids=lambda each: each.__name__)
def test_a_message_leaves_with_the_commit_of_an_async_caller_or_not_at_all(
    bank: Celery, database: str, rows: Rows, open_caller: Callable[[str], AbstractAsyncContextManager[Any]]
) -> None:
    async def main() -> str:
        async with open_caller(database) as caller:
            await b.deposit.aenqueue(caller, "rolled back", countdown=5)
            await apublish(caller, "order.paid", {}, exchange="shop", app=bank)
            await caller.rollback()
            statement = ROW if isinstance(caller, psycopg.AsyncConnection) else text(ROW)
            await caller.execute(statement)
            handle = await b.deposit.aenqueue(caller, "a1", amount=3, ordering_key="one after another")
            event_id = await apublish(caller, "order.paid", {"order": 17}, exchange="shop", app=bank)
            assert rows() == []
            await caller.commit()
            assert (await handle.alookup()) is None
            return event_id

    event_id = asyncio.run(main())
    assert sorted(rows()) == sorted([("entry", "business"), ("outbox", "a1"), ("outbox", event_id)])


def test_a_message_accepted_through_asyncpg_is_the_one_accepted_through_psycopg(
    bank: Celery, database: str, engine: Engine
) -> None:
    async def main() -> None:
        async with async_session_by_asyncpg(database) as session, session.begin():
            await b.deposit.aenqueue(session, "a1", amount=3, task_id="t1", countdown=60, priority=4)

    asyncio.run(main())
    with a_session(database) as session, session.begin():
        b.deposit.enqueue(session, "a1", amount=3, task_id="t1", countdown=60, priority=4)
    columns = "tenant, task, key, fingerprint, message, queue, ordering_key, origin, settled_at, generation, status"
    with engine.connect() as connection:
        due = "round(extract(epoch FROM available_at - created_at))"  # clocks read in one statement differ a little
        first, second = connection.execute(text(f"SELECT {columns}, {due} FROM idempotency.outbox")).all()
    assert first == second


# ---------------------------------------------------------------- refused


@contextmanager
def autocommit_session(database: str) -> Iterator[Any]:
    with Session(sqlalchemy_engine(database).execution_options(isolation_level="AUTOCOMMIT")) as session:
        yield session


@contextmanager
def autocommit_psycopg(database: str) -> Iterator[Any]:
    with psycopg.connect(plain(database), autocommit=True) as connection:
        yield connection


@contextmanager
def autocommit_psycopg2(database: str) -> Iterator[Any]:
    with psycopg_2(database) as connection:
        connection.autocommit = True
        yield connection


@pytest.mark.parametrize(
    "open_caller", [autocommit_session, autocommit_psycopg, autocommit_psycopg2], ids=lambda each: each.__name__
)
def test_a_connection_that_commits_each_statement_is_refused(
    bank: Celery, database: str, rows: Rows, open_caller: Callable[[str], AbstractContextManager[Any]]
) -> None:
    with open_caller(database) as caller:
        with pytest.raises(InvalidArguments, match=r"^session: its connection is in AUTOCOMMIT mode, .*; begin a"):
            b.deposit.enqueue(caller, "a1")
        with pytest.raises(InvalidArguments, match=r"^session: its connection is in AUTOCOMMIT mode, .*; begin a"):
            publish(caller, "order.paid", {}, exchange="shop", app=bank)
    assert rows() == []


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_an_async_connection_that_commits_each_statement_is_refused(
    bank: Celery, database: str, rows: Rows, driver: str
) -> None:
    async def main() -> None:
        async with _connection(database, driver) as connection:
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            with pytest.raises(InvalidArguments, match=r"^session: its connection is in AUTOCOMMIT mode"):
                await b.deposit.aenqueue(connection, "a1")

    asyncio.run(main())
    assert rows() == []


NOT_A_CALLER: dict[str, Any] = {
    "None": None,
    "the class Session": Session,
    r"sessionmaker: `with sessionmaker.begin\(\) as session` makes one": sessionmaker(),
    r"AsyncSession: `await` aenqueue or apublish with it, or `await session\.run_sync\(\.\.\.\)` for anything else": AsyncSession(),
    "str": "a1",
}


@pytest.mark.parametrize("described", NOT_A_CALLER)
def test_what_has_no_transaction_is_refused_with_what_to_give_instead(bank: Celery, described: str) -> None:
    with pytest.raises(InvalidArguments, match=f"^session: must be a Session or Connection .*; got {described}$"):
        publish(NOT_A_CALLER[described], "order.paid", {"order": 1}, exchange="orders", app=bank)


def test_an_engine_is_refused_with_how_to_begin(bank: Celery, database: str) -> None:
    with pytest.raises(InvalidArguments, match=r"got Engine: `with Engine\.begin\(\)"):
        b.deposit.enqueue(sqlalchemy_engine(database), "a1")


def test_a_session_of_another_database_system_is_refused(bank: Celery) -> None:
    with (
        Session(create_engine("sqlite://")) as session,
        pytest.raises(InvalidArguments, match=r"^session: must be connected to the library's Postgres; got sqlite$"),
    ):
        b.deposit.enqueue(session, "a1")


@pytest.mark.parametrize("described", ["None", "Session: call enqueue or publish with it"])
def test_an_event_of_an_async_caller_refuses_what_is_not_async(bank: Celery, described: str) -> None:
    caller: Any = None if described == "None" else Session()
    with pytest.raises(InvalidArguments, match=f"^session: must be an AsyncSession .*; got {described}$"):
        asyncio.run(apublish(caller, "order.paid", {"order": 1}, app=bank))


# ---------------------------------------------------------------- what the database says

CARD = "4111-1111-1111-1111"


def by_psycopg(database: str) -> None:
    with psycopg.connect(plain(database)) as connection:
        b.deposit.enqueue(connection, CARD)


def by_psycopg2(database: str) -> None:
    with closing(psycopg2.connect(plain(database))) as connection, connection:
        b.deposit.enqueue(connection, CARD)


def by_session(database: str) -> None:
    with Session(sqlalchemy_engine(database)) as session, session.begin():
        b.deposit.enqueue(session, CARD)


def by_async_psycopg(database: str) -> None:
    async def main() -> None:
        async with async_psycopg(database) as connection:
            await b.deposit.aenqueue(connection, CARD)

    asyncio.run(main())


def by_asyncpg(database: str) -> None:
    async def main() -> None:
        async with _session(database, "asyncpg") as session, session.begin():
            await b.deposit.aenqueue(session, CARD)

    asyncio.run(main())


CALLS = [by_psycopg, by_psycopg2, by_session, by_async_psycopg, by_asyncpg]


@pytest.mark.parametrize("call", CALLS)
def test_without_the_tables_a_caller_of_any_driver_is_told_to_migrate(
    configured: Celery, empty_database: str, call: Callable[[str], None]
) -> None:
    configured.conf.idempotency_database_url = empty_database
    close_runtime(configured)
    with pytest.raises(SettingsError, match="run `idempotency migrate`"):
        call(empty_database)
    close_runtime(configured)


@pytest.mark.parametrize("call", CALLS)
def test_no_error_of_a_call_shows_its_arguments_whatever_the_caller_s_engine_would(
    bank: Celery, connection: Connection, database: str, call: Callable[[str], None]
) -> None:
    connection.execute(text("ALTER TABLE idempotency.outbox ADD CONSTRAINT never CHECK (id < 0) NOT VALID"))
    with pytest.raises(Exception, match="never") as raised:
        call(database)
    assert CARD not in str(raised.value).split("DETAIL")[0]


@pytest.mark.parametrize("call", CALLS)
def test_a_caller_connected_to_another_database_is_refused(
    bank: Celery, other_database: str, call: Callable[[str], None]
) -> None:
    """Its message would be accepted, and no relay would ever send it."""
    with pytest.raises(InvalidArguments, match=r"^session: is connected to another database \(.*\) than"):
        call(other_database)


@pytest.mark.parametrize("call", CALLS)
def test_a_caller_connected_to_the_same_database_under_another_name_is_accepted(
    bank: Celery, database: str, call: Callable[[str], None], rows: Rows
) -> None:
    call(make_url(database).set(host="localhost").render_as_string(hide_password=False))
    assert rows() == [("outbox", CARD)]


@pytest.mark.direct
@pytest.mark.parametrize("options", ["-c timezone=Asia/Tokyo", "-c datestyle=German"])
def test_a_caller_at_home_is_accepted_however_its_session_writes_times(
    bank: Celery, database: str, options: str, rows: Rows
) -> None:
    engine = create_engine(make_url(database).set(host="localhost"), connect_args={"options": options})
    with Session(engine) as session, session.begin():
        b.deposit.enqueue(session, account=CARD)
    engine.dispose()
    assert rows() == [("outbox", CARD)]


def test_a_pipeline_in_autocommit_mode_is_refused(bank: Celery, database: str, rows: Rows) -> None:
    """Its sync would commit the message alone."""
    with psycopg.connect(plain(database), autocommit=True) as connection, connection.pipeline():
        connection.execute("SELECT 1")
        with pytest.raises(InvalidArguments, match="AUTOCOMMIT"):
            b.deposit.enqueue(connection, "a1")
    assert rows() == []


def test_an_invalid_call_is_refused_before_the_async_session_is_used(bank: Celery) -> None:
    with pytest.raises(InvalidArguments, match="countdown"):
        asyncio.run(b.deposit.aenqueue(AsyncSession(), "a1", countdown=-1))
