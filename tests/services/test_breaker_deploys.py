"""Deploys, other applications and copies: each test passes while the bug is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, Row, create_engine, make_url, text
from sqlalchemy.orm import Session

from idempotency import FingerprintMismatch, IdempotentTask, OperationFailed, OperationId, maintenance, operators
from idempotency.dead_letter_queue import DeadLetterConsumer
from idempotency.dead_letters import ReplayRefused
from idempotency.operators import Change
from idempotency.reconcile import reconcile
from idempotency.relay import Relay
from idempotency.runtime import Runtime
from tests import bank as b
from tests import operations as op
from tests.dead_messages import die, headers
from tests.deliveries import Deliveries
from tests.services.test_conclusions import deaths, unwrite, write
from tests.services.test_core import age, make_task
from tests.services.test_operators import deliver_row

ANN = Change("ann", "ticket 42")
Record = Callable[[str], Row[Any]]
Entries = Callable[[str], int]


@pytest.fixture
def connection(engine: Engine) -> Any:
    with engine.connect() as connection:
        yield connection


def test_a_renamed_parameter_strands_every_operation_between_attempts(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    """Called with positional arguments; attempt 1 is released; a deploy renames a parameter (account -> account_id). The
    worker computes the fingerprint anew from today's names and ignores the one in the message, which is the record's own:
    its next delivery is refused as another request. The letter cannot be replayed (the record is released, under another
    fingerprint), nothing else delivers, the operation never ends. Breaks: an operation in flight survives a deploy.
    """

    def old(self: Any, account: str) -> None:
        raise ValueError("again")

    task = make_task(bank, old)
    with Session(engine) as session, session.begin():
        task.enqueue(session, "a", idempotency_key="k")
    assert deliver_row(deliveries, task, op.outbox(connection)[0]).state == "RETRY"
    age(engine, "k")
    retry = op.outbox(connection)[-1]

    def new(self: Any, account_id: str) -> str:
        return account_id

    del bank.tasks[task.name]
    renamed = bank.task(base=IdempotentTask, bind=True, name=task.name, shared=False)(new)
    assert json.loads(retry.message)["headers"]["idempotency-fingerprint"] == record("k").fingerprint
    assert isinstance(deliver_row(deliveries, renamed, retry).value, FingerprintMismatch)
    (letter,) = op.dead_letters(connection)
    with pytest.raises(ReplayRefused):
        operators.replay(bank, letter.id, ANN)
    op.sent(connection, OperationId("default", task.name, "k"))
    for _ in range(3):
        maintenance.recover(bank)
        reconcile(bank)
    assert (record("k").status, op.outbox(connection)[-1].status) == ("released", "published")


def other_application(bank: Celery) -> Celery:
    """Another service on the same database: its own tasks and queues."""
    other = Celery("other")
    other.conf.update({name: bank.conf[name] for name in bank.conf if name.startswith("idempotency_")})
    other.conf.update(broker_url=bank.conf.broker_url, task_default_queue="others", idempotency_service="other")
    other.conf.task_create_missing_queues = False
    return other


def test_the_relay_of_another_service_ends_an_operation_with_attempts_left(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record, entries: Entries
) -> None:
    """The task has max_attempts=50 and has used 20; its process dies. The relay of another service (-A other) on this
    database does not know the task, so it takes its own default of 5 (+10): `failed`, "its process died in every attempt",
    without undo and on_failed, with 30 attempts left. Breaks: wrong failed.
    """

    def body(self: Any) -> str:
        self.step("reserve", write, "reserved", undo=unwrite)
        if record("k").attempts < 21:
            raise ValueError("again")
        return "paid"

    task = make_task(bank, body, max_attempts=50)
    deliveries.deliver(task, key="k")
    deaths(engine, "k", 20)
    other = other_application(bank)
    try:
        maintenance.recover(other)
        assert (record("k").status, record("k").attempts) == ("failed", 20)
        assert (record("k").error_code, entries("reserved")) == ("unfinished", 1)
        assert isinstance(deliveries.deliver(task, key="k", origin="recover").value, OperationFailed)
    finally:
        Runtime.discard(other)


def test_a_replay_is_not_sent_again_while_a_broken_copy_has_an_open_letter(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    """An operation fails (letter 1), and a broken copy of its message is an open letter 2. Letter 1 is replayed; the broker is
    wiped. Reconcile finds an open letter of the same request: `taken`, never sent again. Letter 2 cannot be replayed (the
    operation is released) and its discard takes nothing back. Breaks: wiping the broker loses nothing.
    """
    with Session(engine) as session, session.begin():
        b.failing.enqueue(session, "a", "permanent")
    id = OperationId("default", b.failing.name, "a")
    (row,) = op.outbox(connection, id)
    consumer = DeadLetterConsumer(bank)
    op.sent(connection, id)
    deliver_row(deliveries, b.failing, row)
    die(bank, consumer, "not JSON", headers=headers(task=b.failing.name) | {"idempotency-outbox-id": row.event_id})
    op.eventually(consumer.run_once)
    consumer.close()
    failed, broken = op.dead_letters(connection, id)
    operators.replay(bank, failed.id, ANN)
    connection.execute(
        text("UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp() - interval '1 day'")
    )
    with pytest.raises(ReplayRefused):
        operators.replay(bank, broken.id, ANN)
    for _ in range(3):
        assert reconcile(bank).resent == 0
    replayed = op.outbox(connection, id)[-1]
    assert (replayed.origin, replayed.taken, replayed.settled_at) == ("replay", True, None)
    assert (record("a").status, record("a").generation) == ("released", 2)


def test_one_dead_copy_ends_an_operation_that_another_plain_copy_would_run(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, entries: Entries
) -> None:
    """delay() twice (a client's retry): no outbox row tells of the second message. The first one was allowed to expire by
    its foreign producer; it is rejected, and the consumer ends the operation as failed with on_failed; the second, healthy
    message then gets OperationFailed. Breaks: a duplicate ends nothing that lives.
    """
    consumer = DeadLetterConsumer(bank)
    die(bank, consumer, headers=headers(expires="2020-01-01T00:00:00+00:00"))
    op.eventually(consumer.run_once)
    consumer.close()
    assert (record("a1").status, record("a1").error_code) == ("failed", "expired")
    assert isinstance(deliveries.deliver(b.deposit, "a1").value, OperationFailed)
    assert entries("a1") == 0


def test_the_relay_of_another_service_delays_rows_it_cannot_route(
    bank: Celery, engine: Engine, connection: Connection
) -> None:
    """Rows are leased whatever service wrote them: a relay of another service on this database finds the queue unknown,
    notes an error and backs the row off, up to 60 s each time, with alerts from the fifth on.
    """
    with Session(engine) as session, session.begin():
        b.deposit.enqueue(session, "a")
    other = other_application(bank)
    relay = Relay(other)
    try:
        for _ in range(7):
            relay.run_once()
            connection.execute(text("UPDATE idempotency.outbox SET available_at = clock_timestamp()"))
        (row,) = op.outbox(connection)
        assert (row.status, row.attempts) == ("pending", 7)
    finally:
        relay.close()
        Runtime.discard(other)


def test_an_eager_call_inside_a_transaction_over_another_name_of_the_host_is_not_refused(
    bank: Celery, database: str, entries: Entries
) -> None:
    """The caller's engine says "localhost", the library's "127.0.0.1" (or a socket, a pooler, a second address): the same
    database, compared by its spelling. The eager call runs inside the caller's transaction and stays committed when the
    caller rolls back. Breaks: inside an open transaction of the same thread and database the call is refused.
    """
    url = make_url(database)
    names = {"127.0.0.1": "localhost", "localhost": "127.0.0.1"}
    theirs = create_engine(url.set(host=names[str(url.host)]))
    with Session(theirs) as session:
        session.execute(text("INSERT INTO entries (account, amount) VALUES ('theirs', 1)"))
        assert b.deposit.apply(("a",)).get() == {"account": "a", "amount": 1}
        session.rollback()
    theirs.dispose()
    assert (entries("theirs"), entries("a")) == (0, 1)


def test_a_cancel_by_another_application_ends_it_and_never_tells_the_business(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record, entries: Entries
) -> None:
    """`idempotency cancel KEY -A other`: the task is not known there, and it is cancelled all the same: `unfinished` although
    nothing has happened outside, the step not undone, on_failed not run; and no later command with the right application
    runs them (cancel: "is failed"; resolve: no effect). Only a replay, which does the work that was to be cancelled.
    Breaks: undos and the rows of the task's on_failed are one commit with the cancel.
    """

    def body(self: Any) -> None:
        self.step("reserve", write, "reserved", undo=unwrite)
        raise ValueError("again")

    task = make_task(bank, body, on_failed=b.record_failure)
    deliveries.deliver(task, key="k")
    shown = operators.read(connection, OperationId("default", task.name, "k"))
    other = other_application(bank)
    try:
        operators.cancel(other, shown, ANN)
    finally:
        Runtime.discard(other)
    assert (record("k").status, record("k").error_code) == ("failed", "unfinished")
    assert (entries("reserved"), entries("undone reserved")) == (1, 0)
    with pytest.raises(operators.ChangeRefused):
        operators.cancel(bank, operators.read(connection, shown.id), ANN)
    assert connection.execute(text("SELECT count(*) FROM failures")).scalar_one() == 0
