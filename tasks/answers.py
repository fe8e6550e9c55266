"""What providers answer over HTTP, within limits of size and time: one that says too much, or too slowly, is not listened to for ever."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.util.ssl_ import create_urllib3_context

from idempotency.deadlines import Overdue, PlainSocket, TlsSocket

# Bytes of an answer about one object, and of a list of a hundred.
ANSWER_LIMIT, LIST_LIMIT = 1024 * 1024, 8 * 1024 * 1024
# How many times as long as one read of it a whole answer may take, with its headers.
ANSWER_READS = 3


class AnswerBeyondLimits(Exception):
    """There is an answer, of which not all was read: what was asked for may have happened. The message names the limit."""


def limited(pools: urllib3.PoolManager) -> urllib3.PoolManager:
    """The same connections, with a limit of time for each answer; through a proxy that is itself spoken to by TLS, for each read alone."""
    pools.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
    return pools


def ask(
    pools: urllib3.PoolManager, method: str, url: str, *, limit: int = ANSWER_LIMIT, **options: Any
) -> tuple[int, Mapping[str, str], bytes]:
    """The status, headers and body of an answer. `limit`: of its body, in bytes.

    Raises urllib3's `HTTPError` without a complete answer, and `AnswerBeyondLimits`. Then the connection is not used again.
    """
    body = bytearray()
    try:
        response = pools.request(method, url, preload_content=False, **options)
        try:
            # no compression is asked for, and none is undone
            while len(body) <= limit and (part := response.read(limit + 1 - len(body), decode_content=False)):
                body += part
        finally:
            response.close()  # the connection, too, unless all was read: then it is in the pool again
    except urllib3.exceptions.HTTPError as error:
        if not isinstance(error.__cause__, Overdue):
            raise
        reason = f"not complete after ANSWER_READS ({ANSWER_READS}) times the time of one read"
    else:
        if len(body) <= limit:
            return response.status, response.headers, bytes(body)
        reason = f"more than {'LIST_LIMIT' if limit == LIST_LIMIT else 'ANSWER_LIMIT'} ({limit} bytes)"
    raise AnswerBeyondLimits(reason)


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
