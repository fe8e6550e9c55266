"""Requests to the same endpoint with and without the middleware, in turns, from clients that keep their connections."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from uuid import uuid4

from rich.progress import track

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


def measure(*, rounds: int, messages: int) -> Rates:
    """Ask both servers in turns, each with the other idle; the first round is a warm-up and not counted."""
    rates: dict[str, list[float]] = {"plain": [], "keyed": [], "replay": []}
    with server("plain") as plain, server("keyed") as keyed, ThreadPoolExecutor(CLIENTS) as threads:
        for round_ in track(range(rounds + 1), description="http: with and without the middleware in turns"):
            keys = [str(uuid4()) for _ in range(messages)]
            for name, port in (("plain", plain), ("keyed", keyed), ("replay", keyed)):
                rate = _one(threads, port, keys)
                if round_:
                    rates[name].append(rate)
    return Rates(**rates)


def _one(threads: ThreadPoolExecutor, port: int, keys: list[str]) -> float:
    numbered = list(enumerate(keys))
    began = time.perf_counter()
    for done in [threads.submit(_send, port, numbered[client::CLIENTS]) for client in range(CLIENTS)]:
        done.result()
    return len(keys) / (time.perf_counter() - began)


def _send(port: int, numbered: list[tuple[int, str]]) -> None:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for number, key in numbered:
        headers = {"content-type": "application/json", "idempotency-key": key}
        connection.request("POST", "/jobs", json.dumps({"number": number}), headers)
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
