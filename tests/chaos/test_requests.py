"""The clients of a run: they ask until they have an answer, and say what they should not have been told."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.chaos import requests
from tests.chaos.evidence import Answer
from tests.chaos.requests import Requests, is_final
from tests.support.processes import eventually

pytestmark = pytest.mark.long

Answering = Callable[[str, dict[str, Any], int], tuple[int, dict[str, Any]]]
TYPES = "urn:idempotency:problem:"


class Servers:
    """Two servers that answer by one function of the key, the body, and how often that key was sent."""

    def __init__(self, answering: Answering) -> None:
        self.times: Counter[str] = Counter()
        first: dict[str, dict[str, Any]] = {}
        lock = threading.Lock()
        servers = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                given = self.rfile.read(int(self.headers["Content-Length"]))
                key = f"{self.headers['x-tenant']} {self.headers['Idempotency-Key']}"
                try:
                    body = json.loads(given)
                except ValueError:
                    return  # the client is gone
                with lock:
                    servers.times[key] += 1
                    is_other = first.setdefault(key, body) != body
                    status, answer = answering(key, body, servers.times[key])
                if is_other and "type" not in answer and status == 201:
                    status, answer = 422, {"type": f"{TYPES}idempotency_key_reused"}
                self.send_response(status)
                self.send_header("Content-Type", "application/problem+json" if "type" in answer else "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *_: Any) -> None:
                pass

        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
        self.urls = [f"http://127.0.0.1:{server.server_port}" for server in self._servers]
        self._threads = [threading.Thread(target=server.serve_forever, daemon=True) for server in self._servers]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Requests]]:
    """Clients that have asked servers of this behaviour until something was true of them."""
    monkeypatch.setattr(requests, "PAUSE", 0.01)
    monkeypatch.setattr(requests, "REUSED", 1.0)
    started: list[Servers] = []

    def ask(answering: Answering, until: Callable[[Requests], object], within: float = 20.0) -> Requests:
        started.append(Servers(answering))
        clients = Requests(started[-1].urls, ("red", "blue"), seed=1, url="http://provider")
        clients.start()
        eventually(lambda: until(clients), what="enough was asked")
        clients.finish(within)
        return clients

    yield ask
    for servers in started:
        servers.close()


def done(key: str, body: dict[str, Any], times: int) -> tuple[int, dict[str, Any]]:
    return 201, {"account": body["account"], "attempt": key}


def test_every_key_is_asked_for_by_both_tenants_at_both_servers(asking: Any) -> None:
    clients = asking(done, lambda clients: clients.tally["keys reused"] >= 4)
    assert clients.violations == []
    assert clients.answers.keys() == clients.sent.keys()
    assert {id.tenant for id in clients.sent} == {"red", "blue"}
    assert all(len(answers) == 3 for answers in clients.answers.values())  # a copy to each server, and one afterwards
    assert {id for id, answers in clients.answers.items() if len(set(answers)) > 1} == set()


def test_what_is_no_final_answer_is_asked_again(asking: Any) -> None:
    def slowly(key: str, body: dict[str, Any], times: int) -> tuple[int, dict[str, Any]]:
        early = {1: 409, 2: 503, 3: 500, 4: 429}
        return (early[times], {}) if times in early else done(key, body, times)

    clients = asking(slowly, lambda clients: clients.tally["keys reused"] >= 2)
    assert clients.violations == []
    assert {answer.status for answers in clients.answers.values() for answer in answers} == {201}
    assert clients.tally["refused in flight"] >= 2
    assert set(clients.certain) == set(clients.answers)


def test_a_request_without_an_answer_is_a_violation(asking: Any) -> None:
    clients = asking(lambda *_: (503, {}), lambda clients: clients.tally["copies"] >= 20, within=0.1)
    assert clients.violations
    assert {violation.invariant for violation in clients.violations} == {"I2"}
    assert len(clients.violations) == len(clients.sent)


def test_another_request_under_a_key_that_is_not_refused_is_a_violation(asking: Any) -> None:
    answered = {"type": "urn:nothing"}
    clients = asking(lambda *_: (201, answered), lambda clients: clients.tally["keys reused"] >= 2)
    assert {violation.invariant for violation in clients.violations} == {"I6"}


def test_a_client_that_breaks_is_a_violation(asking: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "is_final", lambda answer: 1 / 0)
    clients = asking(done, lambda clients: clients.violations)
    assert "ZeroDivisionError" in str(clients.violations[0])


@pytest.mark.parametrize(
    ("status", "problem", "final"),
    [
        (201, None, True),
        (422, None, True),
        (404, None, True),
        (409, "request_in_progress", False),
        (429, "quota_exceeded", False),
        (503, "unavailable", False),
        (500, None, False),
        (500, "operation_failed", True),
    ],
)
def test_only_an_answer_that_repeats_cannot_change_is_final(status: int, problem: str | None, final: bool) -> None:
    body = {"type": f"{TYPES}{problem}"} if problem else {}
    media_type = "application/problem+json" if problem else "application/json"
    assert is_final(Answer(status, media_type, json.dumps(body).encode())) == final
