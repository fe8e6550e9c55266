"""Bad outcomes that happen today: each test passes because of the defect that its docstring names."""

from __future__ import annotations

import calendar
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from kombu import Queue
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool
from typer.testing import CliRunner

from idempotency.cli import cli
from idempotency.dead_letter_queue import DeadLetterConsumer
from idempotency.keys import OperationId
from idempotency.runtime import Runtime
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


@pytest.fixture
def crowded(bank: Celery, engine: Engine, database: str) -> Iterator[Engine]:
    """The application under a role that may have two connections; whoever takes one by this engine fills Postgres."""
    role = f"app_{uuid4().hex[:8]}"
    with engine.connect() as connection:
        owner = connection.execute(text("SELECT current_user")).scalar_one()
        connection.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD 'secret' CONNECTION LIMIT 2"))
        connection.execute(text(f'GRANT "{owner}" TO {role}'))
    limited = make_url(database).set(username=role, password="secret")  # noqa: S106
    Runtime.discard(bank)
    bank.conf.update(idempotency_database_url=limited.render_as_string(hide_password=False))
    other = create_engine(limited, poolclass=NullPool)
    yield other
    other.dispose()
    Runtime.discard(bank)
    with engine.connect() as connection:
        connection.execute(text(f"DROP ROLE {role}"))


def test_a_postgres_that_was_full_ends_operations_that_never_ran(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Any, entries: Any, crowded: Engine
) -> None:
    """Claims have their connections, bodies get none (53300): each try is an attempt, and five take seconds."""
    id = OperationId("default", b.deposit.name, "a1")
    with Runtime.of(bank).autocommit() as own:
        own.exec_driver_sql("SELECT 1")  # the pool of claims has its connection
    with crowded.connect():
        for attempt in range(1, 6):
            deliveries.deliver(b.deposit, "a1", origin="retry" if attempt > 1 else None)
            assert record("a1").attempts == attempt
            op.age(connection, id, **({"available_at": -1} if attempt < 5 else {"locked_until": -1}))
    outcome = deliveries.deliver(b.deposit, "a1", origin="recover")  # Postgres has room again
    assert (outcome.state, outcome.value.code) == ("FAILURE", "attempts_exhausted")
    assert (record("a1").status, record("a1").error_code) == ("failed", "attempts_exhausted")
    assert connection.execute(text("SELECT account, code FROM failures")).all() == [("a1", "attempts_exhausted")]
    assert entries("a1") == 0
