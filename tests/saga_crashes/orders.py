"""Placing an order: its branches, and what the books say of one order when all is over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from sqlalchemy import text

from tests.orders.books import check_order
from tests.saga_crashes.shop import Struck, ends, told_apart

# A branch gets an article of which there are five, and returns the order.
Branch = Callable[[Struck, str], str]


def processed(shop: Struck, sku: str) -> str:
    order = shop.order(sku, 2)
    shop.run()
    return order


def free(shop: Struck, sku: str) -> str:
    order = shop.order(sku, amount=0)
    shop.run()
    return order


def nothing_in_stock_is_needed(shop: Struck, _: str) -> str:
    order = shop.order(None)
    shop.run()
    return order


def out_of_stock(shop: Struck, sku: str) -> str:
    order = shop.order(sku, 6)
    shop.run()
    return order


def payment_failed(shop: Struck, sku: str) -> str:
    order = shop.order(sku, 2)
    shop.provider.declines.add(order)
    shop.run()
    return order


def answer_of_the_charge_is_lost(shop: Struck, sku: str) -> str:
    order = shop.order(sku, 2)
    shop.provider.silent.add(order)
    shop.run()
    return order


def charged_while_it_is_cancelled(shop: Struck, sku: str) -> str:
    order = shop.order(sku, 2)
    shop.provider.silent.add(order)
    shop.run("payments.capture_payment")
    (capture,) = shop.waiting()
    with shop.undisturbed():  # a second attempt before the request would be another branch
        shop.deliver(capture)
    shop.cancel(order)
    shop.run("payments.capture_payment")
    shop.run()
    return order


def cancelled(*held_back: str) -> Branch:
    """Cancelled on request while these messages are on their way; the request comes before them."""

    def branch(shop: Struck, sku: str) -> str:
        order = shop.order(sku, 2)
        shop.run(*held_back)
        shop.cancel(order)
        shop.run(*held_back)
        shop.run()
        return order

    return branch


# With the state in which the order ends.
BRANCHES: dict[str, tuple[str, Branch]] = {
    "processed": ("PROCESSING", processed),
    "free": ("PROCESSING", free),
    "not-in-stock": ("PROCESSING", nothing_in_stock_is_needed),
    "answer-lost": ("PROCESSING", answer_of_the_charge_is_lost),
    "out-of-stock": ("CANCELLED", out_of_stock),
    "payment-failed": ("CANCELLED", payment_failed),
    "cancelled-first": ("CANCELLED", cancelled("placement_requested")),
    "cancelled-pending": ("CANCELLED", cancelled("stock.confirmed")),
    "cancelled-before-charge": ("CANCELLED", cancelled("payments.capture_payment")),
    "cancelled-charged": ("CANCELLED", cancelled("payment.captured > orders")),
    "cancelled-in-doubt": ("CANCELLED", charged_while_it_is_cancelled),
    "cancelled-paid": ("CANCELLED", cancelled("order.paid > warehouse")),
    "cancelled-reserved": ("CANCELLED", cancelled("stock.reserved > orders")),
    "cancelled-too-late": ("PROCESSING", cancelled()),
}

_BOOKS = {
    "order": "SELECT status, reason FROM orders WHERE id = :id",
    "payment": "SELECT status, order_status, amount, refunded FROM payments WHERE id = :id",
    "reservation": "SELECT status, quantity FROM reservations WHERE order_id = :id",
    "stock": "SELECT available, reserved FROM stock WHERE sku = :sku",
    "movements": "SELECT kind, quantity FROM stock_movements WHERE sku = :sku",
    "ledger": "SELECT kind, amount, currency FROM ledger WHERE payment_id = :id",
    "refunds": "SELECT amount, status FROM refunds WHERE payment_id = :id",
    "notifications": """SELECT about, status FROM notifications WHERE split_part(about, ':', 2) IN
                        (SELECT CAST(:id AS varchar) UNION ALL SELECT id FROM refunds WHERE payment_id = :id)""",
    "cases": "SELECT code FROM support_cases WHERE payment_id = :id",
    "letters": """SELECT task, reason, status FROM idempotency.dead_letters
                  WHERE key LIKE '%' || :id || '%' OR payload LIKE '%' || :id || '%'""",
    "observed": "SELECT status FROM idempotency.saga_instances WHERE (saga_type, entity_id) = ('order_placement', :id)",
}


def run(shop: Struck, name: str) -> tuple[Any, list[str]]:
    """Carry out a branch. Returns its books, and what the services' own rules say is wrong."""
    shop.forget()
    status, branch = BRANCHES[name]
    sku = f"sku-{uuid4().hex}"
    shop.receive(sku, 5)
    order = branch(shop, sku)
    wrong = []
    try:
        check_order(shop, order, status)
    except AssertionError as error:
        wrong.append(f"{error}"[:300])
    return books(shop, order, sku), wrong


def books(shop: Struck, order: str, sku: str) -> dict[str, Any]:
    """What is there of an order, in every service, at the provider and in the mail, without what each run chooses."""
    from tasks import notifications

    found: dict[str, Any] = {}
    with shop.books.connect() as connection:
        refunds = connection.execute(text("SELECT id FROM refunds WHERE payment_id = :id"), {"id": order}).scalars()
        names = (order, sku, *sorted(refunds))
        for book, query in _BOOKS.items():
            rows = connection.execute(text(query), {"id": order, "sku": sku})
            found[book] = Counter(told_apart(tuple(row), *names) for row in rows)
    found["seen"] = sorted(shop.observed(order).context)
    found["charges"] = sorted(amount for id, amount in shop.provider.charges if id == order)
    found["money back"] = sorted(amount for id, amount in shop.provider.refunds if id == order)
    sent = notifications.mailer.sent.values()  # type: ignore[attr-defined]
    found["mails"] = Counter(told_apart(mail, *names) for mail in sent if order in mail[2])
    events = Counter(
        sent.event["id"] + " " + sent.event["type"]
        for sent in shop.outbox()
        if sent.event is not None and sent.event["data"].get("order_id") == order
    )
    found["events"] = Counter(key.partition(" ")[2] for key in events)
    found["ended"] = Counter(ends(shop))
    return found
