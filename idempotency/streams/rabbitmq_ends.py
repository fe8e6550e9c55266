"""Where streams of RabbitMQ end: looked at on channels of their own, since a subscription shows no more than it may be sent.

What the broker counts (`message_count`) is no end: it is as far as its oldest file, entries of its own included, and seconds old.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from amqp.exceptions import AccessRefused, NotFound, PreconditionFailed, ResourceLocked
from kombu import Connection as BrokerConnection

from ..errors import BrokerUnavailable
from ..store.streams import EMPTY
from .holdings import At, Holdings
from .partition import Partition
from .rabbitmq_message import OFFSET_HEADER, offset_of
from .reader import LOOK

# The consumer tag: each channel has one consumer.
TAG = "position"
# Seconds for which the last messages of a stream are waited for.
END_PATIENCE = 1.0
# Seconds without a message after which the last one that has come is the last one there is.
QUIET = 0.25
# How many streams are looked at at once: opening a channel takes three answers of the broker.
AT_ONCE = 4
# What the broker refuses of one queue, while others go on.
REFUSED = (NotFound, AccessRefused, PreconditionFailed, ResourceLocked)


class Look:
    """One look at the end of a partition's stream, while its messages come."""

    def __init__(self, partition: Partition, channel: Any) -> None:
        self.partition = partition
        self.channel = channel
        self.began = self.heard = time.monotonic()

    def is_over(self, *, has_end: bool) -> bool:
        """Whether the last message has come, or is waited for no longer."""
        now = time.monotonic()
        return now - self.began > END_PATIENCE or (has_end and now - self.heard > QUIET)


class Ends:
    """The ends of the streams that one connection reads. Of `prefetch` messages at most, the answer is on its way at a time."""

    def __init__(self, broker: BrokerConnection, holdings: Holdings, prefetch: int) -> None:
        self._broker = broker
        self._holdings = holdings
        self._prefetch = prefetch
        self._looks: dict[At, Look] = {}
        # When a partition is looked at again; one that was taken since, at once.
        self._due: dict[At, tuple[Partition, float]] = {}

    def look(self, queue_of: Callable[[int], str]) -> None:
        """Begin and end looks; waits for none. What comes meanwhile, with all other messages, is noted in the partitions.

        A partition is looked at if messages of it wait, so that the broker may have more, or if nothing of it has come yet.
        """
        for at, look in list(self._looks.items()):
            if look.is_over(has_end=look.heard > look.began) or self._holdings.get(at) is not look.partition:
                del self._looks[at]
                with suppress(*REFUSED):
                    look.channel.basic_cancel(TAG)
                    look.channel.close()
        now = time.monotonic()
        for each in self._holdings.all():
            at = each.place.topic, each.place.partition
            held, due = self._due.get(at, (None, 0.0))
            if each.is_lost or at in self._looks or (held is each and now < due):
                continue
            if len(self._looks) == AT_ONCE:
                return
            if each.end is None or each.at_hand or each.stopped is not None:
                self._due[at] = each, now + LOOK
                self._begin(at, each, queue_of(at[1]))

    def _begin(self, at: At, held: Partition, queue: str) -> None:
        channel = self._broker.channel()
        look = self._looks[at] = Look(held, channel)
        try:
            self._subscribe(channel, queue, partial(self._noted, look), since="last")
        except REFUSED:  # the partition itself says so
            del self._looks[at]

    def _noted(self, look: Look, offset: int) -> None:
        look.heard = time.monotonic()
        if not look.partition.is_lost:
            self._holdings.note_end(look.partition, offset + 1)

    def _subscribe(self, channel: Any, queue: str, seen: Callable[[int], object], *, since: str) -> None:
        channel.auto_decode = False
        channel.basic_qos(0, self._prefetch, False)

        def received(message: Any) -> None:
            if (offset := offset_of(message)) is not None:
                seen(offset)
            channel.basic_ack(message.delivery_tag)

        channel.basic_consume(queue, TAG, callback=received, arguments={OFFSET_HEADER: since})

    def of(self, queue: str, *, is_wanted: Callable[[], bool] = lambda: True, since: str = "last") -> int | None:
        """The offset after the last message that a stream has, or had a moment ago; None: none has come. Waits for it."""
        end: list[int] = []

        def seen(offset: int) -> None:
            end[:] = [offset + 1]

        with self._broker.channel() as channel:
            self._subscribe(channel, queue, seen, since=since)
            until = time.monotonic() + END_PATIENCE
            while time.monotonic() < until and is_wanted():
                before = list(end)
                with suppress(TimeoutError):
                    self._broker.drain_events(timeout=QUIET)
                if end and end == before:
                    break
            channel.basic_cancel(TAG)
        return end[0] if end else None

    def latest(self, queue: str) -> int | None:
        """The offset of the next message that will be published, or `EMPTY`; None: there is no such stream. Waits for it."""
        try:
            if (end := self.of(queue)) is not None:
                return end
            with self._broker.channel() as channel:  # the broker counts only every five seconds
                _, many, _ = channel.queue_declare(queue, passive=True)
            if many == 1 and (end := self.of(queue, since="first")) is not None:
                return end
        except NotFound:
            return None
        if many > 1:
            raise BrokerUnavailable(f"{queue!r} has messages, and its last one does not come")
        return EMPTY  # new, or a file that retention has left with nothing in it but an entry of the broker's own
