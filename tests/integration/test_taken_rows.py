"""A row that something else delivers is not sent again; a row that nothing else delivers is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text

from idempotency.application import runtime_of
from idempotency.attempt.endings import Release
from idempotency.attempt.policy import Policy
from idempotency.attempt.run import run
from idempotency.attempt.runtime import Runtime
from idempotency.letters.storing import store
from idempotency.relay.relay import Relay
from idempotency.relay.resend import resend_lost
from idempotency.store.answers import Busy
from idempotency.wire.delivery import Delivery
from idempotency.wire.keys import OperationId, fingerprint
from tests.support import bank as b
from tests.support import operations as op
from tests.support.dead_messages import dead
from tests.support.deliveries import Deliveries, deliver_row
from tests.support.tasks import enqueued

POLICY = Policy(max_attempts=3, retention_completed=3600, retention_failed=3600, provider_key_retention=3600)
ID = OperationId("default", b.deposit.name, "a")
NEXT_MONTH = 30 * 86400.0


@pytest.fixture
def relay(bank: Celery) -> Iterator[Relay]:
    relay = Relay(bank)
    yield relay
    relay.close()


def lose(app: Celery, connection: Connection) -> None:
    """The broker loses all that it has, a while ago."""
    with app.connection_for_write() as broker:
        broker.default_channel.queue_purge(app.conf.task_default_queue)
    connection.execute(text("UPDATE idempotency.outbox SET published_at = published_at - interval '1 hour'"))


def asked() -> Delivery:
    """A call without a message, as by `run`."""
    return Delivery(ID, fingerprint({"account": "a"}), {"account": "a"})


# ---------------------------------------------------------------- another call, for later


@pytest.mark.parametrize("depth", [None, lambda _: 0], ids=["first in, first out", "counted"])
def test_what_is_lost_is_sent_again_though_the_same_call_is_enqueued_for_next_month(
    bank: Celery, connection: Connection, relay: Relay, depth: Any
) -> None:
    enqueued(connection, b.deposit, "a")
    assert relay.run_once().published == 1
    enqueued(connection, b.deposit, "a", countdown=NEXT_MONTH)
    lose(bank, connection)
    assert resend_lost(bank, depth).resent == 1
    assert relay.run_once().published == 1
    assert [(row.resends, row.taken, row.status) for row in op.outbox(connection)] == [
        (1, False, "published"),
        (0, False, "pending"),
    ]


def test_what_a_worker_of_before_a_deploy_refuses_comes_back_before_the_call_for_next_month(
    bank: Celery, connection: Connection, relay: Relay, configure: Callable[..., None]
) -> None:
    configure(unknown_task_grace=3600.0)
    enqueued(connection, b.deposit, "a")
    assert relay.run_once().published == 1
    enqueued(connection, b.deposit, "a", countdown=NEXT_MONTH)
    first, _ = op.outbox(connection)
    assert store(bank, dead(first, bank.conf.task_default_queue)) is None
    first, _ = op.outbox(connection)
    assert (first.status, first.refusals) == ("pending", 1)
    assert op.dead_letters(connection) == []


# ---------------------------------------------------------------- an attempt without a message


def test_a_lost_message_is_sent_again_after_an_attempt_without_one(
    bank: Celery, connection: Connection, engine: Engine, relay: Relay
) -> None:
    """Its record has no message, so that no next delivery of it would be written."""
    enqueued(connection, b.deposit, "a")
    assert relay.run_once().published == 1

    def body(attempt: Any) -> None:
        lose(bank, connection)
        assert resend_lost(bank).resent == 0
        raise ValueError("try again")

    assert isinstance(run(runtime_of(bank), asked(), POLICY, body), Release)
    op.make_due(engine, "a", "-1 hour")
    assert resend_lost(bank).resent == 1


def test_a_lost_message_is_sent_again_after_the_death_of_an_attempt_without_one(
    bank: Celery, connection: Connection, relay: Relay
) -> None:
    enqueued(connection, b.deposit, "a")
    assert relay.run_once().published == 1
    op.started(connection, ID, fingerprint=asked().fingerprint, message="")
    lose(bank, connection)
    assert resend_lost(bank).resent == 0
    op.recover_now(bank, connection)
    assert op.status(connection, ID) == "released"
    assert resend_lost(bank).resent == 1


def test_a_message_is_kept_though_a_duplicate_without_one_was_counted_before(
    bank: Celery, deliveries: Deliveries, connection: Connection, relay: Relay
) -> None:
    there = Runtime(runtime_of(bank).settings)
    enqueued(connection, b.deposit, "a")
    assert relay.run_once().published == 1
    seen: list[Any] = []

    def body(attempt: Any) -> None:
        seen.append(run(there, asked(), POLICY, body))
        (row,) = op.outbox(connection, ID)
        seen.append(deliver_row(deliveries, b.deposit, row).state)  # the worker acknowledges it
        raise ValueError("try again")

    try:
        assert isinstance(run(runtime_of(bank), asked(), POLICY, body), Release)
    finally:
        there.close()
    assert seen == [Busy(), "IGNORED"]
    record = op.record(connection, ID)
    assert (record.status, record.duplicates, record.message != "") == ("released", 2, True)
    assert [row.origin for row in op.outbox(connection, ID) if row.status == "pending"] == ["retry"]
