"""A server that speaks DynamoDB's protocol, one request after the other: `python -m tests.stores.dynamodb_server PORT`.

It is moto's. That looks at the condition of a write and changes the item in two steps, without a lock between them: with a
thread for each request, of several claims that race two may succeed, which DynamoDB excludes. So it has one thread here. What
is between two requests of the library is still open to every race.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, run_simple


class Quiet(WSGIRequestHandler):
    def log(self, *args: object, **named: object) -> None:
        pass


@contextlib.contextmanager
def running() -> Iterator[str]:
    """The address of such a server in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "tests.stores.dynamodb_server", str(port)])
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None
            assert time.monotonic() < deadline, "the server has not started"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(60)


if __name__ == "__main__":
    application = DomainDispatcherApplication(create_backend_app)
    run_simple("127.0.0.1", int(sys.argv[1]), application, threaded=False, request_handler=Quiet)
