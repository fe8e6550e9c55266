"""What is kept of a copy's headers can be sent again, also where JSON lacks their types."""

# ruff: noqa: F811  fixtures of another module

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text

from idempotency.relay.relay import Relay
from tests.integration.test_signed_messages import bank, environment, letters, signed  # noqa: F401
from tests.support import bank as b
from tests.support import operations as op
from tests.support.dead_messages import publish
from tests.support.processes import Processes, eventually
from tests.support.tasks import transactional


def bytes_that_are_no_text() -> dict[str, Any]:
    """40 KB on the wire, as little as anybody's header may be; as the text of a record it is `b'\\xff\\xff…'`, four times that."""
    return {"junk": b"\xff" * 40_000}


def times() -> dict[str, Any]:
    """8 bytes each where they are counted, and 19 characters in the record."""
    return {f"x{number:053}": datetime(2026, 1, 1, tzinfo=UTC) for number in range(1700)}


@pytest.mark.few(1)
@pytest.mark.timeout(200)
@pytest.mark.parametrize("added", [bytes_that_are_no_text, times])
def test_what_grows_when_it_is_kept_is_measured_as_it_is_kept(
    bank: Celery,
    relay: Relay,
    processes: Processes,
    engine: Engine,
    connection: Connection,
    added: Callable[[], dict[str, Any]],
) -> None:
    with transactional(engine).begin() as caller:
        b.failing.enqueue(caller, "a1", "defer")
    name = bank.conf.task_default_queue
    with bank.connection_for_write() as broker:
        channel = broker.channel()
        bank.amqp.queues[name](channel).declare()
        first = eventually(lambda: channel.basic_get(name, no_ack=True))
    given = first.properties["application_headers"]
    sent = {name: value for name, value in given.items() if value is not None and name != "ignore_result"}
    publish(bank, first.body, headers=sent | added())
    processes.worker()

    def is_published_again() -> bool:
        states = connection.execute(text("SELECT status FROM idempotency.records")).scalars().all()
        return states == ["released"] and len(rows := op.outbox(connection)) == 2 and rows[-1].status == "published"

    eventually(is_published_again, what="its next delivery")
    assert op.dead_letters(connection) == []
