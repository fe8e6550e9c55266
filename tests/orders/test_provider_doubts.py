"""What the poll, the reconciliation and a restore conclude from what the provider says."""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import text

from idempotency.store.rights import RELAY
from sandbox import ledger
from sandbox.process import Sandbox
from tests.orders.shop import Shop
from tests.orders.test_reconciliation import found, paid
from tests.orders.test_reports import posted, refund, report, settle
from tests.orders.test_restore import configured
from tests.support.sandbox import faults

pytestmark = pytest.mark.long


def pay(shop: Shop) -> str:
    from tasks.payments import submit_payment

    payment_id = f"p-{uuid4().hex}"
    with shop.transaction() as session:
        submit_payment(session, payment_id=payment_id, customer_id="c1", amount=1000, currency="EUR")
    return payment_id


def charges(gateway: Any, payment_id: str) -> list[Any]:
    now = datetime.now(UTC)
    return [
        each for each in gateway.charges(now - timedelta(days=1), now + timedelta(days=1)) if each.name == payment_id
    ]


def test_a_charge_that_a_report_has_noted_is_not_made_again(
    shop: Shop,
    gateway: Any,
    provider: Sandbox,
) -> None:
    """Its call was answered with a 500, its webhook has noted it, and the provider's search lags behind: not finding it proves nothing."""
    payment_id = pay(shop)
    faults(provider, next=["error_500_after"], only={"purchase_id": payment_id})
    faults(provider, search_lag_ms=3_600_000)
    try:
        shop.deliver(shop.waiting()[0])
        (charge,) = charges(gateway, payment_id)
        assert settle(shop, report(charge.id, "succeeded", payment_id)) == ["applied"]
        assert shop.one("SELECT status, charge_id FROM payments WHERE id = :id", id=payment_id)[:] == (
            "captured",
            charge.id,
        )
        shop.run()
    finally:
        faults(provider, search_lag_ms=0)
    assert [each.id for each in charges(gateway, payment_id)] == [charge.id]


def test_the_poll_does_not_take_a_charge_of_another_amount(
    shop: Shop,
    gateway: Any,
    provider: Sandbox,
) -> None:
    """A charge under the payment's name, but of another amount, is not the one that was called for."""
    payment_id = pay(shop)
    about = {"customer_id": "c1", "amount": 999, "currency": "EUR"}
    other = gateway.capture(payment_id=payment_id, **about, idempotency_key=uuid4().hex)["id"]
    faults(provider, next=["error_500_before"], only={"purchase_id": payment_id})
    assert settle(shop, report(other, "succeeded", payment_id, amount=999)) == ["waiting"]
    shop.run()
    row = shop.one("SELECT charge_id FROM payments WHERE id = :id", id=payment_id)
    assert (row.charge_id, posted(shop, payment_id)) != (other, 1000)


def test_a_difference_that_comes_back_is_told_again(shop: Shop, gateway: Any) -> None:
    """The operation of a difference completes once both sides agree; the next time is another operation."""
    order, charge = paid(shop)

    def post(amount: int) -> None:
        with shop.books.begin() as connection:
            connection.execute(
                text("UPDATE ledger SET amount = :amount WHERE payment_id = :id"), {"id": order, "amount": amount}
            )

    post(999)
    found(shop)
    shop.run()
    key = shop.one("SELECT key FROM idempotency.dead_letters WHERE key LIKE :key", key=f"charge:{charge}:%")[0]
    post(1000)
    shop.replay(key)
    shop.run()
    post(999)
    assert charge in found(shop)
    shop.run()
    letters = "SELECT count(*) FROM idempotency.dead_letters WHERE key LIKE :key AND status = 'open'"
    assert shop.one(letters, key=f"{key}%")[0] == 1


def test_a_charge_of_another_provider_is_no_difference(shop: Shop, gateway: Any) -> None:
    """Stripe is not asked about what another provider has reported."""
    order = shop.order()
    shop.run("capture_payment")
    charge = f"ch_{uuid4().hex}"
    assert settle(shop, report(charge, "succeeded", order, gateway="payment")) == ["applied"]
    assert shop.one("SELECT status FROM payments WHERE id = :id", id=order)[0] == "captured"
    assert charge not in found(shop)


def test_whether_to_ask_first_is_decided_by_the_clock_of_postgres(
    shop: Shop,
    gateway: Any,
    provider: Sandbox,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker whose clock is days ahead asks first, too."""
    from idempotency.store import clock

    asked: list[datetime] = []

    def has_come(connection: Any, time: datetime) -> bool:
        asked.append(time)
        return real(connection, time)

    real = clock.has_come
    monkeypatch.setattr(clock, "has_come", has_come)
    payment_id = pay(shop)
    about = {"customer_id": "c1", "amount": 1000, "currency": "EUR"}
    gateway.capture(payment_id=payment_id, **about, idempotency_key=uuid4().hex)  # its key is forgotten
    configured(shop, idempotency_ask_first_until=datetime.now(UTC) + timedelta(days=3))
    try:
        shop.run()
    finally:
        configured(shop, idempotency_ask_first_until=None)
    assert asked
    assert len(charges(gateway, payment_id)) == 1


def test_a_refund_at_the_site_that_is_pending_is_no_difference(
    shop: Shop,
    gateway: Any,
    provider: Sandbox,
) -> None:
    """Our books wait for its success, so nothing is missing in them."""
    order, charge = paid(shop)
    faults(provider, next=["refund_fails"], only={})
    faults(provider, decision_ms=3_600_000)
    made = gateway._connection().client.v1.refunds.create({"payment_intent": charge, "amount": 300})
    assert made.status == "pending"
    about = {"object": "refund", "charge_id": charge, "amount": 300}
    settle(shop, report(made.id, "pending", order, **about))
    differ = found(shop)
    faults(provider, decision_ms=500)
    assert made.id not in differ


def test_a_refund_that_fails_after_days_is_found_without_its_webhook(
    shop: Shop,
    gateway: Any,
    provider: Sandbox,
) -> None:
    """What is decided weeks after it was made is still compared."""
    from tasks import reconciliation

    order, _ = paid(shop)
    refund_id = refund(shop, order)
    shop.run()
    (made,) = shop.one("SELECT provider_refund_id FROM refunds WHERE id = :id", id=refund_id)
    with sqlite3.connect(provider.data / ledger.PROVIDER_FILE, timeout=10) as book:
        book.execute("INSERT INTO failed_refunds VALUES (?, 'lost_or_stolen_card', 0)", (made,))
    assert gateway.refunded(made) is None
    told = set()
    with shop.operating(RELAY):
        until = datetime.now(UTC) + timedelta(days=4)
        for days in reconciliation.days_before(until, reconciliation.WINDOW / timedelta(days=1)):
            told |= {each.id for each in reconciliation.reconcile(*days).differences}
    assert made in told


# The last one, because its charge would stop the others.
def test_a_charge_of_an_odd_tenant_stops_no_other_difference(shop: Shop, gateway: Any) -> None:
    """Metadata at the provider may name a tenant that is none: its difference is the default tenant's, and the others go on."""
    about = {"customer_id": "c1", "amount": 700, "currency": "EUR"}
    lost = gateway.capture(payment_id="lost", **about, idempotency_key=uuid4().hex)["id"]
    odd = gateway.capture(payment_id="odd", **about, idempotency_key=uuid4().hex, tenant="t" * 400)["id"]
    try:
        found(shop)
    except Exception as error:
        raised = type(error).__name__
    else:
        raised = ""
    shop.run()
    query = "SELECT count(*) FROM idempotency.dead_letters WHERE reason = 'ledger_differs' AND key LIKE :key"
    letters = {id: shop.one(query, key=f"charge:{id}:%")[0] for id in (odd, lost)}
    assert (raised, letters[lost]) == ("", 1)
