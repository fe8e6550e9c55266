"""One partition in this process: its position, the messages at hand, and what it waits for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..store.stream_places import Place
from ..store.streams import Held
from .message import StreamMessage


@dataclass(slots=True, eq=False)
class Partition:
    """A partition that this process holds."""

    held: Held
    # Messages that have come and are not handled yet, in order.
    at_hand: deque[StreamMessage] = field(default_factory=deque)
    # Nothing is done before this time, by the monotonic clock.
    waits_until: float = 0.0
    # When the first message's next attempt is due, by the same clock. Until then, only whether a person has decided is looked at.
    due_at: float = 0.0
    # Messages of these offsets are handled one by one, each in a transaction of its own.
    alone: range = range(0)
    # So are this many of the next ones: the process that had them may have died of one, and only alone are attempts counted.
    suspected: int = 0
    # Whether another process, or a person, has the partition now.
    is_lost: bool = False
    # Whether a commit had no answer: where the partition is has to be read again before anything else.
    is_in_doubt: bool = False
    # Why it has stopped, as stored.
    stopped: str | None = None
    # Why it had stopped in another process, as stored: over, once this one reads it and nothing is held up.
    said: str | None = None
    # Whose claim the first message waits for, as the log has it.
    waits_for: str | None = None
    # The stream's end: the offset of the next message that will be published, as far as is known.
    end: int | None = None

    @property
    def place(self) -> Place:
        return self.held.place

    @property
    def position(self) -> int:
        """The offset of the next message. Only of a partition that has begun."""
        assert self.held.position is not None
        return self.held.position

    @property
    def is_ready(self) -> bool:
        """Whether there is something to do now."""
        return bool(self.at_hand or self.is_in_doubt) and not self.is_lost and time.monotonic() >= self.waits_until

    def add(self, messages: Sequence[StreamMessage]) -> None:
        """Add messages that have come. Those handled or at hand are left out: a broker may begin earlier than asked."""
        for each in messages:
            if each.offset >= self.position and not (self.at_hand and each.offset <= self.at_hand[-1].offset):
                self.at_hand.append(each)

    def is_alone(self, offset: int) -> bool:
        """Whether the message at this offset has to have a transaction of its own."""
        return self.suspected > 0 or offset in self.alone

    def wait(self, seconds: float) -> None:
        """Do nothing for so many seconds; other partitions go on."""
        self.waits_until = time.monotonic() + seconds

    def wait_for_attempt(self, seconds: float, *, look: float) -> None:
        """Leave the first message alone for so many seconds, with a look after `look` seconds; other partitions go on."""
        self.due_at = time.monotonic() + seconds
        self.wait(min(seconds, look))

    def moved(self, to: int) -> None:
        """The position is here now, committed."""
        self.held = self.held.at(to)
        self.due_at, self.waits_for = 0.0, None
        while self.at_hand and self.at_hand[0].offset < to:
            self.at_hand.popleft()
            self.suspected = max(self.suspected - 1, 0)
        if self.alone.stop <= to:
            self.alone = range(0)
        if self.end is not None:
            self.end = max(self.end, to)
        self.stopped = self.said = None
