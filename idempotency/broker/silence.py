"""Queues that do not answer although their broker does: without a majority of their members, or with a leader that hangs.

They are left alone for a while, so that they hold up no others. All of them have one pause, however many they are, and are tried
together after it, so that waiting for their answers takes no more than a fixed share of the time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from amqp.exceptions import ChannelError

from ..observe.logs import log

# Seconds that they are left alone: each time twice as long as the last, as long as no other queue falls silent.
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0
# Of the last pause, what a try may take. The other queues wait meanwhile.
SHARE = 1 / 6
# Seconds that a try may take at least.
LEAST_PATIENCE = 1.0


class SilentQueues:
    """The queues that one connection has found silent, by their names. Each process, and each of its loops, finds its own."""

    def __init__(self) -> None:
        # the one that was tried longest ago first
        self._silent: dict[str, None] = {}
        self._pause = self._until = 0.0

    def __bool__(self) -> bool:
        return bool(self._silent)

    def __contains__(self, queue: str) -> bool:
        return queue in self._silent

    def note(self, *queues: str) -> float:
        """These did not answer. Returns for how many seconds all are left alone."""
        known = self._silent.keys() >= set(queues)
        self._pause = min(2 * self._pause, LONGEST_PAUSE) if known else FIRST_PAUSE
        self._until = time.monotonic() + self._pause
        for queue in queues:
            self._silent.pop(queue, None)
            self._silent[queue] = None
        return self._pause

    @contextmanager
    def noting(self, queue: str) -> Iterator[None]:
        """Note whether this block, which asks a queue, runs into a time-out; a refusal is an answer."""
        try:
            yield
        except TimeoutError:
            log.warning("queue_silent", queues=queue, retry_seconds=self.note(queue))
            raise
        except ChannelError:
            self.answered(queue)
            raise
        self.answered(queue)

    def answered(self, queue: str) -> None:
        """It is like all others again."""
        self._silent.pop(queue, None)

    @property
    def are_left_alone(self) -> bool:
        return bool(self._silent) and time.monotonic() < self._until

    def left_alone(self) -> list[str]:
        """Those to which nothing is to be sent now."""
        return list(self._silent) if self.are_left_alone else []

    def in_turn(self, queues: Iterable[str]) -> list[str]:
        """The queues to be asked now, one after the other: silent ones last, and only after their pause.

        The first of them that stays silent begins the next pause, and is the last one after it.
        """
        wanted = list(queues)
        tries = [] if self.are_left_alone else [queue for queue in self._silent if queue in wanted]
        return [queue for queue in wanted if queue not in self._silent] + tries

    def patience(self, usual: float) -> float:
        """How many seconds a try may wait, where others wait for the usual ones."""
        return min(usual, max(self._pause * SHARE, LEAST_PATIENCE))
