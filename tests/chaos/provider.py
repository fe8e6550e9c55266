"""A payment provider with a ledger, and an unreliable connection to it: a real HTTP server.

The provider acts once per idempotency key and replays its stored answers, its failures included, before or after
which it may have acted. It declines some requests, and refuses some repeats for another reason (a key was revoked) before
it has looked at what it stored. `/close` says whether a key has
acted, and if not, that it never will. The line in front of it loses requests, loses answers, and invents errors after
the provider has acted.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import httpx


class Line(NamedTuple):
    """What the line does, in shares of all calls; the rest passes. `swallow` and `invent` follow an act."""

    lose: float
    swallow: float
    invent: float


STEADY = Line(lose=0.05, swallow=0.05, invent=0.05)
# Bad enough that an operation with three attempts often ends over an open effect.
ROUGH = Line(lose=0.1, swallow=0.3, invent=0.3)
# Of the repeats.
REFUSED = 0.2
# Of the rough requests, by their amount, so that each repeat is declined too.
DECLINES = 7
# Of the rough keys: the provider fails, and answers so for ever; half of the time it has acted before.
BREAKS = 0.1
# Of the questions: the provider cannot say yet.
TOO_EARLY = 0.2

# What can go wrong, and in a run has to.
FAULTS = ("lost requests", "swallowed replies", "invented errors", "refused repeats", "declines", "stored failures")

DECLINED, REVOKED, CLOSED, EARLY, BROKEN = 402, 403, 409, 425, 503
# What every call under the key is answered, the first one too.
KEPT = frozenset({DECLINED, CLOSED})


class Provider:
    """`acts` and `amounts` are the provider's ledger, by key; `struck` counts what went wrong on the way."""

    def __init__(self, seed: int) -> None:
        self.acts: Counter[str] = Counter()
        self.amounts: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        self._closed: set[str] = set()
        self._broken: set[str] = set()
        self._chance = random.Random(f"provider {seed}")
        self._lock = threading.Lock()
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                request = json.loads(self.rfile.read(length) or b"{}")
                with provider._lock:
                    status, answer = provider._answer(self.path, self.headers["Idempotency-Key"], request)
                if status == 0:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    self.close_connection = True
                    return
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with contextlib.suppress(OSError):  # the caller may have been killed
                    self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    super().handle()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, path: str, key: str, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """What arrives at the caller; status 0 for nothing."""
        if path == "/close":
            return self._close(key)
        line = ROUGH if path == "/rough" else STEADY
        fate = self._chance.random()
        if fate < line.lose:
            self.struck["lost requests"] += 1
            return 0, {}
        acted = self.acts[key]
        status, answer = self._act(path, key, int(request["amount"]))
        fate -= line.lose
        if fate < line.swallow:
            self.struck["swallowed replies"] += self.acts[key] > acted
            return 0, {}
        if fate < line.swallow + line.invent:
            self.struck["invented errors"] += self.acts[key] > acted
            return 500, {}
        return status, answer

    def _act(self, path: str, key: str, amount: int) -> tuple[int, dict[str, Any]]:
        if self.acts[key] and self._chance.random() < REFUSED:
            self.struck["refused repeats"] += 1
            return REVOKED, {"error": "api_key_revoked"}
        if key in self._closed:
            return CLOSED, {"error": "closed"}
        if path == "/rough" and amount % DECLINES == 0:
            self.struck["declines"] += 1
            return DECLINED, {"error": "declined"}
        if key not in self._broken:
            breaks = path == "/rough" and not self.acts[key] and self._chance.random() < BREAKS
            if not self.acts[key] and not (breaks and self._chance.random() < 0.5):
                self.acts[key] += 1
                self.amounts[key] += amount
            if not breaks:
                return 200, self._receipt(key)
            self.struck["stored failures"] += 1
            self._broken.add(key)
        return BROKEN, {"error": "stored"}

    def _close(self, key: str) -> tuple[int, dict[str, Any]]:
        if self._chance.random() < TOO_EARLY:
            return EARLY, {}
        if not self.acts[key]:
            self._closed.add(key)
            return 200, {"acted": False}
        return 200, {"acted": True, "receipt": self._receipt(key)}

    def _receipt(self, key: str) -> dict[str, Any]:
        return {"receipt": key[-12:], "amount": self.amounts[key]}


def ask(url: str, key: str) -> dict[str, Any] | None:
    """Whether a key has acted, its receipt, and if it has not, that it never will; None: too early to tell."""
    response = httpx.post(f"{url}/close", headers={"Idempotency-Key": key}, timeout=10)
    if response.status_code == EARLY:
        return None
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer
