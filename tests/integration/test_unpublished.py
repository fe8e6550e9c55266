"""A row whose operation has ended is published like any other, and outlives it no longer than the broker may take it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, text

from idempotency import OperationFailed
from idempotency.errors import ChangeRefused
from idempotency.operate.cancel import cancel
from idempotency.operate.change import Change, read
from idempotency.operate.erase import erase
from idempotency.queues import quorum_queue
from idempotency.relay.relay import Relay
from idempotency.relay.resend import resend_lost
from idempotency.store import alarms, unpublished
from idempotency.upkeep import maintenance
from idempotency.wire.keys import OperationId
from tests.support import bank as b
from tests.support import operations as op
from tests.support.bank import fingerprint_of, forget_queues
from tests.support.deliveries import Deliveries, deliver_row
from tests.support.relaying import make_due
from tests.support.tasks import enqueued

ANN = Change("ann", "ticket 42", is_verified=True)
ID = OperationId("default", b.deposit.name, "a")


@pytest.fixture
def relay(configured: Celery) -> Iterator[Relay]:
    relay = Relay(configured)
    yield relay
    relay.close()


@pytest.fixture
def gone(configured: Celery, connection: Connection, environment: dict[str, str]) -> Callable[[], None]:
    """Enqueues a call for a queue that a deploy has removed since."""
    before, name = list(configured.conf.task_queues), f"gone-{environment['BANK_QUEUE']}"

    def enqueue() -> None:
        configured.conf.task_queues = [*before, quorum_queue(name, exchange=name, dead_letter_queue=f"{name}-dead")]
        forget_queues(configured)
        enqueued(connection, b.deposit, "a", queue=name)
        configured.conf.task_queues = before
        forget_queues(configured)

    return enqueue


def discard_letters(connection: Connection) -> None:
    connection.execute(text("UPDATE idempotency.dead_letters SET status = 'discarded', closed_at = now()"))


def refused(connection: Connection, times: int) -> None:
    """By the broker, so many times so far."""
    connection.execute(text("UPDATE idempotency.outbox SET attempts = :times"), {"times": times})
    make_due(connection)


def statuses(connection: Connection) -> list[tuple[str, bool]]:
    return [(row.status, row.settled_at is not None) for row in op.outbox(connection, ID)]


# ---------------------------------------------------------------- cancelled before its time


@pytest.mark.parametrize("options", [{}, {"ordering_key": "k"}], ids=["alone", "in a lane"])
def test_what_a_cancelled_operation_was_to_run_by_goes_at_once(
    bank: Celery, connection: Connection, deliveries: Deliveries, relay: Relay, options: Any
) -> None:
    enqueued(connection, b.deposit, "a", eta=datetime.now(UTC) + timedelta(days=365), **options)
    assert relay.run_once().published == 0
    cancel(bank, read(connection, ID, op.SERVICE), ANN)
    assert relay.run_once().published == 1
    outcome = deliver_row(deliveries, b.deposit, op.outbox(connection, ID)[0])
    assert isinstance(outcome.value, OperationFailed)
    discard_letters(connection)
    erase(bank, ID, ANN)


def test_another_request_under_its_key_keeps_its_time(bank: Celery, connection: Connection, relay: Relay) -> None:
    enqueued(connection, b.deposit, "a")
    enqueued(connection, b.deposit, "a", 7, countdown=3600)
    cancel(bank, read(connection, ID, op.SERVICE), ANN)
    assert relay.run_once().published == 1
    assert statuses(connection) == [("published", False), ("pending", False)]


# ---------------------------------------------------------------- refused by the broker


def test_a_row_that_no_broker_takes_does_not_outlive_its_cancelled_operation(
    bank: Celery, connection: Connection, relay: Relay, gone: Callable[[], None]
) -> None:
    gone()
    refused(connection, unpublished.REFUSALS)
    resend_lost(bank)
    assert relay.run_once().refused == 1  # as long as its operation has not ended
    cancel(bank, read(connection, ID, op.SERVICE), ANN)
    discard_letters(connection)
    with pytest.raises(ChangeRefused, match="has not been delivered; try again later"):
        erase(bank, ID, ANN)
    make_due(connection)
    resend_lost(bank)
    assert statuses(connection) == [("published", True)]
    assert relay.run_once().refused == 0
    assert alarms.news(connection, op.SERVICE, "log", interval=60.0, most=100, repeat=3600.0).stuck == 0
    erase(bank, ID, ANN)


@pytest.mark.parametrize(("times", "settled"), [(unpublished.REFUSALS - 1, False), (unpublished.REFUSALS, True)])
def test_a_second_call_that_no_broker_takes_outlives_the_end_by_an_hour(
    bank: Celery, connection: Connection, relay: Relay, gone: Callable[[], None], times: int, settled: bool
) -> None:
    """Its callbacks are sent by its own delivery, so a queue that is full for a while costs none."""
    gone()
    op.completed(connection, ID, fingerprint=fingerprint_of("a"))
    refused(connection, times)
    resend_lost(bank)
    assert statuses(connection) == [("published", True) if settled else ("pending", False)]
    assert relay.run_once().refused == (not settled)


def test_what_is_given_up_keeps_its_record_as_long_as_what_was_published(
    bank: Celery, connection: Connection, gone: Callable[[], None]
) -> None:
    """A relay may have been sending it at that moment: the message would run anew without its record."""
    gone()
    op.completed(connection, ID, fingerprint=fingerprint_of("a"))
    refused(connection, unpublished.REFUSALS)
    op.age(connection, ID, expires_at=-86400 * 400)
    resend_lost(bank)
    assert maintenance.purge(bank) == 0
    connection.execute(text("UPDATE idempotency.outbox SET published_at = now() - interval '1 year'"))
    op.age(connection, ID, kept_until=-1)
    assert maintenance.purge(bank) == 1
    assert op.outbox(connection, ID) == []


@pytest.mark.parametrize("change", ["generation = 2", "fingerprint = 'v1:another'", "service = 'another'"])
def test_a_row_that_the_end_does_not_answer_is_not_given_up(
    bank: Celery, connection: Connection, gone: Callable[[], None], change: str
) -> None:
    gone()
    op.completed(connection, ID, fingerprint=fingerprint_of("a"))
    refused(connection, unpublished.REFUSALS)
    connection.execute(text(f"UPDATE idempotency.outbox SET {change}"))
    resend_lost(bank)
    assert statuses(connection) == [("pending", False)]
