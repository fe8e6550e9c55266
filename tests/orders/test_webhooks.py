"""What arrives at the webhooks' addresses: whose it is, how long it may be, and what an answer means."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
import re
import time
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import uuid4

import httpx
import pytest
import stripe
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from pydantic import SecretStr
from sqlalchemy import text
from standardwebhooks import Webhook

from tasks.signatures import NotSigned, check_standard, check_stripe
from tests.orders.shop import Shop
from tests.orders.test_reports import slow_order
from tests.support.edge import within

OLD, NEW = "whsec_old", "whsec_new"
# `make fuzz` tries more.
EXAMPLES = int(os.environ.get("EXAMPLES", "60"))
SHARED = f"whsec_{base64.b64encode(b'a secret of 24 bytes ....').decode()}"


@pytest.fixture(autouse=True)
def _secrets(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    import celeryconfig

    shop.forget()
    monkeypatch.setattr(celeryconfig.environment, "stripe_webhook_secrets", SecretStr(f"{NEW}, {OLD}"))
    monkeypatch.setattr(celeryconfig.environment, "payment_webhook_secrets", SecretStr(SHARED))


def post(path: str, body: bytes, headers: Mapping[str, str]) -> httpx.Response:
    from api.application import create_app

    async def send(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(path, content=body, headers=dict(headers))

    return asyncio.run(within(create_app(), send))


def event(charge_id: str, payment_id: str, status: str = "succeeded", **changes: Any) -> bytes:
    metadata = {"purchase_id": payment_id}
    intent = {"id": charge_id, "object": "payment_intent", "status": status, "amount": 1000, "currency": "eur"}
    document = {
        "id": f"evt_{uuid4().hex}",
        "object": "event",
        "type": f"payment_intent.{status}",
        "created": int(time.time()),
        "data": {"object": {**intent, "metadata": metadata}},
    }
    return json.dumps(document | changes, indent=2).encode()  # as Stripe does: not the shortest form


def signed(body: bytes, secret: str = NEW, at: float | None = None) -> dict[str, str]:
    made = stripe.WebhookSignature.generate_signature_header(body.decode(), secret, None if at is None else int(at))
    return {"Stripe-Signature": made}


def events(shop: Shop) -> int:
    return int(shop.one("SELECT count(*) FROM payment_events")[0])


@pytest.mark.few(1)
@pytest.mark.parametrize("secret", [OLD, NEW])
def test_what_the_provider_has_signed_is_settled_once(shop: Shop, secret: str) -> None:
    order = slow_order(shop)
    body = event(shop.provider.decide(order), order)
    assert [post("/webhooks/stripe", body, signed(body, secret)).status_code for _ in range(3)] == [200, 200, 200]
    assert shop.status(order)[:2] == ("PAID", "captured")
    shop.run()
    assert shop.one("SELECT count(*) FROM ledger WHERE payment_id = :id", id=order)[0] == 1


@pytest.mark.long
def test_a_decline_has_the_code_that_the_answer_to_the_call_would_have(shop: Shop) -> None:
    order = slow_order(shop)
    charge = shop.provider.decide(order, is_paid=False)
    error = {"code": "card_declined", "decline_code": "generic_decline"}
    intent = json.loads(event(charge, order))["data"]["object"] | {"status": "requires_payment_method"}
    body = event(
        charge, order, type="payment_intent.payment_failed", data={"object": intent | {"last_payment_error": error}}
    )
    assert post("/webhooks/stripe", body, signed(body)).status_code == 200
    assert shop.one("SELECT status, reason FROM orders WHERE id = :id", id=order) == ("CANCELLED", "card_declined")
    shop.run()


NOT_SIGNED: dict[str, Any] = {
    "24 none": lambda body: {},
    "24 empty": lambda body: {"Stripe-Signature": ""},
    "24 by another secret": lambda body: signed(body, "whsec_other"),
    "24 of another body": lambda body: signed(body.replace(b"1000", b"1001")),
    "24 re-serialised": lambda body: signed(json.dumps(json.loads(body)).encode()),
    "24 another version": lambda body: {"Stripe-Signature": signed(body)["Stripe-Signature"].replace("v1=", "v0=")},
    "24 no time": lambda body: {"Stripe-Signature": signed(body)["Stripe-Signature"].partition(",")[2]},
    "24 malformed": lambda body: {"Stripe-Signature": "t,v1"},
    "24 not ASCII": lambda body: {"Stripe-Signature": b"t=1,v1=\xe4"},
    "25 too old": lambda body: signed(body, at=time.time() - 301),
    "25 of the future": lambda body: signed(body, at=time.time() + 360),
    "25 nan": lambda body: {"Stripe-Signature": "t=nan,v1=" + "0" * 64},
    "25 empty": lambda body: {"Stripe-Signature": "t=,v1=" + "0" * 64},
    "25 huge": lambda body: signed(body, at=10**30),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("headers", NOT_SIGNED.values(), ids=NOT_SIGNED)
def test_what_is_not_signed_is_refused_before_anything_is_read(
    shop: Shop, headers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from api import webhooks

    for reading in ("of_stripe", "of_standard", "_settled"):
        monkeypatch.setattr(webhooks, reading, lambda *_: pytest.fail("it was read"))
    before = events(shop)
    body = event("pi_1", "order-1")
    answer = post("/webhooks/stripe", body, headers(body))
    assert (answer.status_code, events(shop)) == (401, before)
    assert "order-1" not in answer.text


def standard(body: bytes, id: str = "msg_1", secret: str = SHARED, at: float | str | None = None) -> dict[str, str]:
    when = datetime.now(UTC) if at is None or isinstance(at, str) else datetime.fromtimestamp(at, UTC)
    made = Webhook(secret).sign(id, when, body.decode())
    stamp = at if isinstance(at, str) else str(math.floor(when.timestamp()))
    return {"webhook-id": id, "webhook-timestamp": stamp, "webhook-signature": made}


@pytest.mark.parametrize(("seconds", "is_believed"), [(-302, False), (-295, True), (298, True), (302, False)])
def test_a_time_is_believed_within_five_minutes(seconds: int, is_believed: bool) -> None:
    """The bound itself, where no application is made between the signature and its check."""
    at = time.time() + seconds
    with nullcontext() if is_believed else pytest.raises(NotSigned):
        check_stripe(b"{}", httpx.Headers(signed(b"{}", at=at)), [NEW])
    at = time.time() + seconds
    with nullcontext() if is_believed else pytest.raises(NotSigned):
        check_standard(b"{}", standard(b"{}", at=at), [SHARED])


def reported(charge_id: str, payment_id: str, **changes: Any) -> bytes:
    about = {"type": "charge", "id": charge_id, "charge_id": charge_id, "state": "succeeded", "amount": 1000}
    return json.dumps(
        {**about, "currency": "EUR", "occurred_at": "2026-03-01T12:00:00Z", "payment_id": payment_id, **changes}
    ).encode()


@pytest.mark.long
def test_another_provider_reports_under_its_own_address(shop: Shop) -> None:
    order = slow_order(shop)
    body = reported(shop.provider.decide(order), order)
    headers = standard(body, id="msg_" + order)
    assert [post("/webhooks/payment", body, headers).status_code for _ in range(2)] == [200, 200]
    assert shop.status(order)[:2] == ("PAID", "captured")
    shop.run()


@pytest.mark.parametrize(
    "headers",
    [
        lambda body: {},
        lambda body: standard(body, secret=f"whsec_{base64.b64encode(b'another one ............').decode()}"),
        lambda body: standard(body, at=time.time() - 302),
        lambda body: standard(body, at=time.time() + 360),
        lambda body: standard(body, at="nan"),
        lambda body: standard(body, at=""),
        lambda body: standard(body) | {"webhook-signature": "v1"},
        lambda body: standard(body) | {"webhook-signature": "v1,%%%"},
        lambda body: standard(body) | {"webhook-id": "msg_2"},
    ],
    ids=[
        "none",
        "by another secret",
        "too old",
        "of the future",
        "nan",
        "empty",
        "malformed",
        "not base64",
        "another id",
    ],
)
def test_what_another_provider_has_not_signed_is_refused(
    shop: Shop, headers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from api import webhooks

    for reading in ("of_stripe", "of_standard", "_settled"):
        monkeypatch.setattr(webhooks, reading, lambda *_: pytest.fail("it was read"))
    body, before = reported("ch_1", "order-1"), events(shop)
    answer = post("/webhooks/payment", body, headers(body))
    assert (answer.status_code, events(shop)) == (401, before)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"amount": -1}, "amount"),
        ({"amount": 2**63}, "amount"),
        ({"amount": 1.5}, "amount"),
        ({"currency": "euro"}, "currency"),
        ({"occurred_at": "2026-03-01T12:00:00"}, "occurred_at"),
        ({"payment_id": "x" * 256}, "payment_id"),
        ({"payment_id": "a\x00b"}, "payment_id"),
        ({"type": "payout"}, "type"),
        ({"id": ""}, "id"),
    ],
)
def test_a_signed_event_that_is_not_as_documented_names_the_field(
    shop: Shop, change: dict[str, Any], field: str
) -> None:
    body = json.dumps(json.loads(reported("ch_1", "order-1")) | change).encode()
    answer = post("/webhooks/payment", body, standard(body, id=f"msg_{uuid4().hex}"))
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith(field)


def test_a_body_beyond_the_limit_is_refused_and_an_event_of_no_interest_is_answered(shop: Shop) -> None:
    from api.webhooks import LONGEST_BODY

    before, body = events(shop), b" " * (LONGEST_BODY + 1)
    assert post("/webhooks/stripe", body, signed(body)).status_code == 413
    body = json.dumps({"id": "evt_1", "type": "payout.paid", "data": {"object": {"object": "payout"}}}).encode()
    assert post("/webhooks/stripe", body, signed(body)).status_code == 200
    body = event("pi_1", "order-1", "requires_payment_method", type="payment_intent.created")
    assert post("/webhooks/stripe", body, signed(body)).status_code == 200
    assert events(shop) == before


def test_without_a_secret_there_is_no_webhook(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    import celeryconfig

    monkeypatch.setattr(celeryconfig.environment, "stripe_webhook_secrets", SecretStr(" , "))
    body = event("pi_1", "order-1")
    assert post("/webhooks/stripe", body, signed(body, "")).status_code == 404


def test_the_seed_of_a_charges_lock_is_its_name() -> None:
    """Processes of two releases, one of which has another, would not wait for each other."""
    from tasks import settlement

    assert f", {int.from_bytes(b'webh', 'big')})" in str(settlement._OF_CHARGE)


@pytest.mark.long
def test_while_the_charge_is_locked_the_provider_is_told_to_try_again(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks import settlement

    monkeypatch.setattr(settlement, "WAIT_SECONDS", 0.1)
    order = slow_order(shop)
    charge = shop.provider.decide(order)
    body = event(charge, order)
    with shop.transaction() as session:
        session.execute(settlement._OF_CHARGE, {"charge": f"stripe {charge}"})
        answer = post("/webhooks/stripe", body, signed(body))
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
    assert shop.status(order)[:2] == ("PENDING_PAYMENT", "pending")
    assert post("/webhooks/stripe", body, signed(body)).status_code == 200
    assert shop.status(order)[:2] == ("PAID", "captured")
    shop.run()


@pytest.mark.long
def test_a_dispute_names_no_payment_and_the_provider_is_asked(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks import outside
    from tasks.gateway import Moved

    order = shop.order()
    shop.run()
    (charge,) = shop.one("SELECT charge_id FROM payments WHERE id = :id", id=order)
    monkeypatch.setattr(
        outside.gateway,
        "charge",
        lambda asked: Moved(asked, charge, 1000, "EUR", "default", order) if asked == charge else None,
    )
    dispute = {"id": "dp" + order, "object": "dispute", "status": "needs_response", "amount": 1000, "currency": "eur"}
    body = event(charge, order, data={"object": {**dispute, "payment_intent": charge, "reason": "fraudulent"}})
    assert post("/webhooks/stripe", body, signed(body)).status_code == 200
    assert tuple(shop.one("SELECT status, reason, payment_id FROM disputes WHERE id = :id", id="dp" + order)) == (
        "needs_response",
        "fraudulent",
        order,
    )


@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(header=some.text(max_size=200), body=some.binary(max_size=200), stamp=some.text(max_size=30))
def test_whatever_is_sent_as_a_signature_is_refused_and_nothing_else_is_raised(
    header: str, body: bytes, stamp: str
) -> None:
    from tasks.signatures import NotSigned, check_standard, check_stripe

    with pytest.raises(NotSigned):
        check_stripe(body, {"stripe-signature": header}, [NEW, OLD])
    with pytest.raises(NotSigned):
        check_standard(body, {"webhook-id": header, "webhook-timestamp": stamp, "webhook-signature": header}, [SHARED])


JSON = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=20),
    lambda children: some.lists(children, max_size=4) | some.dictionaries(some.text(max_size=10), children, max_size=4),
    max_leaves=20,
)


@some.composite
def anywhere_wrong(draw: some.DrawFn, /, **right: list[Any]) -> dict[str, Any]:
    """A right document, of which fields may be anything: so that a wrong one is met by code that has read the others."""
    wrong = draw(some.sets(some.sampled_from(sorted(right)), max_size=2))
    return {name: draw(JSON if name in wrong else some.sampled_from(values)) for name, values in right.items()}


OF_STRIPE = some.builds(
    lambda event, thing: {**event, "data": {"object": thing}},
    anywhere_wrong(
        id=["evt_1"], type=["charge.succeeded", "payment_intent.payment_failed"], created=[0, 1_772_366_400]
    ),
    anywhere_wrong(
        object=["payment_intent", "charge", "refund", "dispute"],
        id=["ob_1"],
        status=["succeeded", "canceled", "requires_payment_method", None],
        amount=[0, 1000],
        currency=["eur"],
        payment_intent=["pi_1", None],
        metadata=[None, {"purchase_id": "p", "tenant": "t"}],
        last_payment_error=[None, {"code": "card_declined"}],
        reason=[None, "fraudulent"],
    ),
)
OF_ANOTHER = anywhere_wrong(
    type=["charge", "refund", "dispute"],
    id=["ob_1"],
    state=["succeeded", "failed", "lost"],
    charge_id=["ch_1"],
    amount=[0, 1000],
    currency=["EUR"],
    occurred_at=["2026-03-01T12:00:00Z"],
    tenant=["t"],
    payment_id=[None, "p"],
    code=[None, "card_declined"],
)


@pytest.mark.long
@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(document=JSON | OF_STRIPE | OF_ANOTHER)
def test_whatever_a_signed_body_says_is_read_or_refused_by_its_field(document: Any) -> None:
    from tasks.reports import Malformed, of_standard, of_stripe

    body = json.dumps(document).encode()
    for read in (of_stripe, partial(of_standard, "msg_1")):
        report, refusal = None, "none: "
        try:
            report = read(body)
        except Malformed as error:
            refusal = str(error)
        assert re.match(r"[a-z_.0-9-]+: ", refusal)
        assert report is None or (0 <= report.amount < 2**63 and len(report.currency) == 3)


def test_tables_of_events_belong_to_a_tenant(shop: Shop) -> None:
    body = event(f"pi_{uuid4().hex}", "of nobody")
    assert post("/webhooks/stripe", body, signed(body)).status_code == 200
    with shop.transaction() as session:
        assert session.execute(text("SELECT count(*) FROM payment_events")).scalar_one() > 0
    with shop.transaction("other") as session:
        assert session.execute(text("SELECT count(*) FROM payment_events")).scalar_one() == 0
