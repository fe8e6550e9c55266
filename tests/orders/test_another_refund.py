"""A refund whose answer is another refund, a failure that was heard under another row, cases that end, and questions without an answer."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text

from idempotency import Defer
from idempotency.operate.cancel import cancel
from idempotency.store.rights import RELAY
from sandbox.process import Sandbox
from tests.orders.shop import Shop
from tests.orders.test_reconciliation import paid
from tests.orders.test_refunds_of_others import case, forget_refund, now, submit, the_sites_and_ours, there_of
from tests.orders.test_report_doubts import of_refund, posted_net
from tests.orders.test_reported_and_typed import ask, eventually
from tests.orders.test_reports import captured, operation, refund, settle
from tests.orders.test_reserved import refunded, row_of, seen
from tests.orders.test_restore import configured
from tests.support.operators import ANN
from tests.support.sandbox import faults

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _fresh(shop: Shop) -> None:
    shop.forget()


def test_a_case_ends_as_all_of_the_payment_was_given_back_by_an_older_request(shop: Shop) -> None:
    """A second request of 1000 is refused; the first comes back; a person replays the second's letter, and it is made."""
    order, charge = captured(shop)
    one = refund(shop, order, 1000)
    shop.run()
    two = refund(shop, order, 1000)
    shop.run()
    assert row_of(shop, two) == ("refused", "exceeds_captured")
    assert settle(shop, now(of_refund(order, one, charge, "failed", there_of(shop, one), 1000))) == ["applied"]
    shop.run()
    assert case(shop, order) == "refund_failed"
    shop.replay(two)
    shop.run()
    assert row_of(shop, two)[0] == "refunded"
    assert (posted_net(shop, order), refunded(shop, order)) == (0, 1000)  # all is with the buyer
    assert case(shop, order) == "recovered"


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a defect, or a server that is away, which a deploy ends")


@pytest.mark.parametrize("is_last_look", [False, True])
def test_what_is_another_refund_is_refused_also_in_a_last_look(shop: Shop, is_last_look: bool) -> None:
    """The finish fails until the attempts are used up; the last look finds that it is another refund."""
    order, one, there = the_sites_and_ours(shop)
    shop.replay(one)
    for _ in range(5 if is_last_look else 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shop.refunds, "_other_refund", broken)
            shop.deliver(shop.waiting()[0])
    shop.run()
    assert operation(shop, one).status == "failed"
    assert row_of(shop, one) == ("refused", "refund_of_another")
    assert row_of(shop, f"stripe-{there}")[0] == "refunded"
    assert (refunded(shop, order), posted_net(shop, order)) == (400, 600)
    rest = refund(shop, order, 600)
    shop.run()
    assert row_of(shop, rest)[0] == "refunded"


def test_a_replay_that_a_person_cancels_reserves_nothing_of_what_is_known_to_be_another(shop: Shop) -> None:
    order, one, _ = the_sites_and_ours(shop)
    shop.replay(one)
    shop.run()
    shop.replay(one)
    with shop.operating():
        cancel(shop.app, seen(shop, one), ANN, may_have_happened=True)
    assert row_of(shop, one) == ("refused", "refund_of_another")
    assert refunded(shop, order) == 400


@pytest.mark.parametrize("seconds", [1, 0])
def test_a_case_ends_if_as_much_was_given_at_the_site_in_the_same_second(shop: Shop, seconds: int) -> None:
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
    assert case(shop, order) == "recovered"


def test_a_failure_that_our_request_hears_of_frees_what_was_written_down_as_the_sites(
    shop: Shop, gateway: Any, servers: Any, provider: Sandbox
) -> None:
    """A backup has forgotten a refund. Its late report `pending` writes it down as the site's, and reserves it. The client asks
    again, and the provider, asked first, says that it has failed: so no other report will say it."""
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
        assert row_of(shop, f"stripe-{there}")[0] == "refused"
        assert settle(shop, now(of_refund(order, one, charge, "failed", there))) == ["duplicate"]
        assert (refunded(shop, order), posted_net(shop, order)) == (0, 1000)
        rest = refund(shop, order, 1000)
        shop.run()
        assert row_of(shop, rest)[0] == "refunded"
    finally:
        configured(shop, idempotency_ask_first_until=None)
        faults(provider, decision_ms=500)


def test_a_refund_that_the_provider_does_not_know_is_one_letter_whatever_the_day(shop: Shop, gateway: Any) -> None:
    """The company has moved to another Stripe account; a refund at the site of the old one was pending."""
    order, charge = paid(shop)
    assert settle(shop, of_refund(order, None, charge, "pending", f"re_g{order}", 300)) == ["applied"]
    letters = (
        "SELECT count(*) FROM idempotency.dead_letters WHERE task = 'payments.ask_about_refund' AND status = 'open'"
    )
    before = shop.one(letters)[0]
    for _ in range(3):
        ask(shop)
        assert shop.one(letters)[0] == before + 1


def test_a_question_without_an_answer_holds_up_no_other_object(
    shop: Shop, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The provider does not answer about a payment of two days ago; a difference of today is told all the same."""
    from tasks import maintenance, reconciliation

    old, old_charge = paid(shop)
    order, charge = paid(shop)
    with shop.books.begin() as connection:
        connection.execute(
            text("UPDATE payments SET created_at = created_at - interval '2 days' WHERE id = :id"), {"id": old}
        )
        connection.execute(text("UPDATE ledger SET amount = 999 WHERE payment_id = :id"), {"id": order})
    monkeypatch.setattr(reconciliation, "SETTLED_AFTER", timedelta(seconds=-5))
    real = gateway.charge

    def charge_of(id: str) -> Any:
        if id == old_charge:
            raise Defer(5.0, "the payment provider is unreachable or did not answer in time")
        return real(id)

    monkeypatch.setattr(gateway, "charge", charge_of)
    with shop.operating(RELAY), pytest.raises(RuntimeError, match=r"1 questions have no answer: charge: .*unreachable"):
        maintenance.reconcile_provider()
    told = "SELECT count(*) FROM idempotency.outbox WHERE task = 'payments.check_difference' AND key LIKE :key"
    assert shop.one(told, key=f"charge:{charge}:%")[0] == 1
