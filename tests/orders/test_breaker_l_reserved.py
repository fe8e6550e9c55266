"""Proofs of a reader: each passes while the defect exists."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from sandbox.process import Sandbox
from tests.orders.shop import Shop
from tests.orders.test_reconciliation import found, paid
from tests.orders.test_refunds_of_others import forget_refund, now, submit, there_of
from tests.orders.test_report_doubts import of_refund, posted_net
from tests.orders.test_reported_and_typed import ask, eventually
from tests.orders.test_reports import operation, refund, settle
from tests.orders.test_reserved import refunded, row_of
from tests.orders.test_restore import configured
from tests.support.sandbox import faults


@pytest.fixture(autouse=True)
def _fresh(shop: Shop) -> None:
    shop.forget()


def test_what_was_written_down_as_pending_stays_reserved_for_ever_after_our_request_heard_of_its_failure(
    shop: Shop, gateway: Any, servers: Any, provider: Sandbox
) -> None:
    """A backup has forgotten a refund. Its late report `pending` writes it down as the site's, and reserves it. The client asks
    again; the provider, asked first, says that it has failed: the request is refused, and that answer is kept as the report
    `failed` of the same object. So the true report is a duplicate, as is each day's answer; 400 stay reserved."""
    order, charge = paid(shop)
    faults(provider, next=["refund_fails"], only={})
    faults(provider, decision_ms=1500)
    one = refund(shop, order)
    shop.run()
    there = there_of(shop, one)
    forget_refund(shop, servers, order, one)
    configured(shop, idempotency_ask_first_until=datetime.now(UTC) + timedelta(days=3))
    try:
        assert settle(shop, now(of_refund(order, one, charge, "pending", there))) == ["applied"]
        assert row_of(shop, f"stripe-{there}")[0] == "reserved"
        assert eventually(lambda: gateway.state_of_refund(there)[0] == "failed")
        submit(shop, one, order, 400)
        shop.run()
        assert (operation(shop, one).status, row_of(shop, one)[0]) == ("failed", "refused")
        # the report of the failure comes, and the provider is asked each day
        assert settle(shop, now(of_refund(order, one, charge, "failed", there))) == ["duplicate"]
        shop.run()
        for _ in range(2):
            ask(shop)
        assert row_of(shop, f"stripe-{there}")[0] == "reserved"  # the defect
        assert (refunded(shop, order), posted_net(shop, order)) == (400, 1000)  # nothing was given back
        rest = refund(shop, order, 1000)
        shop.run()
        assert row_of(shop, rest) == ("refused", "exceeds_captured")
        assert there not in found(shop)  # nor does the reconciliation name it
    finally:
        configured(shop, idempotency_ask_first_until=None)
        faults(provider, decision_ms=500)
