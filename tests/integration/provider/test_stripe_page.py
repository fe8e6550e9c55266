"""The page about Stripe: its code, run as it is printed, against the sandbox."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import stripe
from celery import Celery
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from idempotency import StoredRefusal, Undecided
from idempotency.application import runtime_of
from sandbox import process
from sandbox.process import Sandbox
from tests.integration.provider.test_page import PRINTED
from tests.support.deliveries import Deliveries
from tests.support.documents import python_blocks
from tests.support.operations import make_due
from tests.support.sandbox import faults

SECRET = "whsec_test"


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    with process.running("provider", tmp_path_factory.mktemp("stripe"), "--faults", "hold_ms=200") as sandbox:
        yield sandbox


@pytest.fixture
def shop(bank: Celery, provider: Sandbox) -> dict[str, Any]:
    """What the page defines."""
    names: dict[str, Any] = {"__name__": "shop", "app": bank, "engine": runtime_of(bank).engine, "Session": Session}
    for block in python_blocks("docs/stripe.md"):
        exec(block.replace(PRINTED, provider.url), names)
    return names


def charges(shop: dict[str, Any], payment_id: str) -> list[Any]:
    found = shop["client"].v1.payment_intents.list({"limit": 100}).data
    return [each for each in found if each.metadata["payment_id"] == payment_id]


def capture(shop: dict[str, Any], deliveries: Deliveries, payment_id: str, **origin: Any) -> Any:
    return deliveries.deliver(shop["capture_payment"], payment_id, 1250, "eur", key=payment_id, **origin)


@pytest.mark.long
def test_a_charge_is_made_once_whatever_the_provider_does(
    shop: dict[str, Any], deliveries: Deliveries, engine: Engine, provider: Sandbox, tmp_path: Path
) -> None:
    only = {"payment_id": "p1"}
    faults(provider, next=["rate_limited", "timeout_after"], only=only)
    assert capture(shop, deliveries, "p1").state == "RETRY"
    for _ in range(2):
        make_due(engine, "p1")
        last = capture(shop, deliveries, "p1", origin="retry")
    assert (last.state, last.value["amount"]) == ("SUCCESS", 1250)
    assert len(charges(shop, "p1")) == 1


def test_while_the_provider_is_away_a_charge_waits_and_uses_up_no_attempt(
    shop: dict[str, Any], deliveries: Deliveries, engine: Engine, provider: Sandbox, connection: Connection
) -> None:
    there = shop["client"]
    shop["client"] = stripe.StripeClient(
        "sk_test_sandbox", base_addresses={"api": "http://127.0.0.1:1"}, max_network_retries=0
    )
    for _ in range(7):  # more than max_attempts: first the call, then the question
        assert capture(shop, deliveries, "p5", origin="retry").state == "RETRY"
        make_due(engine, "p5")
    shop["client"] = there
    shop["SEARCH_LAG"] = 0.0
    for _ in range(2):
        last = capture(shop, deliveries, "p5", origin="retry")
        make_due(engine, "p5")
    assert (last.state, last.value["amount"]) == ("SUCCESS", 1250)
    assert len(charges(shop, "p5")) == 1
    assert connection.execute(text("SELECT attempts FROM idempotency.records WHERE key = 'p5'")).scalar_one() == 1


@pytest.fixture(params=[401, 403])
def refusing(request: pytest.FixtureRequest) -> Iterator[str]:
    """Answers as Stripe does to a key that was revoked (401), and to a restricted one that lacks the permission (403)."""

    class Refusing(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            said = {"type": "invalid_request_error", "message": "The provided key does not have access"}
            self.send_response(request.param)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps({"error": said}).encode())

        do_GET = _answer  # noqa: N815
        do_POST = _answer  # noqa: N815

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.few(1)
def test_while_the_provider_refuses_our_key_a_charge_waits_and_uses_up_no_attempt(
    shop: dict[str, Any], deliveries: Deliveries, engine: Engine, refusing: str, connection: Connection
) -> None:
    shop["client"] = stripe.StripeClient("sk_test_sandbox", base_addresses={"api": refusing}, max_network_retries=0)
    for _ in range(7):  # more than max_attempts
        assert capture(shop, deliveries, "p7", origin="retry").state == "RETRY"
        make_due(engine, "p7")
    found = connection.execute(text("SELECT status, attempts FROM idempotency.records WHERE key = 'p7'")).one()
    assert tuple(found) == ("released", 0)


def test_a_stored_failure_leads_to_the_next_key_and_a_decline_to_an_end(
    shop: dict[str, Any], deliveries: Deliveries, engine: Engine, provider: Sandbox
) -> None:
    shop["SEARCH_LAG"] = 0.0
    faults(provider, next=["error_500_before"], only={"payment_id": "p2"})
    assert capture(shop, deliveries, "p2").state == "RETRY"
    time.sleep(0.01)  # the end of the call has to be past the lag
    for _ in range(3):
        make_due(engine, "p2")
        last = capture(shop, deliveries, "p2", origin="retry")
    assert last.state == "SUCCESS"
    assert len(charges(shop, "p2")) == 1
    faults(provider, next=["declined"], only={"payment_id": "p3"})
    refused = capture(shop, deliveries, "p3")
    assert (refused.state, refused.value.code) == ("FAILURE", "card_declined")


@pytest.mark.long
def test_the_webhook_wakes_what_waits_and_passes_on_the_rest(
    shop: dict[str, Any], deliveries: Deliveries, connection: Connection
) -> None:
    def undecided(*_: Any, **__: Any) -> Any:
        raise Undecided(3600.0, "the bank decides")

    shop["capture"] = undecided
    assert capture(shop, deliveries, "p4").state == "RETRY"
    is_due = text("SELECT available_at <= clock_timestamp() FROM idempotency.records WHERE key = 'p4'")
    assert connection.execute(is_due).scalar_one() is False
    about = {"object": {"id": "pi_1", "object": "payment_intent", "metadata": {"payment_id": "p4"}}}
    assert report(shop, "payment_intent.succeeded", about, secret="whsec_other") == 400
    assert connection.execute(is_due).scalar_one() is False
    assert report(shop, "payment_intent.succeeded", about) == 200
    assert connection.execute(is_due).scalar_one() is True
    for _ in range(2):
        assert report(shop, "charge.dispute.created", {"object": {"id": "dp_1", "object": "dispute"}}) == 200
    noted = text("SELECT count(DISTINCT key) FROM idempotency.outbox WHERE task = 'shop.note_event'")
    assert connection.execute(noted).scalar_one() == 1


@pytest.mark.parametrize("metadata", [{}, {"invoice": "4711"}, None])
def test_a_charge_of_another_program_at_the_provider_wakes_nothing(
    shop: dict[str, Any], connection: Connection, metadata: dict[str, str] | None
) -> None:
    about = {"object": {"id": "pi_2", "object": "payment_intent", "metadata": metadata}}
    assert report(shop, "payment_intent.succeeded", about) == 200
    assert connection.execute(text("SELECT count(*) FROM idempotency.records")).scalar_one() == 0


def report(shop: dict[str, Any], type: str, data: dict[str, Any], secret: str = SECRET) -> int:
    payload = json.dumps({"id": f"evt_{type}", "object": "event", "type": type, "data": data})
    signed = hmac.new(secret.encode(), f"{(at := int(time.time()))}.{payload}".encode(), hashlib.sha256).hexdigest()
    answer: int = shop["reported"](payload.encode(), f"t={at},v1={signed}", SECRET)
    return answer


@pytest.mark.long
@pytest.mark.parametrize("status", ["requires_payment_method", "canceled"])
def test_a_charge_that_is_found_need_not_have_succeeded(shop: dict[str, Any], status: str) -> None:
    with pytest.raises(StoredRefusal, match=status):
        shop["outcome"](type("Intent", (), {"status": status}))
