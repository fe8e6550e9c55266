"""An issuer of identities (OIDC) that is slow, drips or says too much: nobody waits for it longer than need be."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import jwt
import pytest
from celery import Celery
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

from idempotency import issuer as keys
from idempotency.application import runtime_of
from idempotency.errors import NotAuthenticated
from idempotency.operate.people import authenticate
from tests.integration.test_identities import AUDIENCE, ISSUER
from tests.support.dripping import BODY, CHUNKS, HEADERS, dripping
from tests.support.operations import at_once
from tests.support.processes import eventually

NOT_FETCHED = "IDEMPOTENCY_TOKEN: idempotency_oidc_keys: the keys could not be fetched"
KEY = ec.generate_private_key(ec.SECP256R1())


class Issuer:
    """Serves keys, and counts how often it is asked. `pause`: seconds until an answer."""

    def __init__(self) -> None:
        self.asked, self.pause, self.more = 0, threading.Event(), ""
        self.pause.set()
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.asked += 1
                issuer.pause.wait(10)
                document = ECAlgorithm.to_jwk(KEY.public_key(), as_dict=True) | {"kid": "known", "use": "sig"}
                body = json.dumps({"keys": [document], "more": issuer.more}).encode()
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


def token(kid: str, key: Any = None) -> str:
    """A token that names a key, and is signed with another one, or with `key`."""
    now = int(time.time())
    claims = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "sub": "ann",
        "iat": now,
        "exp": now + 60,
        "groups": ["idempotency-admin"],
    }
    return jwt.encode(claims, key or ec.generate_private_key(ec.SECP256R1()), algorithm="ES256", headers={"kid": kid})


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


def known(bank: Celery) -> str:
    """Who comes with a token of the issuer's."""
    return authenticate(runtime_of(bank), token("known", KEY), role="operator", action="test").name


def guess(bank: Celery, kid: str) -> str:
    """Why a token that names this key is refused."""
    with pytest.raises(NotAuthenticated) as refused:
        authenticate(runtime_of(bank), token(kid), role="operator", action="test")
    return str(refused.value)


def test_guesses_lead_to_one_fetch_in_a_while(bank: Celery, issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert known(bank) == "ann"
    for number in range(20):
        assert "not an ID token" in guess(bank, f"unknown-{number}")
    assert issuer.asked == 1
    monkeypatch.setattr(keys, "PAUSE", 0.0)  # it is over
    assert "not an ID token" in guess(bank, "unknown")
    assert issuer.asked == 2


def test_who_has_a_known_key_waits_for_no_guess(bank: Celery, issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys are kept, while what a guess has led to is waited for."""
    assert known(bank) == "ann"
    monkeypatch.setattr(keys, "PAUSE", 0.0)
    issuer.pause.clear()
    with ThreadPoolExecutor(1) as pool:
        guessing = pool.submit(guess, bank, "unknown")
        eventually(lambda: issuer.asked == 2, what="the issuer is asked")
        begun = time.monotonic()
        assert known(bank) == "ann"
        assert time.monotonic() - begun < 1.0
        assert not guessing.done()
        issuer.pause.set()
        assert "not an ID token" in guessing.result(10)


def test_guesses_that_come_at_once_wait_for_one_fetch_together(
    bank: Celery, configure: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "PATIENCE", 0.5)
    with dripping(*BODY) as server:
        configure(oidc_issuer=ISSUER, oidc_audience=AUDIENCE, oidc_keys=server.url)
        begun = time.monotonic()
        said = at_once(4, lambda number: guess(bank, f"unknown-{number}"))
        assert time.monotonic() - begun < 2.0
        assert server.asked == 1
    assert set(said) == {NOT_FETCHED}


@pytest.mark.parametrize("dripped", [HEADERS, BODY, CHUNKS], ids=["headers", "body", "chunks"])
def test_keys_that_drip_are_given_up_in_time(
    bank: Celery, configure: Callable[..., None], monkeypatch: pytest.MonkeyPatch, dripped: tuple[bytes, bytes]
) -> None:
    monkeypatch.setattr(keys, "PATIENCE", 0.3)
    with dripping(*dripped) as server:
        configure(oidc_issuer=ISSUER, oidc_audience=AUDIENCE, oidc_keys=server.url)
        begun = time.monotonic()
        assert guess(bank, "known") == NOT_FETCHED
        assert time.monotonic() - begun < 2.0
        assert server.asked == 1


def test_known_keys_are_kept_while_the_issuer_says_nothing_of_use(
    bank: Celery, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert known(bank) == "ann"
    monkeypatch.setattr(keys, "PAUSE", 0.0)
    issuer.more = "x" * keys.LIMIT
    assert guess(bank, "unknown") == NOT_FETCHED
    assert (known(bank), issuer.asked) == ("ann", 2)
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + keys.KEPT)
    monkeypatch.setattr(keys, "time", later)
    assert guess(bank, "known") == NOT_FETCHED
