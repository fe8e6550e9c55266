"""The bodies of webhooks are erased with the operation that made them of an event, or that delivered one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine, text

from idempotency.errors import ChangeRefused, ReplayRefused
from idempotency.operate import webhooks as operate
from idempotency.operate.erase import erase
from idempotency.operate.replay import replay
from idempotency.store import erasure
from idempotency.testing import Outbox
from idempotency.wire.keys import OperationId
from tests.support import bank as b
from tests.support.deliveries import Deliveries
from tests.support.dump import holding
from tests.support.operators import ANN
from tests.support.receiver import Receiver
from tests.webhooks.test_deliveries import statuses, step
from tests.webhooks.test_letters import Waiting, cancelled

CANARY = "canary-7f3a"


@pytest.mark.few(1)
@pytest.mark.parametrize("by", ["fan_out", "deliver"])
def test_the_body_of_a_webhook_is_erased_and_not_delivered_again(
    shop: Celery,
    happen: Callable[..., str],
    register: Callable[..., Any],
    outbox: Outbox,
    engine: Engine,
    rows: Any,
    by: str,
) -> None:
    register("acme", "order.*")
    event = happen("order.paid", name=CANARY)
    step(outbox)
    fan_out = OperationId("acme", "webhooks.fan_out", event)
    (delivery,) = rows("deliveries")
    with pytest.raises(ChangeRefused, match=f"the webhook {delivery.id} has not been delivered"):
        erase(shop, fan_out, ANN)
    outbox.run()
    assert holding(engine, CANARY) == {"records", "outbox", "webhook_deliveries"}
    if by == "fan_out":
        erase(shop, fan_out, ANN)
        assert holding(engine, CANARY) == set()
    else:
        erase(shop, OperationId("acme", "webhooks.deliver", f"{delivery.id}:0"), ANN)
        assert holding(engine, CANARY) == {"records", "outbox"}  # of the operation that the event was given to
    with pytest.raises(ChangeRefused, match="its body was erased"):
        operate.redeliver(shop, ANN, delivery.id)


def test_a_webhook_redelivered_as_it_is_erased_is_refused_and_nothing_empty_is_posted(
    shop: Celery,
    happen: Callable[..., str],
    register: Callable[..., Any],
    outbox: Outbox,
    receiver: Receiver,
    rows: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The erasure has found nothing in its way; a person redelivers before it has emptied the body."""
    register("acme", "order.*")
    event = happen("order.paid", name="x")
    outbox.run()
    (delivery,) = rows("deliveries")
    real, refused = erasure.obstacle, Future[Exception | None]()
    redelivering = threading.Thread(
        target=lambda: refused.set_result(error_of(lambda: operate.redeliver(shop, ANN, delivery.id)))
    )

    def then_redelivered(connection: Any, id: OperationId, sagas: Any) -> Any:
        found = real(connection, id, sagas)
        if redelivering.ident is None:
            redelivering.start()
            redelivering.join(1)
            assert redelivering.is_alive(), "it waits for the erasure"
        return found

    with monkeypatch.context() as patch:
        patch.setattr(erasure, "obstacle", then_redelivered)
        erase(shop, OperationId("acme", "webhooks.fan_out", event), ANN)
    redelivering.join(30)
    assert str(refused.result(0)) == f"{delivery.id}: its body was erased"
    posted = len(receiver.requests)
    outbox.run()
    (delivery,) = rows("deliveries")
    assert (delivery.status, delivery.redelivery, len(receiver.requests)) == ("delivered", 0, posted)


def test_a_replayed_webhook_is_not_erased_before_it_has_been_delivered(
    shop: Celery, waiting: Waiting, outbox: Outbox, receiver: Receiver, engine: Engine
) -> None:
    fan_out, id = waiting(name="x")
    replay(shop, cancelled(shop, engine, id), ANN)
    with pytest.raises(ChangeRefused, match="has not been delivered"):
        erase(shop, fan_out, ANN)
    outbox.run()
    assert [request.document["data"] for request in receiver.webhooks] == [{"name": "x"}]
    erase(shop, fan_out, ANN)


def test_the_letter_of_an_erased_webhook_is_not_replayed(shop: Celery, waiting: Waiting, engine: Engine) -> None:
    fan_out, id = waiting()
    letter = cancelled(shop, engine, id)
    erase(shop, fan_out, ANN)
    with pytest.raises(ReplayRefused, match="the body of its webhook was erased"):
        replay(shop, letter, ANN)


def test_an_empty_body_is_given_up_and_not_posted(
    shop: Celery, waiting: Waiting, outbox: Outbox, receiver: Receiver, engine: Engine, rows: Any
) -> None:
    """A command of a version before has replayed a delivery without saying that it waits, and another has erased it."""
    waiting()
    with engine.connect() as connection:
        connection.execute(text("UPDATE idempotency.webhook_deliveries SET body = ''"))
    outbox.run()
    assert (receiver.webhooks, statuses(rows)) == ([], [("given_up", "erased")])
    assert rows("endpoints")[0].given_up == 0


def test_the_erasure_of_another_consumer_of_an_event_leaves_its_webhooks(
    shop: Celery, waiting: Waiting, outbox: Outbox, rows: Any
) -> None:
    """Each of its consumers has an operation with the event's id as its key."""
    fan_out, _ = waiting(name="x")
    outbox.run()
    another = OperationId("acme", b.deposit.name, fan_out.key)
    Deliveries(shop).deliver(b.deposit, "x", key=fan_out.key, tenant="acme")
    assert erase(shop, another, ANN).operations == [another]
    assert rows("deliveries")[0].body != ""
    operate.redeliver(shop, ANN, rows("deliveries")[0].id)


def error_of(act: Callable[[], object]) -> Exception | None:
    try:
        act()
    except Exception as error:
        return error
    return None
