"""A position is of one topic, stream or super stream: where another one has its name, it is not that one's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import amqp
import pytest

from idempotency import streams
from idempotency.operate.change import Change
from idempotency.operate.seek import seek_stream
from tests.streams.conftest import Make
from tests.support import bank
from tests.support.processes import eventually
from tests.support.streaming import NAME, Handler, KafkaBroker, RabbitBroker, Streaming, configure

CHANGE = Change("ann", "moved", is_verified=True)
Publish = Callable[..., None]


@pytest.fixture
def plain(make_streaming: Make) -> Iterator[Callable[[Streaming, str], Publish]]:
    """Makes a plain stream of RabbitMQ of this name, and returns what publishes there."""
    made: list[tuple[amqp.Channel, str]] = []

    def make(streaming: Streaming, name: str) -> Publish:
        assert isinstance(streaming.broker, RabbitBroker)
        channel = streaming.broker._channel
        channel.queue_declare(name, durable=True, auto_delete=False, arguments={"x-queue-type": "stream"})
        made.append((channel, name))
        return lambda account: channel.basic_publish(
            amqp.Message(json.dumps({"account": account}).encode()), routing_key=name
        )

    yield make
    for channel, name in made:
        channel.queue_delete(name)


def goes_on_after_a_seek(streaming: Streaming, topic: str, accounts: list[str]) -> None:
    configure(streaming.environment)
    seek_stream(bank.app, NAME, topic, 0, 0, CHANGE, take=True)
    eventually(lambda: streaming.entries()[-len(accounts) :] == accounts, what=streaming.logs())
    assert streaming.stopped() == ""


@pytest.mark.long
def test_a_plain_stream_that_becomes_a_super_stream_stops_and_skips_nothing(
    make_streaming: Make, plain: Callable[[Streaming, str], Publish]
) -> None:
    streaming = make_streaming("rabbitmq", partitions=2)
    topic = streaming.broker.topic
    publish = plain(streaming, topic)
    for number in range(3):
        publish(f"old{number}")
    process = streaming.start(Handler(streams.rabbitmq_stream(topic)))
    eventually(lambda: streaming.positions() == {0: 3}, what=streaming.logs())
    assert process.end() == 0
    accounts = [f"new{number}" for number in range(5)]
    for account in accounts:
        streaming.broker.publish({"account": account}, 0)
    streaming.start()
    streaming.wait_until_stopped(
        "position 3 is of a stream of RabbitMQ of this name, and a super stream of RabbitMQ is"
    )
    streaming.broker.publish({"account": "other"}, 1)
    eventually(lambda: streaming.positions() == {0: 3, 1: 1}, what=streaming.logs())
    goes_on_after_a_seek(streaming, topic, accounts)


@pytest.mark.long
def test_a_stream_that_moves_to_the_other_broker_and_back_stops_and_skips_nothing(
    make_streaming: Make, plain: Callable[[Streaming, str], Publish]
) -> None:
    kafka, rabbit = make_streaming("kafka"), make_streaming("rabbitmq")
    kafka.broker.publish_many(3)
    process = kafka.start()
    kafka.wait_until_handled()
    assert process.end() == 0
    topic = kafka.broker.topic
    publish = plain(rabbit, topic)
    accounts = [f"new{number}" for number in range(5)]
    for account in accounts:
        publish(account)
    process = rabbit.start(Handler(streams.rabbitmq_stream(topic)))
    rabbit.wait_until_stopped("position 3 is of a topic of Kafka of this name, and a stream of RabbitMQ is read now")
    goes_on_after_a_seek(rabbit, topic, accounts)
    assert process.end() == 0
    more = kafka.broker.publish_many(5, first=100)
    process = kafka.start()
    kafka.wait_until_stopped("position 5 is of a stream of RabbitMQ of this name, and a topic of Kafka is read now")
    assert len(kafka.entries()) == 8
    goes_on_after_a_seek(kafka, topic, more)


@pytest.mark.long
def test_a_position_from_before_it_was_noted_is_of_what_is_read_next(rabbit: Streaming) -> None:
    accounts = rabbit.broker.publish_many(3)
    process = rabbit.start()
    rabbit.wait_until_handled()
    assert process.end() == 0
    rabbit.query("UPDATE idempotency.stream_positions SET source = NULL RETURNING id")
    accounts += rabbit.broker.publish_many(3, first=100)
    rabbit.start()
    rabbit.wait_until_handled()
    assert rabbit.entries() == accounts
    (row,) = rabbit.query("SELECT source FROM idempotency.stream_positions")
    assert row.source == "a super stream of RabbitMQ"


@pytest.mark.long
def test_a_topic_of_kafka_begins_at_latest_where_an_empty_stream_of_its_name_was_read(make_streaming: Make) -> None:
    rabbit, kafka = make_streaming("rabbitmq"), make_streaming("kafka")
    assert isinstance(kafka.broker, KafkaBroker)
    topic, cluster = rabbit.broker.topic, kafka.broker.cluster
    process = rabbit.start()
    eventually(lambda: rabbit.owners().get(0) == process.pid, what=process.log)
    assert process.end() == 0
    assert rabbit.positions() == {0: None}
    cluster.create_topic(topic, 1)
    cluster.publish(topic, 0, b'{"account": "before"}')
    cluster.flush()
    process = rabbit.start(Handler(streams.kafka(topic, group=topic, start="latest")))
    eventually(lambda: rabbit.positions() == {0: 1}, what=process.log)
    cluster.publish(topic, 0, b'{"account": "a1"}')
    cluster.flush()
    rabbit.wait_until_entered({"a1"})
    assert rabbit.entries() == ["a1"]
    assert rabbit.stopped() == ""
