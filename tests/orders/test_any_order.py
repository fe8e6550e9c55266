"""Events in any order, repeated and late: whatever the interleaving, the orders end in the one right state."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from typing import Any
from uuid import uuid4

import pytest

from tests.orders.books import check_events, check_order, check_stock
from tests.orders.shop import ORDER, Shop
from tests.support.operations import at_once

# A block of seeds is one test. ORDER_SEEDS=500 runs more.
SEEDS = int(os.environ.get("ORDER_SEEDS", "12"))
BLOCKS = 6


def status_of(shop: Shop, order: str) -> str:
    return str(shop.one("SELECT status FROM orders WHERE id = :id", id=order)[0])


# ---------------------------------------------------------------- one order, all of its interleavings, drawn by a seed


def one_order(shop: Shop, seed: int) -> None:
    """One order and everything that can befall it. What is known of the end beforehand is stated beforehand."""
    chance = random.Random(seed)
    sku, wanted, there = f"sku-{uuid4().hex[:8]}", chance.randint(1, 3), chance.randint(1, 4)
    shop.receive(sku, there)
    shop.forget()
    order = shop.order(sku, wanted)
    fate = chance.choice(["paid", "paid", "declined", "answer lost", "cancelled", "cancelled, answer lost"])
    if fate == "declined":
        shop.provider.declines.add(order)
    if "answer lost" in fate:
        shop.provider.silent.add(order)
    if "cancelled" in fate:
        for _ in range(chance.randint(0, 12)):
            if waiting := shop.waiting():
                shop.deliver(chance.choice(waiting))
        shop.cancel(order)
    shop.run_in_any_order(chance, repeats=chance.randint(0, 8))

    status = status_of(shop, order)
    if wanted > there or fate == "declined":
        assert status == "CANCELLED"
    elif "cancelled" not in fate:
        assert status == "PROCESSING"
    check_order(shop, order, status)
    check_events(shop, order, shop.told)
    assert shop.stock(sku) == ((there - wanted, wanted) if status == "PROCESSING" else (there, 0))
    check_stock(shop)


@pytest.mark.few(2)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_one_order_ends_right_in_any_order_of_its_events(shop: Shop, block: int) -> None:
    for seed in range(block, SEEDS, BLOCKS):
        try:
            one_order(shop, seed)
        except AssertionError as error:
            error.add_note(f"seed {seed}: " + " | ".join(shop.log))
            raise


# ---------------------------------------------------------------- several orders of a scarce article, on several threads


def some_orders(shop: Shop, seed: int) -> None:
    chance = random.Random(seed)
    sku, there = f"sku-{uuid4().hex[:8]}", chance.randint(1, 4)
    shop.receive(sku, there)
    shop.forget()
    orders = {shop.order(sku, wanted): wanted for wanted in (chance.randint(1, 3) for _ in range(4))}
    for order in orders:
        if chance.random() < 0.2:
            shop.provider.declines.add(order)
        if chance.random() < 0.3:
            shop.provider.silent.add(order)
        if chance.random() < 0.3:
            shop.cancel(order)
    with ThreadPoolExecutor(3) as threads:
        while waiting := shop.waiting():
            chance.shuffle(waiting)
            batch = waiting[:6]
            batch += chance.sample(batch, len(batch) // 3)  # at the same moment as themselves
            list(threads.map(shop.deliver, batch))

    statuses = {order: status_of(shop, order) for order in orders}
    for order, status in statuses.items():
        check_order(shop, order, status)
        check_events(shop, order, shop.told)
    sold = sum(wanted for order, wanted in orders.items() if statuses[order] == "PROCESSING")
    assert shop.stock(sku) == (there - sold, sold)
    check_stock(shop)


@pytest.mark.long
def test_orders_of_a_scarce_article_share_it_whatever_happens_at_once(shop: Shop) -> None:
    for seed in range(SEEDS // 4):
        try:
            some_orders(shop, seed)
        except AssertionError as error:
            error.add_note(f"seed {seed}: " + " | ".join(shop.log))
            raise


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("order.paid > warehouse", "order.cancelled > warehouse"),
        ("payments.capture_payment", "order.cancelled > payments"),
        ("order.pending_payment > payments", "order.cancelled > payments"),
        ("stock.reserved > orders", "order.cancellation_requested > orders"),
    ],
)
def test_two_events_of_an_order_at_the_same_moment_end_as_one_after_the_other(
    shop: Shop, first: str, second: str
) -> None:
    for _ in range(2):
        sku = f"sku-{uuid4().hex[:8]}"
        shop.receive(sku, 3)
        shop.forget()
        order = shop.order(sku, 2)
        shop.run(first, second)
        shop.cancel(order)
        shop.run(first, second)
        racing = [next(sent for sent in shop.waiting() if part in sent.what) for part in (first, second)]
        at_once(2, lambda number, racing=racing: shop.deliver(racing[number]))
        shop.run()
        status = status_of(shop, order)
        check_order(shop, order, status)
        check_events(shop, order, shop.told)
        assert shop.stock(sku) == ((1, 2) if status == "PROCESSING" else (3, 0))
        check_stock(shop)


@pytest.mark.long
def test_a_cancellation_told_twice_at_the_same_moment_is_one_refund(shop: Shop) -> None:
    for _ in range(2):
        shop.forget()
        order = shop.order(None)
        shop.run("order.paid > warehouse")
        shop.cancel(order)
        shop.run("order.paid > warehouse", "order.cancelled > payments")
        shop.tell("order.cancelled", shop.events("order.cancelled", order)[0]["data"])
        racing = [sent for sent in shop.waiting() if "order.cancelled > payments" in sent.what]
        at_once(2, lambda number, racing=racing: shop.deliver(racing[number]))
        shop.run()
        check_order(shop, order, "CANCELLED")


# ---------------------------------------------------------------- one service alone: every permutation of what it hears


def told(order: str, sku: str) -> dict[str, Any]:
    return {**ORDER, "order_id": order, "checkout_session_id": f"cs-{order}", "sku": sku, "quantity": 2}


def hear(shop: Shop, service: str, order: str, sku: str, events: tuple[str, ...]) -> None:
    """The service hears these events, each twice, and the second time as another event; nobody else hears anything."""
    for event in [each for each in events for _ in range(2)]:
        shop.tell(event, {**told(order, sku), "payment_id": order, "code": "card_declined", "reason": "test"})
        for sent in shop.waiting():
            if sent.row.task.startswith(f"{service}.") and sent.event is not None:
                shop.deliver(sent)
    # what was deferred, because it had come too early
    while early := [sent for sent in shop.waiting() if sent.row.task.startswith(f"{service}.") and sent.event]:
        shop.deliver(early[0])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("events", "status", "left"),
    [
        (("order.placement_requested", "order.paid"), "STOCK_RESERVED", (3, 2)),
        (("order.placement_requested", "order.cancelled"), "STOCK_RELEASED", (5, 0)),
        (("order.placement_requested", "order.paid", "order.cancelled"), "STOCK_RELEASED", (5, 0)),
    ],
)
def test_the_warehouse_ends_the_same_in_every_permutation(
    shop: Shop, events: tuple[str, ...], status: str, left: tuple[int, int]
) -> None:
    for permutation in permutations(events):
        shop.forget()
        order, sku = f"order-{uuid4().hex}", f"sku-{uuid4().hex[:8]}"
        shop.receive(sku, 5)
        hear(shop, "warehouse", order, sku, permutation)
        found = shop.one("SELECT status FROM reservations WHERE order_id = :id", id=order)[0]
        assert (found, shop.stock(sku)) == (status, left), permutation
        check_stock(shop)


# Of the permutations one in three; `make long` takes all of them.
STRIDES = pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.long)])


@pytest.mark.few(1)
@STRIDES
@pytest.mark.parametrize(
    ("events", "statuses"),
    [
        (("order.placement_requested", "stock.confirmed", "payment.captured", "stock.reserved"), {"PROCESSING"}),
        (("order.placement_requested", "stock.confirmed", "payment.failed"), {"CANCELLED"}),
        (("order.placement_requested", "stock.unavailable"), {"CANCELLED"}),
        # whether it comes before PROCESSING is decided here
        (
            ("stock.confirmed", "payment.captured", "stock.reserved", "order.cancellation_requested"),
            {"PROCESSING", "CANCELLED"},
        ),
    ],
)
def test_orders_end_the_same_in_every_permutation(
    shop: Shop, events: tuple[str, ...], statuses: set[str], stride: int
) -> None:
    found = set()
    for permutation in list(permutations(events))[::stride]:
        shop.forget()
        order = f"order-{uuid4().hex}"
        hear(shop, "orders", order, "sku", permutation)
        found.add(status_of(shop, order))
        for event_type in ("order.pending_payment", "order.paid", "order.cancelled"):
            assert len(shop.events(event_type, order)) <= 1, permutation
        cancelled = status_of(shop, order) == "CANCELLED"
        assert len(shop.events("order.cancelled", order)) == cancelled, permutation
    assert found == statuses


@pytest.mark.long
@STRIDES
@pytest.mark.parametrize("cancelled", [False, True])
def test_payments_end_the_same_in_every_permutation(shop: Shop, cancelled: bool, stride: int) -> None:
    """The capture itself comes anywhere among them once it is asked for, too."""
    heard = ("order.placement_requested", "order.pending_payment", "capture", *["order.cancelled"] * cancelled)
    charged = set()
    for permutation in list(permutations(heard))[::stride]:
        shop.forget()
        order = f"order-{uuid4().hex}"
        for event in permutation:
            if event == "capture":
                for asked_for in [sent for sent in shop.waiting() if sent.row.task == "payments.capture_payment"]:
                    shop.deliver(asked_for)
            else:
                hear(shop, "payments", order, "sku", (event,))
        shop.run("> orders", "> warehouse", "> notifications")
        charges = shop.provider.count(shop.provider.charges, order)
        charged.add(charges)
        assert shop.provider.net(order) == (0 if cancelled else ORDER["amount"]), permutation
        assert charges == shop.provider.count(shop.provider.refunds, order) + (not cancelled), permutation
    assert charged == ({0, 1} if cancelled else {1})
