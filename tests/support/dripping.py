"""A server that answers a piece at a time, each in time, and never comes to an end."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
# What is sent first, and then again and again.
HEADERS = (OK + b"X-Long: ", b"x")
BODY = (OK + b"Content-Length: 100000\r\n\r\n", b" ")
# The line that says how long the next chunk is.
CHUNKS = (OK + b"Transfer-Encoding: chunked\r\n\r\n1;", b"x")


@dataclass
class Dripping:
    """`told`: the first line of each request, without its version."""

    url: str
    told: list[str] = field(default_factory=list)

    @property
    def asked(self) -> int:
        """How many requests there were."""
        return len(self.told)


@contextmanager
def dripping(
    begin: bytes, each: bytes, *, certificate: Path | None = None, pause: float = 0.05, pieces: int | None = None
) -> Iterator[Dripping]:
    """A server that sends `begin`, and then `each` every `pause` seconds; after `pieces` of them, it closes the connection."""
    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
    listener, stopped = socket.create_server(("127.0.0.1", 0)), threading.Event()
    scheme = "http" if certificate is None else "https"
    server = Dripping(f"{scheme}://127.0.0.1:{listener.getsockname()[1]}")

    def serve(plain: socket.socket) -> None:
        with suppress(OSError), context.wrap_socket(plain, server_side=True) if context else plain as connection:
            _take(connection, server)
            connection.sendall(begin)
            sent = 0
            while sent != pieces and not stopped.wait(pause):
                connection.sendall(each)
                sent += 1

    def run() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=run, daemon=True).start()
    try:
        yield server
    finally:
        stopped.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def _take(connection: socket.socket, server: Dripping) -> None:
    """Read a request, all of it: what is left unread when a connection is closed would reset it."""
    with connection.makefile("rb") as lines:
        server.told.append(lines.readline().decode().rpartition(" HTTP/")[0])
        length = 0
        while (line := lines.readline().strip().lower()) != b"":
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        lines.read(length)
