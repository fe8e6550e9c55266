"""The application's part of an end: `on_failed`, and what it does to the transaction that it is called in."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from idempotency import AttemptsExhausted, DidNotHappen, EffectUnknown, Operation, OperationId, PermanentError
from idempotency.attempt import attempt
from idempotency.attempt.attempt import ON_FAILED_ATTEMPTS
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.operate.cancel import cancel
from idempotency.operate.replay import replay
from idempotency.operate.resolve import resolve_effect
from tests.support import bank as b
from tests.support import operations as op
from tests.support.dead_messages import die, headers
from tests.support.deliveries import Deliveries, deliver_row
from tests.support.operations import Entries, Record, code, deaths, make_due, recover_now
from tests.support.operators import ANN, replay_and_deliver, shown
from tests.support.processes import eventually
from tests.support.tasks import (
    Provider,
    lost,
    make_task,
    on_failed,
    pay,
    told,
    told_codes,
    transactional,
    unwrite,
    write,
)

# The constraint of `cases` is checked when its transaction commits.
DEFERRED = """
CREATE TABLE cases (id bigserial PRIMARY KEY, account text);
CREATE TABLE customers (account text PRIMARY KEY);
ALTER TABLE cases ADD CONSTRAINT case_has_a_customer FOREIGN KEY (account) REFERENCES customers
    DEFERRABLE INITIALLY DEFERRED;
"""
NOTE = text("INSERT INTO failures (account, code) VALUES ('note', 'x')")


# ---------------------------------------------------------------- an `on_failed` that ends its transaction


def commit_the_connection(session: Session, operation: Operation, error: PermanentError) -> None:
    told.append((error.code, operation))
    session.execute(NOTE)
    session.connection().commit()


def roll_the_connection_back(session: Session, operation: Operation, error: PermanentError) -> None:
    told.append((error.code, operation))
    session.execute(NOTE)
    session.connection().rollback()


def invalidate(session: Session, operation: Operation, error: PermanentError) -> None:
    """SQLAlchemy's advice after a gevent time-out."""
    told.append((error.code, operation))
    session.execute(NOTE)
    session.invalidate()


def commit_in_sql(session: Session, operation: Operation, error: PermanentError) -> None:
    """Hand-written SQL."""
    told.append((error.code, operation))
    session.execute(NOTE)
    session.execute(text("COMMIT"))


def commit_by_libpq(session: Session, operation: Operation, error: PermanentError) -> None:
    """By libpq itself, where nothing sees it before Postgres does."""
    told.append((error.code, operation))
    session.execute(text("INSERT INTO failures (account, code) VALUES ('note', 'x')"))
    driver: Any = session.connection().connection.driver_connection
    driver.pgconn.exec_(b"COMMIT")


HANDLERS = [commit_the_connection, roll_the_connection_back, invalidate, commit_in_sql, commit_by_libpq]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("handler", HANDLERS)
def test_an_operation_ends_without_an_on_failed_that_ends_its_transaction(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, handler: Any
) -> None:
    def waiting(self: Any) -> None:
        raise ValueError("again")

    def declined(self: Any) -> None:
        raise PermanentError("no", "declined")

    task = make_task(bank, waiting, on_failed=handler)
    deliveries.deliver(task, key="k")
    cancel(bank, shown(connection, task), ANN)
    assert code(record("k"))[0] == "cancelled"

    task = make_task(bank, declined, on_failed=handler)
    assert deliveries.deliver(task, key="k2").state == "FAILURE"
    assert (code(record("k2"))[0], record("k2").attempts) == ("declined", 1)
    assert told_codes() == ["cancelled", "declined"]
    assert [letter.reason for letter in op.dead_letters(connection)] == ["on_failed_error"] * 2


@pytest.mark.filterwarnings("ignore")
def test_undos_that_on_failed_has_committed_are_not_run_again(
    bank: Celery, deliveries: Deliveries, record: Record, entries: Entries
) -> None:
    def body(self: Any) -> None:
        self.step("reserve", write, "reserved", undo=unwrite)
        raise PermanentError("no", "declined")

    task = make_task(bank, body, on_failed=commit_by_libpq)
    deliveries.deliver(task, key="k")
    assert code(record("k")) == ("unfinished", "declined")
    assert (entries("undone reserved"), told_codes()) == (1, ["declined"])


def test_a_soft_time_limit_in_the_applications_part_is_no_end(
    bank: Celery, deliveries: Deliveries, record: Record, entries: Entries
) -> None:
    def hurry(session: Session, operation: Operation, error: PermanentError) -> None:
        told.append((error.code, operation))
        if len(told) == 1:
            raise SoftTimeLimitExceeded

    def body(self: Any) -> None:
        self.step("reserve", write, "reserved", undo=unwrite)
        raise PermanentError("no", "declined")

    task = make_task(bank, body, on_failed=hurry)
    assert deliveries.deliver(task, key="k").state == "FAILURE"
    assert (code(record("k")), told_codes()) == (("declined", None), ["declined", "declined"])
    assert (entries("reserved"), entries("undone reserved")) == (0, 1)


class Killed(BaseException):
    """As the end of the process: nothing catches it. `sys.exit` is an error of `on_failed` like any other."""


def test_what_dies_in_its_end_is_ended_without_the_applications_part(
    bank: Celery, connection: Connection, engine: Engine, deliveries: Deliveries, record: Record
) -> None:
    """`on_failed` kills its process: five more claims, then the end goes on without it."""

    def body(self: Any) -> None:
        raise ValueError("again")

    def die(session: Session, operation: Operation, error: PermanentError) -> None:
        raise Killed

    task = make_task(bank, body, max_attempts=1, on_failed=die)
    for _ in range(10):
        with contextlib.suppress(Killed):
            deliveries.deliver(task, key="k", origin="recover")
        if record("k").status == "failed":
            break
        recover_now(bank, connection)
    assert (record("k").status, record("k").attempts) == ("failed", 1 + 1 + ON_FAILED_ATTEMPTS)


# ---------------------------------------------------------------- an `on_failed` that would stop the end


def open_case(session: Session, operation: Operation, error: PermanentError) -> None:
    """Its constraint is checked at COMMIT, unless it is asked for before."""
    session.execute(text("INSERT INTO cases (account) VALUES (:key)"), {"key": operation.key})


def roll_back_and_raise(session: Session, operation: Operation, error: PermanentError) -> None:
    """What many applications do with an error in a handler."""
    session.rollback()
    raise ValueError("a bug in on_failed")


@pytest.mark.parametrize("handler", [open_case, roll_back_and_raise])
def test_an_on_failed_that_cannot_commit_does_not_keep_an_operation_open(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, handler: Any
) -> None:
    connection.execute(text(DEFERRED))
    keys: list[str] = []

    def charge(*, idempotency_key: str) -> str:
        keys.append(idempotency_key)
        raise PermanentError("the card was declined", "card_declined")

    task = make_task(bank, lambda self: self.effect("call", charge), on_failed=handler)
    assert deliveries.deliver(task, key="k").state == "FAILURE"
    assert (record("k").status, code(record("k"))[0], len(keys)) == ("failed", "card_declined", 1)
    assert [letter.reason for letter in op.dead_letters(connection)] == ["on_failed_error"]
    assert connection.execute(text("SELECT count(*) FROM cases")).scalar_one() == 0


def test_a_person_can_cancel_over_an_on_failed_that_rolls_back_and_raises(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record
) -> None:
    def body(self: Any) -> None:
        raise ValueError("again")

    task = make_task(bank, body, on_failed=roll_back_and_raise)
    deliveries.deliver(task, key="k")
    assert cancel(bank, shown(connection, task), ANN).code == "cancelled"
    assert (record("k").status, code(record("k"))[0]) == ("failed", "cancelled")
    assert [letter.reason for letter in op.dead_letters(connection)] == ["on_failed_error"]


# ---------------------------------------------------------------- a process that dies in each end


def test_an_end_that_skips_on_failed_says_so_in_its_letter(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    """Claims lost beyond the last attempt, as after an `on_failed` that kills its process."""

    def body(self: Any) -> None:
        raise ValueError("again")

    task = make_task(bank, body, max_attempts=2, on_failed=on_failed)
    deliveries.deliver(task, key="k")
    deaths(engine, "k", 2 + attempt.ON_FAILED_ATTEMPTS, spent_at=3)
    deliveries.deliver(task, key="k", origin="recover")
    assert (code(record("k"))[0], told) == ("attempts_exhausted", [])
    assert [letter.reason for letter in op.dead_letters(connection)] == ["on_failed_error"]


# ---------------------------------------------------------------- what it is told


def test_on_failed_is_told_one_type_for_each_code(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection
) -> None:
    heard: list[PermanentError] = []
    provider = Provider(lost())
    task = make_task(
        bank, lambda self: self.effect("call", provider), max_attempts=1, on_failed=lambda *told: heard.append(told[2])
    )
    deliveries.deliver(task, key="k")
    make_due(engine, "k")
    deliveries.deliver(task, key="k", origin="retry")
    resolve_effect(bank, shown(connection, task), "call", DidNotHappen(), ANN, end=True)
    assert [(type(error), error.code) for error in heard] == [
        (EffectUnknown, "effect_unknown"),
        (AttemptsExhausted, "attempts_exhausted"),
    ]
    assert isinstance(heard[0].__cause__, AttemptsExhausted)


def test_on_failed_is_told_what_used_up_the_attempts(bank: Celery, deliveries: Deliveries) -> None:
    heard: list[PermanentError] = []

    def body(self: Any) -> None:
        raise ConnectionError("the gateway is away")

    deliveries.deliver(make_task(bank, body, max_attempts=1, on_failed=lambda *told: heard.append(told[2])), key="k")
    assert isinstance(heard[0].__cause__, ConnectionError)


# ---------------------------------------------------------------- what else it does


@pytest.mark.filterwarnings("ignore")
def test_on_failed_does_not_commit_an_undo_and_a_replay_repeats_its_step(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, entries: Entries
) -> None:
    declined = [True]

    def body(self: Any) -> str:
        self.step("reserve", write, "reserved", undo=unwrite)
        if declined:
            raise PermanentError("no", "declined")
        return pay(self)

    task = make_task(bank, body, on_failed=commit_in_sql)
    deliveries.deliver(task, key="k")
    assert (code(record("k")), told_codes()) == (("declined", None), ["declined"])
    assert (entries("reserved"), entries("undone reserved")) == (0, 1)
    assert "on_failed_error" in [letter.reason for letter in op.dead_letters(connection)]
    declined.clear()
    assert replay_and_deliver(bank, connection, deliveries, task).value == "paid"
    assert (record("k").status, entries("paid"), entries("reserved")) == ("completed", 1, 1)


@pytest.mark.filterwarnings("ignore")
def test_an_accepted_operation_is_cancelled_although_on_failed_commits(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record, entries: Entries
) -> None:
    task = make_task(bank, pay, on_failed=commit_in_sql)
    with Session(transactional(engine)) as session, session.begin():
        task.enqueue(session, idempotency_key="k")
    cancel(bank, shown(connection, task), ANN)
    assert (code(record("k"))[0], told_codes()) == ("cancelled", ["cancelled"])
    assert connection.execute(text("SELECT count(*) FROM failures")).scalar_one() == 0
    assert connection.execute(text("SELECT action FROM idempotency.audit")).scalars().all() == ["cancel"]
    assert deliver_row(deliveries, task, op.outbox(connection)[0]).state != "SUCCESS"
    assert entries("paid") == 0


@pytest.mark.filterwarnings("ignore")
def test_a_dead_message_gets_its_letter_although_on_failed_commits(
    bank: Celery, connection: Connection, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bank.tasks[b.deposit.name], "on_failed", commit_in_sql)
    consumer = DeadLetterConsumer(bank)
    die(bank, consumer, headers=headers(expires="2001-01-01T00:00:00+00:00"))
    consumer.run_once()
    consumer.close()
    assert (record("a1").status, told_codes()) == ("failed", ["expired"])
    (letter,) = op.dead_letters(connection)
    assert (letter.task, letter.key, letter.status) == (b.deposit.name, "a1", "open")


@pytest.fixture
def role(connection: Connection) -> Iterator[str]:
    """A tenant's role with rights on the application's tables and none on the library's."""
    name = "proven_tenant"
    connection.execute(text(f"CREATE ROLE {name} NOLOGIN"))
    connection.execute(text(f"GRANT {name} TO CURRENT_USER"))
    connection.execute(text(f"GRANT ALL ON failures, entries TO {name}"))
    connection.execute(text(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {name}"))
    yield name
    connection.execute(text(f"DROP OWNED BY {name}"))
    connection.execute(text(f"DROP ROLE {name}"))


def test_an_end_goes_on_after_an_on_failed_that_has_set_its_role(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, role: str
) -> None:
    """Row level security by `SET LOCAL ROLE`, which outlives its savepoint."""

    def handler(session: Session, operation: Operation, error: PermanentError) -> None:
        told.append((error.code, operation))
        session.execute(text(f"SET LOCAL ROLE {role}"))
        session.execute(text("INSERT INTO failures (account, code) VALUES ('told', 'x')"))

    def body(self: Any) -> None:
        raise PermanentError("no", "declined")

    assert deliveries.deliver(make_task(bank, body, on_failed=handler), key="k").state == "FAILURE"
    assert (code(record("k")), told_codes()) == (("declined", None), ["declined"])
    assert connection.execute(text("SELECT count(*) FROM failures")).scalar_one() == 1


# ---------------------------------------------------------------- dead messages


def test_a_dead_message_ends_over_an_on_failed_that_cannot_commit(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    connection.execute(text(DEFERRED))

    def body(self: Any) -> None:
        raise ValueError("again")

    task = make_task(bank, body, on_failed=open_case)
    deliveries.deliver(task, key="k")
    make_due(engine, "k")
    marks = op.sent(connection, OperationId("default", task.name, "k"))
    consumer = DeadLetterConsumer(bank)
    message = headers(task=task.name) | {"idempotency-key": "k"} | marks
    die(bank, consumer, json.dumps([[], {}, {}]), headers=message)
    eventually(consumer.run_once)
    consumer.close()
    (letter,) = op.dead_letters(connection)
    assert (record("k").status, letter.status, letter.reason) == ("failed", "open", "on_failed_error")
    assert replay(bank, letter.id, ANN).key == "k"
