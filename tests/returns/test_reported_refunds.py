"""Refunds of returns and by hand that the provider has reported: that have come back, that were made in silence, or twice."""

from __future__ import annotations

from typing import Any

import pytest

from idempotency import DidNotHappen, StillUnknown
from tasks.gateway import GatewayError
from tests.orders.test_report_doubts import of_refund, posted_net, silent_refund
from tests.orders.test_reports import operation, settle
from tests.orders.test_reserved import give_up, resolve
from tests.returns.shop import Returns

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _fresh(shop: Returns) -> None:
    shop.forget()


def charge_of(shop: Returns, order: str) -> str:
    return str(shop.one("SELECT charge_id FROM payments WHERE id = :id", id=order)[0])


def test_a_return_whose_refund_has_come_back_is_left_to_a_person(shop: Returns) -> None:
    """Reported before the refund's task notes that it was made: the task ends with the status `reversed`."""
    order = shop.bought()
    return_id = shop.in_transit(order)
    shop.inspect(return_id, "APPROVED")
    shop.run("refunds.refund_payment")
    refund_id = shop.row(return_id).refund_id
    failed = of_refund(order, refund_id, charge_of(shop, order), "failed", f"id_{len(shop.provider._done)}", 1000)
    assert settle(shop, failed) == ["applied"]
    shop.run()
    assert shop.one("SELECT status FROM refunds WHERE id = :id", id=refund_id)[0] == "reversed"
    assert shop.one("SELECT refunded FROM payments WHERE id = :id", id=order)[0] == 0
    assert (shop.row(return_id).status, shop.row(return_id).problem) == ("ESCALATED", "refund_failed")
    assert "return.refunded" not in shop.told_of(return_id)


def test_a_refund_that_was_made_in_silence_and_reported_is_made(shop: Returns) -> None:
    """Its answer was lost, and the provider cannot be asked; its report has posted the refund. A charge is settled by its report."""
    order = shop.bought()
    return_id = shop.in_transit(order)
    made = type(shop.provider).refund

    def made_in_silence(**call: Any) -> None:
        before = len(shop.provider._done)
        made(shop.provider, **call)
        if len(shop.provider._done) > before:
            about = of_refund(order, call["refund_id"], charge_of(shop, order), "succeeded", f"id_{before}", 1000)
            assert settle(shop, about) == ["applied"]
        raise GatewayError("no answer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "refund", made_in_silence, raising=False)
        patch.setattr(shop.provider, "find_refund", lambda **_: StillUnknown())
        shop.inspect(return_id, "APPROVED")
        shop.run()
    row = shop.row(return_id)
    assert shop.one("SELECT status FROM refunds WHERE id = :id", id=row.refund_id)[0] == "refunded"
    assert (posted_net(shop, order), shop.provider.net(order)) == (0, 0)
    assert shop.provider.count(shop.provider.refunds, order) == 1
    assert (row.status, row.problem) == ("REFUNDED", None)


def test_a_refund_that_was_made_twice_is_on_the_list(shop: Returns) -> None:
    """A person says wrongly that it was not made; the report of the first comes during the second call. A charge is `charged_twice`."""
    shop.forget()
    order, charge, refund_id, first = silent_refund(shop)
    give_up(shop, refund_id)
    resolve(shop, refund_id, DidNotHappen())
    shop.replay(refund_id)
    shop.provider.silent.discard(refund_id)
    made = type(shop.provider).refund

    def reported(**call: Any) -> Any:
        answer = made(shop.provider, **call)
        assert settle(shop, of_refund(order, refund_id, charge, "succeeded", first)) == ["applied"]
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "refund", reported, raising=False)
        shop.run()
    assert shop.provider.net(order) == 200  # twice 400 of 1000
    assert operation(shop, refund_id).status == "failed"
    assert posted_net(shop, order) == 600
    assert shop.one("SELECT refunded FROM payments WHERE id = :id", id=order)[0] == 400
    assert shop.one("SELECT provider_refund_id FROM refunds WHERE id = :id", id=refund_id)[0] == first
    open_ = "SELECT last_error FROM idempotency.dead_letters WHERE key = :id AND status = 'open'"
    assert f"made twice, also as {first}" in shop.one(open_, id=refund_id)[0]
    (second,) = [done["id"] for done in shop.provider._done.values() if done["id"] > first and done["amount"] == 400]
    assert settle(shop, of_refund(order, refund_id, charge, "succeeded", second)) == ["waiting"]


def test_a_wrong_word_does_not_undo_what_the_provider_has_reported(shop: Returns) -> None:
    order, charge, refund_id, there = silent_refund(shop)
    give_up(shop, refund_id)
    assert settle(shop, of_refund(order, refund_id, charge, "succeeded", there)) == ["applied"]
    resolve(shop, refund_id, DidNotHappen(), end=True)
    assert shop.one("SELECT status FROM refunds WHERE id = :id", id=refund_id)[0] == "refunded"
    assert (shop.provider.net(order), posted_net(shop, order)) == (600, 600)


def refunded_return(shop: Returns) -> tuple[str, str, Any]:
    """A return whose refund was made, and whose saga has not gone on from that: order, return, and a report of its failure."""
    order = shop.bought()
    return_id = shop.in_transit(order)
    shop.inspect(return_id, "APPROVED")
    made = "SELECT coalesce(min(provider_refund_id), '') FROM refunds WHERE status = 'refunded' AND payment_id = :id"
    while not (there := shop.one(made, id=order)[0]):
        shop.deliver(shop.waiting()[0])
    assert shop.row(return_id).status == "INSPECTED"
    about = of_refund(order, shop.row(return_id).refund_id, charge_of(shop, order), "failed", there, 1000)
    return order, return_id, about


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_return_whose_refund_comes_back_after_its_call_is_left_to_a_person(shop: Returns, is_cancelled: bool) -> None:
    """And before the saga goes on from it, or ends because a person has cancelled it."""
    order, return_id, failed = refunded_return(shop)
    if is_cancelled:
        shop.cancel_return(return_id)
    assert settle(shop, failed) == ["applied"]
    shop.run()
    assert (shop.one("SELECT refunded FROM payments WHERE id = :id", id=order)[0], posted_net(shop, order)) == (0, 1000)
    problem = "cancelled, refund_failed, already_booked" if is_cancelled else "refund_failed"
    assert (shop.row(return_id).status, shop.row(return_id).problem) == ("ESCALATED", problem)
    assert "return.refunded" not in shop.told_of(return_id)
    assert shop.cases(return_id) == set(problem.split(", "))


@pytest.mark.parametrize("state", ["succeeded", "failed"])
def test_a_refund_at_the_site_that_is_under_way_is_waited_for(shop: Returns, state: str) -> None:
    order = shop.bought()
    charge = charge_of(shop, order)
    return_id = shop.in_transit(order)
    assert settle(shop, of_refund(order, None, charge, "pending", "re_h" + order, 400)) == ["applied"]
    shop.inspect(return_id, "APPROVED")
    for _ in range(8):
        shop.deliver(shop.waiting()[0])
    assert (shop.row(return_id).status, shop.row(return_id).refund_id) == ("INSPECTED", None)
    assert settle(shop, of_refund(order, None, charge, state, "re_h" + order, 400)) == ["applied"]
    shop.run()
    row = shop.row(return_id)
    assert (row.status, row.problem) == ("REFUNDED", None)
    left = 600 if state == "succeeded" else 1000
    assert shop.one("SELECT amount FROM refunds WHERE id = :id", id=row.refund_id)[0] == left
    assert (shop.provider.net(order), posted_net(shop, order)) == (1000 - left, 0)
