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


def test_a_dead_letter_queue_declared_otherwise_is_never_consumed(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    """Workers and the publisher live with a queue that exists otherwise (a classic one, another limit); this does not."""
    name = f"{bank.conf.task_default_queue}-dead"
    with bank.connection_for_write() as broker:
        channel = broker.channel()
        Queue(name, routing_key=name, durable=True)(channel).declare()
    bury(bank, ["a1", "a2"])
    for _ in range(3):
        with pytest.raises(Exception) as raised:
            consumer.run_once()
        assert type(raised.value).__name__ == "PreconditionFailed"  # `run` says "broker_unavailable", for ever
        consumer.close()
    assert op.dead_letters(connection) == []
    assert waiting(bank) == 2


def test_one_record_that_is_refused_stops_the_rest_of_a_bulk_replay(
    bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """`_each` goes on after an IdempotencyError only: a trigger, or a lock held for longer than a lease, ends the command."""
    for account in ("a1", "a2", "a3"):
        deliveries.deliver(b.failing, account, "permanent")
    connection.execute(
        text("""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'frozen account'; END $$;
        CREATE TRIGGER refuse BEFORE UPDATE ON idempotency.records FOR EACH ROW
        WHEN (NEW.key = 'a2') EXECUTE FUNCTION refuse()""")
    )
    arguments = ["dead-letters", "replay", "--operation", b.failing.name, "--json", "-A", "tests.bank"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 1
    assert type(result.exception).__name__ in ("ProgrammingError", "InternalError"), result.exception
    assert result.stdout == ""  # and it does not say what it has done
    assert [(letter.key, letter.status) for letter in op.dead_letters(connection)] == [
        ("a1", "replayed"),
        ("a2", "open"),
        ("a3", "open"),
    ]
