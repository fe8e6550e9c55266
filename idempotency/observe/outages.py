"""Outages: why a server cannot be reached, and one line in the log for each outage of Postgres.

A process logs that line once, whichever of its loops and deliveries notice the outage.
"""

from __future__ import annotations

import re
import time

# Seconds without a failure after which the next one is another outage: longer than any loop waits between two tries, so
# that one with a stale connection does not announce an outage that the others have seen end.
QUIET = 60.0
# Seconds between two tries of a loop: most outages are over at once, and a server that starts must not be flooded.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 5.0

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


class Outage:
    """The outages of one server, as this process sees them."""

    def __init__(self) -> None:
        self._noticed_at: float | None = None

    def is_news(self) -> bool:
        """Note a failure; whether it is the first of its outage."""
        now = time.monotonic()
        # without a call in between, so no other thread is let in (a lock would have to be one that gevent leaves alone)
        before, self._noticed_at = self._noticed_at, now
        return before is None or now - before > QUIET


class Pauses:
    """The pauses of one loop between its tries: each twice as long as the last, up to `LONGEST_PAUSE`."""

    def __init__(self) -> None:
        self._last = 0.0

    def next(self) -> float:
        """The next pause, in seconds."""
        self._last = min(max(2 * self._last, FIRST_PAUSE), LONGEST_PAUSE)
        return self._last

    def end(self) -> None:
        """There was an answer: the next pause is the first again."""
        self._last = 0.0


postgres = Outage()


def reason(error: BaseException) -> str:
    """Why a server could not be reached, without its own message, which may repeat the address."""
    cause = getattr(error, "orig", None) or error
    said = str(cause).lower() if getattr(cause, "sqlstate", None) is None else ""  # with a state, it has answered
    return next((words for pattern, words in _REASONS if re.search(pattern, said)), type(cause).__name__)
