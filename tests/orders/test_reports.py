"""What providers report of charges, refunds and disputes: late, twice and in any order, with one end."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import text

from tests.orders.books import POSTED, check_order
from tests.orders.shop import Shop

pytestmark = pytest.mark.usefixtures("fresh")

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.fixture
def order(shop: Shop) -> str:
    """An order whose charge the provider has accepted, and not decided."""
    sku = f"sku-{uuid4().hex[:8]}"
    shop.receive(sku, 5)
    return slow_order(shop, sku)


def slow_order(shop: Shop, sku: str | None = None) -> str:
    order = shop.order(sku)
    shop.provider.slow.add(order)
    for sent in iter(lambda: next(iter(shop.waiting()), None), None):  # what its capture defers waits for a wake
        if shop.log[-1:] == ["payments.capture_payment"] and sent.what == "payments.capture_payment":
            break
        shop.deliver(sent)
    return order


def report(object_id: str, state: str, payment_id: str | None, **changes: Any) -> Any:
    from tasks.reports import Report

    about: dict[str, Any] = {
        "gateway": "stripe",
        "event_id": f"evt_{uuid4().hex}",
        "type": "test",
        "object": "charge",
        "object_id": object_id,
        "state": state,
        "charge_id": object_id,
        "amount": 1000,
        "currency": "EUR",
        "occurred_at": NOON,
        "payment_id": payment_id,
    }
    return Report(**about | changes)


def settle(shop: Shop, *reports: Any) -> Sequence[str]:
    from tasks.settlement import settle

    outcomes: list[str] = []
    for each in reports:
        with shop.transaction(each.tenant) as session:
            outcomes.append(settle(session, each))
    return outcomes


def posted(shop: Shop, payment_id: str) -> int:
    with shop.books.connect() as connection:
        return int(connection.execute(POSTED, {"id": payment_id}).scalar_one())


def operation(shop: Shop, key: str) -> Any:
    return shop.one(
        "SELECT status, error_code, available_at <= clock_timestamp() AS is_due FROM idempotency.records"
        " WHERE key = :id AND task IN ('payments.capture_payment', 'refunds.refund_payment')",
        id=key,
    )


def test_what_is_accepted_waits_and_its_report_pays_the_order_in_one_commit(shop: Shop, order: str) -> None:
    assert shop.status(order) == ("PENDING_PAYMENT", "pending", "STOCK_CONFIRMED")
    assert tuple(operation(shop, order)) == ("released", None, False)
    assert settle(shop, report(shop.provider.decide(order), "succeeded", order)) == ["applied"]
    assert shop.status(order) == ("PAID", "captured", "STOCK_CONFIRMED")
    assert posted(shop, order) == 1000
    # the operation has not ended: it is woken, and finds nothing missing
    assert tuple(operation(shop, order)) == ("released", None, True)
    shop.run()
    assert operation(shop, order).status == "completed"
    assert [len(shop.events(type, order)) for type in ("payment.captured", "order.paid")] == [1, 1]
    check_order(shop, order, "PROCESSING")


def test_a_report_of_failure_cancels_the_order_in_one_commit_and_nothing_is_charged_again(
    shop: Shop, order: str
) -> None:
    failed = report(shop.provider.decide(order, is_paid=False), "failed", order, code="debit_refused")
    assert settle(shop, failed) == ["applied"]
    assert shop.status(order)[:2] == ("CANCELLED", "failed")
    shop.run()
    assert tuple(operation(shop, order))[:2] == ("failed", "debit_refused")
    assert len(shop.events("payment.failed", order)) == 1
    check_order(shop, order, "CANCELLED")


@pytest.mark.parametrize("report_first", [True, False])
def test_a_charge_whose_task_got_no_answer_is_settled_once_whoever_comes_first(shop: Shop, report_first: bool) -> None:
    order = shop.order()
    shop.provider.silent.add(order)
    while not shop.provider.count(shop.provider.charges, order):
        shop.deliver(shop.waiting()[0])
    succeeded = report("id_" + str(len(shop.provider._done) - 1), "succeeded", order)
    if report_first:
        assert settle(shop, succeeded) == ["applied"]
        shop.run()
    else:
        shop.run()
        assert settle(shop, succeeded) == ["applied"]
        shop.run()
    assert operation(shop, order).status == "completed"
    assert posted(shop, order) == 1000
    check_order(shop, order, "PROCESSING")


@pytest.mark.long
def test_reports_come_in_any_order_twice_and_late(shop: Shop) -> None:
    for seed, turns in enumerate(itertools.islice(itertools.permutations(range(4)), 0, None, 2)):
        order = slow_order(shop)
        charge = shop.provider.decide(order)
        part = {"object": "refund", "amount": 300, "charge_id": charge}
        reports = [
            report(charge, "succeeded", order),
            report(charge, "failed", order, occurred_at=NOON - timedelta(seconds=9)),
            report("re_1" + order, "succeeded", order, **part),
            report("re_2" + order, "succeeded", order, **part),
        ]
        chance = random.Random(seed)
        for each in turns:
            settle(shop, reports[each])
            again = replace(chance.choice(reports), event_id=f"evt_{uuid4().hex}")
            if again.state == "succeeded" or each == 0:
                settle(shop, again)
            if chance.random() < 0.3:
                shop.run()
        settle(shop, *[replace(each, event_id=f"evt_{uuid4().hex}") for each in reports])
        shop.run()
        payment = shop.one("SELECT status, refunded FROM payments WHERE id = :id", id=order)
        # a late failure may have cancelled the order before its success was heard of; then the rest is given back
        cancelled = shop.status(order)[0] == "CANCELLED"
        assert tuple(payment) == ("captured", 1000 if cancelled else 600), turns
        assert posted(shop, order) == 1000 - payment.refunded, turns
        assert operation(shop, order).status == "completed"


def captured(shop: Shop) -> tuple[str, str]:
    """The order and its charge."""
    order = shop.order()
    shop.run()
    return order, shop.one("SELECT charge_id FROM payments WHERE id = :id", id=order)[0]


def refund(shop: Shop, order: str, amount: int = 400) -> str:
    refund_id = f"rf-{uuid4().hex[:8]}"
    with shop.transaction() as session:
        shop.refunds.submit_refund(session, refund_id=refund_id, payment_id=order, amount=amount, reason="test")
    return refund_id


def of_refund(shop: Shop, order: str, refund_id: str, state: str, id: str | None = None) -> Any:
    row = shop.one(
        "SELECT r.provider_refund_id AS id, r.amount, p.charge_id FROM refunds r JOIN payments p ON p.id = r.payment_id"
        " WHERE r.id = :id",
        id=refund_id,
    )
    about = {"object": "refund", "charge_id": row.charge_id, "refund_id": refund_id, "amount": row.amount}
    return report(id or row.id, state, order, **about)


@pytest.mark.long
def test_a_refund_that_fails_later_is_reversed_once_and_owed_again(shop: Shop) -> None:
    order, _ = captured(shop)
    refund_id = refund(shop, order)
    shop.run()
    assert posted(shop, order) == 600
    failed = of_refund(shop, order, refund_id, "failed")
    assert settle(shop, failed, replace(failed, event_id="evt_again" + order)) == ["applied", "duplicate"]
    settle(shop, of_refund(shop, order, refund_id, "succeeded"))  # older, and late
    shop.run()
    assert shop.one("SELECT status, failure FROM refunds WHERE id = :id", id=refund_id) == ("reversed", "failed")
    assert shop.one("SELECT refunded FROM payments WHERE id = :id", id=order)[0] == 0
    with shop.books.connect() as connection:
        kinds = connection.execute(
            text("SELECT kind, amount FROM ledger WHERE payment_id = :id ORDER BY id"), {"id": order}
        )
        assert [tuple(row) for row in kinds] == [("capture", 1000), ("refund", 400), ("reversal", 400)]
    assert len(shop.events("payment.refund_failed", order)) == 1


@pytest.mark.long
def test_a_refund_that_has_failed_before_its_task_ends_is_reversed_by_it(shop: Shop) -> None:
    order, _ = captured(shop)
    refund_id = refund(shop, order)
    number = len(shop.provider._done)
    assert settle(shop, of_refund(shop, order, refund_id, "failed", id=f"id_{number}")) == ["applied"]
    shop.run()
    assert shop.one("SELECT status FROM refunds WHERE id = :id", id=refund_id)[0] == "reversed"
    assert shop.one("SELECT refunded FROM payments WHERE id = :id", id=order)[0] == 0


@pytest.mark.long
def test_what_somebody_refunds_at_the_provider_is_written_down_and_two_parts_are_two(shop: Shop) -> None:
    order, charge = captured(shop)
    parts = [
        report(f"re_{number}{order}", "succeeded", order, object="refund", charge_id=charge, amount=300)
        for number in range(2)
    ]
    assert settle(shop, *parts, *parts) == ["applied", "applied", "duplicate", "duplicate"]
    assert posted(shop, order) == 400
    assert shop.one("SELECT refunded FROM payments WHERE id = :id", id=order)[0] == 600
    too_much = report(f"re_9{order}", "succeeded", order, object="refund", charge_id=charge, amount=500)
    assert settle(shop, too_much) == ["waiting"]
    assert posted(shop, order) == 400


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "change", [{"amount": 999}, {"currency": "USD"}, {"payment_id": None}, {"payment_id": "unknown"}]
)
def test_a_charge_that_is_not_of_the_payment_changes_nothing(shop: Shop, order: str, change: dict[str, Any]) -> None:
    charge = shop.provider.decide(order)
    assert settle(shop, replace(report(charge, "succeeded", order), **change)) == ["waiting"]
    assert shop.status(order)[:2] == ("PENDING_PAYMENT", "pending")
    assert settle(shop, replace(report(charge, "succeeded", order), tenant="other")) == ["waiting"]
    assert shop.status(order)[:2] == ("PENDING_PAYMENT", "pending")
    shop.provider.slow.discard(order)


@pytest.mark.long
def test_a_second_charge_of_a_payment_is_kept_and_changes_nothing(shop: Shop) -> None:
    order, _ = captured(shop)
    assert settle(shop, report("pi_other" + order, "succeeded", order)) == ["waiting"]
    assert posted(shop, order) == 1000


@pytest.mark.long
def test_a_report_about_an_operation_in_doubt_settles_the_payment_and_its_replay_finds_it(shop: Shop) -> None:
    order = slow_order(shop)
    with shop.books.begin() as connection:
        connection.execute(
            text(
                "UPDATE idempotency.records SET effects = jsonb_set(effects, '{capture,begun_at}', '1') WHERE key = :key"
            ),
            {"key": order},
        )
    settle(shop, report(shop.provider.decide(order), "succeeded", order))
    assert shop.status(order)[:2] == ("PAID", "captured")
    shop.run()
    assert operation(shop, order).status == "completed"
    check_order(shop, order, "PROCESSING")


@pytest.mark.long
def test_a_dispute_is_kept_as_it_was_reported_last_and_its_end_stays(shop: Shop) -> None:
    order, charge = captured(shop)

    def dispute(state: str, seconds: int) -> str:
        about = {"object": "dispute", "charge_id": charge, "code": "fraudulent"}
        when = NOON + timedelta(seconds=seconds)
        settle(shop, report("dp" + order, state, order, occurred_at=when, **about))
        return str(shop.one("SELECT status FROM disputes WHERE id = :id", id="dp" + order)[0])

    assert dispute("under_review", 5) == "under_review"
    assert dispute("needs_response", 3) == "under_review"
    assert dispute("lost", 5) == "lost"
    assert dispute("warning_under_review", 9) == "lost"


@pytest.mark.long
def test_an_operation_that_runs_when_it_is_reported_asks_once_more(shop: Shop) -> None:
    order = shop.order()
    shop.provider.slow.add(order)
    asked = shop.provider.capture

    def capture(**call: Any) -> Any:
        try:
            return asked(**call)
        finally:
            shop.provider.capture = asked  # type: ignore[method-assign]
            settle(shop, report(shop.provider.decide(order), "succeeded", order))

    shop.provider.capture = capture  # type: ignore[method-assign]
    while "payments.capture_payment" not in shop.log:
        shop.deliver(shop.waiting()[0])
    # at once, and not in the hour that it had asked for
    assert tuple(operation(shop, order)) == ("released", None, True)
    shop.run()
    assert operation(shop, order).status == "completed"
    check_order(shop, order, "PROCESSING")
