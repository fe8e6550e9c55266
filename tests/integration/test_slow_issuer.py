"""An issuer of identities that is slow (OIDC) holds no connection of Postgres."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
import pytest
from celery import Celery
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

from idempotency.application import runtime_of
from idempotency.errors import NotAuthenticated
from idempotency.operate.people import authenticate
from tests.integration.test_identities import AUDIENCE, ISSUER

KEY = ec.generate_private_key(ec.SECP256R1())


class Issuer:
    """Serves keys, and counts how often it is asked. `pause`: seconds until an answer."""

    def __init__(self) -> None:
        self.asked, self.pause = 0, threading.Event()
        self.pause.set()
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.asked += 1
                issuer.pause.wait(10)
                document = ECAlgorithm.to_jwk(KEY.public_key(), as_dict=True) | {"kid": "known", "use": "sig"}
                body = json.dumps({"keys": [document]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/keys"


@pytest.fixture
def issuer(configure: Callable[..., None]) -> Iterator[Issuer]:
    running = Issuer()
    configure(oidc_issuer=ISSUER, oidc_audience=AUDIENCE, oidc_keys=running.url)
    yield running
    running.pause.set()
    running.server.shutdown()
    running.server.server_close()


def token(kid: str) -> str:
    now = int(time.time())
    claims = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "sub": "ann",
        "iat": now,
        "exp": now + 60,
        "groups": ["idempotency-admin"],
    }
    return jwt.encode(claims, ec.generate_private_key(ec.SECP256R1()), algorithm="ES256", headers={"kid": kid})


def test_no_connection_is_held_while_the_issuer_is_asked(bank: Celery, issuer: Issuer) -> None:
    """A slow issuer would hold the connections that payments need."""
    runtime = runtime_of(bank)
    issuer.pause.clear()
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            authenticate(runtime, token("unknown"), role="operator", action="test")
        except NotAuthenticated as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    for _ in range(500):
        if issuer.asked:
            break
        time.sleep(0.01)
    held = runtime._autocommit_engine.pool.checkedout()  # type: ignore[attr-defined]
    issuer.pause.set()
    asking.join(20)
    assert (len(errors), issuer.asked > 0) == (1, True)
    assert held == 0
