"""Servers that cannot be reached, and why, without the error's own message, which may repeat the address."""

from __future__ import annotations

import re
from collections.abc import Callable

from amqp.exceptions import AMQPError
from kombu.exceptions import OperationalError as BrokerError
from redis import RedisError
from sqlalchemy.exc import ArgumentError, DBAPIError

from ..settings import NOT_AN_ADDRESS
from .findings import Finding, Level

# Seconds to wait for a server.
TIMEOUT = 5

# Servers' error messages are never shown, because some repeat the address. These are worth distinguishing.
_PASSWORD, _NO_PASSWORD, _NAME = "wrong password", "the address has no password", "no such database or user"
_NO_TLS, _OTHER_HOST, _OTHER_AUTHORITY = (
    "no TLS between it and this process, or only TLS",
    "its certificate is for another host",
    "its certificate is of an authority that is not known here",
)
_REASONS = (
    (r"hostname mismatch|ip address mismatch|does not match host name|host name mismatch", _OTHER_HOST),
    (r"certificate verify failed|root certificate file", _OTHER_AUTHORITY),
    (r"no encryption|not support ssl|wrong version number|record layer|invalid response to ssl", _NO_TLS),
    (r"no password supplied", _NO_PASSWORD),
    (
        r"password authentication failed|access_refused|wrongpass|invalid username-password|noauth|authentication",
        _PASSWORD,
    ),
    (r"refused", "connection refused"),
    (r"resolve|name or service|nodename|getaddrinfo|errno -[235]\b", "no such host"),
    (r"timed? ?out", "no answer in time"),
    (r"does not exist", _NAME),
)
# Those that do not go away by waiting.
WRONG_ADDRESS = (_PASSWORD, _NO_PASSWORD, _NAME, _NO_TLS, _OTHER_HOST, _OTHER_AUTHORITY)


def check_server(
    subject: str, setting: str, ask: Callable[[], list[Finding]], level: Level = Level.REFUSAL
) -> list[Finding]:
    """The findings about a server, or one of this level that says why there are none."""
    try:
        return ask()
    except (DBAPIError, RedisError, BrokerError, AMQPError, OSError) as error:
        return [Finding(level, subject, f"unreachable: {reason(error)}", f"check {setting} and the server")]
    except (ArgumentError, ValueError, KeyError):
        return [Finding(level, setting, NOT_AN_ADDRESS, "correct it")]


def reason(error: BaseException) -> str:
    """Why a server could not be reached, without its own message, which may repeat the address."""
    said = str(getattr(error, "orig", None) or error).lower()
    return next((words for pattern, words in _REASONS if re.search(pattern, said)), type(error).__name__)
