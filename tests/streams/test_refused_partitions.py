"""A partition that RabbitMQ refuses stops by itself: the others go on, and so does it once it is there."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from idempotency.store import streams as store
from tests.streams.conftest import Make
from tests.support.processes import eventually
from tests.support.streaming import RabbitBroker, Streaming, insert

pytestmark = pytest.mark.long


def test_one_partition_that_is_refused_stops_no_other(make_streaming: Make) -> None:
    streaming = make_streaming("rabbitmq", partitions=2)
    assert isinstance(streaming.broker, RabbitBroker)
    channel, topic = streaming.broker._channel, streaming.broker.topic
    channel.queue_delete(f"{topic}-1")
    channel.queue_declare(f"{topic}-1", durable=True, auto_delete=False, arguments={"x-queue-type": "quorum"})
    for number in range(5):
        streaming.broker.publish({"account": f"a{number}"}, 0)
    process = streaming.start()
    eventually(lambda: len(streaming.entries()) == 5, what=process.log)
    streaming.wait_until_stopped(f"RabbitMQ refuses '{topic}-1'")
    assert "stream_broker_unavailable" not in process.log


def test_a_missing_stream_is_said_once_and_read_once_it_is_made(rabbit: Streaming) -> None:
    assert isinstance(rabbit.broker, RabbitBroker)
    rabbit.broker._channel.queue_delete(f"{rabbit.broker.topic}-0")
    process = rabbit.start()
    rabbit.wait_until_stopped("RabbitMQ has no stream")
    rabbit.broker._declare()
    eventually(lambda: rabbit.stopped() == "", what=process.log)  # before there is a message
    accounts = rabbit.broker.publish_many(3)
    rabbit.wait_until_handled()
    assert rabbit.entries() == accounts
    assert process.log.count("stream_stopped") == 1
    assert process.log.count("stream_partition_taken") == 1


def test_a_missing_stream_is_read_once_it_is_made_also_if_postgres_was_away_meanwhile(
    rabbit: Streaming, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = store.stop
    failed: list[Any] = []

    def away(*args: Any) -> None:
        if not failed:
            failed.append(args)
            raise OperationalError("UPDATE", {}, Exception("the connection is gone"), connection_invalidated=True)
        stop(*args)

    monkeypatch.setattr(store, "stop", away)
    assert isinstance(rabbit.broker, RabbitBroker)
    rabbit.broker._channel.queue_delete(f"{rabbit.broker.topic}-0")
    with rabbit.handled_by(lambda stream, event: insert(stream, event["account"])):
        eventually(lambda: failed)
        rabbit.broker._declare()
        accounts = rabbit.broker.publish_many(3)
        rabbit.wait_until_handled()
    assert rabbit.entries() == accounts
    assert rabbit.stopped() == ""


def test_a_reason_that_is_over_is_gone_once_a_new_process_reads_the_partition(rabbit: Streaming) -> None:
    """Not with the next message, which may be days away."""
    assert isinstance(rabbit.broker, RabbitBroker)
    rabbit.broker._channel.queue_delete(f"{rabbit.broker.topic}-0")
    process = rabbit.start()
    rabbit.wait_until_stopped("RabbitMQ has no stream")
    assert process.end() == 0  # for a deploy, say
    rabbit.broker._declare()
    process = rabbit.start()
    eventually(lambda: rabbit.stopped() == "", what=process.log)
    assert rabbit.owners() == {0: process.pid}
    assert process.log.count("stream_goes_on") == 1


def test_a_reason_that_is_not_over_stays_when_a_new_process_has_the_partition(streaming: Streaming) -> None:
    """It is never gone for a moment, so that nobody is told of it again."""
    streaming.broker.publish({"account": "a0", "how": "permanent"})
    process = streaming.start(on_failure="stop")
    streaming.wait_until_stopped("offset 0 has failed")
    assert process.end() == 0
    process = streaming.start(on_failure="stop")
    eventually(lambda: process.log.count("stream_stopped") == 1, what=process.log)
    assert "offset 0 has failed" in streaming.stopped()
    assert "stream_goes_on" not in process.log


def test_a_stream_that_was_recreated_stops_also_if_postgres_is_away_as_it_is_noticed(
    rabbit: Streaming, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once noticed, it is not forgotten: the stream grows past the position, and looks as if nothing had happened."""
    rabbit.broker.publish_many(5)
    process = rabbit.start()
    rabbit.wait_until_handled()
    assert process.end() == 0
    rabbit.broker.recreate()
    rabbit.broker.publish_many(3, first=50)
    original, noticed, is_back = store.stop, threading.Event(), threading.Event()

    def stop(*args: Any) -> None:
        if not is_back.is_set():
            noticed.set()
            raise OperationalError("UPDATE", {}, Exception("Postgres is away for a moment"))
        original(*args)

    monkeypatch.setattr(store, "stop", stop)
    with rabbit.consuming():
        assert noticed.wait(20)
        rabbit.broker.publish_many(20, first=100)
        is_back.set()
        rabbit.wait_until_stopped("and the stream of RabbitMQ ends at 3: it was recreated")
        assert rabbit.positions() == {0: 5}
        assert len(rabbit.entries()) == 5
