"""What has to hold at the end: money and stock computed again from their ledgers, and every service of one mind."""

from __future__ import annotations

from collections import Counter

from sqlalchemy import text

from tasks.flow import EVENTS
from tests.orders.shop import Shop

_STOCK = text("""
SELECT s.sku, s.available, s.reserved, s.quarantined,
    coalesce(sum(m.quantity) FILTER (WHERE kind = 'received'), 0) AS received,
    coalesce(sum(m.quantity) FILTER (WHERE kind = 'reserved'), 0) AS taken,
    coalesce(sum(m.quantity) FILTER (WHERE kind = 'released'), 0) AS given_back,
    coalesce(sum(m.quantity) FILTER (WHERE kind = 'returned'), 0) AS returned,
    coalesce(sum(m.quantity) FILTER (WHERE kind = 'quarantined'), 0) AS damaged,
    (SELECT coalesce(sum(r.quantity), 0) FROM reservations r
     WHERE (r.tenant, r.sku) = (s.tenant, s.sku) AND r.status IN ('STOCK_CONFIRMED', 'STOCK_RESERVED')) AS held
FROM stock s LEFT JOIN stock_movements m USING (tenant, sku) GROUP BY s.tenant, s.sku
""")
# What goes back was reserved, for the same order, whole, and once.
_UNPAIRED = text("""
SELECT back.kind, back.reference FROM stock_movements back
LEFT JOIN returns r ON (r.tenant, r.id) = (back.tenant, back.reference) AND back.kind <> 'released'
LEFT JOIN stock_movements reserved
    ON (reserved.tenant, reserved.reference, reserved.sku, reserved.quantity, reserved.kind)
     = (back.tenant, coalesce(r.order_id, back.reference), back.sku, back.quantity, 'reserved')
WHERE back.kind IN ('released', 'returned', 'quarantined')
GROUP BY back.tenant, back.kind, back.reference, r.order_id, reserved.reference
HAVING reserved.reference IS NULL OR (back.kind <> 'released') <> (r.order_id IS NOT NULL)
UNION ALL
SELECT 'twice', coalesce(r.order_id, back.reference) FROM stock_movements back
LEFT JOIN returns r ON (r.tenant, r.id) = (back.tenant, back.reference) AND back.kind <> 'released'
WHERE back.kind IN ('released', 'returned', 'quarantined')
GROUP BY back.tenant, coalesce(r.order_id, back.reference) HAVING count(*) > 1
""")
POSTED = text("""
SELECT coalesce(sum(CASE kind WHEN 'capture' THEN amount ELSE -amount END), 0) FROM ledger WHERE payment_id = :id
""")
# Each means one move of one row, so no event of this type is published twice for an order.
ONCE = (
    "stock.confirmed",
    "stock.unavailable",
    "order.pending_payment",
    "order.paid",
    "stock.reserved",
    "order.cancelled",
    "stock.released",
    "payment.captured",
)


def check_stock(shop: Shop) -> None:
    """No piece is lost or doubled: each number is what the movements and the reservations say."""
    with shop.books.connect() as connection:
        for row in connection.execute(_STOCK):
            assert row.available == row.received - row.taken + row.given_back + row.returned, row
            assert row.reserved == row.taken - row.given_back - row.returned - row.damaged == row.held, row
            assert row.quarantined == row.damaged, row
            assert row.available >= 0, row
        assert connection.execute(_UNPAIRED).all() == []


def check_order(
    shop: Shop, order: str, status: str, *, failures: int = 0, refunds: int = 1, charged_first: bool = False
) -> None:
    """The order has this status, and its money, its pieces and its events are those of an order that has it.

    `failures` of its payment that a person has replayed, `refunds` at most. `charged_first`: it was charged before the
    warehouse knew of it.
    """
    found = shop.one("SELECT * FROM orders WHERE id = :id", id=order)
    payment = shop.one("SELECT * FROM payments WHERE order_id = :id", id=order)
    reservation = shop.one("SELECT * FROM reservations WHERE order_id = :id", id=order)
    assert found.status == status, found.reason

    charges = shop.provider.count(shop.provider.charges, order)
    net = shop.provider.net(order)
    assert charges <= 1
    assert shop.provider.count(shop.provider.refunds, order) <= refunds
    with shop.books.connect() as connection:
        assert connection.execute(POSTED, {"id": order}).scalar_one() == net
    assert (payment.status == "captured") == (charges == 1)
    with shop.books.connect() as connection:
        asked_for = connection.execute(
            text("SELECT status FROM refunds WHERE payment_id = :id"), {"id": order}
        ).scalars()
        assert set(asked_for) <= {"refunded"}
    if payment.status == "captured":
        assert payment.amount - payment.refunded == net
    if found.reason == "out_of_stock" and not charged_first:
        assert charges == 0

    if status == "PROCESSING":
        assert (reservation.status, payment.order_status, net) == ("STOCK_RESERVED", "placed", found.amount)
        assert reservation.quantity == (found.quantity if found.sku is not None else 0)
    else:
        assert (reservation.status, payment.order_status, net) == ("STOCK_RELEASED", "cancelled", 0)
    assert len(shop.events("payment.failed", order)) <= 1 + failures
    check_observed(shop, order, status)


def check_observed(shop: Shop, order: str, status: str) -> None:
    """The observer has seen the end, and every event once."""
    seen = shop.observed(order)
    assert seen.status == ("COMPLETED" if status == "PROCESSING" else "FAILED")
    published = {
        sent.event["type"] for sent in shop.outbox() if sent.event and sent.event["data"].get("order_id") == order
    }
    assert set(seen.context) == published


def check_events(shop: Shop, order: str, told: Counter[str]) -> None:
    """The services have published each event once; `told`: how many of a type the test has published itself."""
    assert {sent.event["type"] for sent in shop.outbox() if sent.event} <= set(EVENTS)
    for event_type in ONCE:
        assert len(shop.events(event_type, order)) - told[event_type] <= 1, event_type
    if shop.one("SELECT status FROM orders WHERE id = :id", id=order)[0] == "CANCELLED":
        (cancelled, *_), (released, *_) = (shop.events(type, order) for type in ("order.cancelled", "stock.released"))
        assert released["data"] == {**cancelled["data"], "pieces": released["data"]["pieces"]}
        for reserved in shop.events("stock.reserved", order):
            assert released["data"]["pieces"] == reserved["data"]["pieces"]
