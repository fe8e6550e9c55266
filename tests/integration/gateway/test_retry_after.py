"""How long a provider asks us to wait, by a header that may have anything in it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from idempotency import Defer
from tasks.carrier import Carrier
from tasks.gateway import StripeGateway

BODY = b'{"error": {"type": "rate_limit_error", "message": "later"}}'


@contextmanager
def busy(retry_after: str) -> Iterator[str]:
    """A provider that asks for patience."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(429)
            self.send_header("Retry-After", retry_after)
            self.send_header("Content-Length", str(len(BODY)))
            self.end_headers()
            self.wfile.write(BODY)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def label(url: str) -> object:
    return Carrier(url, timeout=5).create_label(return_id="r", kind="return", idempotency_key="k")


def charge(url: str) -> object:
    about: dict[str, Any] = {"payment_id": "p", "customer_id": "c", "amount": 1, "currency": "EUR"}
    return StripeGateway("sk_test_x", url=url).capture(**about, idempotency_key="k")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("given", "seconds"), [("7", 7.0), ("nan", None), ("-nan", None), ("inf", 3600.0), ("-5", 0.0), ("soon", None)]
)
@pytest.mark.parametrize("provider", ["carrier", "gateway"])
def test_a_rate_limit_is_waited_for_as_long_as_makes_sense(provider: str, given: str, seconds: float | None) -> None:
    with busy(given) as url:
        ask = label if provider == "carrier" else charge
        with pytest.raises(Defer) as deferred:
            ask(url)
    assert deferred.value.seconds == seconds or (seconds is None and 0 < deferred.value.seconds <= 60)
