"""What a provider answers is read within limits of size and time; beyond them nobody knows what has happened.

One that is too slow is as one that does not answer; one that is too long uses up an attempt.
"""

from __future__ import annotations

import json
import threading
import time
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from idempotency import NotSent
from tasks import answers
from tasks.carrier import Carrier, CarrierError
from tasks.circuit import Unavailable
from tasks.gateway import GatewayError, StripeGateway
from tests.support import receiver as receivers
from tests.support.dripping import BODY, CHUNKS, HEADERS, OK, dripping

# Seconds of one read, and after which an answer should long have been given up.
READ, LONG = 1.0, 4.0
# Pieces of 64 KiB without an end: ten times what is read of an answer.
MUCH = (OK + b"Connection: close\r\n\r\n", b" " * 65536)
PIECES = 10 * answers.ANSWER_LIMIT // 65536


def label(url: str) -> object:
    with closing(Carrier(url, timeout=READ)) as carrier:
        return carrier.create_label(return_id="r", kind="return", idempotency_key="k")


def charge(url: str) -> object:
    with closing(StripeGateway("sk_test_x", url=url, connect_timeout=READ, read_timeout=READ)) as gateway:
        return gateway.capture(payment_id="p", customer_id="c", amount=1, currency="EUR", idempotency_key="k")


each_provider = pytest.mark.parametrize(
    ("call", "unknown"), [(label, CarrierError), (charge, GatewayError)], ids=["carrier", "gateway"]
)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds of a whole answer: fewer than of a read, so that no read is late on a busy machine."""
    monkeypatch.setattr(answers, "ANSWER_READS", 0.4)
    return answers.ANSWER_READS * READ


@each_provider
def test_of_an_answer_no_more_is_kept_than_the_limit(call: Callable[[str], object], unknown: type[Exception]) -> None:
    """A worker that is killed for its memory takes the operations of its neighbours with it."""
    with dripping(*MUCH, pause=0.0, pieces=PIECES) as server:
        tracemalloc.start()
        try:
            with pytest.raises(unknown, match=f"longer than {answers.ANSWER_LIMIT} bytes"):
                call(server.url)
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert most < 5 * answers.ANSWER_LIMIT


@pytest.mark.few(2)
@pytest.mark.parametrize("dripped", [HEADERS, BODY, CHUNKS], ids=["headers", "body", "chunks"])
@pytest.mark.parametrize("call", [label, charge], ids=["carrier", "gateway"])
def test_an_answer_that_drips_is_given_up_in_time(
    call: Callable[[str], object], dripped: tuple[bytes, bytes], whole: float
) -> None:
    with dripping(*dripped) as server:
        begun = time.monotonic()
        with pytest.raises(Unavailable, match="did not answer in time"):
            call(server.url)
        assert whole - 0.05 < time.monotonic() - begun < LONG
        assert server.asked == 1


@pytest.mark.long
@pytest.mark.parametrize("call", [label, charge], ids=["carrier", "gateway"])
def test_over_tls_too(
    call: Callable[[str], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: float,
) -> None:
    certificate = receivers.certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", f"{certificate}.crt")
    monkeypatch.setattr("stripe.ca_bundle_path", f"{certificate}.crt")
    with dripping(*BODY, certificate=certificate) as server:
        begun = time.monotonic()
        with pytest.raises(Unavailable, match="did not answer in time"):
            call(server.url)
        assert time.monotonic() - begun < LONG


@pytest.mark.long
def test_a_connection_with_an_unread_rest_is_not_used_again(whole: float) -> None:
    """What is left of one answer would be read as the beginning of the next."""
    with dripping(*BODY) as server, closing(Carrier(server.url, timeout=READ)) as carrier:
        for number in (1, 2):
            with pytest.raises(Unavailable):
                carrier.void_label(label_id="l", idempotency_key="k")
            assert server.asked == number


def test_a_provider_that_drips_is_left_alone_for_a_while_as_one_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answers, "ANSWER_READS", 0.1)
    with dripping(*BODY) as server, closing(Carrier(server.url, timeout=READ)) as carrier:
        for error in (*(Unavailable,) * 5, NotSent):
            with pytest.raises(error):
                carrier.void_label(label_id="l", idempotency_key="k")
        assert server.asked == 5


@pytest.mark.long
def test_a_kept_connection_has_its_time_for_each_answer(whole: float) -> None:
    """The limit of one call is none of the next, however much later that comes."""
    body, ports = json.dumps({"id": "l", "status": "created"}).encode(), []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            ports.append(self.client_address)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        with closing(Carrier(f"http://127.0.0.1:{server.server_port}", timeout=READ)) as carrier:
            for _ in range(2):
                assert carrier.void_label(label_id="l", idempotency_key="k")["id"] == "l"
                time.sleep(whole + 0.05)
        server.shutdown()
    assert len(ports) == 2
    assert ports[0] == ports[1]


def test_a_list_of_a_hundred_is_longer_than_one_object() -> None:
    metadata = {f"{number:03}": "x" * 500 for number in range(45)}
    intent = {"object": "payment_intent", "amount": 1, "currency": "eur", "status": "succeeded", "metadata": metadata}
    found = [intent | {"id": f"pi_{number}"} for number in range(100)]
    page = {"object": "list", "has_more": False, "url": "/v1/payment_intents", "data": found}
    body = json.dumps(page).encode()
    assert answers.ANSWER_LIMIT < len(body) < answers.LIST_LIMIT
    whole = OK + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body
    day = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)
    with dripping(whole, b"", pieces=0) as server, closing(StripeGateway("sk_test_x", url=server.url)) as gateway:
        assert len(list(gateway.charges(*day))) == 100
    with (
        dripping(*MUCH, pause=0.0, pieces=PIECES) as server,
        closing(StripeGateway("sk_test_x", url=server.url)) as gateway,
        pytest.raises(GatewayError, match=f"longer than {answers.LIST_LIMIT} bytes"),
    ):
        list(gateway.charges(*day))
