"""Submitting lines over HTTP: every request `copies` times, and some of them abandoned by the client half-way.

Importing this module reads the environment (celeryconfig), so set the servers' addresses first.
"""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
from sqlalchemy import Engine

from demo.input import Intake, Line
from demo.processes import ProcessError
from demo.submission import Submission
from idempotency.operate.api_keys import create_api_key
from idempotency.operate.change import Change
from tasks.tenants import DEFAULT

# Requests at once.
CONNECTIONS = 12
# The share of the lines whose first request is abandoned: before its body is complete, or without its answer.
ABANDONED = 0.1
# Statuses that say nothing about the operation yet: the same request again.
AGAIN = (409, 429, 503)
PAUSE = 0.2
PATIENCE = 60.0


class Requests(Submission):
    """Submits lines as a client of the application does: again, with the same key, until there is an answer."""

    def __init__(self, engine: Engine, intake: Intake, *, copies: int, urls: Sequence[str], seed: int) -> None:
        super().__init__(engine, intake, copies=1)
        self._copies = copies
        self._random = random.Random(seed)
        self._headers = {"Authorization": f"Bearer {_api_key(engine)}", "Content-Type": "application/json"}
        self._clients = [httpx.Client(base_url=url, headers=self._headers, timeout=20) for url in urls]
        self._threads = self._open.enter_context(ThreadPoolExecutor(CONNECTIONS))
        for client in self._clients:
            self._open.callback(client.close)
        self.abandoned = 0
        for client in self._clients:
            _wait_until_it_accepts(client)

    @property
    def events(self) -> list[str]:
        """What was sent beside the requests that were answered."""
        return [f"sent each request {self._copies} times, and {self.abandoned} that the client abandoned half-way"]

    def submit(self, batch: Sequence[Line]) -> None:
        """Send a batch, all copies of all lines at once; refused lines are recorded as refused."""
        abandoned = [line for line in batch if self._random.random() < ABANDONED]
        list(self._threads.map(self._abandon, abandoned, range(len(abandoned))))
        self.abandoned += len(abandoned)
        sent = [(line, copy) for line in batch for copy in range(self._copies)]
        answers = list(self._threads.map(lambda each: self._answered(*each), sent))
        for line, *copies in zip(batch, *[iter(answers)] * self._copies, strict=True):
            if refusal := next((answer for answer in copies if answer), None):
                self._intake.refuse(line, refusal)
            else:
                self.accepted += 1

    def _answered(self, line: Line, copy: int) -> str | None:
        """Send until it is answered. None: accepted; otherwise why it was refused."""
        deadline = time.monotonic() + PATIENCE
        client = self._clients[copy % len(self._clients)]
        while time.monotonic() < deadline:
            try:
                answer = client.post(_path(line), content=_body(line), headers={"Idempotency-Key": _key(line)})
            except httpx.LocalProtocolError:
                return f"{line.kind}_id: not a header's value"
            except httpx.TransportError:
                time.sleep(PAUSE)
                continue
            if answer.status_code not in AGAIN or answer.json()["type"].endswith("already_used"):
                return None if answer.is_success else str(answer.json()["detail"])
            time.sleep(PAUSE)
        raise ProcessError(f"{line.kind} {line.id}: no answer within {PATIENCE:g} s")

    def _abandon(self, line: Line, number: int) -> None:
        """Send a request and go away: every second time in the middle of its body."""
        url, body = urlsplit(str(self._clients[0].base_url)), _body(line)
        headers = {**self._headers, "Host": url.netloc, "Content-Length": len(body), "Idempotency-Key": _key(line)}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        request = f"POST {_path(line)} HTTP/1.1\r\n{head}\r\n".encode(errors="replace") + body
        with socket.create_connection((url.hostname or "", url.port or 80), timeout=5) as connection:
            connection.sendall(request[: -len(body) // 2] if number % 2 else request)


def _wait_until_it_accepts(client: httpx.Client) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            if client.get("/livez").is_success:
                return
        except httpx.TransportError:
            time.sleep(PAUSE)
    raise ProcessError(f"a server did not accept requests within {PATIENCE:g} s")


def _path(line: Line) -> str:
    return "/payments" if line.kind == "purchase" else "/refunds"


def _body(line: Line) -> bytes:
    if line.kind == "purchase":
        body: dict[str, Any] = {"customer_id": line.customer_id, "amount": line.amount, "currency": line.currency}
    else:
        body = {"payment_id": line.purchase_id, "amount": line.amount, "reason": line.reason}
    return json.dumps(body).encode()


def _key(line: Line) -> str:
    """The line's id, quoted: it may have a comma."""
    escaped = line.id.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _api_key(engine: Engine) -> str:
    change = Change("demo", "a key for the demo")
    scopes = ("payments:write", "refunds:write")
    with engine.begin() as connection:
        return create_api_key(connection, change, DEFAULT, name="demo", scopes=scopes).text
