"""Requests to the same endpoint with and without the middleware, in turns, from clients that keep their connections.

For an endpoint that takes an order, and for the least that an endpoint can write (`http_application.py`).
"""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from uuid import uuid4

from rich.progress import track

from . import http_application

CLIENTS = 8


@dataclass(frozen=True)
class Rates:
    """Requests per second, by round. `replay`: repeats of requests that were carried out."""

    plain: list[float]
    keyed: list[float]
    replay: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.keyed) / statistics.median(self.plain)

    @property
    def replay_ratio(self) -> float:
        return statistics.median(self.replay) / statistics.median(self.plain)


def measure(*, rounds: int, messages: int) -> dict[str, Rates]:
    """The rates by endpoint: both servers are asked in turns, each with the other idle.

    The first round is a warm-up and not counted.
    """
    rates: dict[str, dict[str, list[float]]] = {path: {"plain": [], "keyed": [], "replay": []} for path in BODIES}
    http_application.prepare()
    with server("plain") as plain, server("keyed") as keyed, ThreadPoolExecutor(CLIENTS) as threads:
        for round_ in track(range(rounds + 1), description="http: with and without the middleware in turns"):
            for path, of_path in rates.items():
                sent = [(str(uuid4()), json.dumps(BODIES[path](number))) for number in range(messages)]
                for name, port in (("plain", plain), ("keyed", keyed), ("replay", keyed)):
                    rate = _one(threads, port, path, sent)
                    if round_:
                        of_path[name].append(rate)
    return {path: Rates(**of_path) for path, of_path in rates.items()}


def _order(number: int) -> dict[str, object]:
    products = random.sample(range(1, http_application.PRODUCTS + 1), 3)
    lines = [{"product": product, "quantity": 1 + number % 5} for product in products]
    return {"customer": f"customer {number}", "lines": lines}


BODIES: dict[str, Callable[[int], object]] = {
    "/orders": _order,
    "/jobs": lambda number: {"number": number},
    "/async-jobs": lambda number: {"number": number},
}


def _one(threads: ThreadPoolExecutor, port: int, path: str, sent: list[tuple[str, str]]) -> float:
    began = time.perf_counter()
    for done in [threads.submit(_send, port, path, sent[client::CLIENTS]) for client in range(CLIENTS)]:
        done.result()
    return len(sent) / (time.perf_counter() - began)


def _send(port: int, path: str, sent: list[tuple[str, str]]) -> None:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for key, body in sent:
        headers = {"content-type": "application/json", "idempotency-key": key}
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        answer.read()
        if answer.status != 201:
            raise RuntimeError(f"answered {answer.status}")
    connection.close()


@contextmanager
def server(name: str) -> Iterator[int]:
    """A uvicorn process with one of the two applications; yields its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    # Not by `--fd`: uvicorn takes that for a Unix socket, and each answer would wait 40 ms for a delayed acknowledgement.
    command = [sys.executable, "-m", "uvicorn", f"benchmarks.http_application:{name}", "--port", str(port)]
    process = subprocess.Popen([*command, "--log-level", "warning"], env=dict(os.environ))
    try:
        _wait_for(port)
        yield port
    finally:
        process.terminate()
        process.wait(30)


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
