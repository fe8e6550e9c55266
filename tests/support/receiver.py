"""A customer's server for webhooks: TLS by a private authority, answers as a test says, and every request is kept."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support.certificates import certificate_for

# The status, headers and body of an answer; None: the connection is closed without one.
Answer = tuple[int, dict[str, str], bytes] | None


@dataclass(frozen=True)
class Request:
    """What came: the body as it was, and the headers by their names in lower case."""

    path: str
    headers: dict[str, str]
    body: str

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def document(self) -> Any:
        return json.loads(self.body)


def accept(request: Request) -> Answer:
    """Answer a challenge, and accept everything else."""
    if request.document["type"] == "webhook.challenge":
        return 200, {}, json.dumps({"challenge": request.document["data"]["challenge"]}).encode()
    return 204, {}, b""


@dataclass
class Receiver:
    """`answer` says what each request is answered with."""

    url: str
    ca_file: Path
    answer: Callable[[Request], Answer] = accept
    requests: list[Request] = field(default_factory=list)
    server: Any = None

    @property
    def webhooks(self) -> list[Request]:
        """What came, without challenges."""
        return [each for each in self.requests if each.document["type"] != "webhook.challenge"]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def answering(status: int, **headers: str) -> Callable[[Request], Answer]:
    """Challenges are answered, webhooks get this status."""

    def answer(request: Request) -> Answer:
        if request.document["type"] == "webhook.challenge":
            return accept(request)
        return status, {name.replace("_", "-"): value for name, value in headers.items()}, b""

    return answer


def certificate(directory: Path, **options: Any) -> Path:
    """The receiver's certificate with its key, by its own authority: for 127.0.0.1 and two names."""
    return certificate_for("127.0.0.1", directory, "DNS:localhost", "DNS:hooks.example", **options)


def start(both: Path) -> Receiver:
    """A receiver on a free port of 127.0.0.1 with this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(both)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # of clients that refuse it
    # the handshake in the request's own thread: one that hangs holds up no other
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    receiver = Receiver(f"https://127.0.0.1:{server.server_address[1]}", Path(f"{both}.crt"), server=server)
    server.receiver = receiver  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return receiver


@contextmanager
def dripping(certificate: str, pieces: Callable[[], Iterator[bytes]]) -> Iterator[str]:
    """A server that sends its answer piece by piece."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            try:
                with context.wrap_socket(server.accept()[0], server_side=True) as connection:
                    asked = connection.makefile("rb")
                    length = 0
                    while (line := asked.readline().strip()) != b"":
                        if line.lower().startswith(b"content-length:"):
                            length = int(line.split(b":")[1])
                    asked.read(length)  # what is left unread when it closes would reset the connection
                    for piece in pieces():
                        connection.sendall(piece)
            except OSError:
                pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"https://127.0.0.1:{server.getsockname()[1]}/"
    thread.join(5)


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        receiver: Receiver = self.server.receiver  # type: ignore[attr-defined]
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.path, headers, body)
        receiver.requests.append(request)
        if (answer := receiver.answer(request)) is None:
            self.close_connection = True
            return
        status, more, content = answer
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **more}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None: ...
