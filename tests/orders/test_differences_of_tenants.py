"""A difference is the tenant's in whose books the object is, whatever name the provider has of it."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import text

from tests.orders.shop import Shop
from tests.orders.test_reconciliation import found

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _fresh(shop: Shop) -> None:
    shop.forget()


def test_the_letter_about_a_charge_that_a_person_has_found_to_be_a_tenants_is_the_tenants(
    shop: Shop, gateway: Any
) -> None:
    """A charge was made otherwise (another application on the account, which named it `other-7`), and a person has found that it
    is of t1's payment, under whose row it is. The amounts differ; they mend the ledger, and replay the letter.
    """
    about = {"customer_id": "c1", "amount": 700, "currency": "EUR"}
    other = gateway.capture(payment_id="other-7", **about, idempotency_key=uuid4().hex)["id"]
    order = shop.order(tenant="t1")
    shop.run()
    with shop.books.begin() as connection:  # as `effects resolve capture --happened` does of a charge in doubt
        connection.execute(text("UPDATE payments SET charge_id = :it WHERE id = :id"), {"id": order, "it": other})
    assert found(shop)[other] == ("700 EUR", "1000 EUR")
    shop.run()
    query = "SELECT id, tenant, key, last_error FROM idempotency.dead_letters WHERE key LIKE :key AND status = 'open'"
    letter = shop.one(query, key=f"charge:{other}:%")
    assert letter.tenant == "t1"
    assert "the ledger 1000" in letter.last_error
    with shop.books.begin() as connection:
        connection.execute(text("UPDATE ledger SET amount = 700 WHERE payment_id = :id"), {"id": order})
    assert other not in found(shop)  # both agree
    shop.replay(letter.key)
    shop.run()
    assert shop.one("SELECT status FROM idempotency.records WHERE key = :key", key=letter.key)[0] == "completed"


def test_a_difference_of_a_tenants_charge_that_was_given_back_has_its_letter(shop: Shop, gateway: Any) -> None:
    """The same, and the provider's operator gives all of that charge back."""
    about = {"customer_id": "c1", "amount": 700, "currency": "EUR"}
    other = gateway.capture(payment_id="other-8", **about, idempotency_key=uuid4().hex)["id"]
    order = shop.order(tenant="t1")
    shop.run()
    with shop.books.begin() as connection:
        connection.execute(text("UPDATE payments SET charge_id = :it WHERE id = :id"), {"id": order, "it": other})
    gateway._connection().client.v1.refunds.create({"payment_intent": other, "amount": 700})
    for _ in range(2):
        assert other in found(shop)  # our ledger has 1000 of it, the provider 700
        shop.run()
    letters = "SELECT count(*) FROM idempotency.dead_letters WHERE key LIKE :key"
    assert shop.one(letters + " AND status = 'open'", key=f"charge:{other}:%")[0] == 1
