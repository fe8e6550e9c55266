"""Clients of the servers at the edge: each request goes to all servers at once, and again until it has a final answer.

A number is used by both tenants at the same time. Some clients go away half-way, some use a key again for another
request. What clients were told is evidence for the checker; what they should never be told is a violation at once.
"""

from __future__ import annotations

import itertools
import json
import random
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import httpx

from tests.chaos.edge import REFUSAL, TENANT_HEADER
from tests.chaos.evidence import EDGE, Answer, Id, Violation

# Each client has one number in hand: a request of each tenant, with a copy to each server.
CLIENTS = 8
# Numbers per second, of all clients together, while the servers answer.
RATE = 5.0
# Of a hundred requests; what is not listed is plain.
SHARES = {"paid": 30, "refused": 15, "broken": 20}
PATHS = ("/deposits", "/async/deposits")
# Of the requests: sent once more before, by a client that goes away in the middle of the body, or without the answer.
ABANDONED = 0.15
# Of the keys that were answered: used again for another request.
REUSED = 0.2
# A client that waits longer is gone, too; its server may be frozen for longer.
TIMEOUT = 3.0
PAUSE = 0.2
# These say nothing about the operation yet, as does every other 5xx that is not the operation's end.
AGAIN = (409, 429, 503)
ENDED, KEY_REUSED, IN_FLIGHT = "operation_failed", "idempotency_key_reused", 409
# What has to happen in a run.
STRUCK = ("answers replayed", "refused in flight", "server errors", "no answer", "abandoned", "keys reused")


@dataclass(frozen=True, slots=True)
class Request:
    """One request, however often it is sent. `url` is the provider's."""

    tenant: str
    number: str
    kind: str
    path: str
    amount: int
    url: str

    @property
    def id(self) -> Id:
        return Id(self.tenant, EDGE, self.number)

    @property
    def account(self) -> str:
        return f"{self.tenant}-edge-{self.kind}-{self.number}"

    @property
    def body(self) -> bytes:
        fields = {"kind": self.kind, "account": self.account, "amount": self.amount, "url": self.url}
        return json.dumps(fields).encode()

    @property
    def headers(self) -> dict[str, str]:
        return {"Idempotency-Key": self.number, TENANT_HEADER: self.tenant, "Content-Type": "application/json"}


class Requests:
    """`CLIENTS` threads. `sent` and `answers` are what they know; `violations` is what they should not have met."""

    def __init__(self, urls: Sequence[str], tenants: Sequence[str], *, seed: int, url: str) -> None:
        self._urls, self._tenants, self._seed, self._provider = urls, tenants, seed, url
        self._stop, self._over = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._client = httpx.Client(timeout=TIMEOUT)
        self._copies = ThreadPoolExecutor(CLIENTS * len(urls) * len(tenants), thread_name_prefix="copy")
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"client-{number}", daemon=True)
            for number in range(CLIENTS)
        ]
        self.sent: dict[Id, Request] = {}
        self.answers: defaultdict[Id, list[Answer]] = defaultdict(list)
        self.violations: list[Violation] = []
        self.tally: Counter[str] = Counter()

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Begin nothing more; what was begun is repeated until it has its answer."""
        self._stop.set()

    def give_up(self) -> None:
        """Ask nothing more, as when a run is interrupted: the pool's threads would keep this process from ending."""
        self._stop.set()
        self._over.set()

    def finish(self, within: float) -> None:
        """Wait for the answers, at most so many seconds; what has none then is a violation."""
        self._stop.set()
        deadline = time.monotonic() + within
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._copies.shutdown()
        self._client.close()
        for id in self.sent:
            if id not in self.answers:
                self._broken("I2", id, f"no final answer within {within:g} s after everything was healed")

    @property
    def certain(self) -> list[Id]:
        """What was answered as carried out."""
        return [id for id, answers in self.answers.items() if any(answer.status < 400 for answer in answers)]

    # ------------------------------------------------------------ a client

    def _work(self, client: int) -> None:
        chance = random.Random(f"requests {self._seed} {client}")
        longest = 2 * CLIENTS / RATE
        for number in itertools.count():
            if self._stop.wait(chance.uniform(0.0, longest)):
                return
            requests = [self._draw(chance, tenant, f"e{client}-{number}") for tenant in self._tenants]
            try:
                self._ask(requests, chance)
            except Exception as error:  # a finding: whatever a server answers, a client can tell what it is
                self._broken("requests", requests[0].id, f"{type(error).__name__}: {error}")

    def _draw(self, chance: random.Random, tenant: str, number: str) -> Request:
        kinds = [*SHARES, "plain"]
        kind = chance.choices(kinds, [*SHARES.values(), 100 - sum(SHARES.values())])[0]
        return Request(tenant, number, kind, chance.choice(PATHS), chance.randrange(1, 1_000_000), self._provider)

    def _ask(self, requests: Sequence[Request], chance: random.Random) -> None:
        for request in requests:
            self.sent[request.id] = request
            if chance.random() < ABANDONED:
                self._abandon(request, chance.choice(self._urls), in_the_body=chance.random() < 0.5)
        servers = range(len(self._urls))
        copies = [self._copies.submit(self._until_final, each, first) for each in requests for first in servers]
        for copy in copies:
            copy.result()
        for request in requests:
            if chance.random() < REUSED:
                self._use_again(request, chance.choice(servers))

    def _until_final(self, request: Request, first: int) -> None:
        if (answer := self._asked(request, first)) is not None:
            with self._lock:
                self.answers[request.id].append(answer)

    def _use_again(self, request: Request, server: int) -> None:
        """Another request under the key, which must be refused, and then the same request as before."""
        other = replace(request, amount=request.amount + 1)
        if (answer := self._asked(other, server)) is None:
            return
        self._count("keys reused")
        if answer.status != REFUSAL or not answer.is_problem(KEY_REUSED):
            self._broken("I6", request.id, f"another request under the key was answered with {answer}")
        self._until_final(request, server)

    def _asked(self, request: Request, first: int) -> Answer | None:
        """Send until there is a final answer, to each server in turn, as clients behind a proxy do. None: time is up."""
        for number in itertools.count(first):
            answer = self._send(request, self._urls[number % len(self._urls)])
            if answer is not None and is_final(answer):
                return answer
            if self._over.wait(PAUSE):
                return None
        raise AssertionError("unreachable")

    def _send(self, request: Request, url: str) -> Answer | None:
        try:
            response = self._client.post(f"{url}{request.path}", content=request.body, headers=request.headers)
        except httpx.TransportError:
            self._count("no answer")
            return None
        self._count("copies")
        if "idempotency-replayed" in response.headers:
            self._count("answers replayed")
        if response.status_code == IN_FLIGHT:
            self._count("refused in flight")
        elif response.status_code == 500:
            self._count("server errors")
        return Answer(response.status_code, response.headers.get("content-type", ""), response.content)

    def _abandon(self, request: Request, url: str, *, in_the_body: bool) -> None:
        """Send a request and go away."""
        host, body = urlsplit(url), request.body
        headers = {**request.headers, "Host": host.netloc, "Content-Length": len(body)}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        whole = f"POST {request.path} HTTP/1.1\r\n{head}\r\n".encode() + body
        try:
            with socket.create_connection((host.hostname or "", host.port or 80), timeout=TIMEOUT) as connection:
                connection.sendall(whole[: -len(body) // 2] if in_the_body else whole)
        except OSError:
            return
        self._count("abandoned")

    def _count(self, what: str) -> None:
        with self._lock:
            self.tally[what] += 1

    def _broken(self, invariant: str, id: Id, what: str) -> None:
        with self._lock:
            self.violations.append(Violation(invariant, "/".join(id), what))


def is_final(answer: Answer) -> bool:
    """Whether a client has no reason to send its request again."""
    return answer.status not in AGAIN and (answer.status < 500 or answer.is_problem(ENDED))
