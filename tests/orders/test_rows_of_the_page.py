"""Which rows of the shop the page of `idempotency web` shows beside an operation."""

from __future__ import annotations

from uuid import uuid4

import pytest

from idempotency.web.business import Described
from tasks.ledger import rows_of
from tests.orders.shop import TENANT, Shop

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.mark.long
def test_a_payment_is_shown_with_what_was_posted_for_it_and_nothing_of_others(shop: Shop) -> None:
    sku = f"sku-{uuid4().hex[:8]}"
    shop.receive(sku, 5)
    order, other = shop.order(sku), shop.order(sku, 2)
    shop.run()
    with shop.transaction() as session:
        found = list(rows_of(session, Described(TENANT, "payments.capture_payment", order)))
        nothing = list(rows_of(session, Described("another", "payments.capture_payment", order)))
    payment, posting = found
    assert (payment.title, payment.fields["status"], payment.fields["order_id"]) == ("payment", "captured", order)
    assert payment.at is not None
    assert (posting.title, posting.fields["debit"]) == ("ledger: capture", "provider")
    assert posting.fields["amount"] == payment.fields["amount"]
    assert other not in str(found)
    assert nothing == []
