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








# ------------------------------------------------------------ where a position is believed to belong


# ------------------------------------------------------------ renamed


# ------------------------------------------------------------ after a person's command, a pause, a refusal






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






