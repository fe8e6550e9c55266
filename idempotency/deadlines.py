"""Connections with one deadline for everything instead of a time-out for each read, and urllib's requests over them.

A socket's time-out is for each read, so a peer that sends a byte now and then is never given up. Not limited: the look-up of a
name, by the system's resolver.
"""

from __future__ import annotations

import http.client
import math
import socket
import ssl
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

# Where to connect to: a family of addresses, and what `connect` takes.
SocketAddress = tuple[socket.AddressFamily, Any]


class Overdue(TimeoutError):
    """The deadline of a connection has passed."""


class PlainSocket(socket.socket):
    """A connection of which no read or write lasts beyond `deadline`, by `time.monotonic()`; the time-out of each stays as it is.

    Reads are those of `makefile`, as http.client and smtplib make them. Beyond it they raise `Overdue`.
    """

    deadline = math.inf

    def recv_into(self, *args: Any, **options: Any) -> int:
        with self._limited():
            return super().recv_into(*args, **options)

    def send(self, *args: Any, **options: Any) -> int:
        with self._limited():
            return super().send(*args, **options)

    def sendall(self, *args: Any, **options: Any) -> None:
        with self._limited():
            super().sendall(*args, **options)

    @contextmanager
    def _limited(self) -> Iterator[None]:
        each, rest = self.gettimeout(), left(self.deadline)
        if rest >= (math.inf if each is None else each):
            yield
            return
        self.settimeout(rest)
        try:
            yield
        except TimeoutError:
            raise Overdue from None
        finally:
            self.settimeout(each)


class TlsSocket(PlainSocket, ssl.SSLSocket):
    """The same over TLS: set it as a context's `sslsocket_class`. The handshake has the plain socket's time-out."""


def left(deadline: float) -> float:
    """The seconds until then. Raises `Overdue` if there are none."""
    if (seconds := deadline - time.monotonic()) <= 0.0:
        raise Overdue
    return seconds


def connect(places: Iterable[SocketAddress], deadline: float, each: float = math.inf) -> PlainSocket:
    """A connection to the first of these places that takes one, within `each` seconds. Raises `OSError`: that of the last."""
    last: OSError = OSError("the name has no address")
    for family, place in places:
        plain = PlainSocket(family, socket.SOCK_STREAM)
        try:
            plain.settimeout(min(each, left(deadline)))
            plain.connect(place)
            plain.deadline = deadline
            plain.settimeout(left(deadline))
            return plain
        except OSError as error:
            plain.close()
            last = error
    raise last


def open_within(request: urllib.request.Request, seconds: float) -> http.client.HTTPResponse:
    """Send a request, by the proxy that the environment names, and return the answer when its headers are there; follows no redirect.

    `seconds`: from connecting to the last byte that is read of the answer. Raises what `urlopen` raises, and `OSError`.
    """
    opener = urllib.request.build_opener(_NoRedirect, _HttpHandler, _HttpsHandler)
    answer: http.client.HTTPResponse = opener.open(request, timeout=seconds)
    return answer


class _Http(http.client.HTTPConnection):
    """Its time-out is for all of it."""

    def __init__(self, host: str, **options: Any) -> None:
        super().__init__(host, **options)
        self._deadline = math.inf
        self._create_connection = self._connected  # what http.client connects by, before it asks a proxy for a tunnel

    def connect(self) -> None:
        assert self.timeout is not None
        self._deadline = time.monotonic() + self.timeout
        super().connect()

    def _tunnel(self) -> None:
        super()._tunnel()  # type: ignore[misc]  # http.client's own, between connecting to a proxy and the handshake
        self.sock.settimeout(left(self._deadline))

    def _connected(self, address: tuple[str, int], *_: Any) -> PlainSocket:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        return connect(((family, place) for family, *_, place in found), self._deadline)


class _Https(_Http, http.client.HTTPSConnection):
    def __init__(self, host: str, **options: Any) -> None:
        context = ssl.create_default_context()
        context.set_alpn_protocols(["http/1.1"])
        context.sslsocket_class = TlsSocket
        super().__init__(host, context=context, **options)

    def connect(self) -> None:
        super().connect()
        assert isinstance(self.sock, TlsSocket)
        self.sock.deadline = self._deadline


class _HttpHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Http, req)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Https, req)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Requests go to the address in the settings and nowhere else, and no other server's answer is believed."""

    def redirect_request(self, *_: Any) -> None:
        return None
