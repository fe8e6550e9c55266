"""Where the library and Prometheus post alerts: a webhook, and the part of Alertmanager's API that Prometheus uses."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from typing import Any


@dataclass(frozen=True, slots=True)
class Received:
    """An alert as it came. `at` by time.monotonic(); `fields` has what a runbook's page names in capitals, in lower case."""

    runbook: str
    summary: str
    fields: dict[str, Any]
    at: float = field(default_factory=time.monotonic)


class Receiver(ThreadingHTTPServer):
    """Takes alerts into a queue; what is over, and what always fires, is left out."""

    def __init__(self) -> None:
        self.alerts: SimpleQueue[Received] = SimpleQueue()
        self._seen: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def address(self) -> str:
        """`host:port`, for Prometheus."""
        return f"127.0.0.1:{self.server_port}"

    @property
    def webhook(self) -> str:
        """The address for `idempotency_alert_webhook_url`."""
        return f"http://{self.address}/alerts"

    def forget(self) -> None:
        """Drop what has not been taken."""
        while not self.alerts.empty():
            self.alerts.get()

    def take(self, path: str, document: Any) -> None:
        """Read what was posted."""
        if path == "/alerts":
            for alert in document["alerts"]:
                if not alert.get("over"):
                    summary = f"{alert['count']} {alert['reason']} {' '.join(alert.get('at_stake', ()))}".rstrip()
                    self.alerts.put(Received(alert["runbook"], summary, alert))
            return
        for alert in document:
            if datetime.fromisoformat(alert["endsAt"]) <= datetime.now(UTC) or alert["labels"]["severity"] == "none":
                continue
            with self._lock:  # Prometheus repeats what lasts
                identity = (json.dumps(alert["labels"], sort_keys=True), alert["startsAt"])
                is_new = identity not in self._seen
                self._seen.add(identity)
            if is_new and alert["labels"]["severity"] != "info":
                about = alert["annotations"]
                self.alerts.put(Received(about["runbook"], about["summary"], alert["labels"] | about))


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.take(self.path, json.loads(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver on a free port of loopback."""
    receiver = Receiver()
    thread = threading.Thread(target=receiver.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.shutdown()
        receiver.server_close()
