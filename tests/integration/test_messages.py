"""Accepted messages and their rows: other arguments, renamed parameters, and what is left of them."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from idempotency import Defer, FingerprintMismatch, IdempotentTask
from idempotency.relay.reconcile import reconcile
from idempotency.upkeep import maintenance
from idempotency.wire.keys import OperationId
from idempotency.wire.message import FINGERPRINT_HEADER, Message
from tests.support import bank as b
from tests.support import operations as op
from tests.support.deliveries import Deliveries, deliver_row
from tests.support.operations import Entries, Record, make_due
from tests.support.purging import SETTLED, a_retention_later, deliver_again, past_its_time
from tests.support.tasks import accept, make_task


def test_a_message_with_other_arguments_gets_no_strangers_result(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record
) -> None:
    """A body edited by hand, or by a script that shovels messages, keeps its headers."""
    deliveries.deliver(b.deposit, "a", 5)
    edited = deliveries.deliver(b.deposit, "a", 600, headers={FINGERPRINT_HEADER: record("a").fingerprint})
    assert isinstance(edited.value, FingerprintMismatch)
    assert [letter.reason for letter in op.dead_letters(connection)] == ["fingerprint_mismatch"]


def test_a_message_with_other_arguments_does_not_run_as_the_accepted_one(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    runs: list[int] = []

    def body(self: Any, amount: int) -> int:
        runs.append(amount)
        if len(runs) == 1:
            raise ValueError("again")
        return amount

    task = make_task(bank, body)
    deliveries.deliver(task, 5, key="k")
    make_due(engine, "k")
    accepted = {FINGERPRINT_HEADER: record("k").fingerprint}
    assert isinstance(deliveries.deliver(task, 600, key="k", headers=accepted).value, FingerprintMismatch)
    assert deliveries.deliver(task, 5, key="k", headers=accepted).value == 5
    assert (runs, record("k").fingerprint) == ([5, 5], accepted[FINGERPRINT_HEADER])


def test_a_fingerprint_that_cannot_be_read_is_ignored(bank: Celery, deliveries: Deliveries, record: Record) -> None:
    """Half a surrogate pair: AMQP carries it, and Postgres does not."""
    unreadable = {FINGERPRINT_HEADER: "v1:\ud800"}
    assert deliveries.deliver(b.deposit, "a", 5, headers=unreadable).state == "SUCCESS"
    assert record("a").fingerprint.isascii()
    assert isinstance(deliveries.deliver(b.deposit, "a", 6, headers=unreadable).value, FingerprintMismatch)


def test_a_parameter_renamed_before_the_first_attempt_makes_no_letter(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    def old(self: Any, account: str) -> None: ...

    def new(self: Any, account_id: str) -> str:
        return account_id

    task = make_task(bank, old)
    with Session(engine) as session, session.begin():
        task.enqueue(session, "a", idempotency_key="k")
    op.sent(connection, OperationId("default", task.name, "k"))
    del bank.tasks[task.name]
    renamed = bank.task(base=IdempotentTask, bind=True, name=task.name, shared=False)(new)
    assert deliver_row(deliveries, renamed, op.outbox(connection)[0]).value == "a"
    assert record("k").fingerprint == op.outbox(connection)[0].fingerprint
    connection.execute(text("UPDATE idempotency.outbox SET published_at = published_at - interval '2 days'"))
    reconcile(bank, lambda queue: 0)
    (row,) = op.outbox(connection)
    assert (row.settled_at is not None, op.dead_letters(connection)) == (True, [])


def test_a_key_that_is_sent_again_keeps_its_record_and_no_old_rows(bank: Celery, connection: Connection) -> None:
    """A client that repeats its request once in a redelivery horizon."""
    id = past_its_time(connection)
    for _ in range(3):
        deliver_again(connection, id, **SETTLED)
    just_now = dict.fromkeys(("published_at", "settled_at"), "clock_timestamp()")
    deliver_again(connection, id, **SETTLED | just_now)
    a_retention_later(connection)
    assert maintenance.purge(bank) == 0
    assert (op.record(connection, id) is not None, len(op.outbox(connection, id))) == (True, 1)


def test_deferrals_leave_at_most_a_few_outbox_rows(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    """A refund asks every 2 s whether its payment is settled, for up to 12 hours."""

    def body(self: Any, note: str) -> None:
        raise Defer(2.0, "still pending")

    task = make_task(bank, body)
    deliveries.deliver(task, key="k", note="x" * 10_000)
    for _ in range(6):
        connection.execute(
            text("UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp() - interval '1d'")
        )
        make_due(engine, "k")
        deliver_row(deliveries, task, op.outbox(connection)[-1])
        reconcile(bank, lambda queue: 1_000_000)
        maintenance.purge(bank)
    assert (record("k").status, record("k").attempts) == ("released", 0)
    assert len(op.outbox(connection)) <= 3


def test_a_duplicate_accepted_within_the_retention_gets_the_stored_result(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, entries: Entries
) -> None:
    deliveries.deliver(b.deposit, "a")
    id = accept(engine, b.deposit, "a")  # seconds before the retention is over
    (duplicate,) = op.outbox(connection)
    op.sent(connection, id)  # in its queue, behind others
    connection.execute(text("UPDATE idempotency.records SET expires_at = clock_timestamp() - interval '1 s'"))
    assert maintenance.purge(bank) == 0
    assert deliver_row(deliveries, b.deposit, duplicate).state == "SUCCESS"
    assert entries("a") == 1


def test_an_eager_attempts_record_can_be_delivered_to_a_worker(bank: Celery, engine: Engine, record: Record) -> None:
    def body(self: Any) -> None:
        raise Defer(10, "not yet")

    task = make_task(bank, body)
    with pytest.raises(Defer):
        task.apply(idempotency_key="k").get()
    queue = bank.conf.task_default_queue
    assert Message.from_text(record("k").message).destination(bank) == (queue, queue)
    with engine.connect() as connection:
        (row,) = op.outbox(connection)  # the deferral is delivered, should the caller not come back
    assert Message.from_text(row.message).destination(bank) == (queue, queue)
