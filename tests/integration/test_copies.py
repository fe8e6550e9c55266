"""A dead copy of a message ends nothing that something else will deliver; the last delivery does."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, text
from sqlalchemy.orm import Session

from idempotency.application import runtime_of
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.relay.resend import resend_lost
from idempotency.store import dead_letters, ends, lost, sweeps
from idempotency.upkeep import maintenance
from idempotency.wire.headers import GENERATION_HEADER
from idempotency.wire.keys import OperationId, fingerprint
from tests.support import bank as b
from tests.support import operations as op
from tests.support.bank import enqueue_deposit
from tests.support.dead_messages import die, headers
from tests.support.deliveries import Deliveries

ID = OperationId("default", b.deposit.name, "a1")
FINGERPRINT = fingerprint({"account": "a1"})


def dies(app: Celery, consumer: DeadLetterConsumer, marks: dict[str, Any]) -> None:
    die(app, consumer, headers=headers(**marks))
    assert consumer.run_once() == 1


def state(connection: Connection) -> tuple[str, int, int]:
    row = op.record(connection, ID)
    assert row is not None
    return row.status, row.generation, row.attempts


def failures(connection: Connection) -> int:
    return int(connection.execute(text("SELECT count(*) FROM failures")).scalar_one())


def an_hour_passes(connection: Connection) -> None:
    """Since what is published was."""
    connection.execute(text("UPDATE idempotency.outbox SET published_at = published_at - interval '1 hour'"))


def lives(connection: Connection) -> bool:
    return failures(connection) == 0 and not [
        letter for letter in op.dead_letters(connection) if letter.status == "open"
    ]


@pytest.fixture
def replayed(bank: Celery, deliveries: Deliveries, connection: Connection) -> dict[str, Any]:
    """An operation that failed once and was replayed; returns the marks of its first message."""
    enqueue_deposit()
    first = op.sent(connection, ID)
    op.failed(connection, ID, fingerprint=FINGERPRINT)
    resend_lost(bank, lambda _: 0)
    connection.execute(
        text("""
            INSERT INTO idempotency.dead_letters (source, tenant, task, key, generation, fingerprint, queue, reason,
                                                  payload)
            SELECT 'operation', tenant, task, key, generation, fingerprint, queue, 'no_account', message
            FROM idempotency.records
        """)
    )
    (letter,) = op.dead_letters(connection)
    with runtime_of(bank).engine.begin() as transaction:
        dead_letters.replay(transaction, letter.id)
    assert state(connection) == ("released", 2, 0)
    return first


@pytest.mark.parametrize("release", [op.early, op.due])
def test_a_copy_ends_nothing_whose_next_delivery_is_in_the_outbox(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, release: Callable[..., Any]
) -> None:
    enqueue_deposit()
    first = op.sent(connection, ID)
    release(connection, ID, fingerprint=FINGERPRINT)
    dies(bank, consumer, first)
    assert state(connection) == ("released", 1, 1)
    assert lives(connection)
    op.age(connection, ID, available_at=-1)
    assert Deliveries(bank).deliver(b.deposit, "a1", origin="retry").state == "SUCCESS"


@pytest.mark.parametrize("published", [False, True])
def test_a_copy_from_before_a_replay_ends_nothing_after_it(
    bank: Celery,
    consumer: DeadLetterConsumer,
    connection: Connection,
    replayed: dict[str, Any],
    published: bool,
) -> None:
    if published:
        op.sent(connection, ID)
    dies(bank, consumer, replayed)
    assert state(connection) == ("released", 2, 0)
    assert lives(connection)
    assert Deliveries(bank).deliver(b.deposit, "a1", origin="replay").state == "SUCCESS"


def test_a_copy_without_an_outbox_row_ends_nothing_after_a_replay(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, replayed: dict[str, Any]
) -> None:
    connection.execute(text("DELETE FROM idempotency.outbox"))  # as if another table had the replay
    dies(bank, consumer, {GENERATION_HEADER: 1})
    assert state(connection) == ("released", 2, 0)
    assert lives(connection)


def test_the_delivery_of_a_replay_ends_its_generation(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, replayed: dict[str, Any]
) -> None:
    dies(bank, consumer, op.sent(connection, ID))
    assert state(connection) == ("failed", 2, 0)
    assert failures(connection) == 1
    assert [letter.generation for letter in op.dead_letters(connection) if letter.status == "open"] == [2]


def test_a_second_call_after_a_replay_ends_nothing_and_hides_nothing(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, replayed: dict[str, Any]
) -> None:
    of_replay = op.sent(connection, ID)
    enqueue_deposit()  # the same request again, with a row that is newer than the replay's
    dies(bank, consumer, op.sent(connection, ID))
    assert state(connection) == ("released", 2, 0)
    connection.execute(text("UPDATE idempotency.outbox SET published_at = published_at - interval '1 hour'"))
    assert resend_lost(bank, lambda _: 0).resent == 1
    assert [row.origin for row in op.outbox(connection, ID) if row.status == "pending"] == ["resend"]
    op.sent(connection, ID)
    connection.execute(text("UPDATE idempotency.outbox SET status = 'published'"))
    dies(bank, consumer, of_replay)
    assert state(connection) == ("failed", 2, 0)


@pytest.mark.parametrize("holder", [op.started, op.expired])
def test_a_copy_ends_nothing_that_is_started_whatever_its_lease(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, holder: Callable[..., Any]
) -> None:
    enqueue_deposit()
    holder(connection, ID, fingerprint=FINGERPRINT)
    dies(bank, consumer, op.sent(connection, ID))
    row = op.record(connection, ID)
    assert row is not None
    assert (row.status, row.duplicates) == ("started", 1)  # counted, so the commit was flushed
    assert lives(connection)
    op.age(connection, ID, locked_until=-1)
    assert maintenance.recover(bank) == 1
    assert [row.generation for row in op.outbox(connection, ID)] == [1, 1]
    assert Deliveries(bank).deliver(b.deposit, "a1", origin="recover").state == "SUCCESS"


def test_of_two_calls_the_first_to_die_leaves_the_other(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    enqueue_deposit()
    first = op.sent(connection, ID)
    enqueue_deposit()
    second = op.sent(connection, ID)
    dies(bank, consumer, first)
    assert op.record(connection, ID) is None
    assert lives(connection)
    dies(bank, consumer, second)
    assert state(connection) == ("failed", 1, 0)
    assert failures(connection) == 1


@pytest.mark.parametrize("release", [op.due, None], ids=["its retry", "its first call"])
@pytest.mark.parametrize("is_lost", [False, True])
def test_of_two_calls_the_last_to_be_sent_leaves_what_waits_in_its_queue(
    bank: Celery,
    consumer: DeadLetterConsumer,
    connection: Connection,
    release: Callable[..., Any] | None,
    is_lost: bool,
) -> None:
    enqueue_deposit()
    op.sent(connection, ID)
    if release is not None:
        release(connection, ID, fingerprint=FINGERPRINT)
        op.sent(connection, ID)
    enqueue_deposit()
    dies(bank, consumer, op.sent(connection, ID))
    assert lives(connection)
    if is_lost:
        an_hour_passes(connection)
        assert resend_lost(bank).resent == 1
    assert Deliveries(bank).deliver(b.deposit, "a1", origin="retry").state == "SUCCESS"


def test_what_a_worker_has_had_keeps_nothing_from_its_end(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    """The row of the first message stays until the operation has ended, and nothing of it is in the broker."""
    enqueue_deposit()
    op.sent(connection, ID)
    an_hour_passes(connection)
    op.due(connection, ID, fingerprint=FINGERPRINT)
    dies(bank, consumer, op.sent(connection, ID))
    assert state(connection) == ("failed", 1, 1)


def test_what_another_row_covers_keeps_nothing_from_its_end(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    enqueue_deposit()
    op.sent(connection, ID)
    an_hour_passes(connection)
    enqueue_deposit()
    last = op.sent(connection, ID)
    resend_lost(bank)  # the first one has left its queue
    assert [row.taken for row in op.outbox(connection, ID)] == [True, False]
    dies(bank, consumer, last)
    assert state(connection) == ("failed", 1, 0)


def test_a_pass_that_has_seen_both_rows_does_not_leave_the_one_to_the_other(
    bank: Celery, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is settled, once its message has died, while the pass waits between its snapshot and its first row."""
    enqueue_deposit()
    op.sent(connection, ID)
    enqueue_deposit()
    last = op.sent(connection, ID)
    consumer = DeadLetterConsumer(bank)
    die(bank, consumer, headers=headers(**last))
    connection.execute(
        text("UPDATE idempotency.outbox SET queue = :queue, published_at = published_at - interval '1 hour'"),
        {"queue": bank.conf.task_default_queue},
    )
    wait = "(SELECT pg_advisory_xact_lock_shared(7)::text IS NOT NULL) AND r.queue = %(queue)s"
    monkeypatch.setattr(lost, "_JUDGE", lost._JUDGE.replace("r.queue = %(queue)s", wait))
    monkeypatch.setattr(sweeps, "LOCK_TIMEOUT_MS", 10_000)
    connection.exec_driver_sql("SELECT pg_advisory_lock(7)")
    passing = op.in_background(lambda: resend_lost(bank))
    op.wait_for_a_lock(connection)
    assert consumer.run_once() == 1
    consumer.close()
    connection.exec_driver_sql("SELECT pg_advisory_unlock(7)")
    assert passing.result(30).resent == 0
    assert [(row.taken, row.settled_at is not None) for row in op.outbox(connection, ID)] == [
        (False, False),
        (False, True),
    ]
    monkeypatch.undo()
    assert resend_lost(bank).resent == 1


def test_a_row_that_is_about_to_leave_again_lives(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    enqueue_deposit()
    marks = op.sent(connection, ID)
    connection.execute(text("UPDATE idempotency.outbox SET status = 'pending'"))  # resend has sent it again
    dies(bank, consumer, marks)
    assert op.record(connection, ID) is None
    assert lives(connection)


def test_a_message_is_refused_faster_than_its_confirm_is_noted(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    enqueue_deposit()
    marks = op.sent(connection, ID)
    connection.execute(
        text("UPDATE idempotency.outbox SET status = 'pending', relayed_until = clock_timestamp() + interval '30 s'")
    )
    dies(bank, consumer, marks)
    assert state(connection) == ("failed", 1, 0)


def test_an_ordered_message_is_refused_before_its_confirm_is_noted(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    with Session(runtime_of(bank).engine) as session:
        b.deposit.enqueue(session, "a1", ordering_key="k")
        session.commit()
    marks = op.sent(connection, ID)
    connection.execute(text("UPDATE idempotency.outbox SET status = 'pending'"))
    connection.execute(text("UPDATE idempotency.lanes SET relayed_until = clock_timestamp() + interval '30 s'"))
    dies(bank, consumer, marks)
    assert state(connection) == ("failed", 1, 0)


def test_what_is_lost_is_sent_again_by_the_row_of_the_newest_generation(
    bank: Celery, connection: Connection, replayed: dict[str, Any]
) -> None:
    op.sent(connection, ID)
    enqueue_deposit()  # the same request again: a newer row, of an older generation
    op.sent(connection, ID)
    connection.execute(
        text("UPDATE idempotency.outbox SET queue = :queue, published_at = published_at - interval '1 hour'"),
        {"queue": bank.conf.task_default_queue},
    )
    assert resend_lost(bank).resent == 1
    assert [row.generation for row in op.outbox(connection, ID) if row.status == "pending"] == [2]


def test_a_delivery_committed_while_the_copy_is_judged_counts(bank: Celery, connection: Connection) -> None:
    """The judging statement waits for the row's lock; what it sees then is newer than its snapshot."""
    enqueue_deposit()
    marks = op.sent(connection, ID)
    held = op.started(connection, ID, fingerprint=FINGERPRINT)
    consumer = DeadLetterConsumer(bank)
    die(bank, consumer, headers=headers(**marks))
    with runtime_of(bank).engine.connect() as other:
        other.begin()
        ends.release(other, held, delay=0.0, error=None)
        judged = op.in_background(consumer.run_once)
        op.wait_for_a_lock(connection)
        other.commit()
        assert judged.result(30) == 1
    consumer.close()
    assert state(connection)[0] == "released"
    assert lives(connection)


def test_messages_carry_their_generation_and_the_stored_ones_do_not(
    bank: Celery, connection: Connection, replayed: dict[str, Any]
) -> None:
    assert replayed[GENERATION_HEADER] == 1
    assert op.sent(connection, ID)[GENERATION_HEADER] == 2
    claimed = Deliveries(bank).deliver(b.deposit, "a1", origin="replay", headers={GENERATION_HEADER: 2})
    assert claimed.state == "SUCCESS"
    row = op.record(connection, ID)
    assert row is not None
    assert GENERATION_HEADER not in json.loads(row.message)["headers"]
