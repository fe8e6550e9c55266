"""What providers answer over HTTP, within limits of size and time: one that says too much, or too slowly, is not listened to for ever."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.util.ssl_ import create_urllib3_context

from idempotency.deadlines import PlainSocket, TlsSocket

# Bytes of an answer about one object, and of a list of a hundred.
ANSWER_LIMIT, LIST_LIMIT = 1024 * 1024, 8 * 1024 * 1024
# How many times as long as one read of it a whole answer may take, with its headers.
ANSWER_READS = 3


class AnswerTooLong(Exception):
    """There is an answer, of which not all was read: what was asked for may have happened. The message says the limit."""


def with_deadlines(pools: urllib3.PoolManager) -> urllib3.PoolManager:
    """The same connections, with a limit of time for each whole answer of the server that they lead to.

    Only each read has one of what a proxy says itself: of the answer to CONNECT, and of all if it is spoken to by TLS.
    """
    pools.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
    return pools


def request_limited(
    pools: urllib3.PoolManager, method: str, url: str, *, limit: int = ANSWER_LIMIT, **options: Any
) -> tuple[int, Mapping[str, str], bytes]:
    """The status, headers and body of an answer. `limit`: of its body, in bytes.

    Raises urllib3's `HTTPError` without a complete answer in time, and `AnswerTooLong`. Then the connection is not used again.
    """
    body = bytearray()
    response = pools.request(method, url, preload_content=False, **options)
    try:
        # no compression is asked for, and none is undone
        while len(body) <= limit and (part := response.read(limit + 1 - len(body), decode_content=False)):
            body += part
    finally:
        response.close()  # the connection, too, unless all was read: then it is in the pool again
    if len(body) > limit:
        raise AnswerTooLong(f"longer than {limit} bytes")
    return response.status, response.headers, bytes(body)


class _Limited(HTTPConnection):
    def request(self, *args: Any, **options: Any) -> None:
        if isinstance(self.sock, PlainSocket):
            self.sock.deadline = PlainSocket.deadline
        super().request(*args, **options)

    def getresponse(self) -> urllib3.HTTPResponse:  # type: ignore[override]  # as urllib3's own
        if isinstance(self.sock, PlainSocket) and self.timeout is not None:
            self.sock.deadline = time.monotonic() + ANSWER_READS * self.timeout
        return super().getresponse()


class _Connection(_Limited):
    def connect(self) -> None:
        super().connect()
        plain = self.sock
        self.sock = PlainSocket(fileno=plain.detach())
        self.sock.settimeout(self.timeout)


class _TlsConnection(_Limited, HTTPSConnection):
    def connect(self) -> None:
        if self.ssl_context is None:  # as urllib3 makes one
            self.ssl_context = create_urllib3_context()
            if not self.ca_certs:
                self.ssl_context.load_default_certs()
            self.ssl_context.sslsocket_class = TlsSocket
        super().connect()


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _TlsConnection
