"""Deliveries that a second reader proved lost or made twice, each held to what is right."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, Row, text
from sqlalchemy.orm import Session

from idempotency import OperationId
from idempotency.attempt.runtime import Runtime
from idempotency.letters.dead_letter_queue import DeadLetterConsumer
from idempotency.operate import discards, operators
from idempotency.operate.discards import DiscardRefused, Person
from idempotency.relay import reconcile as reconciling
from idempotency.relay.reconcile import reconcile
from idempotency.relay.relay import Relay
from idempotency.store import sweeps
from idempotency.upkeep import maintenance
from tests.support import bank as b
from tests.support import operations as op
from tests.support.dead_messages import die, headers
from tests.support.deliveries import Deliveries, deliver_row
from tests.support.operations import Entries, Record, deaths, make_due
from tests.support.operators import ANN, act, snapshot
from tests.support.tasks import make_task, unwrite, write

ASKS, APPROVES = Person("ann", "operator"), Person("bob", "admin")


def discard(app: Celery, letter: int) -> None:
    act(app, discards.request, ASKS, letter, "a broken copy")
    act(app, discards.approve, APPROVES, letter)


def accept(engine: Engine, task: Any, *arguments: Any) -> OperationId:
    with Session(engine) as session, session.begin():
        task.enqueue(session, *arguments)
    return OperationId("default", task.name, "a")


def lose(connection: Connection) -> None:
    """Everything was published a day ago, and the broker has lost it."""
    connection.execute(
        text("""UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp() - interval '1 day'
                WHERE status <> 'failed'""")
    )


def break_copy(app: Celery, task: Any, row: Row[Any]) -> None:
    """A copy of this row's message comes to the dead-letter queue as something that is no JSON."""
    consumer = DeadLetterConsumer(app)
    die(app, consumer, "not JSON", headers=headers(task=task.name) | {"idempotency-outbox-id": row.event_id})
    op.eventually(consumer.run_once)
    consumer.close()


def sends(app: Celery) -> int:
    """How many operations reconcile sends again, in passes of which the last finds no more."""
    return reconcile(app).resent + reconcile(app).resent


# ---------------------------------------------------------------- open and discarded letters


def test_a_replay_that_was_lost_is_sent_again_beside_an_open_letter(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection
) -> None:
    id = accept(engine, b.failing, "a", "permanent")
    (row,) = op.outbox(connection, id)
    op.sent(connection, id)
    deliver_row(deliveries, b.failing, row)
    break_copy(bank, b.failing, row)
    failed, broken = op.dead_letters(connection, id)
    operators.replay(bank, failed.id, ANN)
    lose(connection)
    assert (broken.outbox_id, sends(bank)) == (row.id, 1)
    replayed = op.outbox(connection, id)[-1]
    assert (replayed.generation, replayed.status, replayed.origin) == (2, "pending", "reconcile")


@pytest.mark.parametrize("broken", [0, 1], ids=["the first", "the second"])
def test_a_letter_of_one_acceptance_loses_no_other(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, entries: Entries, broken: int
) -> None:
    for _ in range(2):
        id = accept(engine, b.deposit, "a")
    rows = op.outbox(connection, id)
    lose(connection)
    break_copy(bank, b.deposit, rows[broken])
    (letter,) = op.dead_letters(connection)
    assert (letter.reason, letter.outbox_id) == ("undecodable", rows[broken].id)

    sent = sends(bank)
    discard(bank, letter.id)
    assert sent + sends(bank) == 1
    healthy = op.outbox(connection, id)[1 - broken]
    assert (healthy.id, healthy.status) == (rows[1 - broken].id, "pending")
    assert deliver_row(deliveries, b.deposit, healthy).state == "SUCCESS"
    assert entries("a") == 1


def test_a_row_with_its_letter_open_is_looked_at_once(bank: Celery, engine: Engine, connection: Connection) -> None:
    id = accept(engine, b.deposit, "a")
    (row,) = op.outbox(connection, id)
    lose(connection)
    break_copy(bank, b.deposit, row)
    assert sends(bank) == 0
    assert op.outbox(connection, id)[0].taken  # so no index that a pass reads has it


def test_a_pass_that_began_before_a_discard_does_not_hide_what_it_gave_back(
    bank: Celery, engine: Engine, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        id = accept(engine, b.deposit, "a")
    lose(connection)
    break_copy(bank, b.deposit, op.outbox(connection, id)[1])
    (letter,) = op.dead_letters(connection)

    # behind its snapshot, before its first row
    wait = "(SELECT pg_advisory_xact_lock_shared(7)::text IS NOT NULL) AND r.queue = %(queue)s"
    monkeypatch.setattr(reconciling, "_LOOK", reconciling._LOOK.replace("r.queue = %(queue)s", wait))
    monkeypatch.setattr(sweeps, "LOCK_TIMEOUT_MS", 10_000)
    connection.exec_driver_sql("SELECT pg_advisory_lock(7)")
    passing = op.in_background(lambda: reconcile(bank))
    op.wait_for_a_lock(connection)
    discard(bank, letter.id)
    connection.exec_driver_sql("SELECT pg_advisory_unlock(7)")
    assert passing.result(30).resent == 0
    monkeypatch.undo()
    assert not op.outbox(connection, id)[0].taken
    assert sends(bank) == 1


def unpublishable(app: Celery, connection: Connection) -> Row[Any]:
    """The letter of what is in the outbox and can never be published."""
    connection.execute(
        text("""UPDATE idempotency.outbox SET message = 'not a message', attempts = 4,
                available_at = clock_timestamp() - interval '1 s'""")
    )
    relay = Relay(app)
    relay.run_once()
    relay.close()
    (letter,) = op.dead_letters(connection)
    assert (letter.reason, letter.source) == ("unpublishable", "relay")
    return letter


def reserving(app: Celery) -> Any:
    """A task whose every attempt does its step and asks for another."""

    def body(self: Any) -> None:
        self.step("reserve", write, "reserved", undo=unwrite)
        raise ValueError("again")

    return make_task(app, body)


def test_the_last_way_on_of_an_operation_is_not_discarded_until_it_has_ended(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record, entries: Entries
) -> None:
    task = reserving(bank)
    deliveries.deliver(task, key="k")
    make_due(engine, "k")
    letter = unpublishable(bank, connection)
    act(bank, discards.request, ASKS, letter.id, "too large")
    before = snapshot(connection)
    with pytest.raises(DiscardRefused, match=r"has not ended and nothing else will deliver it; replay .* or cancel"):
        act(bank, discards.approve, APPROVES, letter.id)
    assert snapshot(connection) == before

    operators.cancel(bank, operators.read(connection, OperationId("default", task.name, "k")), ANN)
    assert (record("k").status, entries("reserved")) == ("failed", 0)
    act(bank, discards.approve, APPROVES, letter.id)
    assert [each.status for each in op.dead_letters(connection)] == ["discarded", "open"]


def test_no_letter_of_a_running_operation_is_discarded(bank: Celery, engine: Engine, connection: Connection) -> None:
    id = accept(engine, b.deposit, "a")
    (row,) = op.outbox(connection, id)
    letter = unpublishable(bank, connection)
    held = op.started(connection, id, fingerprint=row.fingerprint)
    act(bank, discards.request, ASKS, letter.id, "too large")
    with pytest.raises(DiscardRefused, match="is running"):
        act(bank, discards.approve, APPROVES, letter.id)
    op.records.complete(connection, held, "1", retention=60.0, lease=60.0)
    act(bank, discards.approve, APPROVES, letter.id)


def test_discarding_a_broken_copy_of_a_retry_sends_the_retry_again(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    task = reserving(bank)
    deliveries.deliver(task, key="k")
    make_due(engine, "k")
    lose(connection)
    (retry,) = op.outbox(connection)
    break_copy(bank, task, retry)
    assert sends(bank) == 0
    (letter,) = op.dead_letters(connection)
    discard(bank, letter.id)
    assert sends(bank) == 1
    assert deliver_row(deliveries, task, retry).state == "RETRY"
    assert record("k").attempts == 2


def test_the_letter_of_another_request_is_discarded_while_the_operation_runs(
    bank: Celery, engine: Engine, connection: Connection
) -> None:
    id = accept(engine, b.deposit, "a")
    letter = unpublishable(bank, connection)
    op.started(connection, id, fingerprint="v1:another request")
    discard(bank, letter.id)


# ---------------------------------------------------------------- the purge, and other applications


def test_a_duplicate_accepted_within_the_retention_gets_the_stored_result(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, entries: Entries
) -> None:
    deliveries.deliver(b.deposit, "a")
    id = accept(engine, b.deposit, "a")  # seconds before the retention is over
    (duplicate,) = op.outbox(connection)
    op.sent(connection, id)  # in its queue, behind others
    connection.execute(text("UPDATE idempotency.records SET expires_at = clock_timestamp() - interval '1 s'"))
    assert maintenance.purge(bank) == 0
    assert deliver_row(deliveries, b.deposit, duplicate).state == "SUCCESS"
    assert entries("a") == 1


def test_only_an_application_that_knows_the_task_ends_its_operations_as_spent(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record, entries: Entries
) -> None:
    """Another service on the same database, with its own tasks and its own default of attempts."""

    def body(self: Any) -> str:
        self.step("reserve", write, "reserved", undo=unwrite)
        if record("k").attempts < 21:
            raise ValueError("again")
        return "paid"

    task = make_task(bank, body, max_attempts=50)
    deliveries.deliver(task, key="k")
    deaths(engine, "k", 20)
    other = Celery("other")
    other.conf.update({name: bank.conf[name] for name in bank.conf if name.startswith("idempotency_")})
    other.conf.update(idempotency_service="other")
    try:
        maintenance.recover(other)
        assert record("k").status in ("started", "released")
    finally:
        Runtime.discard(other)
    maintenance.recover(bank)
    assert record("k").status == "released"
    assert deliveries.deliver(task, key="k", origin="recover").value == "paid"
    assert (record("k").status, entries("reserved")) == ("completed", 1)
