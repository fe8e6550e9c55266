"""What the provider has moved against what the ledger has posted: each difference is found, told once, and told again if asked."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import text

from idempotency.store.rights import RELAY
from tests.orders.shop import Shop
from tests.orders.test_reports import refund, report, settle

NOW = datetime.now(UTC)
SINCE, UNTIL = NOW - timedelta(days=1), NOW + timedelta(days=1)


def found(shop: Shop) -> dict[str, tuple[str | None, str | None]]:
    """What each side says, by the id at the provider; of what these tests have made themselves."""
    from tasks import reconciliation

    with shop.operating(RELAY):
        return {each.id: (each.provider, each.ledger) for each in reconciliation.reconcile(SINCE, UNTIL).differences}


def paid(shop: Shop) -> tuple[str, str]:
    order = shop.order()
    shop.run()
    return order, shop.one("SELECT charge_id FROM payments WHERE id = :id", id=order)[0]


def test_books_that_agree_have_no_differences(shop: Shop, gateway: Any) -> None:
    order, charge = paid(shop)
    refund_id = refund(shop, order)
    shop.run()
    (made,) = shop.one("SELECT provider_refund_id FROM refunds WHERE id = :id", id=refund_id)
    assert not {charge, made} & found(shop).keys()


def test_each_difference_is_named_with_both_sides_in_one_dead_letter(shop: Shop, gateway: Any) -> None:
    about = {"customer_id": "c1", "amount": 700, "currency": "EUR"}
    unknown = gateway.capture(payment_id=f"lost-{uuid4().hex}", **about, idempotency_key=uuid4().hex)["id"]
    order, charge = paid(shop)
    other, its_charge = paid(shop)
    part = gateway.refund(refund_id="at-the-site", payment_id=order, charge_id=charge, amount=100, idempotency_key="r1")
    with shop.books.begin() as connection:
        connection.execute(text("UPDATE ledger SET amount = 999 WHERE payment_id = :id"), {"id": order})
        connection.execute(text("UPDATE payments SET charge_id = 'pi_gone' WHERE id = :id"), {"id": other})
    # another provider has a charge of that id, of another payment
    assert settle(shop, report("pi_gone", "succeeded", order, charge_id=charge, gateway="payment")) == ["applied"]
    differ = found(shop)
    assert {id: differ[id] for id in (unknown, charge, part["id"], its_charge, "pi_gone")} == {
        unknown: ("700 EUR", None),
        charge: ("1000 EUR", "999 EUR"),
        part["id"]: ("100 EUR", None),
        its_charge: ("1000 EUR", "1000 EUR as pi_gone"),
        "pi_gone": (None, "1000 EUR"),
    }
    assert found(shop) == differ  # the next day
    shop.run()
    letters = "SELECT count(*), min(last_error) FROM idempotency.dead_letters WHERE reason = 'ledger_differs' AND key LIKE :key"
    number, said = shop.one(letters, key=f"charge:{charge}:%")
    assert number == 1
    assert f"charge {charge} of {order}: the provider has 1000 EUR, the ledger 999 EUR" in said


@pytest.mark.long
def test_a_letter_that_is_replayed_after_it_was_mended_completes(shop: Shop, gateway: Any) -> None:
    order, charge = paid(shop)
    with shop.books.begin() as connection:
        connection.execute(text("UPDATE ledger SET amount = 999 WHERE payment_id = :id"), {"id": order})
    assert charge in found(shop)
    shop.run()
    key = shop.one("SELECT key FROM idempotency.dead_letters WHERE key LIKE :key", key=f"charge:{charge}:%")[0]
    with shop.books.begin() as connection:
        connection.execute(text("UPDATE ledger SET amount = 1000 WHERE payment_id = :id"), {"id": order})
    shop.replay(key)
    shop.run()
    assert shop.one("SELECT status FROM idempotency.records WHERE key = :key", key=key)[0] == "completed"
    assert charge not in found(shop)


@pytest.mark.long
def test_a_list_that_cannot_be_read_is_no_difference(shop: Shop, gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks import reconciliation
    from tasks.gateway import StripeGateway

    paid(shop)
    refused = StripeGateway("sk_test_other", url=gateway._url)
    monkeypatch.setattr(reconciliation, "gateway", refused)
    with shop.operating():
        compared = reconciliation.reconcile(SINCE, UNTIL)
    refused.close()
    assert compared.differences == []
    assert len(compared.unanswered) == len(reconciliation.KINDS)
    assert all("API key" in why for why in compared.unanswered)


@pytest.mark.long
def test_the_command_shows_the_differences_and_its_status_says_whether_there_are_any(
    shop: Shop, gateway: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from tasks import reconciliation

    paid(shop)
    gateway.capture(payment_id="[/lost]", customer_id="c1", amount=700, currency="EUR", idempotency_key=uuid4().hex)
    monkeypatch.setattr(reconciliation, "SETTLED_AFTER", timedelta(seconds=-5))
    with shop.operating(RELAY):
        assert reconciliation.main(["--days", "1"]) == 1
    assert "[/lost]" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        reconciliation.main(["--days", "0"])


@pytest.mark.long
def test_one_name_that_postgres_cannot_store_stops_no_reconciliation(shop: Shop, gateway: Any) -> None:
    about = {"customer_id": "c1", "amount": 700, "currency": "EUR"}
    lost = gateway.capture(payment_id=f"lost-{uuid4().hex}", **about, idempotency_key=uuid4().hex)["id"]
    assert found(shop)[lost] == ("700 EUR", None)
    strange = gateway.capture(payment_id=f"a\0b-{uuid4().hex}", **about, idempotency_key=uuid4().hex)["id"]
    assert {lost, strange} <= found(shop).keys()
