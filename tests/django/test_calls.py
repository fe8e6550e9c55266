"""Calls of a task from Django code: enqueued in Django's own transaction, or run here and now outside of any."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from celery import Celery
from celery.contrib.django.task import DjangoTask
from django.db import DatabaseError, transaction
from django.db.transaction import TransactionManagementError
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from idempotency import CallRefused, MissingKey, SettingsError, subscribe
from idempotency.contrib.django import IdempotentTask, idempotent_task, publish
from idempotency.contrib.django.databases import database_url
from tests.django.conftest import Entries, make_task
from tests.django.ledger.models import Entry
from tests.support.deliveries import Deliveries
from tests.support.operations import Record


def pay(self: Any, account: str) -> str:
    Entry.objects.create(account=account)
    return account


@pytest.fixture
def task(app: Celery) -> Any:
    return make_task(app, pay, key="{account}")


def test_what_is_enqueued_in_atomic_leaves_with_its_commit(task: Any, outbox: Entries, entries: Entries) -> None:
    with transaction.atomic():
        Entry.objects.create(account="accepted")
        handle = task.enqueue(account="a")
        assert outbox() == entries() == []
    assert (outbox(), entries()) == (["a"], ["accepted"])
    assert (handle.status(), handle.id.key) == ("accepted", "a")


def test_a_typed_task_is_enqueued_without_a_session(app: Celery, outbox: Entries) -> None:
    @idempotent_task(app, name="ledger.typed", key="{account}", shared=False)
    def typed(self: IdempotentTask, account: str) -> str:
        return str(pay(self, account))

    with transaction.atomic():
        typed.enqueue("a")
    assert outbox() == ["a"]
    assert isinstance(typed, DjangoTask)


def test_a_task_is_enqueued_from_an_async_view_on_djangos_connection(task: Any, outbox: Entries) -> None:
    async def view() -> Any:
        return await task.aenqueue("a")

    assert (async_to_sync(view)().id.key, outbox()) == ("a", ["a"])


def test_a_misspelt_alias_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(SettingsError, match="IDEMPOTENCY_DATABASE: DATABASES has no 'orders'; it has 'default'"):
        database_url("orders")


def test_what_is_enqueued_in_atomic_is_rolled_back_with_it(task: Any, outbox: Entries, entries: Entries) -> None:
    with pytest.raises(ValueError, match="no"), transaction.atomic():
        Entry.objects.create(account="accepted")
        task.enqueue("a")
        raise ValueError("no")
    assert outbox() == entries() == []


def test_what_is_enqueued_in_an_inner_block_is_rolled_back_with_that_alone(task: Any, outbox: Entries) -> None:
    with transaction.atomic():
        task.enqueue("outer")
        with pytest.raises(ValueError, match="no"), transaction.atomic():
            task.enqueue("inner")
            raise ValueError("no")
    assert outbox() == ["outer"]


def test_inside_atomic_of_another_alias_of_the_database_a_call_is_refused_unless_it_names_that_transaction(
    task: Any, second: Any, outbox: Entries, entries: Entries
) -> None:
    with transaction.atomic(using="second"):
        for call in (task.enqueue, task.using(countdown=5).enqueue, task):
            with pytest.raises(CallRefused, match="atomic"):
                call("refused")
        with transaction.atomic():
            task.enqueue("in its own block")
        assert task.enqueue(second.connection, "given").status() == "not_found"  # not before that commits
        assert outbox() == ["in its own block"]
    assert (sorted(outbox()), entries()) == (["given", "in its own block"], [])


def test_options_of_one_call_are_given_with_using(task: Any, outbox: Entries) -> None:
    with transaction.atomic():
        handle = task.using(countdown=60, idempotency_key="own").enqueue("a")
        assert outbox() == []
    assert (outbox(), handle.id.key) == (["own"], "own")


def test_from_an_event_loop_it_is_enqueued_in_an_async_transaction(
    task: Any, database: str, outbox: Entries, entries: Entries
) -> None:
    async def place() -> None:
        engine = create_async_engine(database)
        async with engine.begin() as caller:
            await task.aenqueue(caller, "a")
            await task.using(idempotency_key="own").aenqueue(caller, "a")
        await engine.dispose()

    asyncio.run(place())
    assert outbox() == ["a", "own"]


def test_without_the_tables_enqueue_says_migrate(task: Any, default: Any) -> None:
    task.enqueue("warm")
    with default.cursor() as cursor:
        cursor.execute("DROP SCHEMA idempotency CASCADE")
    with pytest.raises(SettingsError, match="migrate"):
        task.enqueue("a")


def test_what_is_enqueued_outside_of_atomic_is_accepted_at_once(task: Any, outbox: Entries) -> None:
    task.enqueue("a", countdown=5)
    assert outbox() == ["a"]


def test_what_is_enqueued_in_a_broken_block_is_refused(task: Any, outbox: Entries, default: Any) -> None:
    with pytest.raises(TransactionManagementError), transaction.atomic():
        with pytest.raises(DatabaseError), default.cursor() as cursor:
            cursor.execute("SELECT 1/0")
        transaction.set_rollback(True)
        task.enqueue("a")
    assert outbox() == []


def test_a_call_that_is_refused_leaves_the_block_usable(app: Celery, task: Any, outbox: Entries) -> None:
    def keyless(self: Any) -> None: ...

    with transaction.atomic():
        with pytest.raises(MissingKey):
            make_task(app, keyless).enqueue()
        task.enqueue("a")
    assert outbox() == ["a"]


def test_a_sqlalchemy_session_given_first_is_used_as_ever(task: Any, outbox: Entries, database: str) -> None:
    engine = create_engine(database)
    with Session(engine) as session:
        task.enqueue(session, "a")
        assert outbox() == []
        session.commit()
    engine.dispose()
    assert outbox() == ["a"]


def test_what_a_body_enqueues_leaves_with_the_attempts_commit(
    app: Celery, task: Any, deliveries: Deliveries, outbox: Entries, record: Record
) -> None:
    seen = []

    def order(self: Any, works: bool) -> None:
        task.enqueue("a")
        with transaction.atomic():
            task.enqueue("b")
        seen.append(outbox())
        if not works:
            raise ValueError("again")

    ordering = make_task(app, order)
    deliveries.deliver(ordering, False, key="fails")
    assert [key for key in outbox() if key != "fails"] == []
    deliveries.deliver(ordering, True, key="works")
    assert [key for key in outbox() if key != "fails"] == ["a", "b"]
    assert seen == [[], ["fails"]]


def test_an_event_is_published_with_the_transaction_of_django(app: Celery, outbox: Entries) -> None:
    @subscribe("order.*", consumer="ledger", app=app)
    def post(self: Any, event: Any) -> None: ...

    with pytest.raises(ValueError, match="no"), transaction.atomic():
        publish("order.paid", {"order": 1}, app=app)
        raise ValueError("no")
    assert outbox() == []
    with transaction.atomic():
        event_id = publish("order.paid", {"order": 1}, app=app)
    assert outbox() == [event_id]


# ---------------------------------------------------------------- here and now


@pytest.mark.parametrize("call", [lambda task: task("a"), lambda task: task.apply(("a",)).get()], ids=["call", "apply"])
def test_an_eager_call_inside_atomic_is_refused(task: Any, record: Record, entries: Entries, call: Any) -> None:
    with pytest.raises(CallRefused, match="eager call inside"), transaction.atomic():
        call(task)  # nothing was asked of the database yet
    assert (record("a"), entries()) == (None, [])
    assert call(task) == "a"
    assert entries() == ["a"]


def test_delay_with_always_eager_inside_atomic_is_refused(app: Celery, task: Any, entries: Entries) -> None:
    app.conf.task_always_eager = True
    with pytest.raises(CallRefused, match="eager call inside"), transaction.atomic():
        task.delay("a")
    assert task.delay("a").get() == "a"
    assert entries() == ["a"]


def test_an_eager_call_in_a_transaction_without_atomic_is_refused(task: Any, default: Any, entries: Entries) -> None:
    default.set_autocommit(False)
    Entry.objects.create(account="mine")
    with pytest.raises(CallRefused, match="transaction"):
        task("a")
    default.rollback()
    default.set_autocommit(True)
    assert task("a") == "a"
    assert entries() == ["a"]


def test_an_eager_call_in_a_body_is_its_own_operation(app: Celery, task: Any, entries: Entries) -> None:
    def outer(self: Any) -> str:
        inner: str = task("inner")
        Entry.objects.create(account="outer")
        with pytest.raises(CallRefused), transaction.atomic():
            task("refused")
        return inner

    assert make_task(app, outer).apply(idempotency_key="k").get() == "inner"
    assert entries() == ["inner", "outer"]


@pytest.mark.long
def test_celerys_delay_on_commit_works_as_before(app: Celery, task: Any, entries: Entries) -> None:
    app.conf.task_always_eager = True
    with transaction.atomic():
        task.delay_on_commit("a")
        assert entries() == []
    assert entries() == ["a"]
