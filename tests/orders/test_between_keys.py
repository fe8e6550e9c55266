"""A failure that is reported between two keys of one charge."""

from __future__ import annotations

from typing import Any

import pytest

from idempotency import StoredFailure
from idempotency.attempt import effects
from tests.orders.shop import Shop
from tests.orders.test_provider_doubts import pay
from tests.orders.test_report_doubts import posted_net
from tests.orders.test_reported_and_typed import capture_key
from tests.orders.test_reports import operation, report, settle


@pytest.fixture(autouse=True)
def _fresh(shop: Shop) -> None:
    shop.forget()


@pytest.fixture
def died(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The provider stores a 500 under the first key; the process dies just before the second key is begun."""
    real, begin = shop.provider.capture, effects._begin
    keys: set[str] = set()
    died: list[int] = []

    def capture(**call: Any) -> Any:
        keys.add(call["idempotency_key"])
        if len(keys) == 1:
            raise StoredFailure("the payment provider replays a stored 500 for this key")
        return real(**call)

    def dies(attempt: Any, call: Any, *, number: int) -> Any:
        if call.name == "capture" and number == 2 and not died:
            died.append(number)
            raise RuntimeError("its process dies here")
        return begin(attempt, call, number=number)

    monkeypatch.setattr(shop.provider, "capture", capture)
    monkeypatch.setattr(effects, "_begin", dies)
    return died


def test_a_failure_between_the_two_keys_of_an_orders_charge_cancels_nothing(shop: Shop, died: list[int]) -> None:
    order = shop.order()
    while not died:
        shop.deliver(shop.waiting()[0])
    assert tuple(operation(shop, order))[:2] == ("released", None)
    failed = report("pi_first" + order, "failed", order, effect_key=capture_key(shop, order), code="card_declined")
    assert settle(shop, failed) == ["applied"]
    assert shop.status(order)[:2] == ("PENDING_PAYMENT", "pending")
    shop.run()
    assert shop.provider.count(shop.provider.charges, order) == 1
    assert (shop.status(order)[1], posted_net(shop, order)) == ("captured", 1000)


def test_nor_is_a_plain_payment_told_to_have_failed(shop: Shop, died: list[int]) -> None:
    payment_id = pay(shop)
    while not died:
        shop.deliver(shop.waiting()[0])
    key = capture_key(shop, payment_id)
    failed = report("pi_first" + payment_id, "failed", payment_id, effect_key=key, code="card_declined")
    assert settle(shop, failed) == ["applied"]
    assert [each for each in shop.outbox() if each.event is not None and each.event["type"] == "payment.failed"] == []
    shop.run()
    assert shop.one("SELECT status FROM payments WHERE id = :id", id=payment_id)[0] == "captured"
    assert (shop.provider.count(shop.provider.charges, payment_id), posted_net(shop, payment_id)) == (1, 1000)
