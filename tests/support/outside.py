"""The outside world of a test: a real HTTP server that records every call and answers as scripted."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class OutsideWorld:
    """Acts once per idempotency key, as a good provider does, and counts calls and acts by key."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.acts: Counter[str] = Counter()
        # What the next calls answer; "ok" when empty. "fail before" and "busy" (a 429) without having acted; "fail after",
        # "hang" (nothing for 5 s) and "drip" (a byte every 0.2 s, for 5 s) after it.
        self.script: list[str] = []
        self._lock = threading.Lock()
        world = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                key = self.headers["Idempotency-Key"]
                with world._lock:
                    world.calls[key] += 1
                    how = world.script.pop(0) if world.script else "ok"
                    if how not in ("fail before", "busy") and not world.acts[key]:
                        world.acts[key] += 1
                body = json.dumps({"amount": 7}).encode()
                if how == "hang":
                    time.sleep(5)
                if how == "drip":
                    body = body.ljust(25)
                self.send_response({"fail before": 500, "fail after": 500, "busy": 429}.get(how, 200))
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with contextlib.suppress(OSError):  # the caller may have gone
                    if how == "drip":
                        for byte in body:
                            self.wfile.write(bytes([byte]))
                            time.sleep(0.2)
                    else:
                        self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/act"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
