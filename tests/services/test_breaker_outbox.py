"""The outbox, the purge and discarded letters: each test passes while the bug is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, Row, text
from sqlalchemy.orm import Session

from idempotency import Happened, OperationId, discards, maintenance, operators
from idempotency.dead_letter_queue import DeadLetterConsumer
from idempotency.discards import Person
from idempotency.operators import Change
from idempotency.reconcile import reconcile
from idempotency.relay import Relay
from tests import bank as b
from tests import operations as op
from tests.dead_messages import die, headers
from tests.deliveries import Deliveries
from tests.services.test_conclusions import Provider, lost, unwrite, write
from tests.services.test_core import age, make_task
from tests.services.test_operators import deliver_row

ANN = Change("ann", "ticket 42")
Record = Callable[[str], Row[Any]]
Entries = Callable[[str], int]


@pytest.fixture
def connection(engine: Engine) -> Any:
    with engine.connect() as connection:
        yield connection


def discard(engine: Engine, letter: int) -> None:
    with engine.begin() as transaction:
        discards.request(transaction, Person("ann", "operator"), letter, "a broken copy")
        discards.approve(transaction, Person("bob", "admin"), letter)


PUBLISHED = "UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp() - interval '1 day'"


def test_a_letter_that_was_open_for_a_while_loses_an_accepted_operation(
    bank: Celery, engine: Engine, connection: Connection, record: Record
) -> None:
    """Accepted twice. The message of the first row is broken (letter L), that of the second is lost with the broker.
    Reconcile looks at the second row while L is open: `taken`, and never again. L is discarded, "a broken copy": nothing
    takes `taken` back, so the accepted operation is never delivered. Breaks: what was accepted is kept until it has ended.
    """
    for _ in range(2):
        with Session(engine) as session, session.begin():
            b.deposit.enqueue(session, "a")
    id = OperationId("default", b.deposit.name, "a")
    first, second = op.outbox(connection, id)
    connection.execute(text(PUBLISHED))
    consumer = DeadLetterConsumer(bank)
    die(bank, consumer, "not JSON", headers=headers() | {"idempotency-outbox-id": first.event_id})
    op.eventually(consumer.run_once)
    consumer.close()
    (letter,) = op.dead_letters(connection)
    assert (letter.reason, letter.outbox_id) == ("undecodable", first.id)

    assert reconcile(bank).resent == 0  # the queue is empty, and the letter is open
    discard(engine, letter.id)
    for _ in range(3):
        assert reconcile(bank).resent == 0  # for ever
        maintenance.recover(bank)
    row = op.outbox(connection, id)[1]
    assert (row.id, row.status, row.taken, row.settled_at) == (second.id, "published", True, None)
    assert (record("a"), op.dead_letters(connection)[0].status) == (None, "discarded")


def test_discarding_an_unpublishable_retry_leaves_its_operation_released_for_ever(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record, entries: Entries
) -> None:
    """Attempt 1 did its step and is released; its next delivery can never be published (five tries: failed, with a letter),
    which a person discards. The record stays `released` and due, and nothing delivers, ends, undoes or purges it; a
    later call under its key runs it again. Breaks: a discarded operation is ended, and what was accepted ends.
    """

    def body(self: Any) -> None:
        self.step("reserve", write, "reserved", undo=unwrite)
        raise ValueError("again")

    task = make_task(bank, body)
    deliveries.deliver(task, key="k")
    age(engine, "k")
    relay = Relay(bank)
    connection.execute(text("UPDATE idempotency.outbox SET message = 'not a message'"))
    for _ in range(5):
        connection.execute(text("UPDATE idempotency.outbox SET available_at = clock_timestamp() - interval '1 s'"))
        relay.run_once()
    relay.close()
    (letter,) = op.dead_letters(connection)
    assert (letter.reason, letter.source) == ("unpublishable", "relay")
    discard(engine, letter.id)
    connection.execute(text("UPDATE idempotency.records SET available_at = clock_timestamp() - interval '300 days'"))
    connection.execute(text("UPDATE idempotency.outbox SET settled_at = clock_timestamp() - interval '300 days'"))
    for _ in range(2):
        maintenance.recover(bank)
        reconcile(bank)
        maintenance.purge(bank)
    assert (record("k").status, record("k").error_code, entries("reserved")) == ("released", None, 1)
    assert [row.status for row in op.outbox(connection)] == ["failed"]  # nothing will deliver it


def test_a_duplicate_accepted_within_the_retention_runs_again_after_the_purge(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record, entries: Entries
) -> None:
    """A duplicate is accepted while the record is there and waits in its queue; the record reaches its retention; the purge
    deletes it although it sees the unsettled row of the same request; the message arrives and the deposit is made again.
    (A row that is not published yet does keep the record.) Breaks: never an operation that something will still deliver.
    """
    deliveries.deliver(b.deposit, "a")
    with Session(engine) as session, session.begin():
        b.deposit.enqueue(session, "a")  # seconds before the retention is over
    (duplicate,) = op.outbox(connection)
    op.sent(connection, OperationId("default", b.deposit.name, "a"))  # in its queue, behind others
    connection.execute(text("UPDATE idempotency.records SET expires_at = clock_timestamp() - interval '1 s'"))
    assert maintenance.purge(bank) == 1
    assert (record("a"), op.outbox(connection)) == (None, [])
    assert deliver_row(deliveries, b.deposit, duplicate).state == "SUCCESS"
    assert entries("a") == 2


@pytest.mark.parametrize("what", ["route", "properties"])
def test_one_malformed_row_keeps_the_relay_from_publishing_anything(
    bank: Celery, engine: Engine, connection: Connection, what: str
) -> None:
    """One row whose message has a `null` where an object belongs: an AttributeError leaves the publisher, no row of the
    batch is confirmed, all of them go again a second later, and those before the bad one are in the queue once more each
    time. Breaks: one bad row never stops a sweep.
    """
    with Session(engine) as session, session.begin():
        for account in ("before", "bad", "behind"):
            b.deposit.enqueue(session, account)
    row = op.outbox(connection, OperationId("default", b.deposit.name, "bad"))[0]
    message = json.dumps(json.loads(row.message) | {what: None})
    connection.execute(text("UPDATE idempotency.outbox SET message = :m WHERE id = :id"), {"m": message, "id": row.id})
    relay = Relay(bank)
    for _ in range(8):  # OWN_ERRORS is five
        with pytest.raises(AttributeError):
            relay.run_once()
    relay.close()
    assert [row.status for row in op.outbox(connection)] == ["pending"] * 3
    assert op.dead_letters(connection) == []
    with bank.connection_for_read() as broker:
        waiting = broker.channel().queue_declare(bank.conf.task_default_queue, passive=True).message_count
    assert waiting == 8  # "before", eight times


def test_a_charge_that_a_person_has_just_confirmed_is_forgotten_within_the_hour(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    """effect_unknown for 31 days. A person finds the charge (`resolve --happened`), settles it by hand and discards the
    letter. The retention counts from the first end and is not renewed by the word, so the next purge deletes the record; a
    client's repeat under the same key charges again, under a key that the provider has forgotten. Breaks: what has ended
    is remembered for its retention.
    """
    provider = Provider(lost())
    task = make_task(bank, lambda self: self.effect("call", provider), max_attempts=1)
    deliveries.deliver(task, key="k")
    id = OperationId("default", task.name, "k")
    operators.cancel(bank, operators.read(connection, id), ANN, may_have_happened=True)
    connection.execute(text("UPDATE idempotency.records SET expires_at = clock_timestamp() - interval '1 day'"))
    connection.execute(text("UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp()"))
    operators.resolve_effect(bank, operators.read(connection, id), "call", Happened({"charge": "ch_1"}), ANN)
    assert record("k").error_code == "effect_unknown"
    (letter,) = op.dead_letters(connection)
    discard(engine, letter.id)
    assert maintenance.purge(bank) == 1
    assert record("k") is None
    assert deliveries.deliver(task, key="k").value == {"charge": "ch_1"}
    assert len(provider.keys) == 2  # charged twice, if the provider keeps keys for less than a month
