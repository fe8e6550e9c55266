"""An answer of the provider counts like a report, in whichever order they come; names that are not ours change nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import text

from idempotency import DidNotHappen, Happened, StillUnknown
from tests.orders.shop import Shop
from tests.orders.test_money_concluded import CASE, KEY, LOST, has_failed
from tests.orders.test_provider_doubts import pay
from tests.orders.test_reconciliation import found
from tests.orders.test_report_doubts import of_refund, posted_net, silent_refund
from tests.orders.test_reports import captured, operation, refund, report, settle
from tests.orders.test_reserved import give_up, in_doubt, lost, resolve, row_of

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _fresh(shop: Shop) -> None:
    shop.forget()


def until_last_look(shop: Shop, refund_id: str, there: str, *reports: Any) -> None:
    """No answer in five attempts; in the last look, the provider says that its refund has failed."""
    attempts = "SELECT attempts FROM idempotency.records WHERE key = :id AND task = 'refunds.refund_payment'"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "refund", lost)
        patch.setattr(shop.provider, "find_refund", lambda **_: StillUnknown())
        while shop.one(attempts, id=refund_id)[0] < 5:
            shop.deliver(next(each for each in shop.waiting() if each.row.key == refund_id))
        if reports:
            assert settle(shop, *reports) == ["applied"]
        patch.setattr(shop.provider, "find_refund", lambda **_: has_failed(there))
        shop.run()
    assert tuple(operation(shop, refund_id))[:2] == ("failed", "attempts_exhausted")


@pytest.mark.parametrize("is_reported", ["before, without names", "afterwards", "before the look"])
def test_a_refund_that_has_failed_as_the_last_look_has_found_is_not_made(shop: Shop, is_reported: str) -> None:
    order, charge, refund_id, there = silent_refund(shop)
    made = of_refund(order, refund_id, charge, "succeeded", there)
    match is_reported:
        case "before, without names":
            assert settle(shop, replace(made, payment_id=None, refund_id=None)) == ["waiting"]
            until_last_look(shop, refund_id, there)
        case "afterwards":
            until_last_look(shop, refund_id, there)
            assert settle(shop, made) == ["applied"]
        case "before the look":
            until_last_look(shop, refund_id, there, made)
    shop.run()
    assert (posted_net(shop, order), row_of(shop, refund_id)[0] in ("refused", "reversed")) == (1000, True)
    told = ["payment.refunded"] if is_reported == "before the look" else []
    assert [event["type"] for event in shop.events("payment.refunded", order)] == told


@pytest.mark.parametrize("is_bare", [False, True])
@pytest.mark.parametrize("report_first", [False, True])
def test_what_a_person_has_taken_for_another_is_reversed_as_it_fails(
    shop: Shop, report_first: bool, is_bare: bool
) -> None:
    """Two refunds in doubt; one was made, and a person takes its id for the other. Then it fails at the bank."""
    order, charge = captured(shop)
    one, two = refund(shop, order), refund(shop, order)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "refund", lost)
        for sent in [each for each in shop.waiting() if each.row.key in (one, two)]:
            shop.deliver(sent)
    there = f"re_x{order}"  # is of `two`
    give_up(shop, one)
    resolve(shop, one, Happened({"id": there, "amount": 400, "currency": "EUR", "status": "succeeded"}))
    shop.replay(one)
    for sent in [each for each in shop.waiting() if each.row.key == one]:
        shop.deliver(sent)
    assert (row_of(shop, one)[0], posted_net(shop, order)) == ("refunded", 600)
    failed = replace(of_refund(order, two, charge, "failed", there), effect_key=shop.one(KEY, id=two)[0])
    if is_bare:
        failed = replace(failed, payment_id=None, refund_id=None, effect_key=None)
    if report_first:
        assert settle(shop, failed) == ["applied"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "refund", lost)
        patch.setattr(shop.provider, "find_refund", lambda **_: has_failed(there))
        shop.run()
    assert row_of(shop, two) == ("refused", LOST)
    if not report_first:
        assert settle(shop, failed) == ["duplicate"]
        shop.run()
    assert (row_of(shop, one)[0], posted_net(shop, order)) == ("reversed", 1000)


@pytest.mark.parametrize("foreign_first", [False, True])
def test_a_refund_under_somebody_elses_name_is_written_down(shop: Shop, foreign_first: bool) -> None:
    order, charge = captured(shop)
    foreign = of_refund(order, "ERP-17", charge, "succeeded", f"re_site_{order}")
    bare = replace(foreign, event_id=f"bare-{order}", payment_id=None, refund_id=None)
    assert settle(shop, *((foreign, bare) if foreign_first else (bare, foreign))) == ["applied", "duplicate"]
    shop.run()
    assert posted_net(shop, order) == 600


def test_somebody_elses_payment_id_takes_no_waiting_refund_out(shop: Shop) -> None:
    order, charge = captured(shop)
    mine = refund(shop, order)
    bare = replace(of_refund(order, None, charge, "succeeded", f"re_site_{order}"), payment_id=None)
    foreign = replace(bare, event_id=f"foreign-{order}", payment_id="ERP-order-17")
    assert settle(shop, bare, foreign) == ["waiting", "duplicate"]
    shop.run()
    assert (row_of(shop, mine)[0], posted_net(shop, order)) == ("refunded", 200)


def test_tenants_may_have_providers_of_their_own(shop: Shop) -> None:
    one, two = shop.order(tenant="t1"), shop.order(tenant="t2")
    shop.run("capture_payment")
    for order, tenant in ((one, "t1"), (two, "t2")):
        made = report(f"ch_{one}", "succeeded", order, gateway="payment", tenant=tenant)
        assert settle(shop, made) == ["applied"]
    shop.run()
    assert (posted_net(shop, one), posted_net(shop, two)) == (1000, 1000)


def test_what_a_person_has_found_at_another_provider_is_no_difference_at_stripe(shop: Shop, gateway: Any) -> None:
    payment = pay(shop)
    assert settle(shop, report(f"ch-{payment}", "succeeded", payment, gateway="payment")) == ["applied"]
    shop.run()
    refund_id, there = in_doubt(shop, gateway, payment), f"re-{payment}"
    resolve(shop, refund_id, Happened({"id": there, "amount": 400, "currency": "EUR", "status": "succeeded"}))
    shop.replay(refund_id)
    shop.run()
    assert (row_of(shop, refund_id)[0], posted_net(shop, payment)) == ("refunded", 600)
    assert there not in found(shop)


def test_a_case_ends_once_all_was_given_back_after_all(shop: Shop) -> None:
    order = shop.order()
    shop.run("order.paid > warehouse")
    shop.cancel(order)
    shop.run()
    row = shop.one("SELECT id, provider_refund_id AS there FROM refunds WHERE payment_id = :id", id=order)
    charge = shop.one("SELECT charge_id FROM payments WHERE id = :id", id=order)[0]
    assert settle(shop, of_refund(order, row.id, charge, "failed", row.there, 1000)) == ["applied"]
    shop.run()
    assert shop.one(CASE, id=order)[0] == "refund_failed"
    refund(shop, order, 1000)
    shop.run()
    assert (posted_net(shop, order), shop.one(CASE, id=order)[0]) == (0, "recovered")


@pytest.mark.parametrize("others", [400, 0])
def test_a_case_stays_while_what_may_be_given_back_is_in_doubt(shop: Shop, others: int) -> None:
    """A refund has come back; all that is owed is in doubt or given back; and then that in doubt was not made."""
    amount = 1000 - others
    order, charge = captured(shop)
    one = refund(shop, order, amount)
    shop.run()
    there = shop.one("SELECT provider_refund_id FROM refunds WHERE id = :id", id=one)[0]
    assert settle(shop, of_refund(order, one, charge, "failed", there, amount)) == ["applied"]
    again = in_doubt(shop, shop.provider, order, amount)
    if others:
        refund(shop, order, others)
    shop.run()
    assert shop.one(CASE, id=order)[0] == "refund_failed"
    resolve(shop, again, DidNotHappen(), end=True)
    shop.run()
    assert (row_of(shop, again)[0], posted_net(shop, order), shop.one(CASE, id=order)[0]) == (
        "refused",
        amount,
        "refund_failed",
    )


@pytest.mark.parametrize("is_of_code_before", [True, False])
def test_one_refund_of_another_provider_is_not_posted_as_two(shop: Shop, is_of_code_before: bool) -> None:
    """Code of migration 0005 has written no provider, which counts as Stripe."""
    order = shop.order()
    shop.run("capture_payment")
    assert settle(shop, report(f"ch-{order}", "succeeded", order, gateway="payment")) == ["applied"]
    shop.run()
    made = Happened({"id": f"re-{order}", "amount": 400, "currency": "EUR", "status": "succeeded"})
    one, other = "", ""
    for number in range(2):
        one, other = other, in_doubt(shop, shop.provider, order)
        resolve(shop, other, made)
        shop.replay(other)
        shop.run()
        if number == 0 and is_of_code_before:
            with shop.books.begin() as connection:
                connection.execute(text("UPDATE refunds SET gateway = DEFAULT WHERE id = :id"), {"id": other})
    assert (row_of(shop, one)[0], row_of(shop, other)[0], posted_net(shop, order)) == ("refunded", "refused", 600)
