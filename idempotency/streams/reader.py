"""What the two kinds of brokers have in common."""

from __future__ import annotations

from typing import Protocol

from .partition import Partition

# Batches of a partition that are at hand before RabbitMQ is asked for no more of it; Kafka is paused at twice as many.
AHEAD = 2
# Seconds between two questions where a stream ends of which not all messages have come.
LOOK = 10.0
# Why a partition stops.
OVERTAKEN = "retention has overtaken it, and messages are gone"
BEYOND = "it was recreated, or the position was moved beyond its end"


class Reader(Protocol):
    """The broker's side of one consumer: which partitions it may have, and their messages, added to what is at hand.

    All is called from one thread. Everything raises `BrokerUnavailable` when the broker does not answer.
    """

    def poll(self, timeout: float) -> None:
        """Take and give up partitions as the broker or the others want it, and add the messages that have come.

        Waits at most `timeout` seconds for a first one.
        """

    def moved(self, partition: Partition) -> None:
        """The position is committed: tell the broker, for tools that look there."""

    def lost(self, partition: Partition) -> None:
        """Another process, or a person, has the partition: read it no longer, unless it can be taken again."""

    def close(self) -> None:
        """Give all partitions up, and disconnect."""
