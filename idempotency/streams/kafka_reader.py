"""Reading topics of Kafka, through librdkafka: the group divides the partitions, and positions are read from Postgres.

What the broker keeps as the group's offsets is a copy, for tools that show how far behind a group is. It is never read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ..errors import BrokerUnavailable, SettingsError
from ..extras import extra
from ..observe.crash_points import crash_point
from ..observe.logs import log
from ..store.statements import is_news
from .holdings import At, Holdings, until_moved
from .kafka_message import as_stream_message
from .kafka_options import configuration
from .partition import Partition
from .reader import AHEAD, BEYOND, LOOK, OVERTAKEN
from .sources import KafkaTopics

# Seconds for one question to the broker, and for one that nothing waits for.
ANSWER, SOON = 10.0, 1.0
# Seconds without a partition of the group's until that is said.
PATIENCE = 5.0
# Seconds between two tries to take a partition that the group has given to this process.
TAKE_AGAIN = 1.0
# Seconds between two copies of the positions to the broker.
COPY = 1.0


class KafkaReader:
    """The partitions that a group has given to this process, of one consumer."""

    def __init__(self, source: KafkaTopics, holdings: Holdings, *, instance: str | None) -> None:
        with extra("kafka"):
            import confluent_kafka
        self._kafka: Any = confluent_kafka
        self._holdings = holdings
        self._source = source
        self._batch = holdings.stream.batch
        # Pausing throws away what librdkafka has fetched: not for a partition whose turn comes soon.
        self._limit = 2 * AHEAD * self._batch
        # Topics whose ends are noted before anything is read of them.
        self._to_begin = list(source.topics) if source.start == "latest" else []
        # What the group has given to this process, whether or not the position could be taken.
        self._assigned: set[At] = set()
        self._paused: set[At] = set()
        # Those whose position the broker does not have, until that is stored.
        self._refused_at: set[At] = set()
        self._take_at = 0.0
        self._copy_at = 0.0
        # When it is said that the group has given nothing yet.
        self._idle_at = time.monotonic() + PATIENCE
        self._ends_at, self._asked_at = 0.0, time.monotonic() + LOOK
        self._to_copy: dict[At, int] = {}
        self._failed: Any = None
        options = configuration(source, holdings.runtime.settings, name=holdings.stream.name, instance=instance)
        try:
            self._consumer: Any = confluent_kafka.Consumer(options | {"error_cb": self._noted, "logger": log._logger})
            self._consumer.subscribe(
                list(source.topics), on_assign=self._given, on_revoke=self._revoked, on_lost=self._lost
            )
        except confluent_kafka.KafkaException as error:
            raise SettingsError(f"idempotency_kafka_options: {error.args[0]}") from None

    # ------------------------------------------------------------ which partitions

    def _given(self, consumer: Any, partitions: Sequence[Any]) -> None:
        """The group gives partitions to this process: each begins at its position. Runs inside `poll`."""
        begun = []
        for each in partitions:
            at = each.topic, each.partition
            self._assigned.add(at)
            partition = self._taken(at, regardless=True)
            # without a position nothing may be read: it is paused, and taken later
            each.offset = self._kafka.OFFSET_END if partition is None else partition.position
            begun.append(each)
        consumer.incremental_assign(begun)
        waiting = [each for each in begun if not self._is_read((each.topic, each.partition))]
        # librdkafka keeps a pause beyond what is given: one that was lost, and comes back, would never be read
        consumer.resume([each for each in begun if each not in waiting])
        if waiting:
            consumer.pause(waiting)
            self._paused.update((each.topic, each.partition) for each in waiting)

    def _is_read(self, at: At) -> bool:
        """Whether the partition is held, and its position is of what is read."""
        partition = self._holdings.get(at)
        return partition is not None and partition.stopped is None

    def _taken(self, at: At, *, regardless: bool) -> Partition | None:
        """The partition with its position. None: Postgres does not answer, or it is another's."""
        try:
            partition = self._holdings.take(at, regardless=regardless)
            if partition is None:
                return None
            if partition.stopped is not None:
                return partition
            low, high = self._watermarks(at)
            self._holdings.note_end(partition, high)
            # `low` also of `latest`: what was there then has a position
            if partition.held.position is None and not self._holdings.begin(partition, low):
                raise BrokerUnavailable("another process has begun the partition")
            if partition.said is not None and partition.position == high:  # nothing is left that could hold it up
                self._holdings.go_on(partition)
            return partition
        except (DBAPIError, PoolTimeout, BrokerUnavailable) as error:
            if not isinstance(error, DBAPIError) or is_news(error):
                log.warning("stream_partition_not_taken", stream=self._holdings.stream.name, error=type(error).__name__)
            self._holdings.forget(at)
            return None

    def _begin_topics(self) -> None:
        """Note where `latest` is, of all partitions of a topic at once. Raises `BrokerUnavailable` and SQLAlchemy's errors."""
        while self._to_begin:
            topic = self._to_begin[-1]
            if not self._holdings.has_begun(topic):
                ends = {number: self._watermarks((topic, number))[1] for number in self._partitions(topic)}
                self._holdings.begin_topic(topic, ends)
            self._to_begin.pop()

    def _partitions(self, topic: str) -> list[int]:
        """The partitions of a topic; none, if there is no such topic."""
        try:
            found = self._consumer.list_topics(topic, timeout=ANSWER).topics[topic]
        except self._kafka.KafkaException as error:
            raise BrokerUnavailable(error.args[0].name()) from error
        unknown = self._kafka.KafkaError.UNKNOWN_TOPIC_OR_PART, self._kafka.KafkaError._UNKNOWN_TOPIC
        if found.error is not None and found.error.code() not in unknown:
            raise BrokerUnavailable(found.error.name())
        return sorted(found.partitions)

    def _watermarks(self, at: At, *, timeout: float = ANSWER) -> tuple[int, int]:
        try:
            found = self._consumer.get_watermark_offsets(self._kafka.TopicPartition(*at), timeout=timeout)
        except self._kafka.KafkaException as error:
            raise BrokerUnavailable(error.args[0].name()) from error
        if found is None:
            raise BrokerUnavailable("no answer in time")
        low, high = found
        return low, high

    def _revoked(self, consumer: Any, partitions: Sequence[Any]) -> None:
        """The group takes partitions back. What was handled of them is committed: this runs between two batches."""
        self._copy(at_once=True)
        for each in partitions:
            self._leave((each.topic, each.partition))
        consumer.incremental_unassign(partitions)

    def _lost(self, consumer: Any, partitions: Sequence[Any]) -> None:
        """The group has taken partitions away, because it had not heard of this process."""
        for each in partitions:
            self._leave((each.topic, each.partition))
        consumer.incremental_unassign(partitions)

    def _leave(self, at: At) -> None:
        self._assigned.discard(at)
        self._paused.discard(at)
        self._refused_at.discard(at)
        self._to_copy.pop(at, None)
        self._holdings.give_up(at)

    def lost(self, partition: Partition) -> None:
        """Read the partition no longer, until it is free: a person has moved it, or the group is about to say who has it."""
        at = partition.place.topic, partition.place.partition
        self._holdings.forget(at)
        self._to_copy.pop(at, None)
        self._refused_at.discard(at)
        if at in self._assigned:
            self._pause(at)
            self._take_at = time.monotonic()

    def _take_the_rest(self) -> None:
        """Take what the group has given and this process does not hold, if it is free, and read it from its position."""
        if time.monotonic() < self._take_at:
            return
        self._take_at = time.monotonic() + TAKE_AGAIN
        for at in sorted(self._assigned):
            if self._holdings.get(at) is not None or (partition := self._taken(at, regardless=False)) is None:
                continue
            # not by seek(), which librdkafka refuses for what it does not read at the moment, as after an error
            try:
                self._consumer.incremental_unassign([self._kafka.TopicPartition(*at)])
                self._consumer.incremental_assign([self._kafka.TopicPartition(*at, partition.position)])
            except self._kafka.KafkaException as error:
                raise BrokerUnavailable(error.args[0].name()) from error
            if partition.stopped is None:
                self._resume(at)

    # ------------------------------------------------------------ messages

    def poll(self, timeout: float) -> None:
        """Take and give up partitions, and add the messages that have come. Raises `BrokerUnavailable` and `SettingsError`."""
        self._begin_topics()
        self._take_the_rest()
        for at in sorted(self._assigned):
            partition = self._holdings.get(at)
            if partition is not None and len(partition.at_hand) >= self._limit:
                self._pause(at)
            elif partition is not None and not partition.stopped and at not in self._refused_at:
                self._resume(at)
        try:
            first = self._consumer.poll(timeout)
            rest = [] if first is None else self._consumer.consume(self._batch, 0.0)
        except self._kafka.KafkaException as error:
            raise BrokerUnavailable(error.args[0].name()) from error
        for message in [] if first is None else [first, *rest]:
            self._received(message)  # of all of them, before anything is asked of Postgres
        self._stop_refused()
        self._note_ends()
        self._say_if_idle()
        self._copy()
        if self._failed is not None:
            raise SettingsError(f"Kafka: {self._failed.str()}")

    def _received(self, message: Any) -> None:
        at = message.topic(), message.partition()
        partition = self._holdings.get(at)
        if (error := message.error()) is not None:
            self._refused(error, at, partition)
            return
        if partition is None or partition.is_lost:
            return  # from before it was taken
        self._holdings.note_end(partition, message.offset() + 1)
        partition.add([as_stream_message(message, self._kafka.TIMESTAMP_NOT_AVAILABLE)])

    def _say_if_idle(self) -> None:
        if not self._assigned and time.monotonic() >= self._idle_at:
            self._idle_at = float("inf")
            why = "the group has given it none: others have them all, or one that died is missed only after session.timeout.ms"
            log.info("stream_has_no_partition", stream=self._holdings.stream.name, why=why)

    def _note_ends(self) -> None:
        """Note where the topics end: what comes with each answer, and, of those that are not fetched, by a question from time to time."""
        if (now := time.monotonic()) < self._ends_at:
            return
        self._ends_at = now + COPY
        is_asked = now >= self._asked_at
        if is_asked:
            self._asked_at = now + LOOK
        for at in sorted(self._assigned):
            if (partition := self._holdings.get(at)) is None or partition.is_lost:
                continue
            try:
                if at in self._paused and is_asked:
                    self._holdings.note_end(partition, self._watermarks(at, timeout=SOON)[1])
                elif at not in self._paused and (high := self._seen(at)) >= 0:
                    self._holdings.note_end(partition, high)
            except BrokerUnavailable:  # asked again at the next look: nothing is late for it
                is_asked = False

    def _seen(self, at: At) -> int:
        """Where the topic ends by the last answer of the broker that had something of it; negative: none has come."""
        found = self._consumer.get_watermark_offsets(self._kafka.TopicPartition(*at), cached=True)
        return -1 if found is None else int(found[1])

    def _refused(self, error: Any, at: At, partition: Partition | None) -> None:
        """The broker refuses something about a partition."""
        if error.code() == self._kafka.KafkaError._AUTO_OFFSET_RESET and partition is not None:
            self._pause(at)
            self._refused_at.add(at)
            return
        log.warning("stream_kafka_error", place=f"{at[0]}/{at[1]}", error=error.name())

    def _stop_refused(self) -> None:
        """Stop these. The broker tells it once, so what Postgres does not take now is tried again.

        The messages at hand come first, however long they wait: they are before what the broker does not have.
        """
        for at in sorted(self._refused_at):
            if (partition := self._holdings.get(at)) is not None:
                if partition.at_hand:
                    continue
                self._holdings.stop(partition, self._overtaken(at, partition))
            self._refused_at.discard(at)

    def _overtaken(self, at: At, partition: Partition) -> str:
        try:
            low, high = self._watermarks(at)
            there = f"and Kafka has the offsets {low} to {high}"
            why = OVERTAKEN if partition.position < low else BEYOND
        except BrokerUnavailable:
            there, why = "which Kafka does not have", "messages are gone"
        return until_moved(f"position {partition.position}, {there}: {why}")

    def _noted(self, error: Any) -> None:
        """librdkafka tells of errors that it goes on trying to mend, and of fatal ones."""
        if error.fatal():
            self._failed = error

    def _pause(self, at: At) -> None:
        if at not in self._paused:
            self._paused.add(at)
            self._consumer.pause([self._kafka.TopicPartition(*at)])

    def _resume(self, at: At) -> None:
        if at in self._paused:
            self._paused.discard(at)
            self._consumer.resume([self._kafka.TopicPartition(*at)])

    # ------------------------------------------------------------ the broker's copy

    def moved(self, partition: Partition) -> None:
        """Copy the position to the broker, soon."""
        self._to_copy[partition.place.topic, partition.place.partition] = partition.position
        self._copy()

    def _copy(self, *, at_once: bool = False) -> None:
        if not self._to_copy or not (at_once or time.monotonic() >= self._copy_at):
            return
        self._copy_at = time.monotonic() + COPY
        offsets = [self._kafka.TopicPartition(*at, position) for at, position in self._to_copy.items()]
        self._to_copy.clear()
        try:
            self._consumer.commit(offsets=offsets, asynchronous=True)
        except self._kafka.KafkaException as error:  # another generation of the group: its own copies follow
            log.info("stream_offset_not_copied", stream=self._holdings.stream.name, error=error.args[0].name())
        crash_point("stream.copied")

    def close(self) -> None:
        """Give all partitions up, and leave the group."""
        self._copy(at_once=True)
        for at in sorted(self._assigned):
            self._holdings.give_up(at)
        self._assigned.clear()
        # it waits for the group, which may be rebalancing or gone; the partitions themselves are given up by now
        closing = threading.Thread(target=self._consumer.close, name="stream-kafka-close", daemon=True)
        closing.start()
        closing.join(ANSWER)
        if closing.is_alive():
            log.warning("stream_group_not_left", stream=self._holdings.stream.name)
