"""Reading a stream of RabbitMQ over AMQP: by offsets from a position, in a queue that keeps what was read.

Offsets rise, and not always by one: the broker has entries of its own between messages, at the beginning of a file at least
(RabbitMQ 3.10). So a gap alone says nothing. Each subscription begins with the last message that was handled: if the broker still
has it, it has all that came after it, because the oldest go first. A gap in the middle is looked at again in the same way.
"""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from typing import Any

from amqp.exceptions import AccessRefused, NotFound, ResourceLocked
from celery import Celery
from kombu import Connection as BrokerConnection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ..broker.connections import BROKER_ERRORS, connect
from ..errors import BrokerUnavailable, SettingsError
from ..observe.crash_points import crash_point
from ..observe.logs import log
from ..observe.unreachable import reason
from ..wire.arriving import bound_what_arrives
from .holdings import At, Holdings, until_moved
from .partition import Partition
from .rabbitmq_ends import REFUSED, TAG, Ends
from .rabbitmq_message import OFFSET_HEADER, as_stream_message, offset_of
from .reader import AHEAD, BEYOND, OVERTAKEN
from .shares import leave, shares
from .sources import RabbitStream

# How often in a lease it is looked at how partitions are divided.
LOOKS = 12
# Seconds: the longest pause between two looks.
LONGEST_PAUSE = 5.0
# Seconds that the broker may take to connect.
CONNECT_TIMEOUT = 5.0
# Seconds until the broker is asked why the message before the position does not come.
ANCHOR_PATIENCE = 3.0


class Subscription:
    """One partition that is being read. `anchor`: the message before the first one that is wanted, which the broker should have."""

    def __init__(self, partition: Partition, channel: Any, anchor: int | None) -> None:
        self.partition = partition
        self.channel = channel
        self.anchor = anchor
        # The offset of the last message that came; None before the first.
        self.last: int | None = None
        self.asked_at = time.monotonic()
        # The delivery tags of messages that are not handled yet, by offset.
        self.tags: dict[int, int] = {}

    def goes_on(self) -> bool:
        """Whether the broker has sent what there is, nothing is missing, and all of it is handled."""
        is_whole = self.anchor is None or self.last is not None
        return is_whole and not self.partition.at_hand and time.monotonic() - self.asked_at > ANCHOR_PATIENCE


class RabbitReader:
    """The partitions of a stream of RabbitMQ that this process has, of one consumer."""

    def __init__(self, app: Celery, source: RabbitStream, holdings: Holdings) -> None:
        bound_what_arrives()
        self._source = source
        self._holdings = holdings
        self._every: list[At] = [(source.name, number) for number in range(source.partitions or 1)]
        self._prefetch = min(AHEAD * holdings.stream.batch, 65_535)
        self._subscriptions: dict[At, Subscription] = {}
        # Partitions that the broker has refused: each look asks again.
        self._refused: set[At] = set()
        # Why these are to stop, until Postgres has noted it: it may not be seen again, as a stream that was recreated grows.
        self._to_stop: dict[At, str] = {}
        # Whether it has to be noted where the streams end, before anything is read of them.
        self._is_to_begin = source.start == "latest"
        lease = holdings.runtime.settings.lease
        self._pause = min(lease / LOOKS, LONGEST_PAUSE)
        self._look_at = 0.0
        try:
            # no heartbeats: a long body would miss them; the connection's own keepalive finds a host that is gone
            self._broker: BrokerConnection = connect(
                app.connection_for_read, _require_amqp, heartbeat=0, connect_timeout=CONNECT_TIMEOUT
            )
        except BROKER_ERRORS as error:
            raise BrokerUnavailable(reason(error)) from error
        self._ends = Ends(self._broker, holdings, self._prefetch)

    def poll(self, timeout: float) -> None:
        """Take and give up partitions, and add the messages that have come. Raises `BrokerUnavailable`."""
        self._stop_noticed()
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + self._pause
            self._share()
        timeout = max(min(timeout, self._look_at - time.monotonic()), 0.0)
        try:
            self._drain(timeout)
            for at, each in list(self._subscriptions.items()):
                if each.anchor is not None and each.last is None and time.monotonic() - each.asked_at > ANCHOR_PATIENCE:
                    self._check_end(at, each)
                elif (each.partition.stopped or each.partition.said) and each.goes_on():
                    self._holdings.go_on(each.partition)
            self._ends.look(self._source.queue)
        except BROKER_ERRORS as error:
            raise BrokerUnavailable(reason(error)) from error

    def _drain(self, timeout: float) -> None:
        with suppress(TimeoutError):  # nothing has come
            self._broker.drain_events(timeout=max(timeout, 0.001))
            for _ in range(self._prefetch):
                self._broker.drain_events(timeout=0.001)

    # ------------------------------------------------------------ which partitions

    def _share(self) -> None:
        if self._is_to_begin:
            self._begin_stream()
        found = shares(self._holdings, self._every)
        for at in found.give_up:
            self._unsubscribe(at)
            self._holdings.give_up(at)
        for at in sorted(self._refused):
            if (partition := self._holdings.get(at)) is not None and not partition.is_lost:
                self._subscribe(at, partition)
        for at in found.take:
            partition = self._holdings.take(at, regardless=False, dead=found.dead)
            if partition is not None and partition.stopped is None:
                self._subscribe(at, partition)

    def _begin_stream(self) -> None:
        """Note where `latest` is, of all partitions at once. Raises `BrokerUnavailable` and SQLAlchemy's errors."""
        if not self._holdings.has_begun(self._source.name):
            try:
                ends = {
                    number: end
                    for _, number in self._every
                    if (end := self._ends.latest(self._source.queue(number))) is not None
                }
            except BROKER_ERRORS as error:
                raise BrokerUnavailable(reason(error)) from error
            self._holdings.begin_topic(self._source.name, ends)
        self._is_to_begin = False

    def lost(self, partition: Partition) -> None:
        """Read the partition no longer; the next look shows whether it is free."""
        at = partition.place.topic, partition.place.partition
        self._unsubscribe(at)
        self._holdings.forget(at)
        self._look_at = 0.0

    # ------------------------------------------------------------ messages

    def _subscribe(self, at: At, partition: Partition, *, after: int | None = None) -> None:
        """Read from the message before the position, or from `after`, the last one that came before a gap."""
        queue, known = self._source.queue(at[1]), partition.held.position
        anchor = after if after is not None or not known else known - 1
        # "first" also of `latest`: what was there then has a position
        begin: Any = "first" if known is None else anchor or 0
        try:
            channel = self._broker.channel()
            channel.auto_decode = False  # the value is bytes, whatever its headers say
            channel.basic_qos(0, self._prefetch, False)
            subscription = self._subscriptions[at] = Subscription(partition, channel, anchor)
            received = partial(self._received_by, at, subscription)
            channel.basic_consume(queue, TAG, callback=received, arguments={OFFSET_HEADER: begin})
        except REFUSED as error:
            self._subscriptions.pop(at, None)
            self._refused.add(at)  # first: Postgres may not answer now
            self._holdings.stop(partition, _refusal(queue, error))
        except BROKER_ERRORS as error:
            raise BrokerUnavailable(reason(error)) from error
        else:
            if at in self._refused:
                self._refused.discard(at)
                self._holdings.go_on(partition)

    def _unsubscribe(self, at: At) -> None:
        self._refused.discard(at)
        self._to_stop.pop(at, None)
        subscription = self._subscriptions.pop(at, None)
        if subscription is not None:
            try:
                # what is on its way comes before the answer, and is left out
                subscription.channel.basic_cancel(TAG)
                subscription.channel.close()
            except BROKER_ERRORS as error:
                raise BrokerUnavailable(reason(error)) from error

    def _received_by(self, at: At, subscription: Subscription, message: Any) -> None:
        try:
            self._received(at, subscription, message)
        except (DBAPIError, PoolTimeout):
            if at not in self._to_stop:
                # this message is gone from the connection: the partition is read again, from where it is
                self._unsubscribe(at)
                self._holdings.forget(at)
            raise

    def _received(self, at: At, subscription: Subscription, message: Any) -> None:
        partition = subscription.partition
        if self._subscriptions.get(at) is not subscription or partition.is_lost:
            return  # on its way when the channel was closed
        if (offset := offset_of(message)) is None:
            self._stop(at, partition, f"{self._source.queue(at[1])!r} is not a stream: its messages have no offsets")
            return
        if partition.held.position is None and not self._holdings.begin(partition, offset):
            return
        if not self._follows(at, subscription, offset):
            return
        subscription.last = offset
        self._holdings.note_end(partition, offset + 1)
        if offset < partition.position:
            subscription.channel.basic_ack(message.delivery_tag)
            return
        subscription.tags[offset] = message.delivery_tag
        partition.add([as_stream_message(at, offset, message)])

    def _follows(self, at: At, subscription: Subscription, offset: int) -> bool:
        """Whether nothing is missing before this message. If that is not known, the broker is asked once more."""
        partition, last, anchor = subscription.partition, subscription.last, subscription.anchor
        if last is None:
            expected = (partition.position if anchor is None else anchor + 1, anchor)
            if offset in expected:
                return True
            where = f"position {partition.position}, and the next message that RabbitMQ has is {offset}"
            is_new = offset < partition.position
            why = BEYOND if is_new else OVERTAKEN
            self._stop(at, partition, until_moved(f"{where}: {why}"))
            return False
        if offset == last + 1 or last == anchor:
            return True
        log.info("stream_gap", stream=self._holdings.stream.name, place=partition.place, after=last, offset=offset)
        self._unsubscribe(at)
        self._subscribe(at, partition, after=last)
        return False

    def _check_end(self, at: At, subscription: Subscription) -> None:
        """The message before the position does not come: stop, if the stream ends before it.

        The broker would wait until there is one of that offset, and with it miss those before.
        """
        subscription.asked_at = time.monotonic()
        partition = subscription.partition
        end = self._ends.of(self._source.queue(at[1]), is_wanted=lambda: subscription.last is None)
        if subscription.last is not None:
            return
        if end is None:  # a broker that is busy, or a stream in which there is nothing
            self._unsubscribe(at)
            self._subscribe(at, partition, after=subscription.anchor)
        elif end < partition.position:
            why = f"position {partition.position}, and the stream of RabbitMQ ends at {end}: {BEYOND}"
            self._stop(at, partition, until_moved(why))

    def _stop(self, at: At, partition: Partition, why: str) -> None:
        self._unsubscribe(at)
        partition.at_hand.clear()
        self._to_stop[at] = why
        self._stop_noticed()

    def _stop_noticed(self) -> None:
        for at, why in list(self._to_stop.items()):
            if (partition := self._holdings.get(at)) is not None:
                self._holdings.stop(partition, why)
            del self._to_stop[at]

    def moved(self, partition: Partition) -> None:
        """Let the broker send more, as much as has been handled."""
        at = partition.place.topic, partition.place.partition
        subscription = self._subscriptions.get(at)
        if subscription is None or subscription.partition is not partition:
            return
        done = [offset for offset in subscription.tags if offset < partition.position]
        if not done:
            return
        tag = max(subscription.tags.pop(offset) for offset in done)
        try:
            subscription.channel.basic_ack(tag, multiple=True)
        except BROKER_ERRORS as error:
            raise BrokerUnavailable(reason(error)) from error
        crash_point("stream.copied")

    def close(self) -> None:
        """Give all partitions up, and drop the connection."""
        for at in list(self._subscriptions):
            self._subscriptions.pop(at)
            self._holdings.give_up(at)
        try:
            leave(self._holdings)
        except (DBAPIError, PoolTimeout) as error:
            log.warning("stream_member_not_removed", error=type(error).__name__)
        self._broker.collect()


def _refusal(queue: str, error: Exception) -> str:
    if isinstance(error, NotFound):
        return f"RabbitMQ has no stream {queue!r}"
    if isinstance(error, AccessRefused):
        return f"RabbitMQ refuses {queue!r}: its user has no right to read it"
    if isinstance(error, ResourceLocked):
        return f"RabbitMQ refuses {queue!r}: another connection uses it exclusively"
    return f"RabbitMQ refuses {queue!r}: it is not a stream, or does not know offsets"


def _require_amqp(broker: BrokerConnection) -> None:
    if broker.transport.driver_type != "amqp":
        raise SettingsError("broker_url: streams of RabbitMQ are read over AMQP, from a RabbitMQ")
