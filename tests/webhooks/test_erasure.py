"""The bodies of webhooks are erased with the operation that made them of an event, or that delivered one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine

from idempotency.errors import ChangeRefused
from idempotency.operate import webhooks as operate
from idempotency.operate.erase import erase
from idempotency.testing import Outbox
from idempotency.wire.keys import OperationId
from tests.support.dump import holding
from tests.support.operators import ANN
from tests.webhooks.test_deliveries import step

CANARY = "canary-7f3a"


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
