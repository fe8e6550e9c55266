"""Outages: one line in the log for each of Postgres, and the pauses between tries.

A process logs that line once, whichever of its loops and deliveries notice the outage.
"""

from __future__ import annotations

import time

# Seconds without a failure after which the next one is another outage: longer than any loop waits between two tries, so
# that one with a stale connection does not announce an outage that the others have seen end.
QUIET = 60.0
# Seconds between two tries of a loop: most outages are over at once, and a server that starts must not be flooded.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 5.0


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
