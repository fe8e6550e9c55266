"""Bad outcomes that happen today: each test passes because of the defect that its docstring names."""

from __future__ import annotations

import calendar
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from celery import Celery
from kombu import Queue
from sqlalchemy import Connection, Engine, text
from typer.testing import CliRunner

from idempotency.cli import cli
from idempotency.dead_letter_queue import DeadLetterConsumer
from tests import bank as b
from tests import operations as op
from tests.dead_messages import bury, waiting
from tests.deliveries import Deliveries


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    with engine.connect() as connection:
        yield connection


@pytest.fixture
def consumer(bank: Celery) -> Iterator[DeadLetterConsumer]:
    consumer = DeadLetterConsumer(bank)
    yield consumer
    consumer.close()


def test_a_header_that_the_client_cannot_read_stops_the_dead_letters(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timestamp in milliseconds (a producer in JavaScript, say): py-amqp raises before there is a message to hold."""
    consumer.run_once()
    with monkeypatch.context() as patched:
        patched.setattr(calendar, "timegm", lambda _: 1_763_784_000_000)
        bury(bank, ["foreign"], [{"sent-at": datetime.now(UTC)}])
    bury(bank, ["a1", "a2", "a3"])
    for _ in range(20):  # twice as often as any letter is tried
        with pytest.raises(Exception) as raised:
            consumer.run_once()
        consumer.close()  # as `run` does after each
    assert isinstance(raised.value, ValueError | OverflowError), raised.value
    assert op.dead_letters(connection) == []
    assert waiting(bank) == 4
