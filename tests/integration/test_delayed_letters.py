"""Dead messages that RabbitMQ had delayed (`countdown`): to the broker the end of the delay is their first death."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from celery import Celery
from kombu.transport.native_delayed_delivery import (
    bind_queue_to_native_delayed_delivery_exchange,
    declare_native_delayed_delivery_exchanges_and_queues,
)
from sqlalchemy import Connection

from idempotency.application import close_runtime
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.operate.replay import replay
from idempotency.relay.relay import Relay
from tests.support import bank as b
from tests.support import operations as op
from tests.support import queues
from tests.support.dead_messages import waiting
from tests.support.operators import ANN
from tests.support.processes import eventually

# The shortest delay that waits in the broker: a second.
COUNTDOWN = 1.2


@pytest.fixture
def delayed(bank: Celery, consumer: DeadLetterConsumer) -> Iterator[Callable[..., None]]:
    """Send a message with a countdown, let it arrive, and reject it; or lose it until it was delivered too often."""
    consumer.run_once()  # declares the dead-letter queue
    name = bank.conf.task_default_queue
    with bank.connection_for_write() as broker:
        channel = broker.channel()
        queue = bank.amqp.queues[name]
        queue(channel).declare()
        # as a worker's step DelayedDelivery does
        declare_native_delayed_delivery_exchanges_and_queues(broker, "quorum")
        bind_queue_to_native_delayed_delivery_exchange(broker, queue)

        def send(call: Callable[[], object], *, lost: bool = False) -> None:
            call()
            if lost:
                eventually(lambda: (lose(), waiting(bank) == 1)[1], what="the delivery limit")
                return
            message = eventually(lambda: channel.basic_get(name, no_ack=False))
            assert message.headers["x-first-death-queue"].startswith("celery_delayed_")
            channel.basic_reject(message.delivery_tag, requeue=False)
            eventually(lambda: waiting(bank) == 1)

        def lose() -> None:
            with bank.connection_for_write() as lost:
                lost.channel().basic_get(name, no_ack=False)

        yield send


@pytest.fixture
def deploying(bank: Celery) -> Iterator[None]:
    """What a worker of another version may have refused comes back for an hour, as by default."""
    bank.conf.idempotency_unknown_task_grace = 3600.0
    close_runtime(bank)
    yield
    bank.conf.idempotency_unknown_task_grace = 0.0
    close_runtime(bank)


def deposit() -> None:
    b.deposit.apply_async(("a1",), countdown=COUNTDOWN)


@pytest.mark.long
def test_what_a_worker_of_another_version_rejects_comes_back_at_once(
    bank: Celery,
    delayed: Callable[..., None],
    deploying: None,
    consumer: DeadLetterConsumer,
    connection: Connection,
    record: op.Record,
) -> None:
    delayed(deposit)
    consumer.run_once()
    assert (record("a1"), op.dead_letters(connection)) == (None, [])
    (row,) = op.outbox(connection)
    assert (row.status, row.queue) == ("pending", bank.conf.task_default_queue)


@pytest.mark.long
def test_a_replay_goes_to_the_queue_that_the_message_died_in_without_another_delay(
    bank: Celery, delayed: Callable[..., None], consumer: DeadLetterConsumer, connection: Connection
) -> None:
    delayed(deposit)
    consumer.run_once()
    (letter,) = op.dead_letters(connection)
    assert (letter.reason, letter.queue) == ("rejected", bank.conf.task_default_queue)
    replay(bank, letter.id, ANN)
    relay = Relay(bank)
    assert relay.run_once().published == 1
    relay.close()
    (message,) = queues.drained(bank)
    assert message.headers["task"] == b.deposit.name


def test_what_was_delivered_too_often_says_so(
    bank: Celery, delayed: Callable[..., None], consumer: DeadLetterConsumer, connection: Connection
) -> None:
    delayed(deposit, lost=True)
    consumer.run_once()
    assert [letter.reason for letter in op.dead_letters(connection)] == ["delivery_limit"]


@pytest.mark.long
def test_a_plain_tasks_message_is_kept(
    bank: Celery, delayed: Callable[..., None], consumer: DeadLetterConsumer, connection: Connection
) -> None:
    """It was not the broker that let it expire."""

    @bank.task(name="delayed.plain", shared=False)
    def plain(a: str) -> None: ...

    try:
        delayed(lambda: plain.apply_async(("a1",), countdown=COUNTDOWN))
        consumer.run_once()
        assert [letter.reason for letter in op.dead_letters(connection)] == ["rejected"]
    finally:
        bank.tasks.pop("delayed.plain", None)


@pytest.mark.long
def test_it_belongs_to_the_application_in_whose_queue_it_died_whoever_has_sent_it(
    bank: Celery, delayed: Callable[..., None], consumer: DeadLetterConsumer, record: op.Record
) -> None:
    def from_the_web() -> None:
        bank.conf.idempotency_service = "web"
        close_runtime(bank)
        deposit()
        bank.conf.changes.pop("idempotency_service")
        bank.conf.pop("idempotency_service", None)
        close_runtime(bank)

    delayed(from_the_web)
    consumer.run_once()
    assert (record("a1").status, record("a1").service) == ("failed", "bank")
