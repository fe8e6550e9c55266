"""Queues that do not answer although their broker does: without a majority of their members, or with a leader that hangs.

Such a queue is left alone for a while, so that it holds up no other one. After that a single message, or question, tries it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..observe.logs import log

# Seconds that a queue is left alone: each time twice as long as the last, as long as it stays silent.
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0
# Of its last pause, what a try may take. The others wait meanwhile.
SHARE = 1 / 6
# Seconds that a try may take at least.
LEAST_PATIENCE = 1.0


@dataclass(slots=True)
class _Silence:
    pause: float
    until: float  # by time.monotonic()


class SilentQueues:
    """The queues that one connection has found silent, by their names. Each process, and each of its loops, finds its own."""

    def __init__(self) -> None:
        self._silent: dict[str, _Silence] = {}

    def __bool__(self) -> bool:
        return bool(self._silent)

    def __contains__(self, queue: str) -> bool:
        return queue in self._silent

    def note(self, queue: str) -> float:
        """It did not answer. Returns for how many seconds it is left alone."""
        known = self._silent.get(queue)
        pause = FIRST_PAUSE if known is None else min(2 * known.pause, LONGEST_PAUSE)
        self._silent[queue] = _Silence(pause, time.monotonic() + pause)
        return pause

    @contextmanager
    def noting(self, queue: str) -> Iterator[None]:
        """Note a queue that lets this block run into a time-out, and say so."""
        try:
            yield
        except TimeoutError:
            log.warning("queue_silent", queue=queue, retry_seconds=self.note(queue))
            raise

    def answered(self, queue: str) -> None:
        """It answers: it is like all others again."""
        self._silent.pop(queue, None)

    def left_alone(self) -> list[str]:
        """Those to which nothing is to be sent now."""
        return [queue for queue in self._silent if self.rest(queue) > 0]

    def rest(self, queue: str) -> float:
        """For how many seconds more a queue is left alone; 0: it may be tried."""
        known = self._silent.get(queue)
        return 0.0 if known is None else max(known.until - time.monotonic(), 0.0)

    def patience(self, queue: str, usual: float) -> float:
        """How many seconds to wait for an answer of this queue, where one that was never silent gets the usual ones."""
        known = self._silent.get(queue)
        return usual if known is None else min(usual, max(known.pause * SHARE, LEAST_PATIENCE))
