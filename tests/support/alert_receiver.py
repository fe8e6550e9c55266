"""A webhook for alerts, which answers as it is told, or not at all."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver(ThreadingHTTPServer):
    """Takes what a Slack webhook takes, answers as it is told, or not at all."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.alerts: list[dict[str, Any]] = []
        self.status = 200
        self.silent = threading.Event()
        self.hold, self.asked = threading.Event(), threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/services/secret-path"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.silent.is_set():
            while self.server.silent.is_set():
                threading.Event().wait(0.05)
            return
        self.server.asked.set()
        while self.server.hold.is_set():
            threading.Event().wait(0.02)
        self.server.texts.append(body["text"])
        self.server.alerts += body["alerts"]
        self.send_response(self.server.status)
        self.send_header("Location", self.server.url)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()
    thread = threading.Thread(target=receiver.serve_forever, daemon=True)
    thread.start()
    yield receiver
    receiver.silent.clear()
    receiver.shutdown()
    receiver.server_close()
    thread.join(10)
