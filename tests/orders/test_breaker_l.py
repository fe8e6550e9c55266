"""Proofs of a reader: each passes while the defect exists."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from idempotency import DidNotHappen
from tests.orders.shop import Shop
from tests.orders.test_refunds_of_others import case, made_of, now, there_of
from tests.orders.test_report_doubts import of_refund, posted_net
from tests.orders.test_reports import captured, operation, refund, settle
from tests.orders.test_reserved import give_up, refunded, resolve, row_of


@pytest.fixture(autouse=True)
def _fresh(shop: Shop) -> None:
    shop.forget()


def test_a_case_stays_for_ever_though_all_of_the_payment_was_given_back(shop: Shop) -> None:
    """1000 is refunded; a second request of 1000 is refused (exceeds_captured). The first comes back; a person replays the
    second's letter, and it is made: nothing of the payment is left to give back, and the case says `refund_failed` for ever."""
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
    # nothing can be given back any more, so nothing will ever end the case
    again = refund(shop, order, 1)
    shop.run()
    assert row_of(shop, again) == ("refused", "exceeds_captured")
    assert case(shop, order) == "refund_failed"  # the defect


def the_sites_and_ours(shop: Shop) -> tuple[str, str, str]:
    """`one` was made by our call, whose answer was lost; a person ended it as not made; its bare report is written down as the
    site's; the person corrects: it was made, as that. Its letter waits for a replay."""
    order, charge = captured(shop)
    one = refund(shop, order, 400)
    shop.provider.silent.add(one)
    there = f"id_{len(shop.provider._done)}"
    shop.deliver(shop.waiting()[0])
    give_up(shop, one)
    resolve(shop, one, DidNotHappen(), end=True)
    bare = replace(of_refund(order, None, charge, "succeeded", there, 400), payment_id=None)
    assert settle(shop, bare) == ["applied"]
    shop.run()
    resolve(shop, one, made_of(there, 400))
    return order, one, there


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a defect, or a server that is away, which a deploy ends")


def test_control_without_a_last_look_it_is_refused(shop: Shop) -> None:
    order, one, there = the_sites_and_ours(shop)
    shop.replay(one)
    shop.run()
    assert row_of(shop, one) == ("refused", "refund_of_another")
    assert refunded(shop, order) == 400


def test_what_a_last_look_finds_to_be_another_refund_is_unknown_and_reserved_twice(shop: Shop) -> None:
    """The finish fails until the attempts are used up; the last look finds that it is another refund. It is then `unknown`
    with its amount reserved beside the other's, instead of refused as refund_of_another."""
    order, one, there = the_sites_and_ours(shop)
    shop.replay(one)
    for _ in range(5):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shop.refunds, "_other_refund", broken)
            shop.deliver(shop.waiting()[0])
    shop.run()  # the last look, after the deploy
    assert operation(shop, one).status == "failed"
    assert row_of(shop, one) == ("unknown", "unfinished")  # the defect; "refused", "refund_of_another" else
    assert row_of(shop, f"stripe-{there}")[0] == "refunded"
    assert (refunded(shop, order), posted_net(shop, order)) == (800, 600)  # 400 moved, 800 count as given back
    rest = refund(shop, order, 600)
    shop.run()
    assert row_of(shop, rest) == ("refused", "exceeds_captured")  # 600 are left, and cannot be refunded
    shop.replay(one)  # what a person can do, if they guess it: the letter says `unfinished`
    shop.run()
    assert (row_of(shop, one), refunded(shop, order)) == (("refused", "refund_of_another"), 400)
