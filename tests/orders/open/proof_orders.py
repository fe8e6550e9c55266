"""Proofs of a second reader: each asserts the good outcome, and fails."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import text

from idempotency import Defer, StoredRefusal
from tests.orders.shop import ORDER, Shop


@pytest.fixture(autouse=True)
def _fresh(shop: Shop) -> None:
    shop.forget()


def all_rows(shop: Shop, query: str, **values: Any) -> list[Any]:
    with shop.books.connect() as connection:
        return list(connection.execute(text(query), values))


def test_a_cancelled_order_keeps_no_money_though_a_refund_by_hand_comes_to_nothing(shop: Shop) -> None:
    order = shop.order(None)
    shop.run("order.paid > warehouse")
    with shop.transaction() as session:
        shop.refunds.submit_refund(session, refund_id=f"h-{order}", payment_id=order, amount=400, reason="by hand")
    (hand,) = [sent for sent in shop.waiting() if sent.row.task == "refunds.refund_payment"]
    plain = type(shop.provider).refund
    with pytest.MonkeyPatch.context() as patch:

        def unreachable(**call: Any) -> Any:
            if call["refund_id"].startswith("h-"):
                raise Defer(1, "unreachable")
            return plain(shop.provider, **call)

        patch.setattr(shop.provider, "refund", unreachable, raising=False)
        shop.deliver(hand)  # reserved
        shop.cancel(order)
        shop.run("refunds.refund_payment")
        (rest,) = [
            s for s in shop.waiting() if s.row.task == "refunds.refund_payment" and s.row.key.startswith("cancelled-")
        ]
        shop.deliver(rest)

        def refuses(**call: Any) -> Any:
            raise StoredRefusal("the charge is disputed", "charge_disputed")

        patch.setattr(shop.provider, "refund", refuses, raising=False)
        shop.run()
    cases = all_rows(shop, "SELECT code FROM support_cases WHERE payment_id = :id", id=order)
    assert shop.provider.net(order) == 0 or cases, (
        shop.status(order),
        shop.provider.net(order),
        shop.observed(order).status,
        all_rows(shop, "SELECT id, amount, status FROM refunds WHERE payment_id = :id", id=order),
    )


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


def test_a_cancelled_order_whose_refund_fails_for_good_has_a_case(shop: Shop) -> None:
    order = shop.order(None)
    shop.run("order.paid > warehouse")
    shop.provider.keeps.add(order)
    shop.cancel(order)
    shop.run()
    assert (shop.status(order)[0], shop.provider.net(order)) == ("CANCELLED", 1000)
    assert all_rows(shop, "SELECT code FROM support_cases WHERE payment_id = :id", id=order) != []


def test_a_payment_under_the_id_of_an_order_does_not_leave_the_order_waiting(shop: Shop) -> None:
    """The buyer is told of the order's id and of an operation payments.capture_payment under it, and pays that."""
    from tasks.payments import submit_payment

    sku = f"sku-{uuid4().hex[:8]}"
    shop.receive(sku, 1)
    order = shop.order(sku)
    with shop.transaction() as session:
        submit_payment(session, payment_id=order, **ORDER)  # before payments has heard of the order
    shop.run()
    status = shop.status(order)
    assert (status[0], shop.provider.net(order)) in (("PROCESSING", 1000), ("CANCELLED", 0)), (
        status,
        shop.provider.net(order),
        shop.stock(sku),
    )


def test_a_failed_payment_of_before_the_placement_that_is_replayed_is_given_back(shop: Shop) -> None:
    """v0003 makes its order CANCELLED, and its payment's order_status 'placed'."""
    order = shop.order(None)
    shop.provider.declines.add(order)
    shop.run()
    with shop.books.connect() as connection, connection.begin():
        # as the migration leaves it: see test_migrated below
        connection.execute(text("UPDATE payments SET order_status = 'placed' WHERE id = :id"), {"id": order})
    shop.provider.declines.remove(order)
    shop.replay(order)
    shop.run()
    assert (shop.status(order)[0], shop.provider.net(order)) == ("CANCELLED", 0), shop.status(order)
