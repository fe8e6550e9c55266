"""Reports as another would send them: without our names, from another application, that our books refuse."""

from __future__ import annotations

import json
import time
from typing import Any
from uuid import uuid4

import pytest
from pydantic import SecretStr
from sqlalchemy import text

from tests.orders.shop import Shop
from tests.orders.test_reports import captured, report, settle, slow_order
from tests.orders.test_webhooks import NEW, SHARED, event, post, reported, signed, standard


@pytest.fixture(autouse=True)
def _secrets(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    import celeryconfig

    shop.forget()
    monkeypatch.setattr(celeryconfig.environment, "stripe_webhook_secrets", SecretStr(NEW))
    monkeypatch.setattr(celeryconfig.environment, "payment_webhook_secrets", SecretStr(SHARED))


def events_of(shop: Shop, object_id: str) -> list[Any]:
    with shop.books.connect() as connection:
        query = text("SELECT state, is_applied FROM payment_events WHERE object_id = :id ORDER BY received_at")
        return [tuple(row) for row in connection.execute(query, {"id": object_id})]


@pytest.mark.long
def test_zeros_before_its_time_make_no_signature_of_the_far_future_valid(shop: Shop) -> None:
    order = slow_order(shop)
    body = event(shop.provider.decide(order), order)
    at = int(time.time()) + 90 * 86400
    header = signed(body, at=at)["Stripe-Signature"]
    assert post("/webhooks/stripe", body, {"Stripe-Signature": header}).status_code == 401
    longer = header.replace(f"t={at}", f"t={'0' * 19}{at}")
    assert post("/webhooks/stripe", body, {"Stripe-Signature": longer}).status_code == 401
    assert shop.status(order)[1] == "pending"


@pytest.mark.long
def test_a_dispute_that_names_the_charge_alone_is_of_its_payment(shop: Shop) -> None:
    order, charge = captured(shop)
    about = {"type": "dispute", "id": "dp" + order, "charge_id": charge, "state": "needs_response"}
    body = json.loads(reported(charge, order)) | about
    del body["payment_id"]  # is optional
    raw = json.dumps(body).encode()
    assert post("/webhooks/payment", raw, standard(raw, id=f"msg_{uuid4().hex}")).status_code == 200
    shop.run()
    assert shop.one("SELECT payment_id FROM disputes WHERE id = :id", id="dp" + order)[0] == order
    assert events_of(shop, "dp" + order) == [("needs_response", True)]


def test_a_report_without_our_name_waits_for_the_same_one_that_has_it(shop: Shop) -> None:
    order = slow_order(shop)
    charge = shop.provider.decide(order)
    bare = json.loads(reported(charge, order))
    del bare["payment_id"]  # is optional
    for document in (bare, json.loads(reported(charge, order))):
        raw = json.dumps(document).encode()
        assert post("/webhooks/payment", raw, standard(raw, id=f"msg_{uuid4().hex}")).status_code == 200
    assert events_of(shop, charge) == [("succeeded", True)]
    assert shop.status(order)[1] == "captured"
    raw = json.dumps(json.loads(reported(charge, order)) | {"payment_id": "another"}).encode()  # it is applied by now
    assert post("/webhooks/payment", raw, standard(raw, id=f"msg_{uuid4().hex}")).status_code == 200
    assert shop.one("SELECT payment_id FROM payment_events WHERE object_id = :id", id=charge)[0] == order


def test_a_failed_charge_without_metadata_does_not_hide_the_failed_intent(shop: Shop) -> None:
    from tasks import outside

    order = slow_order(shop)
    charge = shop.provider.decide(order, is_paid=False)
    thing = {"id": "ch_1", "object": "charge", "status": "failed", "amount": 1000, "currency": "eur"}
    body = event(
        charge, order, type="charge.failed",
        data={"object": thing | {"payment_intent": charge, "metadata": {}, "failure_code": "card_declined"}},
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outside.gateway, "charge", lambda id: None)  # nothing was charged
        assert post("/webhooks/stripe", body, signed(body)).status_code == 200
        intent = event(charge, order, "requires_payment_method", type="payment_intent.payment_failed")
        assert post("/webhooks/stripe", intent, signed(intent)).status_code == 200
    assert events_of(shop, charge) == [("failed", True)]
    assert shop.status(order)[1] == "failed"
    code = shop.one("SELECT code FROM payment_events WHERE object_id = :id", id=charge)[0]
    assert code == "card_declined"


@pytest.mark.long
def test_a_refund_at_the_site_that_fails_while_it_is_pending_is_refused(shop: Shop) -> None:
    order, charge = captured(shop)
    about = {"object": "refund", "charge_id": charge, "refund_id": None, "amount": 400}
    assert settle(shop, report("re_p" + order, "pending", order, **about)) == ["applied"]
    assert settle(shop, report("re_p" + order, "failed", order, code="expired_or_canceled_card", **about)) == [
        "applied"
    ]
    shop.run()
    row = shop.one("SELECT status, failure FROM refunds WHERE id = :id", id="stripe-re_p" + order)
    assert tuple(row) == ("refused", "expired_or_canceled_card")
    settle(shop, report("re_p" + order, "succeeded", order, **about))  # older than the failure
    row = shop.one("SELECT status, failure FROM refunds WHERE id = :id", id="stripe-re_p" + order)
    assert tuple(row) == ("reversed", "expired_or_canceled_card")


def test_metadata_that_we_cannot_have_written_is_no_defect_of_the_event(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another application on the same account names its things as it likes; after a 400, Stripe would disable the endpoint."""
    from tasks import outside

    monkeypatch.setattr(outside.gateway, "charge", lambda id: None)
    for strange in (
        {"tenant": "a\nb"},
        {"tenant": ""},
        {"purchase_id": "x" * 256},
        {"refund_id": "\x00"},
        {"tenant": 5},
    ):
        intent = json.loads(event("pi_nl" + uuid4().hex, "x"))
        intent["data"]["object"]["metadata"] = strange
        body = json.dumps(intent).encode()
        assert post("/webhooks/stripe", body, signed(body)).status_code == 200
        kept = shop.one("SELECT tenant, payment_id FROM payment_events WHERE event_id = :id", id=intent["id"])
        assert tuple(kept) == ("default", None)


def test_a_tenant_that_there_cannot_be_is_refused_by_name(shop: Shop) -> None:
    raw = json.dumps(json.loads(reported("ch_x", "x")) | {"tenant": "a\nb"}).encode()
    answer = post("/webhooks/payment", raw, standard(raw))
    assert answer.status_code == 400
    assert "tenant: only printable ASCII, got U+000A at position 1" in answer.json()["detail"]
    assert "Value error" not in answer.json()["detail"]


@pytest.mark.long
def test_a_report_that_our_books_refuse_is_kept_and_not_sent_for_ever(shop: Shop) -> None:
    order = slow_order(shop)
    with shop.books.begin() as connection:
        connection.execute(text("UPDATE payments SET amount = 0 WHERE id = :id"), {"id": order})
    body = event(f"pi_{uuid4().hex}", order)
    document = json.loads(body)
    document["data"]["object"]["amount"] = 0
    body = json.dumps(document).encode()
    assert [post("/webhooks/stripe", body, signed(body)).status_code for _ in range(2)] == [200, 200]
    assert shop.status(order)[1] == "pending"
    kept = shop.one("SELECT is_applied FROM payment_events WHERE payment_id = :id", id=order)
    assert kept[0] is False


@pytest.mark.long
def test_disputes_of_two_providers_may_have_one_id(shop: Shop) -> None:
    one, its = captured(shop)
    other, others = captured(shop)
    for order, charge, gateway in ((one, its, "stripe"), (other, others, "payment")):
        about = {"object": "dispute", "charge_id": charge, "gateway": gateway, "code": gateway}
        settle(shop, report("dp_same" + one, "needs_response", order, **about))
    query = text("SELECT payment_id, reason FROM disputes WHERE id = :id ORDER BY gateway DESC")
    with shop.books.connect() as connection:
        rows = [tuple(row) for row in connection.execute(query, {"id": "dp_same" + one})]
    assert rows == [(one, "stripe"), (other, "payment")]
