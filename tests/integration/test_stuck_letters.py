"""A letter that cannot be stored now delays no other letter, and is stored in the end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from idempotency.letters import consumer as consuming
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.letters.ending import LETTER_TRIES
from idempotency.queues import dead_letter_queues
from idempotency.wire.headers import FINGERPRINT_HEADER, KEY_HEADER, MARKS, TENANT_HEADER, VERSION_HEADER
from idempotency.wire.keys import OperationId
from tests.support import bank as b
from tests.support import operations as op
from tests.support.dead_messages import body_of, bury, die, reject, waiting
from tests.support.processes import eventually

# Those that are looked at; what Celery sends besides is only copied.
HEADERS = [
    "x-death",
    "task",
    "id",
    "eta",
    "expires",
    "timelimit",
    "compression",
    *MARKS,
    KEY_HEADER,
    TENANT_HEADER,
]
HEADERS += [FINGERPRINT_HEADER, VERSION_HEADER]
STUCK = OperationId("default", b.deposit.name, "stuck")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A letter that waits is tried again in each pass."""
    monkeypatch.setattr(consuming, "HELD_PAUSE", 0.0)


def wait_for_a_lock_that_is_held(session: Session, operation: Any, error: Any) -> None:
    """As the bank's `on_failed`, except that the stuck one's row is locked for ever."""
    if operation.key == "stuck":
        session.execute(text("SET LOCAL lock_timeout = '20ms'"))
        session.execute(text("SELECT * FROM failures WHERE account = 'locked' FOR UPDATE"))
    b.record_failure(session, operation, error)


@pytest.fixture
def locked(bank: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connection]:
    """The row that `on_failed` wants, held by another transaction until this is rolled back."""
    monkeypatch.setattr(bank.tasks[b.deposit.name], "on_failed", wait_for_a_lock_that_is_held)
    with engine.connect() as setup:
        setup.execute(text("INSERT INTO failures (account, code) VALUES ('locked', 'x')"))
    own = create_engine(engine.url)
    with own.connect() as holder:
        holder.execute(text("SELECT * FROM failures WHERE account = 'locked' FOR UPDATE"))
        yield holder
    own.dispose()


def keys_of_letters(connection: Connection) -> list[tuple[str, str]]:
    return [(letter.key, letter.reason) for letter in op.dead_letters(connection)]


def tries(connection: Connection) -> list[int]:
    return list(connection.execute(text("SELECT tries FROM idempotency.dead_letter_tries")).scalars())


def test_a_letter_that_waits_for_a_lock_lets_the_others_go_on(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, locked: Connection, impatient: None
) -> None:
    die(bank, consumer, body_of("stuck"))
    reject(bank, body_of("a1"), dead=2)
    assert consumer.run_once() == 2
    assert keys_of_letters(connection) == [("a1", "rejected")]
    assert tries(connection) == [1]
    locked.rollback()
    consumer.run_once()
    assert keys_of_letters(connection) == [("a1", "rejected"), ("stuck", "rejected")]
    assert tries(connection) == []
    failures = connection.execute(text("SELECT account FROM failures WHERE code = 'rejected' ORDER BY 1"))
    assert failures.scalars().all() == ["a1", "stuck"]


def test_letters_that_wait_take_turns_with_new_ones(
    bank: Celery,
    consumer: DeadLetterConsumer,
    connection: Connection,
    locked: Connection,
    impatient: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    consumer.run_once()
    bury(bank, ["stuck"] * 7)
    consumer.run_once()
    assert tries(connection) == [1] * 7
    monkeypatch.setattr(consuming, "PASS", 0.0)  # over as soon as it has begun
    bury(bank, ["a1", "a2"])
    assert consumer.run_once() == 1
    assert keys_of_letters(connection) == [("a1", "rejected")]
    assert sorted(tries(connection)) == [1] * 6 + [2]


def test_after_its_tries_a_letter_is_stored_without_on_failed(
    bank: Celery, connection: Connection, locked: Connection, impatient: None
) -> None:
    consumer = DeadLetterConsumer(bank)
    die(bank, consumer, body_of("stuck"))
    for number in range(1, LETTER_TRIES + 1):
        eventually(consumer.run_once)
        assert tries(connection) == [number]
        consumer.close()  # a relay that restarts: the broker hands the message out again
        consumer = DeadLetterConsumer(bank)
    eventually(consumer.run_once)
    assert keys_of_letters(connection) == [("stuck", "on_failed_error")]
    assert tries(connection) == []
    row = op.record(connection, STUCK)
    assert row is not None
    assert row.status == "failed"
    assert connection.execute(text("SELECT count(*) FROM failures WHERE code = 'rejected'")).scalar_one() == 0
    assert consumer.run_once() == 0
    consumer.close()


def test_a_letter_that_waits_is_tried_less_and_less_often(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, locked: Connection
) -> None:
    die(bank, consumer, body_of("stuck"))
    for _ in range(4):
        consumer.run_once()
    assert tries(connection) == [2]  # at once, in the next pass, and then not for five seconds


def test_an_on_failed_that_always_meets_an_operational_error_ends(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another database that is away, say; the library's own answers."""

    def elsewhere(*_: Any) -> None:
        raise OperationalError("SELECT 1", None, Exception("connection refused"), connection_invalidated=True)

    monkeypatch.setattr(bank.tasks[b.deposit.name], "on_failed", elsewhere)
    die(bank, consumer, body_of("stuck"))
    for _ in range(LETTER_TRIES + 1):
        consumer.run_once()
    assert keys_of_letters(connection) == [("stuck", "on_failed_error")]


@pytest.mark.long
def test_a_postgres_that_goes_away_is_no_try(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    outages = LETTER_TRIES + 2

    def cut_off(session: Session, operation: Any, error: Any) -> None:
        nonlocal outages
        outages -= 1
        if outages >= 0:
            backend = session.execute(text("SELECT pg_backend_pid()")).scalar_one()
            connection.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": backend})
        b.record_failure(session, operation, error)

    monkeypatch.setattr(bank.tasks[b.deposit.name], "on_failed", cut_off)
    die(bank, consumer, body_of("stuck"))
    while outages > 0:
        consumer.run_once()
    consumer.run_once()
    assert keys_of_letters(connection) == [("stuck", "rejected")]
    assert connection.execute(text("SELECT account FROM failures")).scalars().all() == ["stuck"]


@pytest.mark.long
def test_an_on_failed_that_ends_its_process_is_counted(
    bank: Celery, connection: Connection, environment: dict[str, str]
) -> None:
    consumer = DeadLetterConsumer(bank)
    die(bank, consumer, body_of("stuck"))
    consumer.close()
    deadly = """
import os
from tests.support import bank
from idempotency.letters.consumer import DeadLetterConsumer
bank.app.tasks[bank.deposit.name].on_failed = lambda *_: os._exit(7)
DeadLetterConsumer(bank.app).run_once()
"""
    ended = subprocess.run([sys.executable, "-c", deadly], env=environment, check=False, timeout=60)
    assert ended.returncode == 7
    assert tries(connection) == [1]
    connection.execute(text("UPDATE idempotency.dead_letter_tries SET tries = :tries"), {"tries": LETTER_TRIES})
    consumer = DeadLetterConsumer(bank)
    eventually(consumer.run_once)
    consumer.close()
    assert keys_of_letters(connection) == [("stuck", "on_failed_error")]


@pytest.mark.plain
def test_a_record_that_is_locked_keeps_no_other_letter_waiting(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, engine: Engine, impatient: None
) -> None:
    op.failed(connection, STUCK, fingerprint="v1:other")
    die(bank, consumer, body_of("stuck"))
    reject(bank, body_of("a1"), dead=2)
    own = create_engine(engine.url)
    with own.connect() as holder:
        holder.execute(text("SELECT * FROM idempotency.records WHERE key = 'stuck' FOR UPDATE"))
        consumer.run_once()
        assert keys_of_letters(connection) == [("a1", "rejected")]
    own.dispose()
    consumer.run_once()
    assert keys_of_letters(connection) == [("a1", "rejected"), ("stuck", "fingerprint_mismatch")]


def test_the_first_try_waits_less_for_a_lock_than_later_ones(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience = []

    def note(session: Session, *_: Any) -> None:
        patience.append(session.execute(text("SHOW lock_timeout")).scalar_one())
        if len(patience) < 3:
            raise OperationalError("LOCK", None, Exception("canceling statement due to lock timeout"))

    monkeypatch.setattr(bank.tasks[b.deposit.name], "on_failed", note)
    die(bank, consumer)
    for _ in range(3):
        consumer.run_once()
    assert patience == ["500ms", "3s", "3s"]
    assert keys_of_letters(connection) == [("a1", "rejected")]


@pytest.mark.long
@pytest.mark.plain
def test_more_letters_than_may_be_held_wait_and_others_go_on(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consuming, "FIRST_PATIENCE", "1ms")
    monkeypatch.setattr(consuming, "HELD_LIMIT", 3)
    monkeypatch.setattr(consuming, "HELD_PAUSE", 1e9)
    monkeypatch.setattr(consuming, "HELD_CAP", 1e9)
    accounts = [f"locked-{number}" for number in range(8)]
    for account in accounts:
        op.failed(connection, OperationId("default", b.deposit.name, account), fingerprint="v1:other")
    consumer.run_once()
    bury(bank, accounts)
    own = create_engine(engine.url)
    with own.connect() as holder:
        holder.execute(text("SELECT * FROM idempotency.records FOR UPDATE"))
        assert consumer.run_once() == 8
        bury(bank, ["free"])
        consumer.run_once()
        assert keys_of_letters(connection) == [("free", "rejected")]
        assert waiting(bank) == 0  # all unacknowledged: what is returned would come first again
    own.dispose()
    for _ in range(6):
        consumer.run_once()
    stored = {key for key, _ in keys_of_letters(connection)}
    assert {"free", *accounts[:5]} <= stored  # the oldest were parked, and have come back
    consumer.close()  # the others are tried much later: they return
    eventually(consumer.run_once)
    assert {key for key, _ in keys_of_letters(connection)} == {"free", *accounts}


STRANGE = [
    5,
    "\0",
    b"\xff",
    [],
    [5],
    [{"routing-keys": 5}],
    [{"exchange": 5, "routing-keys": [None]}],
    [{"reason": "rejected", "queue": "elsewhere", "exchange": 5, "routing-keys": [None], "time": 5}],
    {"a": [{}]},
    True,
]


def test_a_header_that_holds_anything_keeps_no_letter_from_its_row(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    consumer.run_once()
    sent = {f"{header}: {value!r}": {"x-death": None, header: value} for header in HEADERS for value in STRANGE}
    bury(bank, sent, sent.values())
    while consumer.run_once():
        pass
    assert {json.loads(json.loads(letter.payload)["body"])[0][0] for letter in op.dead_letters(connection)} == set(sent)


@pytest.fixture
def refused(connection: Connection) -> Iterator[None]:
    """Postgres refuses the letter of the stuck one, for a reason that is neither a lock nor an outage."""
    connection.execute(
        text("""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused'; END $$;
        CREATE TRIGGER refuse BEFORE INSERT ON idempotency.dead_letters FOR EACH ROW
        WHEN (NEW.payload LIKE '%stuck%' AND NEW.reason <> 'unhandled') EXECUTE FUNCTION refuse()""")
    )
    yield
    connection.execute(text("DROP FUNCTION refuse() CASCADE"))


@pytest.mark.long
def test_a_letter_that_surprises_is_stored_raw_in_the_end(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, impatient: None, refused: None
) -> None:
    op.early(connection, STUCK)
    connection.execute(text("DELETE FROM idempotency.outbox"))
    untouched = op.record(connection, STUCK)
    die(bank, consumer, body_of("stuck"))
    reject(bank, body_of("a1"), dead=2)
    for _ in range(LETTER_TRIES):
        consumer.run_once()
        assert keys_of_letters(connection) == [("a1", "rejected")]
    consumer.run_once()
    (_, letter) = op.dead_letters(connection)
    assert (letter.key, letter.reason, letter.header_task) == (None, "unhandled", b.deposit.name)
    assert json.loads(letter.payload)["body"] == body_of("stuck")
    assert op.record(connection, STUCK) == untouched
    assert (consumer.run_once(), waiting(bank)) == (0, 0)


def test_a_letter_that_cannot_even_be_stored_raw_stays_held(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, impatient: None, refused: None
) -> None:
    connection.execute(text("ALTER TABLE idempotency.dead_letters ADD CONSTRAINT none CHECK (reason <> 'unhandled')"))
    die(bank, consumer, body_of("stuck"))
    for _ in range(LETTER_TRIES + 2):
        consumer.run_once()
    assert keys_of_letters(connection) == []
    connection.execute(text("ALTER TABLE idempotency.dead_letters DROP CONSTRAINT none"))
    consumer.run_once()
    assert [reason for _, reason in keys_of_letters(connection)] == ["unhandled"]


def test_the_dead_letter_queue_drops_nothing_that_comes_back_25_times(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    die(bank, consumer)
    (queue,) = dead_letter_queues(bank.amqp.queues.values())
    assert queue.queue_arguments["x-delivery-limit"] >= 1_000_000_000
    with bank.connection_for_read() as broker:
        channel = broker.channel()
        for _ in range(25):
            message = eventually(lambda: channel.basic_get(queue.name, no_ack=False))
            channel.basic_reject(message.delivery_tag, requeue=True)
    eventually(consumer.run_once)
    assert keys_of_letters(connection) == [("a1", "rejected")]
