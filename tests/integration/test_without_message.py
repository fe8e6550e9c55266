"""Attempts without a message: an operation that nothing can deliver, beside messages for the same one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from idempotency.application import runtime_of
from idempotency.attempt.claim import claim
from idempotency.attempt.endings import Ended, Finished, Release
from idempotency.attempt.policy import Policy
from idempotency.attempt.run import run
from idempotency.attempt.runtime import Runtime
from idempotency.errors import PermanentError, ReplayRefused
from idempotency.operate.change import read
from idempotency.operate.release import release
from idempotency.operate.replay import replay
from idempotency.relay.relay import Relay
from idempotency.relay.resend import resend_lost
from idempotency.store.answers import Busy, Claimed, Completed
from idempotency.wire.delivery import Delivery
from idempotency.wire.keys import OperationId, fingerprint
from idempotency.wire.message import Message
from tests.support import bank as b
from tests.support import operations as op
from tests.support.deliveries import Deliveries, deliver_row
from tests.support.operators import ANN
from tests.support.relaying import make_due
from tests.support.tasks import make_task, transactional

POLICY = Policy(max_attempts=3, retention_completed=3600, retention_failed=3600, provider_key_retention=3600)


def request(key: str, task: str = "http.pay", **arguments: Any) -> Delivery:
    """As in test_without_celery: a delivery that came without a message."""
    return Delivery(OperationId("default", task, key), fingerprint(arguments), arguments)


def test_a_crashed_attempt_without_a_message_is_released_and_nothing_else(bank: Celery, connection: Connection) -> None:
    """Its process dies, the relay recovers it: there is nothing to deliver, and its caller asks again."""
    runtime, asked = runtime_of(bank), request("c")
    for number in range(3):
        assert isinstance(claim(runtime, asked, f"a holder that is gone {number}"), Claimed)
        op.recover_now(bank, connection)
    assert isinstance(claim(runtime, asked, "stuck"), Claimed)
    release(bank, read(connection, asked.id, op.SERVICE), ANN)
    assert (op.status(connection, asked.id), op.outbox(connection, asked.id)) == ("released", [])
    policy = replace(POLICY, max_attempts=9)
    assert isinstance(run(runtime, asked, policy, lambda attempt: "paid"), Finished)
    assert isinstance(run(runtime, asked, policy, lambda attempt: "paid"), Completed)
    assert op.dead_letters(connection, asked.id) == []


def test_a_replay_without_a_message_reopens_the_operation_for_its_caller(bank: Celery, connection: Connection) -> None:
    runtime, asked = runtime_of(bank), request("d")

    def refuse(attempt: Any) -> None:
        raise PermanentError("declined", "card_declined")

    assert isinstance(run(runtime, asked, POLICY, refuse), Ended)
    (letter,) = op.dead_letters(connection, asked.id)
    replay(bank, letter.id, ANN)
    assert (op.status(connection, asked.id), op.outbox(connection, asked.id)) == ("released", [])
    assert isinstance(run(runtime, asked, POLICY, lambda attempt: "paid"), Finished)
    assert [each.status for each in op.dead_letters(connection, asked.id)] == ["replayed"]


def test_a_replay_without_a_message_is_refused_once_the_record_is_gone(bank: Celery, connection: Connection) -> None:
    runtime, asked = runtime_of(bank), request("g")

    def refuse(attempt: Any) -> None:
        raise PermanentError("declined", "card_declined")

    assert isinstance(run(runtime, asked, POLICY, refuse), Ended)
    (letter,) = op.dead_letters(connection, asked.id)
    connection.execute(text("DELETE FROM idempotency.records"))
    with pytest.raises(ReplayRefused, match="no message has asked for its operation"):
        replay(bank, letter.id, ANN)
    assert [each.status for each in op.dead_letters(connection, asked.id)] == ["open"]


def test_a_message_that_meets_an_attempt_without_one_is_its_next_delivery(
    bank: Celery, relays: Callable[..., Relay], deliveries: Deliveries, connection: Connection
) -> None:
    """The same operation, asked for by a message and by an HTTP call at once: the message is counted and acknowledged."""
    runtime = runtime_of(bank)
    with Session(runtime.engine) as session, session.begin():
        b.deposit.enqueue(session, account="m")
    id = OperationId("default", b.deposit.name, "m")
    seen = []

    def body(attempt: Any) -> None:
        relay = relays()
        relay.run_once()  # publishes the accepted row
        seen.append(deliver_row(deliveries, b.deposit, op.outbox(connection, id)[-1]).state)
        # what the resend pass of a relay does with a row whose operation is started
        connection.execute(
            text("UPDATE idempotency.outbox SET published_at = published_at - interval '1 hour' WHERE key = 'm'")
        )
        with bank.connection_for_write() as broker:
            broker.default_channel.queue_purge(bank.conf.task_default_queue)
        resend_lost(bank, publisher=relay.publisher)
        raise ValueError("try again")

    outcome = run(runtime, Delivery(id, fingerprint({"account": "m"}), {"account": "m"}), POLICY, body)
    assert isinstance(outcome, Release)
    assert seen == ["IGNORED"]
    assert op.status(connection, id) == "released"
    (row,) = [row for row in op.outbox(connection, id) if row.origin == "retry"]
    assert row.message == op.record(connection, id).message != ""
    make_due(connection)
    op.age(connection, id, available_at=-1)
    relay = relays()
    assert relay.run_once().published == 1
    assert deliver_row(deliveries, b.deposit, row).state == "SUCCESS"


def test_a_workers_retry_is_delivered_though_the_first_attempt_had_no_message(
    bank: Celery, relays: Callable[..., Relay], deliveries: Deliveries, connection: Connection, engine: Engine
) -> None:
    """The record keeps the first message that has come, and a release sends it."""

    def body(self: Any, name: str) -> None:
        raise ValueError("not yet")

    task = make_task(bank, body, key="{name}")
    id = OperationId("default", task.name, "w")

    def fails(attempt: Any) -> None:
        raise ValueError("not yet")

    asked = Delivery(id, fingerprint({"name": "w"}), {"name": "w"})
    assert isinstance(run(runtime_of(bank), asked, POLICY, fails), Release)
    op.make_due(engine, "w")
    with Session(transactional(engine)) as session, session.begin():
        task.enqueue(session, "w")
    relay = relays()
    relay.run_once()
    assert deliver_row(deliveries, task, op.outbox(connection, id)[-1]).state == "RETRY"  # acknowledged
    next_delivery = op.outbox(connection, id)[-1]
    assert (next_delivery.origin, next_delivery.message) == ("retry", op.record(connection, id).message)
    assert Message.from_text(next_delivery.message).headers["task"] == task.name


def test_a_caller_without_a_message_is_answered_by_postgres_and_not_by_a_hint(
    bank: Celery, connection: Connection
) -> None:
    here, there, asked = runtime_of(bank), Runtime(runtime_of(bank).settings), request("h")
    told: list[Any] = []

    def body(attempt: Any) -> None:
        told.extend(run(there, asked, POLICY, body) for _ in range(2))
        raise ValueError("again")

    try:
        released = run(here, asked, POLICY, body)
        assert isinstance(released, Release)
        assert told == [Busy(), Busy()]
        time.sleep(released.delay + 0.1)
        assert op.seconds_from_now(connection, asked.id, "available_at") < 0
        assert isinstance(run(there, asked, POLICY, lambda attempt: "paid"), Finished)
    finally:
        there.close()


def test_the_hint_of_an_attempt_under_another_fingerprint_goes_with_it(bank: Celery, connection: Connection) -> None:
    """After a deploy that renamed a parameter."""
    runtime, there = runtime_of(bank), Runtime(runtime_of(bank).settings)
    id = OperationId("default", "http.pay", "x")
    old, new = fingerprint({"account": "x"}), fingerprint({"account_id": "x"})
    op.due(connection, id, fingerprint=old)
    asked = Delivery(id, new, {"account_id": "x"}, message=op.MESSAGE, also=[old])

    def body(attempt: Any) -> str:
        runtime.heartbeat.run_once()
        assert run(there, asked, POLICY, body) == Busy()  # a duplicate, counted
        return "paid"

    try:
        assert isinstance(run(runtime, asked, POLICY, body), Finished)
        runtime.hints.flush()  # what the heartbeat and the next claim of this process do
        assert op.status(connection, id) == "completed"
        assert isinstance(run(runtime, asked, POLICY, body), Completed)
        assert isinstance(run(there, asked, POLICY, body), Completed)
    finally:
        there.close()
