"""Calls that run here and now: under their key, with every retry at once, and never inside the caller's transaction."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.engine import Engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

import services
from idempotency import CallRefused, Defer, OperationBusy, OperationFailed, PermanentError
from idempotency.wire.keys import OperationId, fingerprint
from tests.support import bank as app_module
from tests.support import operations
from tests.support.operations import Entries, Record
from tests.support.tasks import ROW, make_task


@pytest.fixture
def always_eager(bank: Celery) -> Iterator[None]:
    bank.conf.task_always_eager = True
    yield
    bank.conf.task_always_eager = False


@pytest.mark.usefixtures("always_eager")
def test_with_always_eager_delay_and_apply_async_run_here_once(bank: Celery, entries: Entries, record: Record) -> None:
    first = app_module.deposit.delay("a", 5)
    second = app_module.deposit.apply_async(("a", 5), idempotency_key="a")

    assert first.get() == second.get() == {"account": "a", "amount": 5}
    assert (entries("a"), record("a").attempts) == (1, 1)


def test_an_eager_call_that_keeps_failing_ends_with_rows_and_dead_letter(
    bank: Celery, record: Record, engine: Engine
) -> None:
    with pytest.raises(ValueError, match="boom"):
        app_module.failing.apply(("a", "boom")).get()
    with pytest.raises(OperationFailed):
        app_module.failing.apply(("a", "boom")).get()

    assert (record("a").status, record("a").attempts) == ("failed", 3)
    with engine.connect() as connection:
        assert [letter.reason for letter in operations.dead_letters(connection)] == ["attempts_exhausted"]
        # its attempts' deliveries leave only once a lease is over: until then only the caller continues it
        assert [row.available_at > row.created_at for row in operations.outbox(connection)] == [True, True]


def test_an_eager_permanent_error_is_raised(bank: Celery, record: Record) -> None:
    with pytest.raises(PermanentError, match="no such account"):
        app_module.failing.apply(("a", "permanent")).get()
    assert record("a").status == "failed"


def test_an_eager_deferral_uses_no_attempt_and_the_next_call_goes_on(bank: Celery, record: Record) -> None:
    for _ in range(2):
        with pytest.raises(Defer, match="not yet"):
            app_module.failing.apply(("a", "defer")).get()
        assert (record("a").status, record("a").attempts) == ("released", 0)


def test_an_interrupt_of_an_eager_call_leaves_it_to_the_next_one(
    bank: Celery, record: Record, entries: Entries
) -> None:
    tries = []

    def body(self: Any, account: str) -> Any:
        self.session.execute(ROW)
        tries.append(account)
        if len(tries) == 1:
            raise KeyboardInterrupt
        return account

    task = make_task(bank, body, key="{account}")
    with pytest.raises(KeyboardInterrupt):
        task.apply(("a",))
    assert task.apply(("a",)).get() == "a"
    assert (len(tries), entries("row"), record("a").attempts) == (2, 1, 1)


def test_an_eager_duplicate_of_a_running_attempt_is_busy(bank: Celery, engine: Engine, entries: Entries) -> None:
    id = OperationId("default", "tests.support.bank.deposit", "a")
    with engine.connect() as connection:
        operations.started(connection, id, fingerprint=fingerprint({"account": "a"}))
    with pytest.raises(OperationBusy):
        app_module.deposit.apply(("a",)).get()
    assert entries("a") == 0


@pytest.mark.parametrize("statement", ["SELECT 1", "INSERT INTO entries (account, amount) VALUES ('theirs', 1)"])
def test_an_eager_call_inside_a_transaction_on_its_database_is_refused(
    bank: Celery, database: str, statement: str, record: Record
) -> None:
    theirs = create_engine(database)
    with Session(theirs) as session:
        session.connection().exec_driver_sql(statement)
        began = time.monotonic()
        with pytest.raises(CallRefused, match="transaction open on the same database"):
            app_module.deposit.apply(("a",))
        with pytest.raises(CallRefused, match="transaction open"):
            app_module.deposit("a")
        assert time.monotonic() - began < 5  # said at once, not after a lock time-out
        assert record("a") is None
        session.commit()
        assert app_module.deposit.apply(("a",)).get() == {"account": "a", "amount": 1}
    theirs.dispose()


def test_an_eager_call_inside_a_transaction_of_another_driver_is_refused(
    bank: Celery, database: str, record: Record
) -> None:
    with Session(create_engine(make_url(database).set(drivername="postgresql+psycopg2"))) as session:
        session.execute(text("SELECT 1"))
        with pytest.raises(CallRefused, match="transaction open on the same database"):
            app_module.deposit("a")
        session.rollback()
        assert app_module.deposit("b")["account"] == "b"
    assert record("a") is None


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_an_eager_call_inside_a_transaction_of_its_own_asyncio_task_is_refused(
    bank: Celery, database: str, record: Record, driver: str
) -> None:
    async def call(account: str) -> None:
        app_module.deposit(account)

    async def main() -> None:
        engine = create_async_engine(make_url(database).set(drivername=f"postgresql+{driver}"), poolclass=NullPool)
        async with AsyncSession(engine) as session:
            await session.execute(text("SELECT 1"))
            with pytest.raises(CallRefused, match="transaction open on the same database"):
                app_module.deposit("a")
            await asyncio.create_task(call("b"))  # has no part in it
            await session.rollback()
            app_module.deposit("c")

    asyncio.run(main())
    assert (record("a"), record("b").status, record("c").status) == (None, "completed", "completed")


def test_an_eager_call_in_a_transaction_by_another_host_name_is_refused(
    bank: Celery, database: str, record: Record
) -> None:
    url = make_url(database)
    theirs = create_engine(url.set(host={"127.0.0.1": "localhost", "localhost": "127.0.0.1"}[str(url.host)]))
    with Session(theirs) as session:
        session.execute(text("SELECT 1"))
        with pytest.raises(CallRefused, match="transaction open on the same database"):
            app_module.deposit.apply(("a",))
    theirs.dispose()
    assert record("a") is None


def test_an_eager_call_beside_an_unrelated_transaction_is_accepted(
    bank: Celery, database: str, servers: services.Services
) -> None:
    theirs = create_engine(database)
    elsewhere = create_engine(servers.database_url)
    with theirs.connect() as idle, elsewhere.connect() as other, Session(theirs) as session:
        idle.exec_driver_sql("SELECT 1")
        idle.rollback()
        other.exec_driver_sql("SELECT 1")
        assert app_module.deposit.apply(("a",)).get() == {"account": "a", "amount": 1}
        session.connection()
        # the other thread's call is its own business
        assert operations.at_once(1, lambda _: app_module.deposit.apply(("b",)).get()) == [
            {"account": "b", "amount": 1}
        ]
    theirs.dispose()
    elsewhere.dispose()
