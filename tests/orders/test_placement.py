"""Placing an order by events: every branch, from the click to the last row."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from idempotency import Defer
from tasks.validation import Taken
from tests.orders.books import check_order
from tests.orders.shop import ORDER, Sent, Shop
from tests.support.operations import at_once

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def sku(shop: Shop) -> str:
    """An article of which there are five."""
    sku = f"sku-{uuid4().hex[:8]}"
    shop.receive(sku, 5)
    return sku


def test_a_click_that_is_answered_has_placed_nothing_yet(shop: Shop, sku: str) -> None:
    order = shop.order(sku)
    assert shop.one("SELECT count(*) FROM orders WHERE id = :id", id=order)[0] == 0
    assert {sent.what for sent in shop.waiting()} == {
        f"order.placement_requested > {task}"
        for task in ("orders.place_order", "payments.initiate_payment", "warehouse.confirm_stock", "observer.watch")
    }


@pytest.mark.long
def test_an_order_is_pending_while_its_payment_is_initiated_and_its_stock_confirmed(shop: Shop, sku: str) -> None:
    order = shop.order(sku, 2)
    shop.run("stock.confirmed")
    assert shop.status(order) == ("PENDING_PAYMENT", "PAYMENT_INITIATED", "STOCK_CONFIRMED")
    assert shop.stock(sku) == (3, 2)
    assert shop.one("SELECT id, order_id FROM payments WHERE order_id = :id", id=order) == (order, order)


@pytest.mark.long
def test_an_order_that_is_paid_is_processed_and_its_pieces_are_its_own(shop: Shop, sku: str) -> None:
    order = shop.order(sku, 2)
    shop.run("order.paid")
    assert shop.status(order) == ("PAID", "captured", "STOCK_CONFIRMED")
    shop.run()
    assert shop.status(order) == ("PROCESSING", "captured", "STOCK_RESERVED")
    assert shop.stock(sku) == (3, 2)
    check_order(shop, order, "PROCESSING")


@pytest.mark.long
def test_an_order_that_costs_nothing_is_cancelled_without_a_refund(shop: Shop, sku: str) -> None:
    order = shop.order(sku, amount=0)
    shop.run("order.paid > warehouse")
    assert shop.status(order) == ("PAID", "free", "STOCK_CONFIRMED")
    shop.cancel(order)
    shop.run()
    assert shop.status(order) == ("CANCELLED", "free", "STOCK_RELEASED")
    assert shop.observed(order).status == "FAILED"


def test_an_order_of_nothing_in_stock_needs_no_warehouse(shop: Shop) -> None:
    order = shop.order(None)
    shop.run()
    assert shop.status(order) == ("PROCESSING", "captured", "STOCK_RESERVED")
    check_order(shop, order, "PROCESSING")


@pytest.mark.long
def test_fifty_clicks_place_one_order(shop: Shop, sku: str) -> None:
    session_id = f"cs-{uuid4().hex}"
    orders = at_once(8, lambda _: shop.order(sku, checkout_session_id=session_id))
    shop.run()
    assert len(set(orders)) == 1
    check_order(shop, orders[0], "PROCESSING")
    assert shop.stock(sku) == (4, 1)


@pytest.mark.long
def test_a_second_order_of_a_checkout_session_is_cancelled(shop: Shop, sku: str) -> None:
    """Checkout has none. The orders' own key is a second safeguard, behind the checkout's."""
    first = shop.order(sku)
    shop.run()
    event = shop.events("order.placement_requested", first)[0]
    second = f"order-{uuid4().hex}"
    shop.tell("order.placement_requested", event["data"] | {"order_id": second})
    shop.run()
    check_order(shop, first, "PROCESSING")
    assert shop.one("SELECT count(*) FROM orders WHERE id = :id", id=second)[0] == 0
    assert shop.one("SELECT status FROM payments WHERE order_id = :id", id=second)[0] == "cancelled"
    assert shop.stock(sku) == (4, 1)
    assert shop.provider.net(second) == 0


@pytest.mark.long
def test_an_observer_sees_how_far_an_order_has_come(shop: Shop, sku: str) -> None:
    order = shop.order(sku)
    shop.run("stock.reserved > observer", "order.paid > warehouse")
    assert shop.observed(order).status == "RUNNING"
    shop.cancel(order)
    shop.run("order.paid > warehouse", "stock.released > observer")
    assert shop.observed(order).status == "COMPENSATING"  # the money is back, the goods are not known to be
    shop.run()
    assert shop.observed(order).status == "FAILED"
    check_order(shop, order, "CANCELLED")


@pytest.mark.long
def test_tenants_have_sessions_and_stock_of_their_own(shop: Shop) -> None:
    same: dict[str, Any] = {"sku": f"sku-{uuid4().hex[:8]}", "checkout_session_id": f"cs-{uuid4().hex}"}
    shop.receive(same["sku"], 1, tenant="acme")
    shop.receive(same["sku"], 7, tenant="globex")
    orders = [shop.order(**same, quantity=quantity, tenant=name) for name, quantity in (("acme", 1), ("globex", 2))]
    shop.run()
    for order in orders:
        check_order(shop, order, "PROCESSING")
    query = "SELECT array_agg(ARRAY[available, reserved] ORDER BY tenant) FROM stock WHERE sku = :sku"
    assert shop.one(query, sku=same["sku"])[0] == [[0, 1], [5, 2]]


# ---------------------------------------------------------------- cancelled


@pytest.mark.long
def test_an_order_that_cannot_be_paid_is_cancelled_and_its_stock_released(shop: Shop, sku: str) -> None:
    order = shop.order(sku, 2)
    shop.provider.declines.add(order)
    shop.run()
    assert shop.status(order) == ("CANCELLED", "failed", "STOCK_RELEASED")
    assert shop.one("SELECT reason FROM orders WHERE id = :id", id=order)[0] == "card_declined"
    assert shop.stock(sku) == (5, 0)
    check_order(shop, order, "CANCELLED")


@pytest.mark.few(1)
@pytest.mark.parametrize("held_back", ["nothing", "order.paid > warehouse", "stock.reserved"])
def test_what_was_reserved_is_released_in_equal_parts(shop: Shop, sku: str, held_back: str) -> None:
    """Cancelled after it was paid, before the warehouse or before orders has heard of the next."""
    order = shop.order(sku, 3)
    shop.run("order.paid > warehouse" if held_back == "nothing" else held_back)
    shop.cancel(order)
    shop.run(held_back)
    shop.run()
    assert shop.status(order) == ("CANCELLED", "captured", "STOCK_RELEASED")
    assert shop.stock(sku) == (5, 0)
    check_order(shop, order, "CANCELLED")
    released = shop.events("stock.released", order)[0]["data"]
    assert released["pieces"] == 3
    for reserved in shop.events("stock.reserved", order):
        assert released == {**reserved["data"], "reason": "on_request"}


def test_out_of_stock_is_cancelled_and_never_charged(shop: Shop, sku: str) -> None:
    order = shop.order(sku, 6)
    shop.run()
    assert shop.status(order) == ("CANCELLED", "cancelled", "STOCK_RELEASED")
    assert (shop.provider.count(shop.provider.charges, order), shop.stock(sku)) == (0, (5, 0))
    check_order(shop, order, "CANCELLED")
    record = shop.one(
        "SELECT status, result FROM idempotency.records WHERE task LIKE '%capture%' AND key = :k", k=order
    )
    assert record.status == "completed"  # the operation that the buyer was told of has ended


def test_an_article_that_nobody_has_heard_of_is_out_of_stock(shop: Shop) -> None:
    order = shop.order("no-such-article")
    shop.run()
    check_order(shop, order, "CANCELLED")
    assert shop.one("SELECT reason FROM orders WHERE id = :id", id=order)[0] == "out_of_stock"


def test_out_of_stock_after_it_was_paid_is_refunded(shop: Shop, sku: str) -> None:
    """The warehouse hears first of the paid order: nothing was set aside for it, and now there is too little."""
    order = shop.order(sku, 5)
    shop.tell("stock.confirmed", shop.events("order.placement_requested", order)[0]["data"])
    shop.run("> warehouse")
    assert shop.one("SELECT status FROM orders WHERE id = :id", id=order)[0] == "PAID"
    other = shop.order(sku, 1)
    shop.run("order.placement_requested > warehouse", "order.paid > warehouse")
    (theirs,) = [s for s in shop.waiting() if s.event is not None and s.event["data"]["order_id"] == other]
    shop.deliver(theirs)
    shop.run("order.placement_requested > warehouse")
    shop.run()
    assert shop.status(order) == ("CANCELLED", "captured", "STOCK_RELEASED")
    assert (shop.provider.net(order), shop.provider.count(shop.provider.refunds, order)) == (0, 1)
    check_order(shop, order, "CANCELLED", charged_first=True)
    check_order(shop, other, "PROCESSING")
    assert shop.stock(sku) == (4, 1)


@pytest.mark.long
def test_a_cancellation_that_comes_first_leaves_nothing_to_do(shop: Shop, sku: str) -> None:
    order = shop.order(sku)
    shop.cancel(order)
    shop.run("placement_requested")
    assert shop.status(order) == ("CANCELLED", "cancelled", "STOCK_RELEASED")
    shop.run()
    assert shop.status(order) == ("CANCELLED", "cancelled", "STOCK_RELEASED")
    assert (shop.provider.net(order), shop.stock(sku)) == (0, (5, 0))
    check_order(shop, order, "CANCELLED")


@pytest.mark.long
def test_a_cancellation_before_the_charge_begins_charges_nothing(shop: Shop, sku: str) -> None:
    order = shop.order(sku)
    shop.run("payments.capture_payment")
    shop.cancel(order)
    shop.run("payments.capture_payment")
    shop.run()
    assert shop.provider.count(shop.provider.charges, order) == 0
    check_order(shop, order, "CANCELLED")


@pytest.mark.long
def test_captured_after_cancelled_is_refunded(shop: Shop, sku: str) -> None:
    """The charge was made and its answer lost; meanwhile the order is cancelled."""
    order = shop.order(sku)
    shop.provider.silent.add(order)
    shop.run("payments.capture_payment")
    (capture,) = shop.waiting()
    assert shop.deliver(capture).state == "RETRY"
    shop.cancel(order)
    shop.run("payments.capture_payment")
    assert shop.status(order) == ("CANCELLED", "pending", "STOCK_RELEASED")
    shop.run()
    assert shop.status(order) == ("CANCELLED", "captured", "STOCK_RELEASED")
    assert (shop.provider.net(order), shop.provider.count(shop.provider.charges, order)) == (0, 1)
    check_order(shop, order, "CANCELLED")


@pytest.mark.long
def test_a_cancellation_is_too_late_once_the_order_is_processed(shop: Shop, sku: str) -> None:
    order = shop.order(sku)
    shop.run()
    shop.cancel(order)
    shop.run()
    check_order(shop, order, "PROCESSING")


@pytest.mark.long
def test_what_was_refunded_by_hand_is_not_refunded_again(shop: Shop, sku: str) -> None:
    order = shop.order(sku)
    shop.run("order.paid > warehouse")
    with shop.transaction() as session:
        shop.refunds.submit_refund(session, refund_id=f"r-{order}", payment_id=order, amount=400, reason="by hand")
    shop.run("order.paid > warehouse")
    shop.cancel(order)
    shop.run()
    assert sorted(amount for id, amount in shop.provider.refunds if id == order) == [400, 600]
    check_order(shop, order, "CANCELLED", refunds=2)


@pytest.mark.long
def test_an_order_is_not_undone_while_a_part_of_its_money_is_kept(shop: Shop) -> None:
    order = shop.order(None)
    shop.run("order.paid > warehouse")
    with shop.transaction() as session:
        shop.refunds.submit_refund(session, refund_id=f"r-{order}", payment_id=order, amount=400, reason="by hand")
    shop.run("order.paid > warehouse")
    shop.provider.keeps.add(order)
    shop.cancel(order)
    shop.run()
    assert (shop.provider.net(order), shop.observed(order).status) == (600, "COMPENSATING")
    shop.provider.keeps.remove(order)
    with shop.transaction() as session:
        shop.refunds.submit_refund(session, refund_id=f"s-{order}", payment_id=order, amount=600, reason="by hand")
    shop.run()
    assert (shop.provider.net(order), shop.observed(order).status) == (0, "FAILED")


# ---------------------------------------------------------------- people


@pytest.mark.long
def test_a_failed_payment_that_is_replayed_in_time_pays_its_order(shop: Shop, sku: str) -> None:
    """Orders hears of the failure after the success: it is older, and changes nothing."""
    order = shop.order(sku)
    shop.provider.declines.add(order)
    shop.run("payment.failed")
    shop.provider.declines.remove(order)
    shop.replay(order)
    shop.run("payment.failed")
    shop.run()
    check_order(shop, order, "PROCESSING", failures=1)


@pytest.mark.long
def test_a_failed_payment_that_is_replayed_too_late_is_refunded(shop: Shop, sku: str) -> None:
    order = shop.order(sku)
    shop.provider.declines.add(order)
    shop.run()
    shop.provider.declines.remove(order)
    shop.replay(order)
    shop.run()
    assert shop.status(order) == ("CANCELLED", "captured", "STOCK_RELEASED")
    check_order(shop, order, "CANCELLED", failures=1)


# ---------------------------------------------------------------- stock


def test_a_delivery_is_received_once(shop: Shop) -> None:
    sku = f"sku-{uuid4().hex[:8]}"
    delivery = {"delivery_id": f"d-{sku}", "sku": sku, "quantity": 3}

    def receive(_: int) -> bool:
        with shop.transaction() as session:
            return bool(shop.warehouse.receive_stock(session, **delivery))

    assert sorted(at_once(4, receive)) == [False, False, False, True]
    assert shop.stock(sku) == (3, 0)
    with shop.transaction() as session, pytest.raises(Taken, match="another delivery"):
        shop.warehouse.receive_stock(session, delivery_id=f"d-{sku}", sku=sku, quantity=4)


def test_two_orders_race_for_the_last_piece_and_one_gets_it(shop: Shop) -> None:
    for _ in range(4):
        shop.forget()
        sku = f"sku-{uuid4().hex[:8]}"
        shop.receive(sku, 1)
        orders = [shop.order(sku), shop.order(sku)]
        racing = [sent for sent in shop.waiting() if sent.row.task == "warehouse.confirm_stock"]
        assert len(racing) == 2
        at_once(2, lambda number, racing=racing: shop.deliver(racing[number]))
        assert shop.stock(sku) == (0, 1)
        shop.run()
        found = sorted(shop.one("SELECT status FROM orders WHERE id = :id", id=order)[0] for order in orders)
        assert found == ["CANCELLED", "PROCESSING"]
        assert sum(shop.provider.count(shop.provider.charges, order) for order in orders) == 1
        for order in orders:
            check_order(shop, order, shop.status(order)[0])


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("quantity", 0, "quantity: must be an integer between 1 and 1000000"),
        ("quantity", 1.0, "quantity: must be an integer"),
        ("quantity", True, "quantity: must be an integer"),
        ("quantity", 10**6 + 1, "quantity: must be an integer"),
        ("sku", "", "sku: must not be empty"),
        ("sku", "ä", "sku: only printable ASCII"),
        ("amount", -1, "amount_cents: must be between 0"),
        ("currency", "XXX", "currency: must be one of"),
        ("customer_id", "a b", "customer_id: at most 55 letters"),
    ],
)
def test_a_bad_order_is_refused_by_field_and_nothing_is_written(
    shop: Shop, field: str, value: object, says: str
) -> None:
    wanted = {**ORDER, "sku": "s", "quantity": 1, "checkout_session_id": f"cs-{uuid4().hex}", field: value}
    with shop.transaction() as session, pytest.raises(ValueError, match=says):
        shop.checkout.submit_order(session, **wanted)
    assert shop.waiting() == []


def case_of(shop: Shop, order: str) -> str:
    return str(shop.one("SELECT code FROM support_cases WHERE payment_id = :id", id=order)[0])


@pytest.mark.long
def test_a_cancelled_order_whose_refund_fails_for_good_has_a_case(shop: Shop) -> None:
    order = shop.order(None)
    shop.run("order.paid > warehouse")
    shop.provider.keeps.add(order)
    shop.cancel(order)
    shop.run()
    assert (shop.status(order)[0], shop.provider.net(order), case_of(shop, order)) == (
        "CANCELLED",
        1000,
        "refund_failed",
    )


def requested_by_hand(shop: Shop, order: str, amount: int) -> Sent:
    refund = {"refund_id": f"h-{order}", "payment_id": order, "amount": amount, "reason": "by hand"}
    with shop.transaction() as session:
        shop.refunds.submit_refund(session, **refund)
    (message,) = [sent for sent in shop.waiting() if sent.row.key == refund["refund_id"]]
    return message


@pytest.mark.long
def test_a_cancelled_order_keeps_no_money_though_a_refund_by_hand_was_requested_before(shop: Shop) -> None:
    order = shop.order(None)
    shop.run("order.paid > warehouse")
    by_hand = requested_by_hand(shop, order, 400)
    shop.cancel(order)
    shop.run("refunds.refund_payment")
    shop.deliver(by_hand)
    shop.run()
    assert (shop.status(order)[0], shop.provider.net(order)) == ("CANCELLED", 0)
    assert shop.one("SELECT count(*) FROM support_cases WHERE payment_id = :id", id=order)[0] == 0


@pytest.mark.long
def test_a_cancelled_order_of_which_a_refund_by_hand_comes_to_nothing_has_a_case(shop: Shop) -> None:
    order = shop.order(None)
    shop.run("order.paid > warehouse")
    by_hand = requested_by_hand(shop, order, 400)

    def unreachable(**_: Any) -> None:
        raise Defer(1, "unreachable")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "refund", unreachable, raising=False)
        shop.deliver(by_hand)  # reserved
    shop.cancel(order)
    shop.run("refunds.refund_payment")
    shop.deliver(next(sent for sent in shop.waiting() if sent.row.key.startswith("cancelled-")))
    assert shop.provider.net(order) == 400
    shop.provider.keeps.add(order)
    shop.run()
    assert (shop.status(order)[0], shop.provider.net(order), case_of(shop, order)) == (
        "CANCELLED",
        400,
        "refund_failed",
    )


@pytest.mark.long
def test_a_payment_under_the_id_of_an_order_is_refused(shop: Shop) -> None:
    """Before payments has heard of the order, and after."""
    from tasks.payments import submit_payment

    order = shop.order(None)
    for _ in range(2):
        with pytest.raises(Taken), shop.transaction() as session:
            submit_payment(session, payment_id=order, **ORDER)
        shop.run()
    check_order(shop, order, "PROCESSING")
