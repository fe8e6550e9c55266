"""Messages of which a part cannot be read: each is a dead letter, and all others go on, of this stream and of others."""

from __future__ import annotations

import base64
import ctypes
import json
from typing import Any

import amqp
import pytest

from tests.streams.conftest import Make
from tests.support.streaming import Handler, KafkaBroker, RabbitBroker, Streaming

NOT_UTF8 = b"caf\xe9"


def publish_with_header_name(broker: KafkaBroker, name: bytes, value: bytes) -> None:
    """By librdkafka itself: names of headers are bytes to Kafka, and text only to confluent-kafka."""
    library, error = broker.cluster._library, ctypes.create_string_buffer(512)
    library.rd_kafka_headers_new.restype = ctypes.c_void_p
    library.rd_kafka_conf_set.argtypes = [
        ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t,
    ]  # fmt: skip
    conf = ctypes.c_void_p(library.rd_kafka_conf_new())
    library.rd_kafka_conf_set(conf, b"bootstrap.servers", broker.cluster.servers.encode(), error, 512)
    producer = ctypes.c_void_p(library.rd_kafka_new(0, conf, error, 512))
    headers = ctypes.c_void_p(library.rd_kafka_headers_new(ctypes.c_size_t(1)))
    library.rd_kafka_header_add(
        headers, ctypes.c_char_p(name), ctypes.c_ssize_t(len(name)), ctypes.c_char_p(b"v"), ctypes.c_ssize_t(1)
    )
    number = ctypes.c_int
    topic, partition, content, flags, of_headers, end = map(number, (1, 3, 4, 7, 10, 0))
    failed = library.rd_kafka_producev(
        producer, topic, ctypes.c_char_p(broker.topic.encode()), partition, ctypes.c_int32(0),
        content, ctypes.c_char_p(value), ctypes.c_size_t(len(value)), flags, number(2), of_headers, headers, end,
    )  # fmt: skip
    assert failed == 0
    assert library.rd_kafka_flush(producer, 10_000) == 0
    library.rd_kafka_destroy(producer)
    broker.published[0] += 1


def publish_raw(broker: RabbitBroker, event: Any, **properties: Any) -> None:
    message = amqp.Message(json.dumps(event).encode(), **properties)
    broker._channel.basic_publish(message, routing_key=f"{broker.topic}-0")
    broker.published[0] += 1


def kept(streaming: Streaming) -> dict[str, Any]:
    (row,) = streaming.query("SELECT headers, last_error FROM idempotency.dead_letters")
    found: dict[str, Any] = json.loads(row.headers)["stream-message"]
    return found | {"says": json.loads(row.last_error)["message"]}


@pytest.mark.long
@pytest.mark.parametrize("name", ["message_id", "type"])
def test_a_property_of_rabbitmq_that_is_not_utf8_makes_a_letter_and_all_streams_go_on(
    make_streaming: Make, name: str
) -> None:
    rabbit, other = make_streaming("rabbitmq"), make_streaming("rabbitmq")
    assert isinstance(rabbit.broker, RabbitBroker)
    publish_raw(rabbit.broker, {"account": "bad"}, **{name: NOT_UTF8})
    rabbit.broker.publish({"account": "a1"})
    other.broker.publish({"account": "b1"})
    process = rabbit.start(Handler(rabbit.broker.source(), "one"), Handler(other.broker.source(), "two"))
    rabbit.wait_until_entered({"a1", "b1"})
    assert not process.has_ended
    assert rabbit.letters() == [("undecodable", "open")]
    found = kept(rabbit)
    assert found["says"].endswith(f"{name}: not UTF-8")
    assert found["unread"] == {name: {"base64": base64.b64encode(NOT_UTF8).decode()}}
    assert found["value"] == {"utf-8": '{"account": "bad"}'}
    assert process.end() == 0


@pytest.mark.long
def test_headers_and_routing_keys_of_rabbitmq_that_are_not_utf8_make_letters(rabbit: Streaming) -> None:
    assert isinstance(rabbit.broker, RabbitBroker)
    exchange, queue = f"{rabbit.broker.topic}-x", f"{rabbit.broker.topic}-0"
    channel = rabbit.broker._channel
    channel.exchange_declare(exchange, "fanout")
    channel.queue_bind(queue, exchange)
    channel.basic_publish(amqp.Message(b'{"account": "bad"}'), exchange, NOT_UTF8)
    publish_raw(rabbit.broker, {"account": "bad"}, application_headers={NOT_UTF8: 1})
    publish_raw(rabbit.broker, {"account": "good"}, application_headers={"h": {NOT_UTF8: NOT_UTF8}})
    publish_raw(rabbit.broker, {"account": "good"}, application_headers={"h": NOT_UTF8})
    rabbit.broker.publish({"account": "a1"})
    process = rabbit.start()
    rabbit.wait_until_entered({"a1"})
    channel.exchange_delete(exchange)
    assert {reason for reason, _ in rabbit.letters()} <= {"undecodable", "beyond_limit"}
    assert "bad" not in rabbit.entries()
    assert process.end() == 0


@pytest.mark.long
def test_a_name_of_a_header_of_kafka_that_is_not_utf8_makes_a_letter_and_all_streams_go_on(
    make_streaming: Make,
) -> None:
    rabbit, kafka = make_streaming("rabbitmq"), make_streaming("kafka")
    assert isinstance(kafka.broker, KafkaBroker)
    publish_with_header_name(kafka.broker, NOT_UTF8, b'{"account": "bad"}')
    kafka.broker.publish({"account": "k1"})
    kafka.broker.flush()
    rabbit.broker.publish({"account": "r1"})
    process = rabbit.start(Handler(rabbit.broker.source(), "one"), Handler(kafka.broker.source(), "two"))
    rabbit.wait_until_entered({"k1", "r1"})
    assert rabbit.letters() == [("undecodable", "open")]
    found = kept(rabbit)
    assert found["says"].endswith("headers: a name is not UTF-8")
    assert found["value"] == {"utf-8": '{"account": "bad"}'}
    assert process.end() == 0


@pytest.mark.long
def test_an_error_that_nobody_expects_stops_its_own_stream_until_it_is_over(
    make_streaming: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the next fault of a client library is: the partition says so, and other streams are not ended with it."""
    from idempotency.streams import partition

    rabbit = make_streaming("rabbitmq")
    rabbit.broker.publish({"account": "a0"})
    original, failed = partition.Partition.is_alone, list[int]()

    def is_alone(self: Any, offset: int) -> bool:
        if len(failed) < 2:
            failed.append(offset)
            raise SystemError("a result with an exception set: a0")
        return original(self, offset)

    monkeypatch.setattr(partition.Partition, "is_alone", is_alone)
    with rabbit.consuming():
        rabbit.wait_until_stopped("SystemError at test_unread.py:")
        assert "a0" not in rabbit.stopped()
        rabbit.wait_until_entered({"a0"})
        assert rabbit.stopped() == ""
