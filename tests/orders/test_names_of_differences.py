"""A difference whose name for its reader changes while both sides stay: the same key, with other arguments."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import text

from idempotency.application import runtime_of
from idempotency.operate import discard
from idempotency.operate.people import Person
from tests.orders.shop import Shop
from tests.orders.test_reconciliation import found, paid
from tests.orders.test_refunds_of_others import submit


@pytest.fixture(autouse=True)
def _fresh(shop: Shop) -> None:
    shop.forget()


def letters(shop: Shop, made: str) -> list[tuple[str, str]]:
    query = "SELECT reason, status FROM idempotency.dead_letters WHERE key LIKE :key ORDER BY id"
    with shop.books.connect() as connection:
        return [tuple(row) for row in connection.execute(text(query), {"key": f"refund:{made}:%"})]


def test_a_difference_that_has_another_name_the_next_day_has_no_second_letter(shop: Shop, gateway: Any) -> None:
    """After a restore: a refund at the provider has our name, of which the books know nothing, so it is told as `stripe-re_1`. Then the
    client requests it again, and it is refused (its payment was forgotten, too): from then on the name is known, and told.
    """
    order, charge = paid(shop)
    name = f"r-{uuid4().hex}"
    made = gateway.refund(refund_id=name, payment_id=order, charge_id=charge, amount=100, idempotency_key=uuid4().hex)[
        "id"
    ]
    assert found(shop)[made] == ("100 EUR", None)
    shop.run()
    assert letters(shop, made) == [("ledger_differs", "open")]
    submit(shop, name, "p-forgotten", 100)
    shop.run()
    assert found(shop)[made] == ("100 EUR", None)
    shop.run()
    assert letters(shop, made) == [("ledger_differs", "open")]

    query = "SELECT id FROM idempotency.dead_letters WHERE key LIKE :key AND reason = 'ledger_differs'"
    letter = shop.one(query, key=f"refund:{made}:%")[0]
    with shop.operating():
        engine = runtime_of(shop.app).engine
        with engine.begin() as connection:
            discard.request(connection, Person("ann", "operator"), letter, "seen to next week")
        with engine.begin() as connection:
            discard.approve(connection, Person("ben", "admin"), letter, app=shop.app)
    for _ in range(3):  # the next days
        assert found(shop)[made] == ("100 EUR", None)
        shop.run()
    assert letters(shop, made) == [("ledger_differs", "discarded"), ("ledger_differs", "open")]
