"""Reports of refunds beside others: made at the provider's site, of another provider, without names, of another call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from idempotency import DidNotHappen, StillUnknown, StoredRefusal
from tasks.gateway import GatewayError
from tests.orders.shop import Shop
from tests.orders.test_report_doubts import of_refund, posted_net, silent_refund
from tests.orders.test_reports import captured, operation, refund, report, settle
from tests.orders.test_reserved import give_up, refunded, resolve, row_of

pytestmark = pytest.mark.long

LOST = StoredRefusal("refund was refused: lost_or_stolen_card", "lost_or_stolen_card")


@pytest.fixture(autouse=True)
def _fresh(shop: Shop) -> None:
    shop.forget()


def is_applied(shop: Shop, there: str) -> list[bool]:
    return list(shop.one("SELECT array_agg(is_applied) FROM payment_events WHERE object_id = :id", id=there)[0])


def books(shop: Shop, order: str) -> tuple[int, int]:
    """What is given back or reserved, and what is left by the ledger."""
    return refunded(shop, order), posted_net(shop, order)


@pytest.mark.parametrize("is_called", [True, False])
def test_a_refund_at_the_site_is_booked_once_ours_is_settled_by_a_report(shop: Shop, is_called: bool) -> None:
    """Both have one amount, so the other one waits for what becomes of ours: which is in doubt, or not called yet."""
    if is_called:
        order, charge, refund_id, there = silent_refund(shop)
        give_up(shop, refund_id)
    else:
        order, charge = captured(shop)
        refund_id = refund(shop, order)
        there = "re_ours" + order
    at_site = of_refund(order, None, charge, "succeeded", "re_site" + order)
    assert settle(shop, at_site) == ["waiting"]
    assert settle(shop, of_refund(order, refund_id, charge, "succeeded", there)) == ["applied"]
    shop.run()
    assert row_of(shop, refund_id)[0] == "refunded"
    assert is_applied(shop, "re_site" + order) == [True]
    assert books(shop, order) == (800, 200)


def test_a_failure_of_another_providers_refund_does_not_reverse_ours(shop: Shop) -> None:
    """Two providers may have one id."""
    one, charge = captured(shop)
    other, its = captured(shop)
    refund_id = refund(shop, one)
    there = f"id_{len(shop.provider._done)}"
    settle(shop, replace(of_refund(other, None, its, "failed", there, 123), gateway="payment"))
    shop.run()
    assert row_of(shop, refund_id) == ("refunded", None)
    assert (books(shop, one), shop.events("payment.refund_failed", one)) == ((400, 600), [])
    assert settle(shop, of_refund(one, None, charge, "failed", there)) == ["applied"]
    assert (row_of(shop, refund_id)[0], books(shop, one)) == ("reversed", (0, 1000))


def test_what_another_provider_has_reported_under_the_same_id_makes_nothing_of_ours(shop: Shop) -> None:
    from tasks.reported import reported_charge, reported_refund

    one, charge = captured(shop)
    other, its = captured(shop)
    refund_id = refund(shop, one)
    shop.run()
    there = shop.one("SELECT provider_refund_id FROM refunds WHERE id = :id", id=refund_id)[0]
    settle(shop, replace(of_refund(other, None, its, "succeeded", there, 123), gateway="payment"))
    settle(shop, report(charge, "succeeded", other, charge_id=its, gateway="payment"))
    assert reported_refund(refund_id, "idem-1", tenant="default") is None
    assert reported_charge(one, "idem-1", tenant="default") is None
    settle(shop, of_refund(one, refund_id, charge, "succeeded", there), report(charge, "succeeded", one))
    assert reported_refund(refund_id, "idem-1", tenant="default").id == there
    assert reported_charge(one, "idem-1", tenant="default") == charge


def test_a_refund_for_whatever_reason_is_not_one_of_the_site(shop: Shop) -> None:
    """`reason` is a caller's free text."""
    order, charge = captured(shop)
    refund_id, about = f"rf-{order}", {"amount": 400, "reason": "made at the provider"}
    with shop.transaction() as session:
        shop.refunds.submit_refund(session, refund_id=refund_id, payment_id=order, **about)
    shop.provider.silent.add(refund_id)
    there = f"id_{len(shop.provider._done)}"
    shop.deliver(shop.waiting()[0])  # made, and its answer was lost
    assert settle(shop, of_refund(order, None, charge, "succeeded", there)) == ["waiting"]
    shop.run()
    assert (shop.provider.net(order), books(shop, order)) == (600, (400, 600))
    assert is_applied(shop, there) == [True]


@pytest.mark.parametrize(("names_its_call", "is_asked"), [(True, False), (False, False), (True, True)])
def test_the_refusal_of_a_second_call_does_not_reverse_what_the_first_has_made(
    shop: Shop, names_its_call: bool, is_asked: bool
) -> None:
    """A person says wrongly that it was not made. The second call is refused, because all is refunded; the first is
    reported meanwhile. `is_asked`: the second one is in doubt, and a report says of it that it has failed."""
    order, charge = captured(shop)
    refund_id = refund(shop, order, 1000)
    shop.provider.silent.add(refund_id)
    first, keys = f"id_{len(shop.provider._done)}", []
    real = type(shop.provider).refund

    def noted(**call: Any) -> Any:
        keys.append(call["idempotency_key"])
        return real(shop.provider, **call)

    def refused(**call: Any) -> Any:
        failed = of_refund(order, refund_id, charge, "failed", "re_second" + order, 1000)
        if is_asked:
            settle(shop, replace(failed, effect_key=call["idempotency_key"]))
        made = of_refund(order, refund_id, charge, "succeeded", first, 1000)
        assert settle(shop, replace(made, effect_key=keys[0] if names_its_call else None)) == ["applied"]
        if is_asked:
            raise GatewayError("no answer")
        raise StoredRefusal("the charge has been refunded", "charge_already_refunded")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "refund", noted, raising=False)
        shop.deliver(shop.waiting()[0])
        give_up(shop, refund_id)
        resolve(shop, refund_id, DidNotHappen())
        shop.replay(refund_id)
        patch.setattr(shop.provider, "refund", refused, raising=False)
        patch.setattr(shop.provider, "find_refund", lambda **_: StillUnknown())
        shop.run()
    assert shop.provider.net(order) == 0
    assert (row_of(shop, refund_id), books(shop, order)) == (("refunded", None), (1000, 0))
    assert (operation(shop, refund_id).status, shop.events("payment.refund_failed", order)) == ("failed", [])


def test_what_two_providers_have_reported_of_one_charge_is_looked_at_again(shop: Shop) -> None:
    """Most of it is reserved for ours, which is refused: then something is left for the two others."""
    order, charge = captured(shop)
    refund_id = refund(shop, order, 700)

    def refuse(**_: Any) -> Any:
        for gateway, amount in (("stripe", 600), ("payment", 400)):
            by_hand = of_refund(order, None, charge, "succeeded", f"re_{gateway}{order}", amount)
            assert settle(shop, replace(by_hand, gateway=gateway)) == ["waiting"]
        raise LOST

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "refund", refuse)
        shop.run()
    assert operation(shop, refund_id).status == "failed"
    assert [is_applied(shop, f"re_{gateway}{order}") for gateway in ("stripe", "payment")] == [[True], [True]]
    assert books(shop, order) == (1000, 0)


def test_our_refund_that_was_refused_has_no_second_row(shop: Shop) -> None:
    """Reported as pending without names, it waits for ever; a report of the site's of this amount is still written down."""
    order, charge = captured(shop)
    refund_id = refund(shop, order)

    def accepted(**_: Any) -> Any:
        assert settle(shop, of_refund(order, None, charge, "pending", "re_p" + order)) == ["waiting"]
        raise LOST

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "refund", accepted, raising=False)
        shop.run()
    rows = "SELECT array_agg(id || ' ' || status ORDER BY status DESC) FROM refunds WHERE payment_id = :id"
    assert shop.one(rows, id=order)[0] == [f"{refund_id} refused"]
    assert settle(shop, of_refund(order, None, charge, "succeeded", "re_s" + order)) == ["applied"]
    assert shop.one(rows, id=order)[0] == [f"{refund_id} refused", f"stripe-re_s{order} refunded"]


@pytest.mark.parametrize("state", ["succeeded", "failed"])
def test_a_refund_at_the_site_is_reserved_while_it_is_pending(shop: Shop, state: str) -> None:
    """Nothing else may give back its amount; and one of ours of this amount, requested later, is no reason to wait."""
    order, charge = captured(shop)
    assert settle(shop, of_refund(order, None, charge, "pending", "re_p" + order, 600)) == ["applied"]
    assert books(shop, order) == (600, 1000)
    refund_id = refund(shop, order, 600)
    shop.run()
    assert row_of(shop, refund_id) == ("refused", "exceeds_captured")
    assert settle(shop, of_refund(order, None, charge, state, "re_p" + order, 600)) == ["applied"]
    assert books(shop, order) == ((600, 400) if state == "succeeded" else (0, 1000))


def test_support_is_told_of_a_cancelled_order_whose_refund_at_the_site_has_failed(shop: Shop) -> None:
    """What the site was giving back was left out of the refund of the cancelled order."""
    order = shop.order()
    shop.run("order.paid > warehouse")
    charge = shop.one("SELECT charge_id FROM payments WHERE id = :id", id=order)[0]
    settle(shop, of_refund(order, None, charge, "pending", "re_p" + order))
    shop.cancel(order)
    shop.run()
    assert books(shop, order) == (1000, 400)
    assert settle(shop, of_refund(order, None, charge, "failed", "re_p" + order)) == ["applied"]
    shop.run()
    assert (books(shop, order), len(shop.events("payment.refund_failed", order))) == ((600, 400), 1)
    assert shop.one("SELECT code FROM support_cases WHERE payment_id = :id", id=order)[0] == "refund_failed"


@pytest.mark.parametrize("is_settled_first", [True, False])
def test_the_buyer_is_not_told_that_money_was_refunded_which_has_failed_already(
    shop: Shop, is_settled_first: bool
) -> None:
    """The reports come in the other order; the second one before or after the task has ended."""
    order, charge, refund_id, there = silent_refund(shop)
    assert settle(shop, of_refund(order, refund_id, charge, "failed", there)) == ["applied"]
    if is_settled_first:
        assert settle(shop, of_refund(order, refund_id, charge, "succeeded", there)) == ["applied"]
    shop.run()
    assert (row_of(shop, refund_id)[0], books(shop, order)) == ("reversed", (0, 1000))
    mails = "SELECT count(*) FROM notifications WHERE about = :id"
    assert shop.one(mails, id=f"payment.refunded:{refund_id}")[0] == 0
    assert len(shop.events("payment.refund_failed", order)) == 1
    assert shop.events("payment.refunded", order) == []
