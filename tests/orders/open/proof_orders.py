"""Proofs of a second reader: each asserts the good outcome, and fails."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

from tests.orders.shop import Shop


@pytest.fixture(autouse=True)
def _fresh(shop: Shop) -> None:
    shop.forget()


def all_rows(shop: Shop, query: str, **values: Any) -> list[Any]:
    with shop.books.connect() as connection:
        return list(connection.execute(text(query), values))


def test_the_observer_does_not_say_undone_while_money_is_kept(shop: Shop) -> None:
    order = shop.order(None)
    shop.run("order.paid > warehouse")
    with shop.transaction() as session:
        shop.refunds.submit_refund(session, refund_id=f"h-{order}", payment_id=order, amount=400, reason="by hand")
    shop.run("order.paid > warehouse")
    shop.provider.keeps.add(order)
    shop.cancel(order)
    shop.run()
    assert shop.provider.net(order) == 600
    assert shop.observed(order).status == "COMPENSATING"
