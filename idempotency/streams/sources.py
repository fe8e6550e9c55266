"""Where the messages of a stream come from: topics of Kafka, or a stream of RabbitMQ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..errors import SettingsError

Start = Literal["earliest", "latest"]


@dataclass(frozen=True, slots=True)
class KafkaTopics:
    """Topics of Kafka, read by one consumer group."""

    topics: tuple[str, ...]
    group: str | None
    start: Start
    options: Mapping[str, str] = field(repr=False)

    @property
    def kind(self) -> str:
        """What a position in it is of, as it is stored."""
        return "a topic of Kafka"

    def reads(self, topic: str, partition: int) -> bool:
        """Whether this is read, if the broker has it."""
        return topic in self.topics


@dataclass(frozen=True, slots=True)
class RabbitStream:
    """A stream of RabbitMQ; with `partitions`, the super stream of that many streams, `name-0` and so on."""

    name: str
    partitions: int | None
    start: Start

    @property
    def kind(self) -> str:
        """What a position in it is of, as it is stored."""
        return "a stream of RabbitMQ" if self.partitions is None else "a super stream of RabbitMQ"

    @property
    def queues(self) -> list[str]:
        """The queues that are its partitions, in order."""
        return [self.queue(number) for number in range(self.partitions or 1)]

    def reads(self, topic: str, partition: int) -> bool:
        """Whether this is read, if the broker has it."""
        return topic == self.name and partition < (self.partitions or 1)

    def queue(self, partition: int) -> str:
        """The queue that is a partition."""
        return self.name if self.partitions is None else f"{self.name}-{partition}"


Source = KafkaTopics | RabbitStream


def kafka(
    *topics: str, group: str | None = None, start: Start = "earliest", options: Mapping[str, str] | None = None
) -> KafkaTopics:
    """Read topics of Kafka, at `idempotency_kafka_servers`. Needs the extra `kafka`.

    `group`: the consumer group that divides the partitions among processes; by default, the application's and the stream's
    names, with a dot between them (one within a name is `%2E`). Two streams that read the same topic need two groups. `start`:
    where to begin if there is no position yet; `latest` is where each partition ends when the first process of the consumer
    starts, and the beginning of a partition that is added later. `options`: librdkafka's, in addition to
    `idempotency_kafka_options`. Raises `SettingsError`.
    """
    if not topics or not all(isinstance(each, str) and each for each in topics):
        raise SettingsError("kafka: name at least one topic")
    if any(each.startswith("^") for each in topics):
        raise SettingsError(
            "kafka: name each topic; a pattern would begin new ones where their first messages are gone"
        )
    _check_start("kafka", start)
    return KafkaTopics(topics, group, start, dict(options or {}))


def rabbitmq_stream(name: str, *, partitions: int | None = None, start: Start = "earliest") -> RabbitStream:
    """Read a stream of RabbitMQ, over AMQP, on the application's broker.

    `partitions`: of a super stream, as `rabbitmq-streams add_super_stream` makes one; None: a plain stream. `start`: as for
    `kafka`. Raises `SettingsError`.
    """
    if not name:
        raise SettingsError("rabbitmq_stream: a name is missing")
    if partitions is not None and partitions < 1:
        raise SettingsError(f"rabbitmq_stream {name!r}: partitions must be at least 1, got {partitions}")
    _check_start(f"rabbitmq_stream {name!r}", start)
    return RabbitStream(name, partitions, start)


def _check_start(what: str, start: str) -> None:
    if start not in ("earliest", "latest"):
        raise SettingsError(f"{what}: start must be 'earliest' or 'latest', got {start!r}")
