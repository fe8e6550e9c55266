"""What a person says, and what was made at the provider's site: one object at the provider is in our books once."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import text

from idempotency import Happened
from idempotency.errors import InvalidResult
from idempotency.store.rights import RELAY
from tests.orders.shop import Shop
from tests.orders.test_provider_doubts import pay
from tests.orders.test_reconciliation import found, paid
from tests.orders.test_report_doubts import posted_net
from tests.orders.test_reports import refund, report, settle
from tests.orders.test_reserved import in_doubt, lost, resolve, row_of, take_for_the_charge_of

pytestmark = pytest.mark.long


def test_a_refund_at_the_site_of_any_tenant_is_no_difference(shop: Shop, gateway: Any) -> None:
    order = shop.order(tenant="t1")
    shop.run()
    charge = shop.one("SELECT charge_id FROM payments WHERE id = :id", id=order)[0]
    made = gateway._connection().client.v1.refunds.create({"payment_intent": charge, "amount": 300})
    seen = gateway.charge(charge)
    assert (seen.tenant, seen.name) == ("t1", order)
    site = report(made.id, "succeeded", order, object="refund", charge_id=charge, amount=300, tenant="t1")
    assert settle(shop, site) == ["applied"]
    assert posted_net(shop, order) == 700
    assert made.id not in found(shop)


def test_one_refund_is_not_posted_as_two_by_a_persons_word(shop: Shop, gateway: Any) -> None:
    """Two partial refunds of one amount; the provider has made one. A person takes its id for both."""
    order, _ = paid(shop)
    one = refund(shop, order)
    shop.run()
    made = shop.one("SELECT provider_refund_id FROM refunds WHERE id = :id", id=one)[0]
    other = in_doubt(shop, gateway, order)
    resolve(shop, other, Happened({"id": made, "amount": 400, "currency": "EUR", "status": "succeeded"}))
    shop.replay(other)
    shop.run()
    assert (row_of(shop, other)[0], posted_net(shop, order)) == ("refused", 600)
    assert made not in found(shop)


def test_one_charge_is_not_posted_for_two_payments_by_a_persons_word(shop: Shop, gateway: Any) -> None:
    one, other = pay(shop), pay(shop)
    shop.deliver(shop.waiting()[0])
    charge = shop.one("SELECT charge_id FROM payments WHERE id = :id", id=one)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway, "capture", lost)
        (mine,) = [sent for sent in shop.waiting() if sent.row.key == other]
        shop.deliver(mine)
    take_for_the_charge_of(shop, other, charge)
    shop.replay(other)
    shop.run()
    assert shop.one("SELECT status FROM payments WHERE id = :id", id=other)[0] == "unknown"
    assert posted_net(shop, one) == 1000
    assert charge not in found(shop)


@pytest.mark.parametrize("is_reported", [True, False])
def test_a_refund_that_a_person_has_made_at_the_site_and_resolved_is_no_difference(
    shop: Shop, gateway: Any, is_reported: bool
) -> None:
    order, charge = paid(shop)
    refund_id = in_doubt(shop, gateway, order)
    made = gateway._connection().client.v1.refunds.create({"payment_intent": charge, "amount": 400})
    if is_reported:
        assert settle(shop, report(made.id, "succeeded", order, object="refund", charge_id=charge, amount=400)) == [
            "waiting"
        ]
    resolve(shop, refund_id, Happened({"id": made.id, "amount": 400, "currency": "EUR", "status": "succeeded"}))
    shop.replay(refund_id)
    shop.run()
    assert (row_of(shop, refund_id)[0], posted_net(shop, order)) == ("refunded", 600)
    assert made.id not in found(shop)


@pytest.mark.parametrize("id", ["", "re\n1", " re_1", "x" * 256])
def test_what_cannot_be_an_id_is_not_taken_from_a_person(shop: Shop, gateway: Any, id: str) -> None:
    order, _ = paid(shop)
    refund_id = in_doubt(shop, gateway, order)
    with pytest.raises(InvalidResult, match="id: "):
        resolve(shop, refund_id, Happened({"id": id, "amount": 400, "currency": "EUR", "status": "succeeded"}))


def test_an_odd_id_in_our_books_does_not_stop_the_reconciliation(
    shop: Shop, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before people's answers were checked, one may have typed it."""
    from tasks import maintenance, reconciliation

    order, _ = paid(shop)
    refund_id = refund(shop, order)
    shop.run()
    with shop.books.begin() as connection:  # three weeks ago
        connection.execute(
            text("""UPDATE refunds SET created_at = created_at - interval '20 days', provider_refund_id = 're_ü'
                    WHERE id = :id"""),
            {"id": refund_id},
        )
    about = {"customer_id": "c1", "amount": 700, "currency": "EUR"}
    lost = gateway.capture(payment_id=f"lost-{uuid4().hex}", **about, idempotency_key=uuid4().hex)["id"]
    monkeypatch.setattr(reconciliation, "SETTLED_AFTER", timedelta(seconds=-5))
    with shop.operating(RELAY):
        maintenance.reconcile_provider()
    shop.run()
    letters = "SELECT count(*) FROM idempotency.dead_letters WHERE reason = 'ledger_differs' AND last_error LIKE :said"
    assert shop.one(letters, said=f"%charge {lost} %")[0] == 1
    assert shop.one(letters, said="%the provider has nothing, the ledger 400 EUR%")[0] == 1


def test_a_refund_of_another_payments_charge_is_a_difference(shop: Shop, gateway: Any) -> None:
    """A person gives a refund of one payment the id of one that was made of another's charge, and whose webhook is lost."""
    one, _ = paid(shop)
    _, charge = paid(shop)
    refund_id = in_doubt(shop, gateway, one)
    made = gateway._connection().client.v1.refunds.create({"payment_intent": charge, "amount": 400})
    resolve(shop, refund_id, Happened({"id": made.id, "amount": 400, "currency": "EUR", "status": "succeeded"}))
    shop.replay(refund_id)
    shop.run()
    its = shop.one("SELECT charge_id FROM payments WHERE id = :id", id=one)[0]
    assert found(shop)[made.id] == ("400 EUR", f"400 EUR of {refund_id}, charged as {its}")


def test_a_letter_of_a_tenants_refund_ends_once_both_agree(shop: Shop, gateway: Any) -> None:
    order = shop.order(tenant="t1")
    shop.run()
    charge = shop.one("SELECT charge_id FROM payments WHERE id = :id", id=order)[0]
    made = gateway._connection().client.v1.refunds.create({"payment_intent": charge, "amount": 300})
    assert made.id in found(shop)
    shop.run()
    key = shop.one("SELECT key FROM idempotency.dead_letters WHERE key LIKE :key", key=f"refund:{made.id}:%")[0]
    site = report(made.id, "succeeded", order, object="refund", charge_id=charge, amount=300, tenant="t1")
    assert settle(shop, site) == ["applied"]
    assert made.id not in found(shop)
    shop.replay(key)
    shop.run()
    assert shop.one("SELECT status FROM idempotency.records WHERE key = :key", key=key)[0] == "completed"


def test_a_charge_of_another_provider_is_no_difference_whatever_its_object_is_called(shop: Shop, gateway: Any) -> None:
    payment = pay(shop)
    made = report(f"object-{payment}", "succeeded", payment, charge_id=f"ch-{payment}", gateway="payment")
    assert settle(shop, made) == ["applied"]
    assert f"ch-{payment}" not in found(shop)
