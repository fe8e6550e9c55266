"""Proofs of a reader: each passes while the defect exists."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from idempotency import OperationId
from idempotency.application import runtime_of, settings_of
from idempotency.errors import OperationNotFound
from idempotency.operate import discard
from idempotency.operate.change import read
from idempotency.operate.people import Person
from idempotency.store import outbox
from idempotency.store.answers import error_text
from idempotency.store.rights import RELAY
from tests.orders.shop import Shop
from tests.orders.test_reports import refund
from tests.orders.test_reserved import refunded, row_of
from tests.orders.test_report_doubts import posted_net

REFUND = "refunds.refund_payment"


def test_a_refund_whose_unpublishable_letter_is_discarded_is_reserved_for_ever(shop: Shop) -> None:
    """An order is cancelled and all of its money reserved for a refund. The broker refuses the message for good (a queue that was
    renamed, say). The letter is discarded, which the discard allows since nothing has begun: no `on_failed` runs, no one is told,
    and no command knows the operation any more: the money cannot be given back."""
    shop.forget()
    order = shop.order()
    shop.run("order.paid > warehouse")
    shop.cancel(order)
    shop.run(REFUND)
    key = shop.one("SELECT id FROM refunds WHERE payment_id = :id", id=order)[0]
    assert row_of(shop, key)[0] == "reserved"
    reserve = "UPDATE idempotency.outbox SET relayed_until = now() + interval '1 minute' WHERE key = :key RETURNING *"
    with shop.operating(RELAY), runtime_of(shop.app).engine.begin() as connection:
        row = connection.execute(text(reserve), {"key": key}).one()
        outbox.give_up(connection, row, error_text("unpublishable", "no queue"), service=settings_of(shop.app).service)
    letter = shop.one("SELECT id, reason FROM idempotency.dead_letters WHERE key = :key AND status = 'open'", key=key)
    assert letter.reason == "unpublishable"
    with shop.operating():
        engine = runtime_of(shop.app).engine
        with engine.begin() as connection:
            discard.request(connection, Person("ann", "operator"), letter.id, "the queue is no more")
        with engine.begin() as connection:
            discard.approve(connection, Person("ben", "admin"), letter.id)
        with runtime_of(shop.app).autocommit() as connection, pytest.raises(OperationNotFound):
            read(connection, OperationId("default", REFUND, key), settings_of(shop.app).service)  # as `cancel KEY` does
    assert row_of(shop, key) == ("reserved", None)
    assert (refunded(shop, order), posted_net(shop, order)) == (1000, 1000)  # nothing was given back
    cases = "SELECT count(*) FROM support_cases WHERE payment_id = :id AND code = 'refund_failed'"
    assert shop.one(cases, id=order)[0] == 0
    again = refund(shop, order, 1)
    shop.run(REFUND + " " + key)
    assert row_of(shop, again) == ("refused", "exceeds_captured")
