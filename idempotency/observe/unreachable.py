"""Why a server cannot be reached, in words that do not repeat its address."""

from __future__ import annotations

import re

# Servers' error messages are never shown, because some repeat the address. These are worth distinguishing.
_PASSWORD, _NO_PASSWORD, _NAME = "wrong password", "the address has no password", "no such database or user"
_RIGHT = "the user of the address has no right to this"
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
    (r"access to .* refused for user", _RIGHT),  # RabbitMQ gives a wrong password the same code
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


def reason(error: BaseException) -> str:
    """Why a server could not be reached, without its own message, which may repeat the address."""
    cause = getattr(error, "orig", None) or error
    said = str(cause).lower() if getattr(cause, "sqlstate", None) is None else ""  # with a state, it has answered
    return next((words for pattern, words in _REASONS if re.search(pattern, said)), type(cause).__name__)
