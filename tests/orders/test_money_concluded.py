"""What is concluded of money when people and providers say different things, late, or twice."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from idempotency import DidNotHappen, Happened, StillUnknown
from idempotency.attempt import effects
from tests.orders.shop import Shop
from tests.orders.test_provider_doubts import pay
from tests.orders.test_report_doubts import of_refund, posted_net, silent_refund
from tests.orders.test_reports import captured, operation, refund, report, settle
from tests.orders.test_reserved import give_up, lost, refunded, resolve, row_of, take_for_the_charge_of

pytestmark = pytest.mark.long

LOST = "lost_or_stolen_card"
KEY = (
    "SELECT effects -> 'refund' ->> 'key' FROM idempotency.records WHERE key = :id AND task = 'refunds.refund_payment'"
)
CASE = "SELECT code FROM support_cases WHERE payment_id = :id"


@pytest.fixture(autouse=True)
def _fresh(shop: Shop) -> None:
    shop.forget()


def has_failed(there: str) -> DidNotHappen:
    """What the provider answers, when it is asked, of a refund that it has accepted and that has failed afterwards."""
    from tasks.gateway import FailedAfterwards

    return DidNotHappen(FailedAfterwards(f"refund was refused: {LOST}", LOST, there))


def found_failed(shop: Shop) -> tuple[str, str, str, str]:
    """A refund whose answer was lost, and which has failed, as its task has found: order, charge, refund, its id there."""
    order, charge, refund_id, there = silent_refund(shop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "find_refund", lambda **_: has_failed(there))
        shop.run()
    assert row_of(shop, refund_id) == ("refused", LOST)
    return order, charge, refund_id, there


def test_a_refund_that_has_come_back_is_not_made_again_by_a_replay(shop: Shop) -> None:
    """Another refund has to be requested: this one is posted, and its reversal, too."""
    order, charge, refund_id, there = silent_refund(shop)
    settle(shop, of_refund(order, refund_id, charge, "succeeded", there))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "find_refund", lambda **_: has_failed(there))
        shop.run()
    assert (operation(shop, refund_id).status, row_of(shop, refund_id)[0]) == ("failed", "reversed")
    shop.replay(refund_id)
    shop.run()
    ended = operation(shop, refund_id)
    assert (ended.status, ended.error_code) == ("failed", "refund_reversed")
    letters = "SELECT count(*) FROM idempotency.dead_letters WHERE key = :id AND status = 'open'"
    assert shop.one(letters, id=refund_id)[0] == 1
    assert (row_of(shop, refund_id)[0], posted_net(shop, order)) == ("reversed", 1000)
    again = refund(shop, order)
    shop.run()
    assert (row_of(shop, again)[0], posted_net(shop, order)) == ("refunded", 600)


def test_a_refund_of_stripe_may_have_no_status_yet() -> None:
    """It is nullable (docs.stripe.com/api/refunds/object)."""
    from tasks.reports import of_stripe

    thing = {"id": "re_n", "object": "refund", "status": None, "amount": 3, "currency": "eur", "payment_intent": "pi_x"}
    event = {"id": "evt_n", "type": "refund.updated", "created": 1_772_366_400, "data": {"object": thing}}
    read = of_stripe(json.dumps(event).encode())
    assert read is not None
    assert read.state == "pending"


def test_a_refund_that_is_written_down_as_the_sites_is_not_posted_again_by_a_persons_word(shop: Shop) -> None:
    """A person ends it as not made; it is reported without our names; then the person corrects that it was made."""
    order, charge, refund_id, there = silent_refund(shop)
    give_up(shop, refund_id)
    resolve(shop, refund_id, DidNotHappen(), end=True)
    bare = replace(of_refund(order, None, charge, "succeeded", there), payment_id=None)
    assert settle(shop, bare) == ["applied"]
    shop.run()
    assert (refunded(shop, order), posted_net(shop, order), shop.provider.net(order)) == (400, 600, 600)
    made = Happened({"id": there, "amount": 400, "currency": "EUR", "status": "succeeded"})
    resolve(shop, refund_id, made)
    shop.replay(refund_id)
    shop.run()
    assert (row_of(shop, refund_id)[1], row_of(shop, f"stripe-{there}")[0]) == ("refund_of_another", "refunded")
    assert "is the refund" in shop.one("SELECT error FROM idempotency.records WHERE key = :id", id=refund_id)[0]
    assert (refunded(shop, order), posted_net(shop, order), shop.provider.net(order)) == (400, 600, 600)
    assert len(shop.events("payment.refunded", order)) == 1


class Died(BaseException):
    pass


@pytest.mark.parametrize("dies", [False, True])
def test_a_refund_that_is_found_to_have_failed_is_reversed(shop: Shop, dies: bool) -> None:
    """`dies`: between the answer, which is recorded, and the end."""
    order, charge, refund_id, there = silent_refund(shop)
    assert settle(shop, of_refund(order, refund_id, charge, "succeeded", there)) == ["applied"]
    real = effects.ask
    deaths: list[int] = []

    def ask(*args: Any, **kwargs: Any) -> Any:
        answer = real(*args, **kwargs)
        if dies and not deaths:
            deaths.append(1)
            raise Died
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "find_refund", lambda **_: has_failed(there))
        patch.setattr(effects, "ask", ask)
        try:
            shop.run()
        except Died:
            shop.deliver(next(each for each in shop._to_be_delivered() if each.row.key == refund_id))
        shop.run()
    ended = operation(shop, refund_id)
    assert bool(deaths) is dies
    assert (ended.status, ended.error_code) == ("failed", "lost_or_stolen_card")
    assert (row_of(shop, refund_id)[0], refunded(shop, order), posted_net(shop, order)) == ("reversed", 0, 1000)


@pytest.mark.parametrize("names_payment_first", [False, True])
def test_a_report_that_names_our_refund_counts_after_one_that_did_not(shop: Shop, names_payment_first: bool) -> None:
    """`payment_id` and `refund_id` are optional. The provider cannot be asked, so the report is all that there is."""
    order, charge, refund_id, there = silent_refund(shop)
    bare = of_refund(order, None, charge, "succeeded", there)
    if not names_payment_first:
        bare = replace(bare, payment_id=None)
    assert settle(shop, bare) == ["waiting"]
    named = settle(shop, of_refund(order, refund_id, charge, "succeeded", there))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "refund", lost)
        patch.setattr(shop.provider, "find_refund", lambda **_: StillUnknown())
        shop.run()
    ended = operation(shop, refund_id)
    assert shop.provider.net(order) == 600
    assert (named, ended.status) == (["applied"], "completed")
    assert (row_of(shop, refund_id)[0], posted_net(shop, order)) == ("refunded", 600)


def test_a_cancelled_orders_refund_in_doubt_that_is_reported_as_made_is_no_case_any_more(shop: Shop) -> None:
    order = shop.order()
    shop.run("order.paid > warehouse")
    charge = shop.one("SELECT charge_id FROM payments WHERE id = :id", id=order)[0]
    shop.cancel(order)
    shop.run("refunds.refund_payment")
    refund_id = shop.one("SELECT id FROM refunds WHERE payment_id = :id", id=order)[0]
    shop.provider.silent.add(refund_id)
    there = f"id_{len(shop.provider._done)}"
    shop.deliver(next(sent for sent in shop.waiting() if sent.row.key == refund_id))
    give_up(shop, refund_id)
    shop.run()
    assert shop.one(CASE, id=order)[0] == "refund_failed"
    assert settle(shop, of_refund(order, refund_id, charge, "succeeded", there, 1000)) == ["applied"]
    shop.run()
    assert (row_of(shop, refund_id), posted_net(shop, order)) == (("refunded", None), 0)
    assert shop.one(CASE, id=order)[0] == "recovered"


def test_a_case_of_a_failed_payment_ends_when_its_call_succeeds(shop: Shop) -> None:
    """A failure without a key is reported and told to support while the call is under way, which then charges."""
    order = shop.order()
    real = type(shop.provider).capture
    told: list[int] = []

    def capture(**call: Any) -> Any:
        if call["payment_id"] == order and not told:
            told.append(1)
            assert settle(shop, report("pi_other" + order, "failed", order, code="card_declined")) == ["applied"]
            for sent in [each for each in shop.waiting() if "support" in each.what]:
                shop.deliver(sent)
        return real(shop.provider, **call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "capture", capture, raising=False)
        shop.run()
    payment = shop.one("SELECT status, failure FROM payments WHERE id = :id", id=order)
    assert (tuple(payment), told) == (("captured", None), [1])
    assert len(shop.events("payment.recovered", order)) == 1
    assert shop.one(CASE, id=order)[0] == "recovered"


def test_a_charge_whose_report_has_two_ids_is_known_when_it_is_asked_for(shop: Shop) -> None:
    """`id` and `charge_id` of a charge may differ."""
    from tasks.reported import reported_charge

    order = shop.order()
    shop.run("capture_payment")
    about = {"charge_id": "ch" + order, "gateway": "payment"}
    assert settle(shop, report("evt-object" + order, "succeeded", order, **about)) == ["applied"]
    assert shop.one("SELECT charge_id FROM payments WHERE id = :id", id=order)[0] == "ch" + order
    assert reported_charge(order, "idem-1", tenant="default") == "ch" + order


@pytest.mark.parametrize("is_named", [True, False])
def test_a_refund_that_was_found_to_have_failed_is_not_made_by_a_late_report(shop: Shop, is_named: bool) -> None:
    order, charge, refund_id, there = found_failed(shop)
    late = of_refund(order, refund_id if is_named else None, charge, "succeeded", there)
    assert settle(shop, late if is_named else replace(late, payment_id=None)) == ["applied"]
    shop.run()
    assert row_of(shop, refund_id) == ("refused", LOST)
    assert (shop.events("payment.refunded", order), posted_net(shop, order)) == ([], 1000)
    again = refund(shop, order, 1000)
    shop.run()
    assert row_of(shop, again)[0] == "refunded"


def test_what_the_provider_has_made_again_by_itself_is_made(shop: Shop) -> None:
    order, charge, refund_id, _ = found_failed(shop)
    assert settle(shop, of_refund(order, refund_id, charge, "succeeded", f"again_{order}")) == ["applied"]
    shop.run()
    assert (row_of(shop, refund_id), posted_net(shop, order)) == (("refunded", None), 600)


@pytest.mark.parametrize("second_is_made", [True, False])
def test_a_late_report_of_a_failed_call_decides_nothing_about_the_next_one(shop: Shop, second_is_made: bool) -> None:
    order, charge, refund_id, there = found_failed(shop)
    first = shop.one(KEY, id=refund_id)[0]
    shop.replay(refund_id)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "refund", lost)
        shop.deliver(shop.waiting()[0])
    assert shop.one(KEY, id=refund_id)[0] != first
    late = replace(of_refund(order, refund_id, charge, "succeeded", there), effect_key=first)
    assert settle(shop, late) == ["applied"]
    made = Happened({"id": f"second_{order}", "amount": 400, "currency": "EUR", "status": "succeeded"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "refund", lost)
        patch.setattr(
            shop.provider, "find_refund", lambda **_: made if second_is_made else has_failed(f"second_{order}")
        )
        shop.run()
    ended = ("completed", "refunded", 600) if second_is_made else ("failed", "refused", 1000)
    assert (operation(shop, refund_id).status, row_of(shop, refund_id)[0], posted_net(shop, order)) == ended


def test_a_named_failure_of_what_is_written_down_as_the_sites_reverses_that(shop: Shop) -> None:
    order, charge, refund_id, there = silent_refund(shop)
    give_up(shop, refund_id)
    resolve(shop, refund_id, DidNotHappen(), end=True)
    bare = replace(of_refund(order, None, charge, "succeeded", there), payment_id=None)
    assert settle(shop, bare) == ["applied"]
    assert settle(shop, of_refund(order, refund_id, charge, "failed", there)) == ["applied"]
    shop.run()
    assert (posted_net(shop, order), row_of(shop, f"stripe-{there}")[0]) == (1000, "reversed")


def test_a_name_of_somebody_elses_keeps_no_refund_from_being_written_down(shop: Shop) -> None:
    order, charge = captured(shop)
    mine = refund(shop, order)
    bare = replace(of_refund(order, None, charge, "succeeded", f"re_site{order}"), payment_id=None)
    assert settle(shop, bare) == ["waiting"]
    assert settle(shop, of_refund(order, "their-own-number", charge, "succeeded", f"re_site{order}")) == ["waiting"]
    shop.run()
    assert (row_of(shop, mine)[0], posted_net(shop, order)) == ("refunded", 200)


def test_another_providers_charge_of_the_same_id_is_another(shop: Shop) -> None:
    one, other = pay(shop), pay(shop)
    there = f"id_{len(shop.provider._done)}"
    assert settle(shop, report(there, "succeeded", one, gateway="payment")) == ["applied"]
    shop.deliver(next(sent for sent in shop.waiting() if sent.row.key == other))
    assert (posted_net(shop, one), posted_net(shop, other)) == (1000, 1000)


def test_two_payments_whose_charge_is_one_are_not_both_posted(shop: Shop) -> None:
    """At the same time, when neither sees the other."""
    from tasks import payments

    one, two = pay(shop), pay(shop)
    charge, gate = {"id": f"same_{one}", "amount": 1000, "currency": "EUR", "status": "succeeded"}, threading.Barrier(2)
    real = payments._other_payment

    def other(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        with suppress(threading.BrokenBarrierError):
            gate.wait(5)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(payments, "_other_payment", other)
        patch.setattr(shop.provider, "capture", lambda **_: charge)
        sent = [each for each in shop.waiting() if each.row.key in (one, two)]
        threads = [threading.Thread(target=shop.deliver, args=(each,)) for each in sent]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        gate.abort()
        shop.run()
    assert posted_net(shop, one) + posted_net(shop, two) == 1000
    status = "SELECT array_agg(status ORDER BY status) FROM payments WHERE id IN (:one, :two)"
    assert shop.one(status, one=one, two=two)[0] == ["captured", "unknown"]


def test_a_report_after_a_persons_wrong_word_posts_no_charge_twice(shop: Shop) -> None:
    one, other = pay(shop), pay(shop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "capture", lost)
        for sent in [each for each in shop.waiting() if each.row.key in (one, other)]:
            shop.deliver(sent)
    charge = f"ch_x{other}"
    take_for_the_charge_of(shop, one, charge)
    shop.replay(one)
    for sent in [each for each in shop.waiting() if each.row.key == one]:
        shop.deliver(sent)
    assert settle(shop, report(charge, "succeeded", other)) == ["waiting"]
    assert (posted_net(shop, one), posted_net(shop, other)) == (1000, 0)


def test_an_order_whose_refund_has_come_back_is_not_undone(shop: Shop) -> None:
    order = shop.order()
    shop.run("order.paid > warehouse")
    shop.cancel(order)
    shop.run()
    assert posted_net(shop, order) == 0
    row = shop.one("SELECT id, provider_refund_id AS there FROM refunds WHERE payment_id = :id", id=order)
    charge = shop.one("SELECT charge_id FROM payments WHERE id = :id", id=order)[0]
    assert settle(shop, of_refund(order, row.id, charge, "failed", row.there, 1000)) == ["applied"]
    shop.run()
    assert posted_net(shop, order) == 1000
    assert shop.observed(order).status == "COMPENSATING"
    refund(shop, order, 1000)
    shop.run()
    assert (posted_net(shop, order), shop.observed(order).status) == (0, "FAILED")


def test_a_refund_requested_before_the_charge_begins_waits_for_it(shop: Shop) -> None:
    order = shop.order()
    shop.run("charge_order")
    assert shop.one("SELECT status FROM payments WHERE id = :id", id=order)[0] == "PAYMENT_INITIATED"
    refund_id = refund(shop, order)
    shop.deliver(next(sent for sent in shop.waiting() if sent.row.key == refund_id))
    assert operation(shop, refund_id).status == "released"
    shop.run()
    assert shop.one("SELECT status FROM payments WHERE id = :id", id=order)[0] == "captured"
    assert (operation(shop, refund_id).status, row_of(shop, refund_id)[0]) == ("completed", "refunded")
