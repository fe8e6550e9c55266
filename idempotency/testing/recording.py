"""An HTTP server in the provider's place: it records every call and acts once per idempotency key."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY_HEADER = "Idempotency-Key"
# Reading changes nothing, and putting or deleting the same thing twice does it once (RFC 9110, 9.2).
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
REPEATABLE = frozenset({"PUT", "DELETE"})


@dataclass(frozen=True, slots=True)
class Call:
    """One call as the server saw it; `key` is its `Idempotency-Key`, None without one; `path` has the query too."""

    method: str
    path: str
    key: str | None
    body: str
    headers: Mapping[str, str]

    def json(self) -> Any:
        """The body as JSON. Raises `ValueError` if it is not JSON."""
        return json.loads(self.body)

    @property
    def content(self) -> Any:
        """The body, parsed if it is JSON, so that white space and the order of members make no difference."""
        try:
            return json.loads(self.body)
        except ValueError:
            return self.body


Answer = Callable[[Call], tuple[int, Any]]


class RecordingServer:
    """Listens on `url`. `calls` are all calls since the last scenario began.

    `answer` makes (HTTP status, JSON value) from a `Call`; it stands for the provider's act, so it is asked once per key:
    a call under a known key gets the first answer again, unless that was a 5xx. By default acts are numbered.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.answer: Answer = self._number
        self._acts = 0
        self._answers: dict[str, tuple[int, Any]] = {}
        # held during an answer, so that two calls under one key are one act
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        # seconds; shutdown() waits for the loop's next turn
        loop = {"poll_interval": 0.02}
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs=loop, daemon=True)
        self._thread.start()

    def forget(self) -> None:
        """Begin again: no calls, no keys, acts numbered from 1."""
        with self._lock:
            self.calls = []
            self._acts = 0
            self._answers.clear()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def take(self, call: Call) -> tuple[int, Any]:
        """Record a call and answer it."""
        with self._lock:
            self.calls.append(call)
            if call.key is not None and call.key in self._answers:
                return self._answers[call.key]
            status, content = self.answer(call)
            if call.key is not None and status < 500:
                self._answers[call.key] = (status, content)
            return status, content

    def _number(self, call: Call) -> tuple[int, Any]:
        self._acts += call.method not in SAFE
        return 200, {"id": f"act-{self._acts}"}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a caller that was killed did not wait for its answer."""


def _handler(server: RecordingServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def handle_call(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode(errors="replace")
            call = Call(self.command, self.path, self.headers.get(KEY_HEADER), body, dict(self.headers.items()))
            try:
                status, content = server.take(call)
                text = json.dumps(content)
            except Exception as error:
                status, text = 500, json.dumps({"error": f"answer() of the test: {type(error).__name__}: {error}"})
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(text.encode())

        do_GET = do_HEAD = do_OPTIONS = do_POST = do_PUT = do_PATCH = do_DELETE = handle_call  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
