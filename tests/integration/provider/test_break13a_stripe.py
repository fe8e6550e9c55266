"""The page about Stripe says that a call waits while Stripe refuses our API key. It passes while that is not so for 403."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import stripe
from celery import Celery
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from idempotency.application import runtime_of
from tests.support.deliveries import Deliveries
from tests.support.documents import python_blocks
from tests.support.operations import make_due


@pytest.fixture(params=[401, 403])
def refusing(request: pytest.FixtureRequest) -> Iterator[tuple[int, str]]:
    """Answers as Stripe does to a key that was revoked (401), and to a restricted one without the permission (403)."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.dumps({"error": {"type": "invalid_request_error", "message": "The provided key does not have access"}}).encode()
            self.send_response(request.param)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _answer

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield request.param, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_while_stripe_refuses_our_key_by_403_attempts_are_used_up_and_the_charge_ends_in_doubt(
    bank: Celery, refusing: tuple[int, str], engine: Engine, connection: Connection
) -> None:
    status, url = refusing
    deliveries = Deliveries(bank)
    shop: dict[str, Any] = {"__name__": "shop", "app": bank, "engine": runtime_of(bank).engine, "Session": Session}
    for block in python_blocks("docs/stripe.md"):
        exec(block, shop)
    shop["client"] = stripe.StripeClient("sk_test_sandbox", base_addresses={"api": url}, max_network_retries=0)
    states = []
    for _ in range(8):
        states.append(deliveries.deliver(shop["capture_payment"], "p1", 1250, "eur", key="p1", origin="retry").state)
        if states[-1] != "RETRY":
            break
        make_due(engine, "p1")
    row = connection.execute(text("SELECT status, attempts, error_code FROM idempotency.records WHERE key = 'p1'")).one()
    print(status, states, row)
    if status == 401:
        assert (row.status, row.attempts) == ("released", 0)
    else:
        assert row.status == "failed"
        assert row.error_code == "effect_unknown"
