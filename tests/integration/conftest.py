"""Fixtures of the tests against real servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, NullPool, create_engine

import services
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.relay.relay import Relay
from tests.support import tasks
from tests.support.bank import forget_queues


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    """Each statement commits."""
    with engine.connect() as connection:
        yield connection


@pytest.fixture
def empty_database(servers: services.Services) -> Iterator[str]:
    """The address of a database without the library's tables."""
    name = f"empty_{uuid4().hex[:8]}"
    yield servers.create_database(name)
    servers.drop_database(name)


@pytest.fixture
def empty(empty_database: str) -> Engine:
    """A database without the library's tables."""
    return create_engine(empty_database, poolclass=NullPool)


@pytest.fixture
def consumer(bank: Celery) -> Iterator[DeadLetterConsumer]:
    consumer = DeadLetterConsumer(bank)
    yield consumer
    consumer.close()


@pytest.fixture
def relays(bank: Celery) -> Iterator[Callable[..., Relay]]:
    """Makes relays that the test runs pass by pass."""
    made: list[Relay] = []

    def make(**options: Any) -> Relay:
        made.append(Relay(bank, **options))
        return made[-1]

    yield make
    for relay in made:
        relay.close()


@pytest.fixture
def configured(bank: Celery) -> Iterator[Celery]:
    """The test application; what a test changes in its configuration is put back."""
    before = dict(bank.conf.changes)
    yield bank
    bank.conf.changes.clear()
    bank.conf.changes.update(before)
    forget_queues(bank)


@pytest.fixture(autouse=True)
def nothing_told() -> None:
    """No end of an earlier test is in `told`."""
    tasks.told.clear()


@pytest.fixture
def rabbitmq(servers: services.Services) -> None:
    if servers.broker == "redis":
        pytest.skip("needs RabbitMQ")
