"""What goes wrong in streams today: each test passes while its fault is there."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import amqp
import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import IntegrityError, OperationalError

from idempotency import streams
from idempotency.application import close_runtime
from idempotency.operate.cancel import cancel
from idempotency.operate.change import Change
from idempotency.operate.rename import rename_service
from idempotency.operate.replay import replay
from idempotency.operate.seek import seek_stream
from idempotency.streams import Handling
from idempotency.streams.consumer import Consumer
from idempotency.streams.process import make_reader
from tests.streams.conftest import Make
from tests.streams.test_letters import newest, waiting
from tests.support import bank
from tests.support.processes import eventually
from tests.support.proxy import Proxy
from tests.support.streaming import HANDLERS, NAME, Handler, RabbitBroker, Streaming, configure

CHANGE = Change("ann", "proven", is_verified=True)


@contextmanager
def handled_by(
    streaming: Streaming, fn: Callable[[Handling, Any], Any], name: str, source: Any = None, **options: Any
) -> Iterator[Consumer]:
    """While entered, a thread of this process handles the stream with this handler."""
    HANDLERS["proven"] = fn
    configure(streaming.environment)
    stream = Handler(source or streaming.broker.source(), name, "proven", options).declared()
    runtime, stop = streaming.runtime, threading.Event()
    consumer = Consumer(runtime, stream, lambda held: make_reader(bank.app, runtime, stream, None, held), stop)
    thread = threading.Thread(target=consumer.run)
    thread.start()
    try:
        yield consumer
    finally:
        stop.set()
        thread.join(20)


def silent_owner(streaming: Streaming) -> None:
    """As a process leaves it that has died."""
    with streaming.engine.connect() as connection:
        connection.execute(
            text(
                "UPDATE idempotency.stream_positions SET owner = 'gone|b|n|7|1', "
                "locked_until = clock_timestamp() - interval '1 second'"
            )
        )


def insert(stream: Handling, account: str) -> None:
    stream.session.execute(bank.INSERT, {"account": account, "amount": stream.message.offset})


# ------------------------------------------------------------ messages and letters


def test_a_message_of_rabbitmq_never_has_its_timestamp(rabbit: Streaming) -> None:
    """py-amqp leaves the property as a number; the reader looks for a datetime."""
    assert isinstance(rabbit.broker, RabbitBroker)
    seen: list[Any] = []
    rabbit.broker._channel.basic_publish(
        amqp.Message(b'{"account": "a0"}', timestamp=int(time.time())), routing_key=f"{rabbit.broker.topic}-0"
    )

    def handle(stream: Handling, event: Any) -> None:
        seen.append(stream.message.timestamp)

    with handled_by(rabbit, handle, f"s{uuid4().hex[:6]}"):
        eventually(lambda: seen)
    assert seen == [None]


def test_an_event_that_cannot_be_copied_is_handled_together_and_fails_alone(rabbit: Streaming) -> None:
    """So after any death of a process, up to a batch of good messages end as dead letters."""

    def handle(stream: Handling, event: Any) -> None:
        insert(stream, json.loads(bytes(event))["account"])

    name = f"s{uuid4().hex[:6]}"
    for number in range(3):
        rabbit.broker.publish({"account": f"a{number}"}, idempotency_key=f"a{number}")
    with handled_by(rabbit, handle, name, key=None, decode=memoryview, max_attempts=2):
        rabbit.wait_until_handled()
    assert rabbit.entries() == ["a0", "a1", "a2"]
    silent_owner(rabbit)
    for number in range(3, 6):
        rabbit.broker.publish({"account": f"a{number}"}, idempotency_key=f"a{number}")
    with handled_by(rabbit, handle, name, key=None, decode=memoryview, max_attempts=2):
        rabbit.wait_until_handled()
    assert rabbit.entries() == ["a0", "a1", "a2"]
    assert [status for _, status in rabbit.letters()] == ["open"] * 3




def test_a_letter_is_replayed_into_nothing_after_the_key_was_changed(rabbit: Streaming) -> None:
    """A deploy with another key=: the replay is accepted, the letter closed, and no one runs it, nor says so but in a log."""
    told = threading.Event()

    def handle(stream: Handling, event: Any) -> None:
        if not told.is_set():
            from idempotency import PermanentError

            raise PermanentError("no", "no")
        insert(stream, event["account"])

    name = f"s{uuid4().hex[:6]}"
    rabbit.broker.publish({"account": "a0", "tenant": "t"})
    with handled_by(rabbit, handle, name):
        eventually(rabbit.letters)
    told.set()
    with handled_by(rabbit, handle, name, key="v2-{event[account]}"):
        replay(bank.app, newest(rabbit), CHANGE)
        time.sleep(10)
    assert rabbit.entries() == []
    assert [status for _, status in rabbit.letters()] == ["replayed"]
    assert rabbit.stopped() == ""


# ------------------------------------------------------------ where a position is believed to belong









# ------------------------------------------------------------ renamed






# ------------------------------------------------------------ after a person's command, a pause, a refusal


def test_a_cancel_does_not_free_the_partition_that_waits(rabbit: Streaming) -> None:
    """The process waits for the next attempt without looking again; its pause may be minutes, or what a Defer says."""
    from idempotency import Defer

    def handle(stream: Handling, event: Any) -> None:
        if event["account"] == "a0":
            raise Defer(250.0, "later")
        insert(stream, event["account"])

    rabbit.broker.publish({"account": "a0"})
    rabbit.broker.publish({"account": "a1"})
    HANDLERS["proven"] = handle
    name = f"s{uuid4().hex[:6]}"
    with handled_by(rabbit, handle, name):
        sought = "SELECT fence, key FROM idempotency.records WHERE status = 'released'"
        (row,) = eventually(lambda: rabbit.query(sought), timeout=8)
        from idempotency.operate.change import Shown
        from idempotency.wire.keys import OperationId

        cancel(bank.app, Shown(OperationId("default", f"stream.{name}", "a0"), "released", row.fence), CHANGE)
        time.sleep(12)
        assert rabbit.entries() == []
        assert rabbit.positions() == {0: 0}









def test_a_replayed_message_has_other_headers_than_the_one_that_failed(rabbit: Streaming) -> None:
    """A datetime, which RabbitMQ's headers may have, is the name of its type in the letter."""
    from idempotency import PermanentError

    seen: list[Any] = []
    told = threading.Event()

    def handle(stream: Handling, event: Any) -> None:
        seen.append(stream.message.header("at"))
        if not told.is_set():
            raise PermanentError("no", "no")

    rabbit.broker.publish({"account": "a0"}, at=datetime(2026, 1, 1))
    with handled_by(rabbit, handle, f"s{uuid4().hex[:6]}"):
        eventually(rabbit.letters)
        first = seen[0]
        told.set()
        seen.clear()
        replay(bank.app, newest(rabbit), CHANGE)
        eventually(lambda: seen, timeout=15)
    assert isinstance(first, datetime), first
    assert seen[0] == "<datetime>"




def test_beside_older_code_with_fewer_partitions_one_has_no_owner(make_streaming: Make) -> None:
    """Each version divides what it knows: the new one takes two of four, the old one its one of three."""
    streaming = make_streaming("rabbitmq", partitions=4)
    streaming.start()
    eventually(lambda: [each is not None for each in streaming.owners().values()] == [True] * 4, what=streaming.logs())
    streaming.start(Handler(streams.rabbitmq_stream(streaming.broker.topic, partitions=3)))
    time.sleep(6)
    streaming.broker.publish_many(40, first=100)
    time.sleep(12)
    print(streaming.owners(), streaming.positions())
    assert sorted(owner is None for owner in streaming.owners().values()) == [False, False, False, True]
    assert len(streaming.entries()) == 30










def test_many_replays_hold_up_every_partition(rabbit: Streaming) -> None:
    """They are run one after the other by the thread that handles the stream: fifty of them before its next turn."""
    from idempotency import PermanentError

    told = threading.Event()

    def handle(stream: Handling, event: Any) -> None:
        if event["account"].startswith("bad"):
            if not told.is_set():
                raise PermanentError("no", "no")
            time.sleep(2.0)
        insert(stream, event["account"])

    for number in range(10):
        rabbit.broker.publish({"account": f"bad{number}"})
    with handled_by(rabbit, handle, f"s{uuid4().hex[:6]}"):
        eventually(lambda: len(rabbit.letters()) == 10)
        told.set()
        for row in rabbit.query("SELECT id FROM idempotency.dead_letters"):
            replay(bank.app, row.id, CHANGE)
        eventually(rabbit.entries, timeout=15)
        rabbit.broker.publish({"account": "good"})
        time.sleep(10)
        before = rabbit.entries()
        eventually(lambda: "good" in rabbit.entries(), timeout=40)
    assert len(before) > 3
    assert "good" not in before


def test_each_tombstone_of_a_compacted_topic_is_a_dead_letter(make_streaming: Make) -> None:
    """A message without a value, which says that a key is deleted, is decoded as if it were empty text."""
    streaming = make_streaming("kafka")
    streaming.broker.publish({"account": "a0"})
    streaming.broker.cluster._producer.produce(streaming.broker.topic, None, b"a0", partition=0)
    streaming.broker.publish({"account": "a1"})
    streaming.broker.flush()
    streaming.start(on_failure="stop")
    streaming.wait_until_stopped("offset 1 is refused as undecodable")
    assert streaming.entries() == ["a0"]


@pytest.mark.parametrize("where", ["on_failed", "key"])
def test_an_exit_beside_the_handler_ends_each_process_and_is_never_counted(rabbit: Streaming, where: str) -> None:
    """`sys.exit` in a handler is an error as any other; in its `on_failed`, or the function for its key, it is not."""
    import sys

    from idempotency import PermanentError

    def handle(stream: Handling, event: Any) -> None:
        raise PermanentError("no", "no")

    def exits(*_: Any) -> Any:
        sys.exit("told to")

    options: dict[str, Any] = {"max_attempts": 2, where: exits}
    HANDLERS["proven"] = handle
    rabbit.environment["LEASE"] = "1"
    configure(rabbit.environment)
    rabbit.broker.publish({"account": "a0"})
    stream = Handler(rabbit.broker.source(), f"s{uuid4().hex[:6]}", "proven", options).declared()
    runtime = rabbit.runtime
    ended: list[BaseException] = []
    for _ in range(4):
        stop = threading.Event()
        consumer = Consumer(runtime, stream, lambda held: make_reader(bank.app, runtime, stream, None, held), stop)

        def run(consumer: Consumer = consumer) -> None:
            try:
                consumer.run()
            except BaseException as error:
                ended.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(8)
        stop.set()
        thread.join(15)
    print(ended, rabbit.letters(), rabbit.positions())
    print(rabbit.query("SELECT key, status, attempts FROM idempotency.records"))
    assert [type(each) for each in ended] == [SystemExit] * 4
    assert rabbit.letters() == []
    assert rabbit.positions() == {0: 0}




