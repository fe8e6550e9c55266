"""What a shop that is a tenant hears of its orders and payments: from the click to its own server, with every hop doubled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from standardwebhooks import Webhook

from idempotency.application import close_runtime, runtime_of
from idempotency.operate.webhooks import NewEndpoint, add_endpoint, enable_endpoint
from tests.orders.shop import TENANT, Shop
from tests.support import receiver as receivers
from tests.support.operators import ANN
from tests.support.receiver import Receiver


@pytest.fixture(scope="module")
def receiver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiver]:
    directory: Path = tmp_path_factory.mktemp("tls")
    running = receivers.start(receivers.certificate(directory))
    yield running
    running.close()


@pytest.fixture
def endpoint(shop: Shop, receiver: Receiver) -> Iterator[NewEndpoint]:
    """A server of the tenant, which gets everything that the application sends."""
    added = {
        "idempotency_webhook_allowed_hosts": ("127.0.0.1",),
        "idempotency_webhook_ca_file": str(receiver.ca_file),
    }
    shop.app.conf.update(added)
    with shop.operating():
        made = add_endpoint(runtime_of(shop.app), ANN, TENANT, url=receiver.url, events=["*"])
        enable_endpoint(runtime_of(shop.app), ANN, made.id)
    yield made
    for name in added:
        shop.app.conf.changes.pop(name)
    close_runtime(shop.app)


def test_a_tenant_hears_of_its_orders_once_each_under_one_id(
    shop: Shop, receiver: Receiver, endpoint: NewEndpoint
) -> None:
    shop.forget()
    sku = f"sku-{uuid4().hex[:8]}"
    shop.receive(sku, 5)
    order = shop.order(sku, 2)
    while waiting := shop.waiting():
        for _ in range(2):
            shop.deliver(waiting[0])
    heard = {}
    for request in receiver.webhooks:
        document = Webhook(endpoint.verifier).verify(request.body, request.headers)
        heard[request.id] = (document["type"], document["data"]["order_id"])
    assert sorted(heard.values()) == [("order.paid", order), ("payment.captured", order)]
    assert len(receiver.webhooks) == 2
