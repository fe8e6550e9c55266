"""What the tests of bad inputs share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, text

from tests.support.tasks import make_task


@pytest.fixture
def nothing_happens(bank: Celery, connection: Connection) -> Callable[[], Any]:
    """Within the block no row is written and no message published."""

    def counts() -> dict[str, int]:
        tables = ("idempotency.records", "idempotency.outbox", "idempotency.dead_letters", "idempotency.audit")
        rows = {
            table: connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one()
            for table in (*tables, "entries", "failures")
        }
        with bank.connection_for_write() as broker:
            queue = bank.amqp.queues[bank.conf.task_default_queue](broker.default_channel)
            return rows | {"messages": queue.declare() and queue.queue_declare(passive=True).message_count}

    @contextmanager
    def nothing_happens() -> Iterator[None]:
        before = counts()
        yield
        assert counts() == before

    return nothing_happens


@pytest.fixture
def task_of(bank: Celery) -> Iterator[Callable[..., Any]]:
    """Makes tasks of a body, which end with the test: a worker would refuse to start with some of them."""
    made = []

    def task_of(body: Any, **options: Any) -> Any:
        made.append(make_task(bank, body, **options))
        return made[-1]

    yield task_of
    for task in made:
        bank.tasks.unregister(task)
