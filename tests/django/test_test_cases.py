"""Django's test cases: in a TestCase a task runs on the test's transaction, and flush forgets the operations."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from django.core.management import call_command
from django.db import connection, transaction
from django.test import TestCase
from sqlalchemy.orm import Session

from idempotency import CallRefused, Operation, OperationFailed, PermanentError
from tests.django.conftest import Entries, make_task
from tests.django.ledger.models import Entry
from tests.support.operations import Record


@pytest.fixture
def in_test_case(app: Celery) -> Any:
    """What Django does around a test of a TestCase."""

    class Case(TestCase):
        def runTest(self) -> None: ...  # noqa: N802  # unittest's name

    Case.setUpClass()
    case = Case()
    case._pre_setup()
    yield
    case._post_teardown()
    Case.doClassCleanups()
    Case.tearDownClass()


def pay(self: Any, account: str) -> list[str]:
    Entry.objects.create(account=account)
    return list(Entry.objects.order_by("id").values_list("account", flat=True))


@pytest.mark.usefixtures("in_test_case")
def test_a_task_sees_the_tests_rows_and_the_test_its_own(app: Celery, entries: Entries, record: Record) -> None:
    task = make_task(app, pay, key="{account}")
    Entry.objects.create(account="of the test")
    assert task("a") == task("a") == ["of the test", "a"]
    assert [entry.account for entry in Entry.objects.order_by("id")] == ["of the test", "a"]
    assert (entries(), record("a")) == ([], None)  # nothing that the next test could meet


@pytest.mark.usefixtures("in_test_case")
def test_a_task_that_fails_in_a_test_case_leaves_the_test_usable(app: Celery) -> None:
    def note(session: Session, operation: Operation, error: PermanentError) -> None:
        Entry.objects.create(account=f"failed {operation.key}")

    def fail(self: Any) -> None:
        Entry.objects.create(account="undone")
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1 / 0")

    task = make_task(app, fail, max_attempts=2, on_failed=note)
    with pytest.raises(Exception, match="division by zero"):
        task.apply(idempotency_key="k").get()
    with pytest.raises(OperationFailed):
        task.apply(idempotency_key="k").get()
    assert [entry.account for entry in Entry.objects.all()] == ["failed k"]


@pytest.mark.usefixtures("in_test_case")
def test_effects_and_steps_run_in_a_test_case(app: Celery) -> None:
    calls = []

    def charge(*, idempotency_key: str) -> str:
        calls.append(idempotency_key)
        return "charged"

    def reserve(session: Session) -> None:
        Entry.objects.create(account="reserved")

    def order(self: Any) -> str:
        self.step("reserve", reserve)
        charged: str = self.effect("charge", charge)
        Entry.objects.create(account=charged)
        return charged

    task = make_task(app, order)
    assert task.apply(idempotency_key="k").get() == task.apply(idempotency_key="k").get() == "charged"
    assert len(calls) == 1
    assert [entry.account for entry in Entry.objects.order_by("id")] == ["reserved", "charged"]


@pytest.mark.usefixtures("in_test_case")
def test_an_atomic_block_of_the_code_under_test_still_refuses_an_eager_call(app: Celery) -> None:
    task = make_task(app, pay, key="{account}")
    with pytest.raises(CallRefused, match="eager call inside"), transaction.atomic():
        task("a")
    assert task("a") == ["a"]


@pytest.mark.usefixtures("in_test_case")
def test_a_handle_reads_what_the_test_enqueued_and_ran(app: Celery, outbox: Entries) -> None:
    task = make_task(app, pay, key="{account}")
    handle = task.enqueue("a")
    assert handle.status() == "accepted"
    task("a")
    assert (handle.status(), handle.result()) == ("completed", ["a"])
    assert outbox() == []


@pytest.mark.usefixtures("in_test_case")
def test_a_task_leaves_no_time_limit_on_the_tests_transaction(app: Celery) -> None:
    make_task(app, pay, key="{account}")("a")
    with connection.cursor() as cursor:
        cursor.execute("SHOW idle_in_transaction_session_timeout")
        assert cursor.fetchone() == ("0",)


def test_flush_forgets_operations_and_messages(app: Celery, record: Record, outbox: Entries) -> None:
    """Django's TransactionTestCase flushes after each test."""
    task = make_task(app, pay, key="{account}")
    task("a")
    task.enqueue("b")
    call_command("flush", interactive=False, verbosity=0)
    assert (record("a"), outbox()) == (None, [])
    assert task("a") == ["a"]
