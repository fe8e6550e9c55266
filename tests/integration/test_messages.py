"""Accepted messages and their rows: other arguments, renamed parameters, and what is left of them."""

from __future__ import annotations

import calendar
import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from kombu import Connection as BrokerConnection
from sqlalchemy import Connection, Engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session

import services
from idempotency import Defer, FingerprintMismatch, IdempotentTask, publish
from idempotency.application import close_runtime, runtime_of
from idempotency.attempt.hints import Hint
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.operate.change import Change
from idempotency.operate.replay import replay
from idempotency.relay.relay import Relay, Relayed
from idempotency.relay.resend import resend_lost
from idempotency.store import effects, ends
from idempotency.upkeep import maintenance
from idempotency.wire import keys
from idempotency.wire.headers import DUE_HEADER, FINGERPRINT_HEADER, KEY_HEADER, TENANT_HEADER, VERSION_HEADER
from idempotency.wire.keys import OperationId
from idempotency.wire.message import Message
from tests.support import bank as b
from tests.support import operations as op
from tests.support.dead_messages import die, headers
from tests.support.dead_messages import publish as publish_raw
from tests.support.deliveries import Deliveries, deliver_row
from tests.support.operations import Entries, Record, make_due
from tests.support.processes import Worker, eventually
from tests.support.purging import SETTLED, a_retention_later, deliver_again, past_its_time
from tests.support.tasks import accept, make_task, transactional


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
    with Session(transactional(engine)) as session, session.begin():
        task.enqueue(session, "a", idempotency_key="k")
    op.sent(connection, OperationId("default", task.name, "k"))
    del bank.tasks[task.name]
    renamed = bank.task(base=IdempotentTask, bind=True, name=task.name, shared=False)(new)
    assert deliver_row(deliveries, renamed, op.outbox(connection)[0]).value == "a"
    assert record("k").fingerprint == op.outbox(connection)[0].fingerprint
    connection.execute(text("UPDATE idempotency.outbox SET published_at = published_at - interval '2 days'"))
    resend_lost(bank, lambda queue: 0)
    (row,) = op.outbox(connection)
    assert (row.settled_at is not None, op.dead_letters(connection)) == (True, [])


def test_a_body_sees_its_eta_in_every_attempt(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection
) -> None:
    seen: list[str | None] = []

    def body(self: Any, amount: int) -> None:
        seen.append(self.request.eta)
        raise self.retry(countdown=0)

    task = make_task(bank, body)
    past = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
    assert deliveries.deliver(task, 1, key="due", headers={DUE_HEADER: past}).state == "RETRY"
    (retried,) = connection.execute(text("SELECT * FROM idempotency.outbox")).all()
    make_due(engine, "due")
    assert deliver_row(deliveries, task, retried).state == "RETRY"
    assert seen == [past, past]


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
    """A refund asks every 2 s whether its payment has ended, for up to 12 hours."""

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
        resend_lost(bank, lambda queue: 1_000_000)
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


# ---------------------------------------------------------------- older code, shared servers, foreign headers


def test_a_retry_that_old_code_cannot_bind_comes_back(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, engine: Engine, record: Record
) -> None:
    """A rolling deploy (or a rollback) with a new parameter: newer code has charged and been released, and an old worker
    gets the retry. It comes back; after the time of grace it is a letter that can be replayed.
    """
    bank.conf.update(idempotency_unknown_task_grace=3600.0)
    id = OperationId("default", b.deposit.name, "a1")
    fingerprint = keys.fingerprint({"account": "a1", "note": "new"})
    sent = headers(**{KEY_HEADER: "a1", TENANT_HEADER: "default", FINGERPRINT_HEADER: fingerprint, VERSION_HEADER: 1})
    body = json.dumps([[], {"account": "a1", "note": "new"}, {}])
    queue = bank.conf.task_default_queue
    message = Message(sent, body, {"queue": queue}, {})
    held = op.started(connection, id, fingerprint=fingerprint, message=message.to_text(), queue=queue)
    entry = {"kind": "effect", "state": "begun", "key": "k", "number": 1, "args": "v1:x", "position": 1}
    assert effects.begin_effect(connection, held, "capture", entry | {"ended_at": None}) is not None
    assert ends.release(connection, held, delay=0.0, error=op.ERROR)
    marks = op.sent(connection, id)

    die(bank, consumer, body, headers=sent | marks)  # an old worker
    consumer.run_once()  # an old relay
    assert op.dead_letters(connection) == []
    (row,) = op.outbox(connection)
    assert (row.status, row.refusals) == ("pending", 1)

    connection.execute(text("UPDATE idempotency.outbox SET status = 'published', refusals = 66"))
    die(bank, consumer, body, headers=sent | marks)  # the deploy took longer than the time of grace
    consumer.run_once()
    (letter,) = op.dead_letters(connection)
    assert (letter.reason, letter.task, letter.generation, letter.status) == (
        "invalid_arguments", id.task, None, "open",
    )  # fmt: skip
    assert record("a1").status == "released"

    # the deploy is over: every process knows `note` from here on
    connection.execute(text("UPDATE idempotency.outbox SET published_at = clock_timestamp() - interval '1 day'"))
    connection.execute(text("UPDATE idempotency.records SET available_at = clock_timestamp() - interval '1 day'"))
    assert resend_lost(bank).resent == 0
    assert [(row.status, row.taken) for row in op.outbox(connection)] == [("published", True)]
    replay(bank, letter.id, Change("ann", "the deploy is over"))
    assert [(row.status, row.origin) for row in op.outbox(connection)] == [
        ("published", "retry"),
        ("pending", "replay"),
    ]
    assert record("a1").status == "released"


@pytest.mark.long
def test_an_application_that_shares_redis_runs_its_own_messages(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, entries: Entries, redis_url: str,
    servers: services.Services,
) -> None:  # fmt: skip
    """Staging beside production, or a database for each region: what runs there says nothing about what runs here."""
    theirs = servers.create_database(f"theirs_{uuid4().hex[:8]}")
    b.prepare(theirs)
    ours = bank.conf.idempotency_database_url

    close_runtime(bank)
    bank.conf.update(idempotency_database_url=theirs)
    runtime = runtime_of(bank)
    id = OperationId("default", b.deposit.name, "a1")
    fingerprint = keys.fingerprint({"account": "a1"})
    their_delivery = uuid4().hex
    assert runtime.hints.take(id, their_delivery, fingerprint) is Hint.FREE  # as their worker does, and then claims
    with runtime.autocommit() as there:
        op.started(there, id, token=their_delivery, fingerprint=fingerprint)
    assert deliveries.deliver(b.deposit, "a1").state == "IGNORED"  # a duplicate there: counted there, and marked

    close_runtime(bank)
    bank.conf.update(idempotency_database_url=ours)
    assert deliveries.deliver(b.deposit, "a1").state == "SUCCESS"  # the only message here
    assert record("a1").status == "completed"
    assert entries("a1") == 1
    servers.drop_database(str(make_url(theirs).database))


def test_events_for_a_missing_exchange_cost_the_relay_few_connections(
    bank: Celery, connection: Connection, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its refusal closes the channel: once for the exchange, and not for each of the events."""
    connected: list[object] = []
    connect = BrokerConnection.connect
    monkeypatch.setattr(BrokerConnection, "connect", lambda self: (connected.append(self), connect(self))[1])
    with transactional(engine).begin() as own:
        for number in range(200):
            publish(own, "order.paid", {"order": number}, exchange="misspelt", app=bank)
        b.deposit.enqueue(own, "a1")
    relay = Relay(bank)
    assert relay.run_once() == Relayed(published=0, refused=200)
    # the events are due again after a second, which the first pass may have taken
    assert relay.run_once().published == 1
    relay.close()
    assert len(connected) < 10
    (payment,) = [row for row in op.outbox(connection) if row.task == b.deposit.name]
    assert payment.status == "published"


def test_a_header_that_the_client_cannot_read_ends_no_worker(
    bank: Celery, worker: Worker, connection: Connection, entries: Entries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same header in a task queue."""
    with monkeypatch.context() as patched:
        patched.setattr(calendar, "timegm", lambda _: 1_763_784_000_000)
        publish_raw(bank, headers=headers(**{"sent-at": datetime.now(UTC)}))
    b.deposit.delay("a1")
    assert eventually(lambda: entries("a1") == 1, what="the next message to be worked on")
    assert worker.process.poll() is None
