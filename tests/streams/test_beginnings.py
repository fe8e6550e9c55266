"""Where a consumer begins that has no position yet."""

from __future__ import annotations

import time

import pytest

from tests.streams.conftest import Make
from tests.support.processes import eventually
from tests.support.streaming import Handler, RabbitBroker, Streaming

pytestmark = pytest.mark.long


def has_begun(streaming: Streaming) -> bool:
    """In each partition; of RabbitMQ, where there is nothing, there is no position."""
    rows = streaming.query("SELECT advanced_at FROM idempotency.stream_positions")
    return rows != [] and all(row.advanced_at is not None for row in rows)


@pytest.mark.few(2)
@pytest.mark.parametrize("begin", ["latest", "earliest"])
def test_it_begins_where_it_is_told_to(streaming: Streaming, begin: str) -> None:
    old = streaming.broker.publish_many(10)
    process = streaming.start_from(begin)
    eventually(lambda: has_begun(streaming), what=process.log)
    late = streaming.broker.publish_many(5, first=50)
    streaming.wait_until_handled()
    assert streaming.entries() == [*(old if begin == "earliest" else []), *late]


@pytest.mark.few(2)
@pytest.mark.parametrize("many", [0, 300])
def test_latest_is_where_the_first_process_has_started_whenever_the_first_message_is_handled(
    streaming: Streaming, many: int
) -> None:
    """And not before, however much of it the broker has in one piece."""
    streaming.broker.publish_many(many)
    process = streaming.start_from("latest")
    eventually(lambda: has_begun(streaming), what=process.log)
    process.kill()
    nothing = None if isinstance(streaming.broker, RabbitBroker) else 0
    assert streaming.positions() == {0: many or nothing}
    late = streaming.broker.publish_many(5, first=1000)  # while no process runs
    streaming.start_from("latest")
    streaming.wait_until_handled()
    assert streaming.entries() == late


def test_a_partition_that_is_added_later_begins_with_its_first_message(make_streaming: Make) -> None:
    streaming = make_streaming("rabbitmq", partitions=2)
    assert isinstance(streaming.broker, RabbitBroker)
    one = Handler(streaming.broker.source(start="latest", partitions=1))
    two = Handler(streaming.broker.source(start="latest"))
    streaming.broker.publish({"account": "old"}, 0)
    process = streaming.start(one)
    eventually(lambda: has_begun(streaming), what=process.log)
    for number in (0, 1):
        streaming.broker.publish({"account": f"late-{number}"}, number)
    assert process.end() == 0
    streaming.start(two)
    streaming.wait_until_handled()
    assert sorted(streaming.entries()) == ["late-0", "late-1"]


def test_all_partitions_begin_at_once_whoever_is_given_them_first(make_streaming: Make) -> None:
    """Also those that a process is given later, when they have messages from after the beginning."""
    streaming = make_streaming("kafka", partitions=4)
    streaming.broker.publish_many(20)
    process = streaming.start_from("latest")
    eventually(lambda: len(streaming.positions()) == 4 and has_begun(streaming), what=process.log)
    process.kill()
    late = streaming.broker.publish_many(8, first=100)
    for _ in range(3):
        streaming.start_from("latest")
    streaming.wait_until_handled()
    assert sorted(streaming.entries()) == sorted(late)


def empty(broker: RabbitBroker) -> None:
    """Publish until retention has left nothing: a file that has just been begun, with an entry of the broker's own."""
    for first in range(0, 20_000, 500):
        broker.publish_many(500, first=first)
        time.sleep(0.2)
        if not broker.holds_any():
            return
    raise AssertionError("RabbitMQ keeps a message")


def test_latest_of_a_stream_that_retention_has_emptied_is_what_comes_next(make_streaming: Make) -> None:
    """Nobody says at which offset it ends; what is in it from now on is new, also if no process runs by then."""
    streaming = make_streaming(
        "rabbitmq", partitions=1, **{"x-stream-max-segment-size-bytes": 1000, "x-max-length-bytes": 1}
    )
    assert isinstance(streaming.broker, RabbitBroker)
    empty(streaming.broker)
    process = streaming.start_from("latest")
    begun = "SELECT FROM idempotency.stream_positions WHERE advanced_at IS NOT NULL AND position IS NULL"
    eventually(lambda: streaming.query(begun), what=process.log)
    process.kill()
    streaming.broker.publish({"account": "late"})
    streaming.start_from("latest")
    eventually(lambda: streaming.entries() == ["late"], what=streaming.logs()[-2000:])
    assert streaming.stopped() == ""
