"""The ORM in a body: what it writes is the attempt's, committed with the record or not at all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from django.db import IntegrityError, close_old_connections, connection, connections, transaction
from django.db.backends.signals import connection_created
from django.db.models.signals import post_delete
from django.db.transaction import TransactionManagementError
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from idempotency import IdempotentTask as PlainIdempotentTask
from idempotency import Operation, PermanentError
from tests.django.conftest import Entries, make_task
from tests.django.ledger.models import Entry
from tests.support.deliveries import Deliveries
from tests.support.operations import Record, code


def test_what_the_orm_writes_is_committed_with_the_record(
    app: Celery, deliveries: Deliveries, record: Record, entries: Entries
) -> None:
    seen = []

    def pay(self: Any) -> int:
        entry = Entry.objects.create(account="a", details={"n": 1})
        stored = Entry.objects.get()
        counted = self.session.scalar(text("SELECT count(*) FROM ledger_entry"))
        seen.append((entries(), stored.details, stored.at.tzinfo, counted))
        return int(entry.pk)

    task = make_task(app, pay)
    assert deliveries.deliver(task, key="k").value == deliveries.deliver(task, key="k").value == 1
    assert seen == [([], {"n": 1}, UTC, 1)]  # with Django's own types, and not seen outside
    assert (entries(), record("k").status) == (["a"], "completed")


def test_what_the_orm_wrote_in_a_failed_attempt_is_rolled_back(
    app: Celery, deliveries: Deliveries, record: Record, entries: Entries
) -> None:
    def pay(self: Any, error: str) -> None:
        Entry.objects.create(account="a")
        raise PermanentError("no", "no") if error == "permanent" else ValueError("again")

    task = make_task(app, pay)
    assert [deliveries.deliver(task, error, key=error).state for error in ("other", "permanent")] == [
        "RETRY",
        "FAILURE",
    ]
    assert (record("other").status, record("permanent").status, entries()) == ("released", "failed", [])


def test_atomic_in_a_body_is_a_savepoint(app: Celery, deliveries: Deliveries, entries: Entries) -> None:
    def pay(self: Any) -> str:
        Entry.objects.create(account="a")
        with pytest.raises(IntegrityError), transaction.atomic():
            Entry.objects.create(account="b")
            Entry.objects.create(id=Entry.objects.first().pk)
        with transaction.atomic():
            Entry.objects.create(account="c")
        assert entries() == []
        return "paid"

    assert deliveries.deliver(make_task(app, pay), key="k").value == "paid"
    assert entries() == ["a", "c"]


def test_half_of_an_atomic_block_without_savepoint_is_not_committed(
    app: Celery, deliveries: Deliveries, record: Record, entries: Entries
) -> None:
    def book() -> None:
        with suppress(ValueError), transaction.atomic(savepoint=False):
            Entry.objects.create(account="debit")
            raise ValueError("no credit")

    def completes(self: Any) -> str:
        book()
        return "nothing was booked"

    def steps(self: Any) -> str:
        self.step("book", lambda session: book())
        return "nothing was booked"

    def goes_on(self: Any) -> str:
        book()
        with pytest.raises(TransactionManagementError), transaction.atomic():
            Entry.objects.create(account="credit")
        transaction.rollback()
        Entry.objects.create(account="other")
        return "other"

    assert [deliveries.deliver(make_task(app, body), key=body.__name__).state for body in (completes, steps)] == [
        "RETRY",
        "RETRY",
    ]
    assert (record("completes").status, record("steps").effects, entries()) == ("released", {}, [])
    assert "TransactionManagementError" in str(record("steps").error)
    assert deliveries.deliver(make_task(app, goes_on), key="goes on").value == "other"
    assert entries() == ["other"]


def test_a_delete_whose_receiver_raises_is_all_or_nothing(
    app: Celery, deliveries: Deliveries, record: Record, entries: Entries
) -> None:
    Entry.objects.create(account="a")

    def veto(**_: Any) -> None:
        raise ValueError("is still used")

    def clean(self: Any) -> str:
        with suppress(ValueError):
            Entry.objects.filter(account="a").delete()
        return "kept"

    def clean_in_a_block(self: Any) -> str:
        with suppress(ValueError), transaction.atomic():
            Entry.objects.filter(account="a").delete()
        return "kept"

    post_delete.connect(veto, sender=Entry)
    try:
        assert deliveries.deliver(make_task(app, clean), key="k").state == "RETRY"
        assert deliveries.deliver(make_task(app, clean_in_a_block), key="b").value == "kept"
    finally:
        post_delete.disconnect(veto, sender=Entry)
    assert (record("k").status, entries()) == ("released", ["a"])


def test_an_on_failed_that_swallows_half_of_a_block_leaves_no_rows(
    app: Celery, deliveries: Deliveries, record: Record, entries: Entries
) -> None:
    def note(session: Session, operation: Operation, error: PermanentError) -> None:
        with suppress(ValueError), transaction.atomic(savepoint=False):
            Entry.objects.create(account="half")
            raise ValueError("no other half")

    def pay(self: Any) -> None:
        raise PermanentError("no", "no")

    deliveries.deliver(make_task(app, pay, on_failed=note), key="k")
    assert (entries(), record("k").status) == ([], "failed")


def test_a_rollback_of_the_session_inside_a_block_leaves_the_rest_of_the_body_usable(
    app: Celery, deliveries: Deliveries, entries: Entries
) -> None:
    def pay(self: Any) -> str:
        with transaction.atomic():
            Entry.objects.create(account="rolled back")
            self.session.rollback()
            with pytest.raises(Exception, match="ended"):
                Entry.objects.create(account="in the block")
        with transaction.atomic():
            Entry.objects.create(account="after it")
        return "paid"

    assert deliveries.deliver(make_task(app, pay), key="k").value == "paid"
    assert entries() == ["after it"]


def test_a_durable_atomic_block_in_a_body_is_refused_by_django(app: Celery, deliveries: Deliveries) -> None:
    def pay(self: Any) -> str:
        with pytest.raises(RuntimeError, match="durable"), transaction.atomic(durable=True):
            pass
        return "refused"

    assert deliveries.deliver(make_task(app, pay), key="k").value == "refused"


def commit_in_sql() -> None:
    with connection.cursor() as cursor:
        cursor.execute("COMMIT")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "end",
    [
        transaction.commit,
        lambda: transaction.set_autocommit(True),
        lambda: connection.close(),
        lambda: connection.connection.commit(),
        lambda: connection.connection.rollback(),
        commit_in_sql,
    ],
    ids=["commit", "set_autocommit", "close", "commit of the driver", "rollback of the driver", "COMMIT"],
)
def test_a_body_that_ends_the_transaction_is_refused_and_leaves_nothing(
    app: Celery, deliveries: Deliveries, record: Record, entries: Entries, end: Callable[[], object]
) -> None:
    def pay(self: Any) -> None:
        Entry.objects.create(account="a")
        end()

    deliveries.deliver(make_task(app, pay), key="k")
    assert (code(record("k"))[0], entries()) == ("session_not_yours", [])


def test_closing_old_connections_leaves_the_attempts_transaction_alone(
    app: Celery, deliveries: Deliveries, entries: Entries
) -> None:
    def pay(self: Any) -> str:
        Entry.objects.create(account="a")
        close_old_connections()
        return "paid"

    assert deliveries.deliver(make_task(app, pay), key="k").value == "paid"
    assert entries() == ["a"]


def charge(account: str, *, idempotency_key: str) -> str:
    return f"charged {account}"


def test_an_effect_after_a_query_is_refused_until_the_transaction_is_rolled_back(
    app: Celery, deliveries: Deliveries, record: Record, entries: Entries
) -> None:
    def pay(self: Any, rolls_back: bool) -> str:
        account = Entry.objects.values_list("account", flat=True).first()
        if rolls_back:
            transaction.rollback()
        charged: str = self.effect("charge", charge, str(account))
        Entry.objects.create(account=charged)
        return charged

    task = make_task(app, pay, max_attempts=1)
    assert deliveries.deliver(task, False, key="a").state == "FAILURE"
    assert record("a").error_code == "open_transaction"
    assert deliveries.deliver(task, True, key="b").value == "charged None"
    assert entries() == ["charged None"]


@pytest.mark.long
def test_what_an_effects_function_writes_and_enqueues_is_committed_with_its_outcome(
    app: Celery, deliveries: Deliveries, entries: Entries, outbox: Entries
) -> None:
    def send(self: Any, number: str) -> None: ...

    receipt = make_task(app, send, key="{number}")
    ran: list[Any] = []

    def charge_and_save(*, idempotency_key: str) -> str:
        Entry.objects.create(account="the charge's own row")
        receipt.enqueue("r1")
        transaction.on_commit(lambda: ran.append(("told", entries(), outbox())))
        return "ch_1"

    def pay(self: Any) -> str:
        self.effect("charge", charge_and_save)
        ran.append("body")
        raise ValueError("something after it")

    task = make_task(app, pay)
    assert deliveries.deliver(task, key="k").state == "RETRY"
    assert ran == [("told", ["the charge's own row"], ["r1"]), "body"]
    assert entries() == ["the charge's own row"]


def test_a_step_is_committed_with_what_its_function_writes_by_the_orm(
    app: Celery, deliveries: Deliveries, entries: Entries
) -> None:
    def reserve(session: Session) -> int:
        return int(Entry.objects.create(account="reserved").pk)

    def pay(self: Any) -> list[str]:
        self.step("reserve", reserve)
        found = entries()
        Entry.objects.create(account="paid")
        return found

    assert deliveries.deliver(make_task(app, pay), key="k").value == ["reserved"]
    assert entries() == ["reserved", "paid"]


def test_a_query_that_outlives_its_transaction_is_refused(app: Celery, deliveries: Deliveries) -> None:
    Entry.objects.bulk_create([Entry(), Entry(), Entry()])

    def pay(self: Any) -> str:
        rows = Entry.objects.iterator(chunk_size=1)
        next(rows)
        cursor = connection.connection.cursor()
        self.session.rollback()
        with pytest.raises(Exception, match="transaction of this cursor has ended"):
            cursor.execute("SELECT 1")
        with pytest.raises(Exception, match="ended"):
            list(rows)
        return "refused"

    assert deliveries.deliver(make_task(app, pay), key="k").value == "refused"


def test_functions_on_commit_follow_the_attempts_commit_and_only_that(
    app: Celery, deliveries: Deliveries, entries: Entries
) -> None:
    called = []

    def pay(self: Any, works: bool) -> str:
        transaction.on_commit(lambda: called.append(entries()))
        Entry.objects.create(account="a")
        with pytest.raises(ValueError, match="inner"), transaction.atomic():
            transaction.on_commit(lambda: called.append(["never"]))
            raise ValueError("inner")
        if not works:
            raise PermanentError("no", "no")
        return "paid"

    task = make_task(app, pay)
    deliveries.deliver(task, False, key="a")
    assert called == []
    assert deliveries.deliver(task, True, key="b").value == "paid"
    assert called == [["a"]]


def test_functions_on_commit_of_a_step_follow_its_commit(app: Celery, deliveries: Deliveries, entries: Entries) -> None:
    seen: list[Any] = []

    def reserve(session: Session) -> None:
        Entry.objects.create(account="reserved")
        transaction.on_commit(lambda: seen.append(entries()))

    def order(self: Any) -> None:
        self.step("reserve", reserve)
        seen.append("the body goes on")
        raise SystemExit  # a deploy

    with pytest.raises(SystemExit):
        deliveries.deliver(make_task(app, order), key="k")
    assert seen == [["reserved"], "the body goes on"]


def test_functions_on_commit_are_called_once_the_attempt_knows_what_it_has_committed(
    app: Celery, deliveries: Deliveries
) -> None:
    """One that ends the body, as a soft time limit does, must not leave an outcome that is recorded as open."""
    seen: list[Any] = []

    def note(self: Any, name: str) -> None:
        transaction.on_commit(lambda: seen.append(self.request.attempt.claim.effects[name]["state"]))

    def order(self: Any) -> None:
        self.step("reserve", lambda session: note(self, "reserve"))
        self.effect("charge", lambda idempotency_key: note(self, "charge"))

    deliveries.deliver(make_task(app, order), key="k")
    assert seen == ["done", "done"]


def test_what_a_called_task_does_on_commit_is_not_its_callers(
    app: Celery, deliveries: Deliveries, record: Record, entries: Entries, outbox: Entries
) -> None:
    def receipt(self: Any, number: str) -> None: ...

    receipts = make_task(app, receipt, key="{number}")

    def after() -> None:
        Entry.objects.create(account="after the commit")
        receipts.enqueue("r1")

    def inner(self: Any) -> None:
        Entry.objects.create(account="inner")
        transaction.on_commit(after)

    called = make_task(app, inner)

    def outer(self: Any) -> None:
        called.apply(idempotency_key="inner").get(disable_sync_subtasks=False)
        self.effect("charge", charge, "no transaction is open")
        Entry.objects.create(account="outer")
        raise ValueError("later")

    assert deliveries.deliver(make_task(app, outer), key="outer").state == "RETRY"
    assert (record("inner").status, record("outer").status) == ("completed", "released")
    assert (entries(), "r1" in outbox()) == (["inner", "after the commit"], True)


def test_a_function_on_commit_that_raises_changes_no_end(
    app: Celery, deliveries: Deliveries, record: Record, caplog: pytest.LogCaptureFixture
) -> None:
    def pay(self: Any) -> str:
        transaction.on_commit(lambda: 1 / 0)
        return "paid"

    assert deliveries.deliver(make_task(app, pay), key="k").value == "paid"
    assert record("k").status == "completed"


def test_on_failed_writes_by_the_orm_in_the_failing_transaction(
    app: Celery, deliveries: Deliveries, record: Record, entries: Entries
) -> None:
    def note(session: Session, operation: Operation, error: PermanentError) -> None:
        Entry.objects.create(account=f"failed {operation.key} {error.code}")
        assert entries() == []

    def pay(self: Any) -> None:
        Entry.objects.create(account="a")
        raise PermanentError("no", "no_funds")

    deliveries.deliver(make_task(app, pay, on_failed=note), key="k")
    assert (entries(), record("k").status) == (["failed k no_funds"], "failed")


def test_an_on_failed_that_raises_leaves_no_rows_of_the_orm(
    app: Celery, deliveries: Deliveries, record: Record, entries: Entries
) -> None:
    def note(session: Session, operation: Operation, error: PermanentError) -> None:
        Entry.objects.create(account="failed")
        raise ValueError("broken")

    def pay(self: Any) -> None:
        raise PermanentError("no", "no")

    deliveries.deliver(make_task(app, pay, on_failed=note), key="k")
    assert (entries(), record("k").status) == ([], "failed")


def test_after_a_body_the_thread_has_its_own_connection_back(
    app: Celery, deliveries: Deliveries, default: Any, entries: Entries
) -> None:
    def pay(self: Any) -> str:
        assert connections["default"] is not default
        Entry.objects.create(account="in the body")
        return "paid"

    deliveries.deliver(make_task(app, pay), key="k")
    assert connections["default"] is default
    Entry.objects.create(account="after it")
    assert entries() == ["in the body", "after it"]


def test_what_receivers_do_to_a_new_connection_holds_in_a_body(
    app: Celery, deliveries: Deliveries, default: Any
) -> None:
    def set_tenant(connection: Any, **_: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET app.tenant = 'ann'")

    def show(self: Any) -> str:
        with connection.cursor() as cursor:
            cursor.execute("SHOW app.tenant")
            return str(cursor.fetchone()[0])

    connection_created.connect(set_tenant)
    try:
        assert deliveries.deliver(make_task(app, show), key="k").value == "ann"
    finally:
        connection_created.disconnect(set_tenant)


@pytest.mark.long
def test_a_connection_to_a_standby_is_not_used_again(
    app: Celery, deliveries: Deliveries, entries: Entries, record: Record
) -> None:
    backends = []

    def pay(self: Any, writable: bool) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            backends.append(cursor.fetchone())
            if not writable:
                cursor.execute("SET default_transaction_read_only = on")
                cursor.execute("SET transaction_read_only = on")
        Entry.objects.create(account="a")

    task = make_task(app, pay)
    assert deliveries.deliver(task, False, key="standby").state == "RETRY"
    assert deliveries.deliver(task, True, key="primary").state == "SUCCESS"
    assert backends[0] != backends[1]
    assert (record("standby").status, entries()) == ("released", ["a"])


def take_back(session: Session, result: Any) -> None:
    """The undo of a step."""
    Entry.objects.filter(pk=result).delete()
    Entry.objects.create(account="undone")


def test_an_undo_takes_rows_back_by_the_orm_in_the_failing_transaction(
    app: Celery, deliveries: Deliveries, entries: Entries, record: Record
) -> None:
    def pay(self: Any) -> None:
        self.step("reserve", lambda session: Entry.objects.create(account="reserved").pk, undo=take_back)
        assert entries() == ["reserved"]
        raise PermanentError("no", "no")

    deliveries.deliver(make_task(app, pay), key="k")
    assert (entries(), record("k").error_code) == (["undone"], "no")


def test_an_on_failed_that_waits_for_a_commit_is_refused(app: Celery, deliveries: Deliveries, engine: Engine) -> None:
    def note(session: Session, operation: Operation, error: PermanentError) -> None:
        transaction.on_commit(lambda: None)

    def pay(self: Any) -> None:
        raise PermanentError("no", "no")

    deliveries.deliver(make_task(app, pay, on_failed=note), key="k")
    with engine.connect() as outside:
        assert outside.execute(text("SELECT reason FROM idempotency.dead_letters")).all() == [("on_failed_error",)]


def test_a_role_that_a_body_takes_on_by_the_orm_does_not_write_its_end(
    app: Celery, deliveries: Deliveries, record: Record, engine: Engine
) -> None:
    role = f"report_{uuid4().hex[:8]}"
    with engine.connect() as admin:
        admin.execute(text(f"CREATE ROLE {role}"))
        admin.execute(text(f"GRANT {role} TO CURRENT_USER"))

        def pay(self: Any) -> str:
            with connection.cursor() as cursor:
                cursor.execute(f"SET LOCAL ROLE {role}")
            return "paid"

        assert deliveries.deliver(make_task(app, pay), key="k").value == "paid"
        admin.execute(text(f"DROP ROLE {role}"))
    assert record("k").status == "completed"


def test_a_task_on_the_plain_base_is_joined_as_well(app: Celery, deliveries: Deliveries, entries: Entries) -> None:
    def pay(self: Any) -> list[str]:
        Entry.objects.create(account="a")
        return entries()

    task = app.task(base=PlainIdempotentTask, bind=True, name="ledger.plain", shared=False)(pay)
    assert deliveries.deliver(task, key="k").value == []
    assert entries() == ["a"]


def test_the_error_of_a_query_shows_no_values_of_a_row(app: Celery, deliveries: Deliveries, record: Record) -> None:
    def pay(self: Any) -> None:
        Entry.objects.create(pk=4711)
        Entry.objects.create(pk=4711)

    deliveries.deliver(make_task(app, pay, max_attempts=1), key="k")
    assert "unique" in str(record("k").error)
    assert "4711" not in str(record("k").error)


def test_a_lock_that_times_out_in_a_query_uses_up_no_attempt(
    app: Celery, deliveries: Deliveries, record: Record, default: Any
) -> None:
    entry = Entry.objects.create(account="a")

    def pay(self: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL lock_timeout = '50ms'")
        Entry.objects.select_for_update().get(pk=entry.pk)

    def at_once(self: Any) -> None:
        Entry.objects.select_for_update(nowait=True).get(pk=entry.pk)

    other = default.copy()
    with other.cursor() as cursor:
        cursor.execute("BEGIN; SELECT * FROM ledger_entry FOR UPDATE")
        assert deliveries.deliver(make_task(app, pay), key="waited").state == "RETRY"
        assert deliveries.deliver(make_task(app, at_once), key="did not").state == "RETRY"
    other.close()
    assert (record("waited").attempts, record("did not").attempts) == (0, 1)
