"""Disputes, and refunds made at the provider's site, belong to the payment that has their charge in our books."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import anyio
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from idempotency.operate.replay import replay
from idempotency.store.rights import RELAY
from tests.orders.shop import Shop
from tests.orders.test_reconciliation import found, paid
from tests.orders.test_reports import NOON, captured, report, settle
from tests.support.operators import ANN


@pytest.fixture(autouse=True)
def _fresh(shop: Shop) -> None:
    shop.forget()
    with shop.books.begin() as connection:
        connection.execute(text("DELETE FROM disputes"))
        connection.execute(text("DELETE FROM payment_events"))


def set_charge(shop: Shop, id: str, charge: str) -> None:
    """As a person does who has found whose a charge is."""
    with shop.books.begin() as connection:
        connection.execute(text("UPDATE payments SET charge_id = :it WHERE id = :id"), {"id": id, "it": charge})


def theirs_declined(shop: Shop, gateway: Any) -> tuple[str, str]:
    """A payment of t2 that was declined here, and a charge that carries its name at the provider."""
    theirs = f"p-{uuid4().hex}"
    with shop.books.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO payments (tenant, id, customer_id, amount, currency, status, refunded)"
                " VALUES ('t2', :id, 'c1', 1000, 'EUR', 'failed', 0)"
            ),
            {"id": theirs},
        )
    about = {"customer_id": "c1", "amount": 1000, "currency": "EUR"}
    return theirs, gateway.capture(payment_id=theirs, **about, idempotency_key=uuid4().hex, tenant="t2")["id"]


def dispute_of(charge: str, state: str = "needs_response", days: int = 0, **about: Any) -> Any:
    about = {
        "object": "dispute",
        "charge_id": charge,
        "amount": 400,
        "occurred_at": NOON + timedelta(days=days),
    } | about
    return replace(report("dp" + charge, state, None, **about), payment_id=None)


def hand_over(shop: Shop) -> list[str]:
    from tasks import disputes

    with shop.operating(RELAY):
        return disputes.hand_over()


def noted(shop: Shop, charge: str) -> list[tuple[Any, ...]]:
    query = text("SELECT tenant, payment_id, status, amount FROM disputes WHERE id = :id")
    with shop.books.connect() as connection:
        return [tuple(row) for row in connection.execute(query, {"id": "dp" + charge})]


def keep(shop: Shop, dispute: Any, tenant: str) -> None:
    from tasks import settlement

    with shop.transaction(tenant) as session:
        assert settlement.settle(session, replace(dispute, tenant=tenant)) == "waiting"


@pytest.mark.long
def test_one_that_was_kept_for_another_tenant_is_handed_over_as_often_as_it_changes(shop: Shop) -> None:
    order, charge = captured(shop)
    keep(shop, dispute_of(charge), "t-else")
    for _ in range(2):
        assert hand_over(shop) == []
        assert noted(shop, charge) == [("default", order, "needs_response", 400)]
    keep(shop, dispute_of(charge, "won", days=9), "t-else")
    assert hand_over(shop) == []
    assert noted(shop, charge) == [("default", order, "won", 400)]


@pytest.mark.long
def test_one_that_waits_in_the_tenant_whose_charge_it_is_found_to_be_is_noted(shop: Shop) -> None:
    order, _ = captured(shop)
    charge = "pi_late" + uuid4().hex
    assert settle(shop, dispute_of(charge)) == ["waiting"]
    set_charge(shop, order, charge)
    assert hand_over(shop) == []
    assert noted(shop, charge) == [("default", order, "needs_response", 400)]


def test_one_that_was_handed_over_follows_its_charge_to_a_third(shop: Shop) -> None:
    wrong, charge = captured(shop)
    right = shop.order(tenant="t3")
    shop.run()
    keep(shop, dispute_of(charge), "t-else")
    assert hand_over(shop) == []
    set_charge(shop, wrong, "pi_own" + uuid4().hex)
    set_charge(shop, right, charge)
    assert hand_over(shop) == []
    assert noted(shop, charge) == [("t3", right, "needs_response", 400)]


@pytest.mark.long
def test_one_that_names_another_tenants_payment_is_the_one_whose_charge_it_is(
    shop: Shop, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from api import webhooks

    _, charge = theirs_declined(shop, gateway)
    order = shop.order(tenant="t1")
    shop.run()
    set_charge(shop, order, charge)
    monkeypatch.setattr(webhooks, "gateway", gateway)
    assert anyio.run(webhooks._outcome, dispute_of(charge)) == "applied"  # t1's books are not seen
    assert hand_over(shop) == []
    assert noted(shop, charge) == [("t1", order, "needs_response", 400)]


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["dispute", "refund"])
def test_in_one_tenant_it_is_the_payment_that_has_the_charge_and_not_the_one_that_is_named(
    shop: Shop, gateway: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from api import webhooks

    named, charge = paid(shop)
    order, _ = paid(shop)
    set_charge(shop, named, "pi_x" + named)
    set_charge(shop, order, charge)
    monkeypatch.setattr(webhooks, "gateway", gateway)
    if kind == "dispute":
        assert anyio.run(webhooks._outcome, dispute_of(charge)) == "applied"
        assert noted(shop, charge) == [("default", order, "needs_response", 400)]
    else:
        made = gateway._connection().client.v1.refunds.create({"payment_intent": charge, "amount": 100}).id
        told = report(made, "succeeded", None, object="refund", charge_id=charge, amount=100)
        assert anyio.run(webhooks._outcome, told) == "applied"
        assert shop.one("SELECT payment_id, status FROM refunds WHERE provider_refund_id = :id", id=made) == (
            order,
            "refunded",
        )


@pytest.mark.long
def test_one_whose_charge_is_locked_holds_up_nothing_else(shop: Shop, gateway: Any) -> None:
    """The rest is compared, and what could not be done is told at the end."""
    from tasks import maintenance, settlement

    _, locked = captured(shop)
    order, charge = captured(shop)
    for each in (locked, charge):
        keep(shop, dispute_of(each), "t-else")
    with shop.transaction() as session:
        settlement.lock_charge(session, "stripe", locked)
        with shop.operating(RELAY), pytest.raises(RuntimeError, match=f"dispute dp{locked}: OperationalError"):
            maintenance.reconcile_provider()
    assert noted(shop, charge) == [("default", order, "needs_response", 400)]
    assert noted(shop, locked) == []


@pytest.mark.long
def test_a_letter_told_where_a_charge_was_typed_completes_once_it_is_the_others(shop: Shop, gateway: Any) -> None:
    theirs, charge = theirs_declined(shop, gateway)
    order = shop.order(tenant="t1")
    shop.run()
    own = shop.one("SELECT charge_id FROM payments WHERE id = :id", id=order)[0]
    set_charge(shop, order, charge)  # typed wrongly
    assert found(shop)[charge] == ("1000 EUR", f"1000 EUR of {order}")
    shop.run()
    query = "SELECT id, tenant, status FROM idempotency.dead_letters WHERE key LIKE :key"
    letter = shop.one(query, key=f"charge:{charge}:%")
    assert (letter.tenant, letter.status) == ("t1", "open")
    set_charge(shop, order, own)
    assert settle(shop, report(charge, "succeeded", theirs, tenant="t2")) == ["applied"]
    shop.run()
    assert charge not in found(shop)
    with shop.operating():
        replay(shop.app, letter.id, ANN)
    shop.run()
    status = shop.one("SELECT status FROM idempotency.records WHERE key LIKE :key", key=f"charge:{charge}:%")[0]
    assert status == "completed"


@pytest.mark.long
def test_a_name_that_becomes_known_before_the_check_has_run_is_no_second_letter(shop: Shop, gateway: Any) -> None:
    from tests.orders.test_refunds_of_others import submit

    order, charge = paid(shop)
    name = f"r-{uuid4().hex}"
    about = {"refund_id": name, "payment_id": order, "charge_id": charge, "amount": 100}
    made = gateway.refund(**about, idempotency_key=uuid4().hex)["id"]
    assert found(shop)[made] == ("100 EUR", None)  # the workers are away
    submit(shop, name, "p-forgotten", 100)
    assert found(shop)[made] == ("100 EUR", None)  # the next day
    shop.run()
    with shop.books.connect() as connection:
        query = text("SELECT reason FROM idempotency.dead_letters WHERE key LIKE :key")
        assert connection.execute(query, {"key": f"refund:{made}:%"}).scalars().all() == ["ledger_differs"]


@pytest.mark.long
def test_a_report_that_comes_while_its_dispute_is_handed_over_is_taken(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks import disputes, settlement

    order, charge = captured(shop)
    keep(shop, dispute_of(charge), "t-else")
    assign = disputes.assign

    def then_assign(session: Any, *args: Any) -> None:
        late = replace(dispute_of(charge, "lost", days=9), tenant="t-else")
        with Session(shop.engine) as webhook, webhook.begin():
            webhook.execute(text("SELECT idempotency.about('t-else')"))
            assert settlement.settle(webhook, late) == "waiting"
        assign(session, *args)

    with monkeypatch.context() as patch:
        patch.setattr(disputes, "assign", then_assign)
        assert hand_over(shop) == []
    assert noted(shop, charge) == [("default", order, "lost", 400)]


@pytest.mark.long
def test_one_whose_charge_was_taken_away_waits_until_a_payment_has_it(shop: Shop) -> None:
    wrong, charge = captured(shop)
    right, _ = captured(shop)
    assert settle(shop, dispute_of(charge)) == ["applied"]
    set_charge(shop, wrong, "pi_own" + uuid4().hex)
    assert hand_over(shop) == []
    assert noted(shop, charge) == []
    assert settle(shop, dispute_of(charge, "lost", days=9)) == ["waiting"]
    set_charge(shop, right, charge)
    assert hand_over(shop) == []
    assert noted(shop, charge) == [("default", right, "lost", 400)]


@pytest.mark.long
def test_one_of_another_provider_follows_its_charge_with_its_next_report(shop: Shop) -> None:
    wrong, _ = captured(shop)
    right, _ = captured(shop)
    charge = "ch_" + uuid4().hex
    give = text("UPDATE payments SET charge_id = :it, gateway = 'payment' WHERE id = :id")
    with shop.books.begin() as connection:
        connection.execute(give, {"id": wrong, "it": charge})
    assert settle(shop, dispute_of(charge, gateway="payment")) == ["applied"]
    set_charge(shop, wrong, "ch_own" + uuid4().hex)
    with shop.books.begin() as connection:
        connection.execute(give, {"id": right, "it": charge})
    assert settle(shop, dispute_of(charge, "lost", days=9, gateway="payment")) == ["applied"]
    assert noted(shop, charge) == [("default", right, "lost", 400)]


@pytest.mark.long
@pytest.mark.parametrize("provider", ["stripe", "payment"])
def test_one_of_a_second_charge_is_the_payments_that_is_named(shop: Shop, provider: str) -> None:
    """A buyer was charged twice, and disputes the second charge."""
    order, _ = captured(shop)
    second = "pi_second" + uuid4().hex
    assert settle(shop, report(second, "succeeded", order, gateway=provider)) == ["waiting"]
    assert settle(shop, replace(dispute_of(second, gateway=provider), payment_id=order)) == ["applied"]
    for _ in range(2):
        assert hand_over(shop) == []
        assert noted(shop, second) == [("default", order, "needs_response", 400)]


@pytest.mark.long
def test_a_refund_that_is_booked_stays_with_its_payment_when_the_charge_is_found_to_be_anothers(shop: Shop) -> None:
    """And is reversed there when it fails."""
    named, charge = captured(shop)
    other, _ = captured(shop)
    made = "re_" + uuid4().hex
    about: dict[str, Any] = {"object": "refund", "charge_id": charge, "amount": 100}
    assert settle(shop, report(made, "succeeded", named, **about)) == ["applied"]
    set_charge(shop, named, "pi_own" + uuid4().hex)
    set_charge(shop, other, charge)
    assert settle(shop, report(made, "failed", named, **about)) == ["applied"]
    shop.run()
    assert shop.one("SELECT payment_id, status FROM refunds WHERE provider_refund_id = :id", id=made) == (
        named,
        "reversed",
    )
    assert shop.one("SELECT refunded FROM payments WHERE id = :id", id=named)[0] == 0
