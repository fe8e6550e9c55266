"""A refund of ours that is reported without our names is not taken for one that was made at the provider's site."""

from __future__ import annotations

import json
from uuid import uuid4

import pytest
from pydantic import SecretStr

from tests.orders.shop import Shop
from tests.orders.test_report_doubts import posted_net
from tests.orders.test_reports import captured, operation, refund
from tests.orders.test_webhooks import SHARED, post, standard

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _fresh(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    import celeryconfig

    shop.forget()
    monkeypatch.setattr(celeryconfig.environment, "payment_webhook_secrets", SecretStr(SHARED))


def tell(document: dict[str, object]) -> None:
    raw = json.dumps(document).encode()
    assert post("/webhooks/payment", raw, standard(raw, id=f"msg_{uuid4().hex}")).status_code == 200


def bare(order: str, charge: str, there: str, **more: object) -> dict[str, object]:
    return {
        "type": "refund",
        "id": there,
        "charge_id": charge,
        "state": "succeeded",
        "amount": 400,
        "currency": "EUR",
        "occurred_at": "2026-03-01T12:00:00Z",
        **more,
    }


@pytest.mark.parametrize("named_later", [False, True])
def test_our_refund_that_is_reported_without_names_is_posted_once(shop: Shop, named_later: bool) -> None:
    order, charge = captured(shop)
    refund_id = refund(shop, order)
    shop.provider.silent.add(refund_id)
    before = len(shop.provider._done)
    shop.deliver(shop.waiting()[0])  # made, and its answer was lost
    there = f"id_{before}"
    tell(bare(order, charge, there))
    if named_later:
        tell(bare(order, charge, there, payment_id=order, refund_id=refund_id))
    shop.provider.silent.discard(refund_id)
    shop.run()
    assert shop.provider.net(order) == 600
    assert posted_net(shop, order) == 600
    assert shop.one("SELECT refunded FROM payments WHERE id = :id", id=order)[0] == 400
    assert operation(shop, refund_id).status == "completed"
    waiting = "SELECT count(*) FROM payment_events WHERE object_id = :id AND NOT is_applied"
    assert shop.one(waiting, id=there)[0] == 0


def test_our_refund_that_is_reported_as_pending_without_names_has_one_row(shop: Shop) -> None:
    order, charge = captured(shop)
    refund_id = refund(shop, order)
    shop.provider.silent.add(refund_id)
    before = len(shop.provider._done)
    shop.deliver(shop.waiting()[0])
    there = f"id_{before}"
    tell(bare(order, charge, there, state="pending"))
    tell(bare(order, charge, there, payment_id=order, refund_id=refund_id, state="pending"))
    shop.provider.silent.discard(refund_id)
    shop.run()
    rows = shop.one(
        "SELECT array_agg(id || ' ' || status ORDER BY status) FROM refunds WHERE payment_id = :id", id=order
    )[0]
    assert [row.split()[1] for row in rows] == ["refunded"]
