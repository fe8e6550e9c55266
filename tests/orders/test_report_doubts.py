"""What is concluded from reports that are late, odd, of another charge or in each other's way."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import httpx
import pytest
from pydantic import SecretStr
from sqlalchemy.exc import OperationalError

from idempotency import DidNotHappen, Happened, OperationId, StillUnknown, StoredFailure, StoredRefusal
from idempotency.application import runtime_of, settings_of
from tasks.gateway import GatewayError
from tests.orders.shop import Shop
from tests.orders.test_reports import NOON, captured, operation, posted, refund, report, settle, slow_order
from tests.orders.test_webhooks import NEW, event, post, signed
from tests.support.edge import within
from tests.support.operators import ANN

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _fresh(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    import celeryconfig

    shop.forget()
    monkeypatch.setattr(celeryconfig.environment, "stripe_webhook_secrets", SecretStr(NEW))


def of_refund(order: str, refund_id: str | None, charge: str, state: str, id: str, amount: int = 400) -> Any:
    about = {"object": "refund", "charge_id": charge, "refund_id": refund_id, "amount": amount}
    return report(id, state, order, **about)


def silent_refund(shop: Shop) -> tuple[str, str, str, str]:
    """A refund that the provider has made, and whose answer was lost: order, charge, refund, and its id there."""
    order, charge = captured(shop)
    refund_id = refund(shop, order)
    shop.provider.silent.add(refund_id)
    before = len(shop.provider._done)
    shop.deliver(shop.waiting()[0])
    return order, charge, refund_id, f"id_{before}"


@pytest.mark.parametrize("failure_is_reported", [True, False])
def test_a_refund_reported_as_made_and_polled_as_failed_is_freed_once(
    shop: Shop,
    failure_is_reported: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its answer was lost; a report says that it was made, and the provider, asked later, that it has failed."""
    order, charge, refund_id, there = silent_refund(shop)
    reports = [of_refund(order, refund_id, charge, "succeeded", there)]
    if failure_is_reported:
        reports.append(of_refund(order, refund_id, charge, "failed", there))
    settle(shop, *reports)
    refused = StoredRefusal("refund was refused: lost_or_stolen_card", "lost_or_stolen_card")
    monkeypatch.setattr(shop.provider, "find_refund", lambda **_: DidNotHappen(refused))
    shop.run()
    ended = operation(shop, refund_id)
    row = shop.one("SELECT status, failure FROM refunds WHERE id = :id", id=refund_id)
    owed = shop.one("SELECT refunded FROM payments WHERE id = :id", id=order)[0]
    letter = shop.one("SELECT min(reason) FROM idempotency.dead_letters WHERE key = :id", id=refund_id)[0]
    assert (tuple(ended)[:2], row.status, owed, posted_net(shop, order), letter) == (
        ("failed", "lost_or_stolen_card"),
        "reversed",
        0,
        1000,
        "lost_or_stolen_card",
    )


def posted_net(shop: Shop, payment_id: str) -> int:
    query = "SELECT coalesce(sum(CASE kind WHEN 'refund' THEN -amount ELSE amount END), 0) FROM ledger WHERE payment_id = :id"
    return int(shop.one(query, id=payment_id)[0])


@pytest.mark.parametrize("change", [{"amount": 999}, {"currency": "USD"}])
def test_a_failed_charge_of_another_amount_cancels_no_order(shop: Shop, change: dict[str, Any]) -> None:
    """It is not the payment's charge, so its failure says nothing about the payment."""
    order = slow_order(shop)
    settle(shop, replace(report("pi_other" + order, "failed", order, code="card_declined"), **change))
    assert shop.status(order)[:2] == ("PENDING_PAYMENT", "pending")


def test_the_late_failure_of_an_earlier_charge_does_not_fail_the_next_one(shop: Shop) -> None:
    """The provider replayed a 500 for the first key; under the next one the bank is deciding."""
    order = slow_order(shop)
    settle(shop, report("pi_first" + order, "failed", order, code="canceled", effect_key="idem-first"))
    settle(shop, report(shop.provider.decide(order), "succeeded", order))
    shop.run()
    assert shop.status(order)[:2] == ("PROCESSING", "captured")


@pytest.mark.parametrize("is_known", [False, True])
def test_a_charge_that_is_reported_as_failed_is_not_made_under_the_next_key(
    shop: Shop, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The provider keeps a 500 for its key, and its search finds nothing yet: not finding it means to charge again.

    `is_known`: whether the report comes when the 500 is known already, and the attempt waits for the search.
    """
    order = shop.order()
    keys: list[str] = []

    def lost(*, idempotency_key: str, **_: Any) -> Any:
        keys.append(idempotency_key)
        if len(keys) == 1:
            raise GatewayError("no answer")
        raise StoredFailure("the payment provider replays a stored 500 for this key")

    monkeypatch.setattr(shop.provider, "capture", lost)
    monkeypatch.setattr(shop.provider, "find_capture", lambda **_: StillUnknown(1.0))
    while len(keys) <= is_known:
        shop.deliver(shop.waiting()[0])
    failed = report("pi_" + order, "failed", order, code="card_declined", effect_key=keys[0])
    assert settle(shop, failed) == ["applied"]
    assert shop.status(order)[:2] == ("CANCELLED", "failed")
    monkeypatch.setattr(shop.provider, "find_capture", lambda **_: DidNotHappen())
    calls = len(keys)
    shop.run()
    assert tuple(operation(shop, order))[:2] == ("failed", "card_declined")
    assert (len(keys), shop.status(order)[:2]) == (calls, ("CANCELLED", "failed"))
    assert len(shop.events("payment.failed", order)) == 1
    assert posted(shop, order) == 0


def unanswered_charge(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[str]]:
    """An order whose charge gets no answer, whenever it is called; and the keys of those calls."""
    order = shop.order()
    keys: list[str] = []

    def lost(*, idempotency_key: str, **_: Any) -> Any:
        keys.append(idempotency_key)
        raise GatewayError("no answer")

    monkeypatch.setattr(shop.provider, "capture", lost)
    while not keys:
        shop.deliver(shop.waiting()[0])
    return order, keys


def test_a_charge_that_was_reported_as_failed_stays_failed_when_its_task_hears_no_more(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No answer of the provider comes, and its search does not know: the report decides, and it will not come twice."""
    order, keys = unanswered_charge(shop, monkeypatch)
    monkeypatch.setattr(shop.provider, "find_capture", lambda **_: StillUnknown())
    assert settle(shop, report("pi_" + order, "failed", order, code="card_declined", effect_key=keys[0])) == ["applied"]
    shop.run()
    assert tuple(operation(shop, order))[:2] == ("failed", "card_declined")
    assert (shop.status(order)[:2], len(shop.events("payment.failed", order))) == (("CANCELLED", "failed"), 1)


def test_a_failure_of_another_call_says_nothing_of_the_one_in_doubt(shop: Shop) -> None:
    """It names no key; the charge in doubt is asked about, found, and given back with its cancelled order."""
    order = shop.order()
    shop.provider.silent.add(order)
    while not shop.provider.count(shop.provider.charges, order):
        shop.deliver(shop.waiting()[0])
    assert settle(shop, report("pi_other" + order, "failed", order, code="card_declined")) == ["applied"]
    shop.run()
    assert operation(shop, order).status == "completed"
    assert (shop.status(order)[:2], posted(shop, order)) == (("CANCELLED", "captured"), 0)


def test_a_charge_under_a_later_key_that_was_forgotten_is_not_taken_for_refused(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restore, the key in doubt is one whose failure was reported, and the next key, which is forgotten, has charged."""
    order, keys = unanswered_charge(shop, monkeypatch)
    settle(shop, report("pi_next" + order, "succeeded", order, effect_key="idem-next"))
    settle(shop, report("pi_" + order, "failed", order, code="card_declined", effect_key=keys[0]))
    found = {"id": "pi_next" + order, "amount": 1000, "currency": "EUR", "status": "succeeded"}
    monkeypatch.setattr(shop.provider, "find_capture", lambda **_: Happened(found))
    shop.run()
    assert operation(shop, order).status == "completed"
    assert (shop.status(order)[:2], posted(shop, order)) == (("PROCESSING", "captured"), 1000)


def test_what_waits_for_a_charge_is_applied_when_its_task_captures_it(shop: Shop) -> None:
    """A refund at the provider's site is reported while the charge is in doubt, and the report of the charge is lost."""
    order = slow_order(shop)
    charge = shop.provider.decide(order)
    early = of_refund(order, None, charge, "succeeded", "re_1" + order, amount=300)
    assert settle(shop, early) == ["waiting"]
    wake(shop, order)
    shop.run()
    assert shop.status(order)[:2] == ("PROCESSING", "captured")
    settle(shop, replace(early, event_id=f"evt_{uuid4().hex}"))
    assert posted(shop, order) == 700


def wake(shop: Shop, order: str) -> None:
    from tasks.settlement import _wake

    with shop.transaction() as session:
        _wake(session, "payments.capture_payment", "default", order)


def test_a_refund_at_the_site_is_posted_once_our_reserved_one_is_refused(shop: Shop) -> None:
    """While ours is reserved nothing is left for it; then the provider refuses ours."""
    order, charge = captured(shop)
    refund_id = refund(shop, order, amount=1000)
    asked: list[Any] = []

    def refuse(**call: Any) -> Any:
        if not asked:
            asked.append(call)
            by_hand = of_refund(order, None, charge, "succeeded", "re_site" + order, amount=1000)
            assert settle(shop, by_hand) == ["waiting"]
        raise StoredRefusal("the charge has been refunded", "charge_already_refunded")

    shop.provider.refund = refuse  # type: ignore[method-assign]
    try:
        shop.run()
    finally:
        del shop.provider.refund
    assert operation(shop, refund_id).status == "failed"
    settle(shop, replace(of_refund(order, None, charge, "succeeded", "re_site" + order, amount=1000)))
    assert (posted(shop, order), shop.one("SELECT refunded FROM payments WHERE id = :id", id=order)[0]) == (0, 1000)


def test_a_refund_in_another_currency_is_not_posted_in_ours(shop: Shop) -> None:
    order, charge = captured(shop)
    other = of_refund(order, None, charge, "succeeded", "re_jpy" + order, amount=300)
    settle(shop, replace(other, currency="JPY"))
    assert posted(shop, order) == 1000


def test_a_dispute_that_changes_within_a_state_is_kept(shop: Shop) -> None:
    """`charge.dispute.updated` brings another amount in the same state."""
    order, charge = captured(shop)
    first = report(
        "dp" + order, "needs_response", order, object="dispute", charge_id=charge, amount=1000, code="general"
    )
    later = replace(first, event_id=f"evt_{uuid4().hex}", amount=400, occurred_at=NOON + timedelta(hours=1))
    settle(shop, first, later)
    assert shop.one("SELECT amount FROM disputes WHERE id = :id", id="dp" + order)[0] == 400


def test_a_dispute_that_goes_back_to_an_earlier_state_is_kept(shop: Shop) -> None:
    """It needs a response again: the deadline runs."""
    order, charge = captured(shop)
    for number, state in enumerate(("needs_response", "under_review", "needs_response")):
        about = {"object": "dispute", "charge_id": charge, "occurred_at": NOON + timedelta(hours=number)}
        settle(shop, report("dp" + order, state, order, **about))
    assert shop.one("SELECT status FROM disputes WHERE id = :id", id="dp" + order)[0] == "needs_response"


def test_a_stripe_refund_without_metadata_is_taken(shop: Shop) -> None:
    """At Stripe, `metadata` may be null."""
    order, charge = captured(shop)
    thing = {"id": "re_null" + order, "object": "refund", "status": "succeeded", "amount": 300, "currency": "eur"}
    document = {
        "id": f"evt_{uuid4().hex}",
        "type": "refund.created",
        "created": 1_772_366_400,
        "data": {"object": thing | {"payment_intent": charge, "metadata": None, "reason": None}},
    }
    from tasks import outside
    from tasks.gateway import Moved

    body = json.dumps(document).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outside.gateway, "charge", lambda id: Moved(id, id, 1000, "EUR", "default", order))
        answer = post("/webhooks/stripe", body, signed(body))
    assert (answer.status_code, posted(shop, order)) == (200, 700)


def test_a_report_while_the_provider_fails_is_answered_with_503(
    shop: Shop,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A dispute names no payment, so the provider is asked."""
    from tasks import outside
    from tasks.gateway import GatewayError

    def fail(id: str) -> Any:
        raise GatewayError("the payment provider failed: 500")

    monkeypatch.setattr(outside.gateway, "charge", fail)
    thing = {"id": "dp_1", "object": "dispute", "status": "needs_response", "amount": 1000, "currency": "eur"}
    document = {"id": "evt_f", "type": "charge.dispute.created", "created": 1_772_366_400}
    body = json.dumps(document | {"data": {"object": thing | {"payment_intent": "pi_1"}}}).encode()
    try:
        status = post("/webhooks/stripe", body, signed(body)).status_code
    except GatewayError:
        status = 500
    assert status == 503


def test_the_report_of_a_refund_and_the_end_of_its_task_do_not_deadlock(shop: Shop) -> None:
    """Both lock the payment, and then the refund."""
    order, charge = captured(shop)
    refund_id = refund(shop, order)
    there = f"id_{len(shop.provider._done)}"
    from tasks import settlement
    from tasks.refunds import locked, mark_refunded

    shop.provider.silent.add(refund_id)
    shop.deliver(shop.waiting()[0])
    reached, go_on, errors = threading.Event(), threading.Event(), []

    def by_report() -> None:
        real = settlement._refund_of

        def paused(*args: Any) -> Any:
            reached.set()
            go_on.wait(10)
            return real(*args)

        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(settlement, "_refund_of", paused)
                settle(shop, of_refund(order, refund_id, charge, "succeeded", there))
        except OperationalError as error:
            errors.append(error)

    thread = threading.Thread(target=by_report)
    thread.start()
    assert reached.wait(10)
    try:  # what the end of `refund_payment` does
        with shop.transaction() as session:
            threading.Timer(0.5, go_on.set).start()
            row, _ = locked(session, refund_id, tenant="default")
            assert row is not None
            mark_refunded(session, row, there)
    except OperationalError as error:
        errors.append(error)
    thread.join(20)
    shop.run()
    assert [type(error.orig).__name__ for error in errors] == []


def test_an_unknown_state_of_another_provider_is_refused(shop: Shop) -> None:
    """An integration with a wrong word must not look healthy."""
    from tasks.reports import Malformed, of_standard

    body = json.dumps(
        {"type": "charge", "id": "ch", "charge_id": "ch", "state": "paid", "amount": 1, "currency": "EUR"}
        | {"occurred_at": "2026-03-01T12:00:00Z", "payment_id": "order-1"}
    ).encode()
    with pytest.raises(Malformed, match="state"):
        of_standard("msg_1", body)


def test_a_report_of_a_time_that_no_clock_has_is_refused() -> None:
    """Postgres would keep it, and Python could not read it back: every later report of its charge would fail."""
    from tasks.reports import Malformed, of_standard

    body = {"type": "refund", "id": "re_1", "charge_id": "ch_1", "state": "succeeded", "amount": 1, "currency": "EUR"}
    odd = json.dumps(body | {"occurred_at": "9999-12-31T23:59:59-10:00", "payment_id": "order"}).encode()
    with pytest.raises(Malformed, match="occurred_at"):
        of_standard("msg_1", odd)


def test_support_is_told_of_a_refund_that_failed_later(shop: Shop) -> None:
    """Of an order that is not cancelled."""
    order, charge = captured(shop)
    refund_id = refund(shop, order)
    shop.run()
    (there,) = shop.one("SELECT provider_refund_id FROM refunds WHERE id = :id", id=refund_id)
    settle(shop, of_refund(order, refund_id, charge, "failed", there))
    shop.run()
    assert shop.one("SELECT status FROM refunds WHERE id = :id", id=refund_id)[0] == "reversed"
    assert shop.one("SELECT code FROM support_cases WHERE payment_id = :id", id=order)[0] == "refund_failed"


def test_a_malformed_time_in_a_valid_signature_is_a_401(shop: Shop) -> None:
    """Stripe's SDK takes "t=123=x" for the time 123."""
    body = json.dumps({"id": "evt_t", "type": "payout.paid", "data": {"object": {"object": "payout"}}}).encode()
    header = signed(body)["Stripe-Signature"].replace(",v1", "=x,v1")
    try:
        status = post("/webhooks/stripe", body, {"Stripe-Signature": header}).status_code
    except ValueError:
        status = 500
    assert status == 401


def test_reports_of_one_charge_hold_up_no_report_of_another(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for its lock, but not for long."""
    from api.application import create_app
    from tasks import settlement

    monkeypatch.setattr(settlement, "WAIT_SECONDS", 1.5)
    order = slow_order(shop)
    shop.forget()
    other = slow_order(shop)
    charge = shop.provider.decide(order)
    bodies = [event(charge, order, created=number) for number in range(4)]
    body = event(shop.provider.decide(other), other)

    async def send(client: httpx.AsyncClient) -> int:
        def posted(body: bytes) -> Any:
            return client.post("/webhooks/stripe", content=body, headers=signed(body))

        waiting = [asyncio.create_task(posted(each)) for each in bodies]
        await asyncio.sleep(1.0)
        try:
            return int((await asyncio.wait_for(posted(body), 10.0)).status_code)
        except TimeoutError:
            return 0
        finally:
            await asyncio.gather(*waiting)

    with shop.transaction() as session:
        session.execute(settlement._OF_CHARGE, {"charge": f"stripe {charge}"})
        status = asyncio.run(within(create_app(), send))
    assert status == 200


def test_a_refund_that_a_report_has_noted_is_not_made_again_by_a_replay(shop: Shop) -> None:
    """A person found nothing at the provider and said so; then the webhook came."""
    from idempotency.operate.cancel import cancel
    from idempotency.operate.change import read
    from idempotency.operate.resolve import resolve_effect

    order, charge, refund_id, there = silent_refund(shop)
    id = OperationId("default", "refunds.refund_payment", refund_id)

    def seen() -> Any:
        with runtime_of(shop.app).autocommit() as connection:
            return read(connection, id, settings_of(shop.app).service)

    with shop.operating():
        cancel(shop.app, seen(), ANN, may_have_happened=True)
        resolve_effect(shop.app, seen(), "refund", DidNotHappen(), ANN)
    assert settle(shop, of_refund(order, refund_id, charge, "succeeded", there)) == ["applied"]
    assert shop.one("SELECT status FROM refunds WHERE id = :id", id=refund_id)[0] == "refunded"
    shop.replay(refund_id)
    shop.run()
    assert shop.provider.count(shop.provider.refunds, order) == 1


def test_what_an_operator_cancels_ends_in_the_business_rows_too(shop: Shop) -> None:
    """`on_failed` and undos run with the role of people's commands."""
    from idempotency.operate.cancel import cancel
    from idempotency.operate.change import read

    order = slow_order(shop)
    id = OperationId("default", "payments.capture_payment", order)
    with shop.operating():
        with runtime_of(shop.app).autocommit() as connection:
            seen = read(connection, id, settings_of(shop.app).service)
        cancel(shop.app, seen, ANN, may_have_happened=True)
    letter = shop.one("SELECT reason FROM idempotency.dead_letters WHERE key = :id", id=order)[0]
    status = shop.one("SELECT status FROM payments WHERE id = :id", id=order)[0]
    assert (letter, status) == ("effect_unknown", "unknown")
