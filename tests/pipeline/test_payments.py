"""The application on real servers, a real worker, the provider's sandbox and a mail sink."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
import requests
from sqlalchemy import text
from sqlalchemy.orm import Session

from sandbox import ledger
from tests.support.processes import eventually
from tests.support.shop import Shop, running


@pytest.fixture(scope="module")
def shop(servers: Any, template: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with running(servers, template, tmp_path_factory.mktemp("shop")) as shop:
        yield shop


def test_a_purchase_is_charged_posted_and_announced_once(shop: Shop) -> None:
    payment_id = shop.buy(1234)
    for _ in range(3):
        shop.payments.capture_payment.delay(payment_id=payment_id)
    payment = shop.ended("payments", payment_id)

    assert payment.status == "captured"
    assert shop.charges(payment_id) == [1234]
    eventually(lambda: mails(shop, payment_id) == 1)
    with shop.engine.connect() as connection:
        entries = connection.execute(
            text("SELECT account, amount FROM ledger_entries WHERE reference = :id ORDER BY account"),
            {"id": payment_id},
        ).all()
    assert [tuple(entry) for entry in entries] == [("provider", 1234), ("revenue", -1234)]


def test_a_free_purchase_is_completed_without_a_charge(shop: Shop) -> None:
    payment_id = shop.buy(0)
    assert shop.ended("payments", payment_id).status == "free"
    assert shop.charges(payment_id) == []


@pytest.mark.few(1)
@pytest.mark.parametrize("fault", ["error_500_after", "timeout_after", "error_500_before", "rate_limited"])
def test_whatever_the_provider_does_a_purchase_is_charged_once(shop: Shop, fault: str) -> None:
    payment_id = shop.buy(500, faults=[fault])
    assert shop.ended("payments", payment_id).status == "captured"
    assert shop.charges(payment_id) == [500]


def test_a_declined_card_fails_the_payment_and_leaves_a_dead_letter(shop: Shop) -> None:
    payment_id = shop.buy(500, faults=["declined"])
    payment = shop.ended("payments", payment_id)
    assert (payment.status, payment.failure) == ("failed", "card_declined")
    assert shop.charges(payment_id) == []
    with shop.engine.connect() as connection:
        reasons = connection.execute(
            text("SELECT reason FROM idempotency.dead_letters WHERE key = :key"), {"key": payment_id}
        ).scalars()
        assert list(reasons) == ["card_declined"]


def test_a_rate_limit_uses_no_attempt(shop: Shop) -> None:
    payment_id = shop.buy(500, faults=["rate_limited"])
    shop.ended("payments", payment_id)
    assert shop.record(payment_id).attempts == 1


def test_a_refund_of_more_than_is_left_is_refused_and_gives_nothing_back(shop: Shop) -> None:
    payment_id = shop.buy(1000)
    shop.ended("payments", payment_id)
    assert shop.ended("refunds", shop.give_back(payment_id, 700)).status == "refunded"
    too_much = shop.give_back(payment_id, 301)
    refund = shop.ended("refunds", too_much)

    assert (refund.status, refund.failure) == ("refused", "exceeds_captured")
    assert json.loads(shop.record(too_much).error)["message"] == "amount: at most 300 left to refund, got 301"
    assert shop.refunds_of(payment_id) == [700]
    assert shop.row("payments", payment_id).refunded == 700
    assert shop.ended("refunds", shop.give_back(payment_id, 300)).status == "refunded"


def test_two_refunds_that_race_past_the_total_give_back_one(shop: Shop) -> None:
    payment_id = shop.buy(1000)
    shop.ended("payments", payment_id)
    first, second = shop.give_back(payment_id, 600), shop.give_back(payment_id, 600)
    statuses = sorted(shop.ended("refunds", id).status for id in (first, second))

    assert statuses == ["refunded", "refused"]
    assert shop.refunds_of(payment_id) == [600]
    assert shop.row("payments", payment_id).refunded == 600


def test_two_refunds_within_the_total_are_both_given_back(shop: Shop) -> None:
    payment_id = shop.buy(1000)
    shop.ended("payments", payment_id)
    refunds = [shop.give_back(payment_id, 400), shop.give_back(payment_id, 600)]
    assert [shop.ended("refunds", id).status for id in refunds] == ["refunded", "refunded"]
    assert sorted(shop.refunds_of(payment_id)) == [400, 600]


def test_a_refund_of_a_pending_payment_is_deferred_and_uses_no_attempt(shop: Shop) -> None:
    payment_id = f"p-{uuid4().hex[:10]}"
    with Session(shop.engine) as session, session.begin():
        session.add(shop.payments.Payment(id=payment_id, customer_id="c", amount=700, currency="USD"))
    refund_id = shop.give_back(payment_id, 700)
    eventually(lambda: (row := shop.record(refund_id)) is not None and row.status == "released")
    assert shop.record(refund_id).attempts == 0

    with Session(shop.engine) as session, session.begin():
        shop.payments.capture_payment.enqueue(session, payment_id=payment_id)
    assert shop.ended("refunds", refund_id).status == "refunded"


@pytest.mark.parametrize(
    ("kind", "code"), [("unknown", "payment_unknown"), ("free", "payment_free"), ("failed", "payment_failed")]
)
def test_a_refund_of_an_uncaptured_payment_is_refused_and_the_row_says_why(shop: Shop, kind: str, code: str) -> None:
    if kind == "unknown":
        payment_id = "p-nowhere"
    else:
        payment_id = shop.buy(0) if kind == "free" else shop.buy(500, faults=["declined"])
        shop.ended("payments", payment_id)
    refund = shop.ended("refunds", shop.give_back(payment_id, 100))
    assert (refund.status, refund.failure) == ("refused", code)


def test_a_refund_answered_500_after_it_was_made_is_made_once(shop: Shop) -> None:
    payment_id = shop.buy(1000)
    shop.ended("payments", payment_id)
    body = {"next": ["error_500_after"], "only": {"purchase_id": payment_id}}
    requests.post(f"{shop.provider.url}/_sandbox/faults", json=body, timeout=5).raise_for_status()
    assert shop.ended("refunds", shop.give_back(payment_id, 300)).status == "refunded"
    assert shop.refunds_of(payment_id) == [300]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("amount", -1, "amount_cents: must be between 0"),
        ("amount", 1.5, "amount_cents: must be an integer"),
        ("amount", 10**12, "amount_cents: must be between 0"),
        ("amount", 2**63, "amount_cents: must be between 0"),
        ("currency", "XXX", "currency: must be one of"),
        ("payment_id", "", "purchase_id: must not be empty"),
        ("payment_id", "x" * 256, "purchase_id: at most 255 characters, got 256"),
    ],
)
def test_a_bad_purchase_is_refused_by_field_and_nothing_is_written(
    shop: Shop, field: str, value: Any, says: str
) -> None:
    purchase = {
        "payment_id": f"p-{uuid4().hex[:10]}",
        "customer_id": "c1",
        "amount": 5,
        "currency": "USD",
        field: value,
    }
    with Session(shop.engine) as session, session.begin(), pytest.raises(ValueError, match=says):
        shop.payments.submit_payment(session, **purchase)
    with shop.engine.connect() as connection:
        assert not connection.execute(
            text("SELECT 1 FROM idempotency.outbox WHERE key = :key"), {"key": purchase["payment_id"]}
        ).all()


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("amount", 0, "amount_cents: must be between 1"),
        ("amount", -1, "amount_cents: must be between 1"),
        ("amount", 2**63, "amount_cents: must be between 1"),
        ("amount", 1.5, "amount_cents: must be an integer"),
        ("refund_id", "a\nb", r"refund_id: only printable ASCII, got U\+000A at position 1"),
        ("payment_id", "", "purchase_id: must not be empty"),
        ("reason", "x" * 201, "reason: at most 200 printable characters"),
    ],
)
def test_a_bad_refund_is_refused_by_field_and_nothing_is_written(shop: Shop, field: str, value: Any, says: str) -> None:
    refund = {"refund_id": f"r-{uuid4().hex[:10]}", "payment_id": "p", "amount": 5, "reason": "test", field: value}
    with Session(shop.engine) as session, session.begin(), pytest.raises(ValueError, match=says):
        shop.refunds.submit_refund(session, **refund)
    with shop.engine.connect() as connection:
        for query in ("SELECT 1 FROM refunds WHERE id = :id", "SELECT 1 FROM idempotency.outbox WHERE key = :id"):
            assert not connection.execute(text(query), {"id": refund["refund_id"]}).all()


def test_every_currency_sums_to_zero(shop: Shop) -> None:
    with shop.engine.connect() as connection:
        sums = connection.execute(text("SELECT currency, sum(amount) FROM ledger_entries GROUP BY currency")).all()
    assert sums
    assert {total for _, total in sums} == {0}


def test_no_log_line_of_the_worker_shows_arguments_results_or_secrets(shop: Shop) -> None:
    log = shop.worker.log
    assert "succeeded" in log
    for word in ("sk_test_sandbox", r"\bpi_", "customers.example", re.escape(str(shop.engine.url.password))):
        assert not re.search(word, log)


def mails(shop: Shop, payment_id: str) -> int:
    subject = f"payment.captured {payment_id}"
    return sum(message.subject == subject for message in ledger.read_mail(shop.data / "mail"))
