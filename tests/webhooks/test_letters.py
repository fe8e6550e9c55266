"""Dead letters of deliveries: a replay makes the delivery after all, and what two people discard is given up."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine, text

from idempotency.errors import ChangeRefused, OperationFailed, ReplayRefused
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.operate import discard
from idempotency.operate import webhooks as operate
from idempotency.operate.cancel import cancel
from idempotency.operate.change import read
from idempotency.operate.erase import erase
from idempotency.operate.replay import replay
from idempotency.relay.relay import Relay
from idempotency.testing import Outbox
from idempotency.wire.keys import OperationId
from tests.integration.test_discard import BEN, EVE
from tests.support import operations as op
from tests.support.operators import ANN, act
from tests.support.processes import eventually
from tests.support.receiver import Receiver
from tests.webhooks.test_deliveries import Rows, statuses

Waiting = Callable[..., tuple[OperationId, OperationId]]


def letter_of(engine: Engine, id: OperationId) -> Any:
    with engine.connect() as connection:
        (letter,) = op.dead_letters(connection, id)
    return letter


def cancelled(app: Celery, engine: Engine, id: OperationId, *, without_task: bool = False) -> int:
    """A person cancels the delivery. Returns its dead letter."""
    with engine.connect() as connection:
        found = read(connection, id, "bank")
    cancel(app, found, ANN, without_task=without_task)
    return int(letter_of(engine, id).id)


def refused_by_a_worker_of_before(app: Celery, engine: Engine, id: OperationId) -> int:
    """A deploy has taken the module away for a while: no worker knows the task. Returns the dead letter."""
    task = app.tasks.pop("webhooks.deliver")
    try:
        with closing(DeadLetterConsumer(app)) as consumer, app.connection_for_write() as broker:
            consumer.run_once()  # declares the queues
            with closing(Relay(app)) as relay:
                assert relay.run_once().published == 1
            channel = broker.channel()
            message = eventually(lambda: channel.basic_get(app.conf.task_default_queue, no_ack=False))
            channel.basic_reject(message.delivery_tag, requeue=False)
            eventually(consumer.run_once)
    finally:
        app.tasks.register(task)
    letter = letter_of(engine, id)
    assert (letter.reason, letter.status) == ("unknown_task", "open")
    return int(letter.id)


def discarded(app: Celery, letter: int) -> None:
    act(app, discard.request, EVE, letter, "the customer has left")
    act(app, discard.approve, BEN, letter)


def test_a_replayed_delivery_waits_again_and_is_made_once(
    shop: Celery, waiting: Waiting, outbox: Outbox, receiver: Receiver, rows: Rows, engine: Engine
) -> None:
    _, id = waiting()
    letter = cancelled(shop, engine, id)
    assert statuses(rows) == [("given_up", "cancelled")]
    replay(shop, letter, ANN)
    assert statuses(rows) == [("waiting", None)]
    assert operate.redeliver(shop, ANN, rows("deliveries")[0].id) == 0  # which is under way
    outbox.run()
    assert (len(receiver.webhooks), statuses(rows)) == (1, [("delivered", None)])


def test_the_letter_of_a_delivery_that_was_redelivered_is_not_replayed(
    shop: Celery, waiting: Waiting, outbox: Outbox, receiver: Receiver, rows: Rows, engine: Engine
) -> None:
    letter = cancelled(shop, engine, waiting()[1])
    operate.redeliver(shop, ANN, rows("deliveries")[0].id)
    with pytest.raises(ReplayRefused, match="its webhook was redelivered since; discard the letter"):
        replay(shop, letter, ANN)
    discarded(shop, letter)
    assert statuses(rows) == [("waiting", None)]
    with pytest.raises(OperationFailed):  # the message of what was cancelled
        outbox.run()
    outbox.run()
    assert (len(receiver.webhooks), statuses(rows)) == (1, [("delivered", None)])


@pytest.mark.long
def test_a_delivery_whose_letter_is_discarded_before_it_has_begun_is_given_up(
    shop: Celery, waiting: Waiting, outbox: Outbox, receiver: Receiver, rows: Rows, engine: Engine
) -> None:
    fan_out, id = waiting()
    letter = refused_by_a_worker_of_before(shop, engine, id)
    with pytest.raises(ChangeRefused, match=f"its message is the dead letter {letter}; replay that"):
        operate.redeliver(shop, ANN, rows("deliveries")[0].id)
    discarded(shop, letter)
    assert statuses(rows) == [("given_up", "discarded")]
    (delivery,) = rows("deliveries")
    assert operate.redeliver(shop, ANN, delivery.id) == 1
    outbox.run()
    assert (len(receiver.webhooks), statuses(rows)) == (1, [("delivered", None)])
    erase(shop, fan_out, ANN)
    assert rows("deliveries")[0].body == ""


def test_a_delivery_whose_operation_has_ended_without_its_task_is_given_up_with_the_letter(
    shop: Celery, waiting: Waiting, rows: Rows, engine: Engine
) -> None:
    _, id = waiting()
    task = shop.tasks.pop("webhooks.deliver")
    try:
        letter = cancelled(shop, engine, id, without_task=True)
    finally:
        shop.tasks.register(task)
    assert statuses(rows) == [("waiting", None)]  # for a replay
    discarded(shop, letter)
    assert statuses(rows) == [("given_up", "discarded")]


def test_a_delivery_that_another_message_brings_waits_on(
    shop: Celery, waiting: Waiting, outbox: Outbox, receiver: Receiver, rows: Rows, engine: Engine
) -> None:
    _, id = waiting()
    letter = refused_by_a_worker_of_before(shop, engine, id)
    with engine.connect() as connection:
        connection.execute(
            text("""INSERT INTO idempotency.outbox (message_id, tenant, task, key, fingerprint, message, origin, service)
                SELECT 'another', tenant, task, key, fingerprint, message, origin, service FROM idempotency.outbox WHERE key = :key"""),
            {"key": id.key},
        )
    discarded(shop, letter)
    assert statuses(rows) == [("waiting", None)]
    outbox.run()
    assert (len(receiver.webhooks), statuses(rows)) == (1, [("delivered", None)])
