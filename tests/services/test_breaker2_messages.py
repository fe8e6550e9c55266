"""A second breaker: fingerprints that are believed, and records that are kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, Row, text
from sqlalchemy.orm import Session

from idempotency import IdempotentTask
from idempotency.maintenance import purge
from idempotency.message import FINGERPRINT_HEADER
from idempotency.reconcile import reconcile
from idempotency.runtime import Runtime
from tests import bank as b
from tests import operations as op
from tests.bank import INSERT
from tests.deliveries import Deliveries
from tests.services.test_core import age, make_task
from tests.services.test_operators import deliver_row
from tests.services.test_purge import deliver_again, past_its_time

Record = Callable[[str], Row[Any]]
Entries = Callable[[str], int]


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    with engine.connect() as connection:
        yield connection


def test_a_message_with_other_arguments_is_answered_with_a_strangers_result(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record
) -> None:
    """A body edited by hand or by a script that shovels messages keeps its headers."""
    deliveries.deliver(b.deposit, "a", 5)
    edited = deliveries.deliver(b.deposit, "a", 600, headers={FINGERPRINT_HEADER: record("a").fingerprint})
    assert (edited.state, edited.value) == ("SUCCESS", {"account": "a", "amount": 5})
    assert op.dead_letters(connection) == []


def test_a_message_with_other_arguments_runs_in_place_of_the_accepted_ones(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    """Between two attempts: 600 are paid under a record, a message and a fingerprint that say 5."""
    runs: list[int] = []

    def body(self: Any, account: str, amount: int) -> int:
        runs.append(amount)
        if len(runs) == 1:
            raise ValueError("again")
        self.session.execute(INSERT, {"account": account, "amount": amount})
        return amount

    task = make_task(bank, body)
    deliveries.deliver(task, "a", 5, key="k")
    age(engine, "k")
    accepted = record("k").fingerprint
    deliveries.deliver(task, "a", 600, key="k", headers={FINGERPRINT_HEADER: accepted})
    assert connection.execute(text("SELECT amount FROM entries")).scalars().all() == [600]
    assert (record("k").status, record("k").fingerprint) == ("completed", accepted)
    assert json.loads(json.loads(record("k").message)["body"])[0] == ["a", 5]
    assert op.dead_letters(connection) == []


def test_a_parameter_renamed_before_the_first_attempt_makes_a_false_letter(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    """The record takes the new name's fingerprint, and its own outbox row counts as another request's for ever."""

    def old(self: Any, account: str) -> None: ...

    task = make_task(bank, old)
    with Session(engine) as session, session.begin():
        task.enqueue(session, "a", idempotency_key="k")
    op.sent(connection, op.outbox(connection)[0])

    def new(self: Any, account_id: str) -> str:
        return account_id

    del bank.tasks[task.name]
    renamed = bank.task(base=IdempotentTask, bind=True, name=task.name, shared=False)(new)
    assert deliver_row(deliveries, renamed, op.outbox(connection)[0]).value == "a"
    assert record("k").status == "completed"
    connection.execute(text("UPDATE idempotency.outbox SET published_at = published_at - interval '2 days'"))
    reconcile(bank, lambda queue: 0)
    (letter,) = op.dead_letters(connection)
    assert (letter.reason, letter.status) == ("fingerprint_mismatch", "open")
    assert letter.fingerprint != record("k").fingerprint


def test_a_key_that_is_sent_again_keeps_its_record_and_every_row_for_ever(
    bank: Celery, connection: Connection, record: Record
) -> None:
    """A client that repeats its request once in a redelivery horizon: a row each time, and none is ever deleted."""
    id = past_its_time(connection)
    for days in range(1000, 0, -50):
        deliver_again(
            connection,
            id,
            status="'published'",
            published_at=f"clock_timestamp() - interval '{days} days'",
            settled_at=f"clock_timestamp() - interval '{days} days'",
        )
    deliver_again(
        connection, id, status="'published'", published_at="clock_timestamp()", settled_at="clock_timestamp()"
    )
    connection.execute(text("UPDATE idempotency.records SET expires_at = clock_timestamp() - interval '3 years'"))
    assert purge(bank) == 0
    assert len(op.outbox(connection, id)) == 21
    assert Runtime.of(bank).settings.retention_completed < 86400 * 50
