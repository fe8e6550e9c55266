"""Proofs of a reader: each passes while the defect exists."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text

from idempotency.operate.cancel import cancel
from tests.orders.shop import Shop
from tests.orders.test_breaker_l import the_sites_and_ours
from tests.orders.test_reconciliation import paid
from tests.orders.test_refunds_of_others import case, there_of
from tests.orders.test_report_doubts import of_refund, posted_net
from tests.orders.test_reported_and_typed import ask
from tests.orders.test_reports import captured, refund, settle
from tests.orders.test_reserved import ANN, refunded, row_of, seen


@pytest.fixture(autouse=True)
def _fresh(shop: Shop) -> None:
    shop.forget()


@pytest.mark.parametrize(("seconds", "end"), [(1, "recovered"), (0, "refund_failed")])
def test_a_case_stays_for_ever_if_as_much_was_given_at_the_site_in_the_same_second(
    shop: Shop, seconds: int, end: str
) -> None:
    """A script hears of the failure, and gives the money again at the site; Stripe's times have whole seconds."""
    order, charge = captured(shop)
    one = refund(shop, order, 1000)
    shop.run()
    with shop.books.begin() as connection:  # some days ago
        connection.execute(
            text("UPDATE refunds SET created_at = created_at - interval '3 days' WHERE id = :id"), {"id": one}
        )
    second = datetime.now(UTC).replace(microsecond=0)
    failed = replace(of_refund(order, one, charge, "failed", there_of(shop, one), 1000), occurred_at=second)
    bare = replace(of_refund(order, None, charge, "succeeded", f"re_t{order}", 1000), payment_id=None)
    assert settle(shop, failed, replace(bare, occurred_at=second + timedelta(seconds=seconds))) == [
        "applied",
        "applied",
    ]
    shop.run()
    assert (posted_net(shop, order), refunded(shop, order)) == (0, 1000)
    assert case(shop, order) == end


def test_a_replay_that_a_person_cancels_reserves_again_what_is_known_to_be_another(shop: Shop) -> None:
    """It is refused as refund_of_another. Its letter is replayed by mistake, and the replay cancelled before it runs."""
    order, one, _ = the_sites_and_ours(shop)
    shop.replay(one)
    shop.run()
    assert (row_of(shop, one), refunded(shop, order)) == (("refused", "refund_of_another"), 400)
    shop.replay(one)
    with shop.operating():
        cancel(shop.app, seen(shop, one), ANN, may_have_happened=True)
    assert (row_of(shop, one)[0], refunded(shop, order)) == ("unknown", 800)


def test_a_refund_that_the_provider_does_not_know_is_another_letter_each_day(shop: Shop, gateway: Any) -> None:
    """The company has moved to another Stripe account; a refund at the site of the old one was pending."""
    order, charge = paid(shop)
    assert settle(shop, of_refund(order, None, charge, "pending", f"re_g{order}", 300)) == ["applied"]
    letters = (
        "SELECT count(*) FROM idempotency.dead_letters WHERE task = 'payments.ask_about_refund' AND status = 'open'"
    )
    before = shop.one(letters)[0]
    for day in range(3):
        ask(shop)
        assert shop.one(letters)[0] == before + day + 1
