"""One POST to an endpoint, within limits of time and size: to an address that was checked, never by a proxy, never redirected."""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from functools import cache
from http import HTTPStatus
from typing import Self

from ..attempt.threads import DaemonThreads
from ..deadlines import TlsSocket, connect, left
from ..errors import AddressRefused
from ..hosts import Address, Allowed
from ..settings import Settings
from .addresses import Resolve, Target, addresses_of, look_up, target_of

# Of an answer, which is read only for a challenge. The rest is left unread.
BODY_LIMIT = 4096
# Seconds. The system's resolver may take half a minute; a thread waits for it instead of the delivery.
RESOLVE_TIMEOUT = 5.0
# A name server that hangs holds a thread for half a minute, and must not hold all. An endpoint that fails has one at a time.
RESOLVERS = 64
# Seconds for one address, so that another one may be tried.
CONNECT_TIMEOUT = 5.0
# Of one host.
MOST_ADDRESSES = 4


class Failure(StrEnum):
    """Why there was no answer."""

    ADDRESS_REFUSED = "address_refused"
    NO_ADDRESS = "no_address"
    CONNECTION_FAILED = "connection_failed"
    TLS = "tls"
    TIMEOUT = "timeout"
    NOT_HTTP = "not_http"


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a POST: a status, or why there is none. `retry_after` in seconds from then, if the endpoint asks for it."""

    status: int | None
    failure: Failure | None
    milliseconds: int
    retry_after: float | None = None
    body: bytes = field(default=b"", repr=False)

    @property
    def is_accepted(self) -> bool:
        """Whether it is a 2xx. A redirect is not."""
        return self.status is not None and 200 <= self.status < 300

    def __str__(self) -> str:
        return f"status {self.status}" if self.failure is None else f"no answer ({self.failure})"


@dataclass(frozen=True, slots=True)
class Sender:
    """Makes POSTs. `timeout`: seconds for one, from the name's look-up to the end of the answer."""

    allowed: Allowed
    authorities: ssl.SSLContext
    timeout: float
    resolve: Resolve = look_up

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """The sender of an application. Raises `OSError` if the setting `webhook_ca_file` names no file with certificates."""
        file = settings.webhook_ca_file
        context = _authorities(None if file is None else str(file))
        return cls(Allowed.of(settings.webhook_allowed_hosts), context, settings.webhook_timeout)

    def post(self, url: str, headers: Mapping[str, str], body: str) -> Answer:
        """Post a body as JSON. Raises nothing that the endpoint or the network may be the cause of."""
        begun = time.monotonic()
        try:
            status, found, answered = self._post(url, headers, body.encode(), begun + self.timeout)
        except AddressRefused:
            failure = Failure.ADDRESS_REFUSED
        except (socket.gaierror, UnicodeError):
            failure = Failure.NO_ADDRESS
        except TimeoutError:
            failure = Failure.TIMEOUT
        except ssl.SSLError:
            failure = Failure.TLS
        except OSError:  # also of a connection that was closed without an answer
            failure = Failure.CONNECTION_FAILED
        except http.client.HTTPException:
            failure = Failure.NOT_HTTP
        else:
            return Answer(status, None, _since(begun), _retry_after(status, found), answered)
        return Answer(None, failure, _since(begun))

    def _post(
        self, url: str, headers: Mapping[str, str], body: bytes, deadline: float
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        target = target_of(url, self.allowed)
        if target.address is not None:
            addresses: Sequence[Address] = (target.address,)
        else:
            looking = _resolvers(os.getpid()).submit(addresses_of, target, self.allowed, self.resolve)
            addresses = looking.result(min(RESOLVE_TIMEOUT, left(deadline)))
        with self._connected(target, addresses, deadline) as connected:
            connection = http.client.HTTPSConnection(target.host, target.port, context=self.authorities)
            connection.sock = connected  # so that it neither looks the name up nor connects
            try:
                connection.request(
                    "POST",
                    target.path,
                    body,
                    {"Host": target.authority, "Content-Type": "application/json", "Connection": "close", **headers},
                )
                answer = connection.getresponse()
                return answer.status, answer.headers, _begin_of(answer)
            finally:
                connection.close()

    def _connected(self, target: Target, addresses: Sequence[Address], deadline: float) -> TlsSocket:
        """A connection to one of these addresses and no other, with a certificate that is valid for the name."""
        families = {4: socket.AF_INET, 6: socket.AF_INET6}
        places = [(families[each.version], (str(each), target.port)) for each in addresses[:MOST_ADDRESSES]]
        plain = connect(places, deadline, each=CONNECT_TIMEOUT)
        try:
            connected = self.authorities.wrap_socket(plain, server_hostname=target.host)
        except BaseException:
            plain.close()
            raise
        assert isinstance(connected, TlsSocket)
        connected.deadline = deadline
        return connected


def _begin_of(answer: http.client.HTTPResponse) -> bytes:
    """The first bytes of an answer. Its status is there: what is wrong with its body, or slow, changes nothing."""
    begin = b""
    try:
        # by `read1`, which takes a buffer at most, whatever size a chunk claims to have
        while len(begin) < BODY_LIMIT and (part := answer.read1(BODY_LIMIT - len(begin))):
            begin += part
    except (OSError, ValueError, http.client.HTTPException):  # ValueError: of a chunk's size
        return b""
    return begin[:BODY_LIMIT]


def _since(begun: float) -> int:
    return round((time.monotonic() - begun) * 1000)


def _retry_after(status: int, headers: http.client.HTTPMessage) -> float | None:
    """Seconds, from a number or a date (RFC 9110, 10.2.3), where a status says that it is too early."""
    text = headers.get("Retry-After")
    if text is None or status not in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        return None
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        at = parsedate_to_datetime(text)
        return max(((at if at.tzinfo else at.replace(tzinfo=UTC)) - datetime.now(UTC)).total_seconds(), 0.0)
    except (ValueError, OverflowError):  # a date beyond what a clock has
        return None


@cache
def _authorities(file: str | None) -> ssl.SSLContext:
    """Those that the system trusts, and those in the file."""
    context = ssl.create_default_context()
    if file is not None:
        context.load_verify_locations(file)
    context.sslsocket_class = TlsSocket
    return context


@cache
def _resolvers(_pid: int) -> DaemonThreads:
    """Threads of this process: those of its parent are not there after a fork."""
    return DaemonThreads(RESOLVERS, "webhook-resolver")
