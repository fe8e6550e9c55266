"""A second breaker: the application's part of an end that ends its transaction, and what was committed with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, Row, text
from sqlalchemy.orm import Session

from idempotency import Operation, OperationId, PermanentError, maintenance, operators, waiting
from idempotency.dead_letter_queue import DeadLetterConsumer
from idempotency.message import FINGERPRINT_HEADER
from idempotency.operators import Change, ChangeRefused
from tests import bank as b
from tests import operations as op
from tests.bank import INSERT
from tests.dead_messages import die
from tests.deliveries import Deliveries
from tests.services.test_conclusions import code, unwrite, write
from tests.services.test_core import make_task
from tests.services.test_operators import deliver_row
from tests.services.test_proven_ends import replay, shown

pytestmark = pytest.mark.filterwarnings("ignore")
ANN = Change("ann", "ticket 42")
Record = Callable[[str], Row[Any]]
Entries = Callable[[str], int]
told: list[str] = []


def commit_in_sql(session: Session, operation: Operation, error: PermanentError) -> None:
    """Hand-written SQL, or a procedure that commits."""
    told.append(error.code)
    session.execute(text("INSERT INTO failures (account, code) VALUES ('told', 'x')"))
    session.execute(text("COMMIT"))


@pytest.fixture(autouse=True)
def _nothing_told() -> None:
    told.clear()


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    with engine.connect() as connection:
        yield connection


def test_a_replay_charges_on_a_reservation_that_its_committed_undo_has_freed(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, entries: Entries
) -> None:
    """The end says that the steps were not undone; the undo is committed, and the replay skips its step."""
    declined = [True]

    def body(self: Any) -> str:
        self.step("reserve", write, "reserved", undo=unwrite)
        if declined:
            raise PermanentError("no", "declined")
        self.session.execute(INSERT, {"account": "charged", "amount": 1})
        return "charged"

    task = make_task(bank, body, on_failed=commit_in_sql)
    deliveries.deliver(task, key="k")
    assert code(record("k")) == ("unfinished", "declined")
    assert "its steps were not undone" in record("k").error
    assert (entries("reserved"), entries("undone reserved")) == (0, 1)  # they were
    declined.clear()
    assert replay(bank, connection, deliveries, task).value == "charged"
    assert (record("k").status, entries("charged"), entries("reserved")) == ("completed", 1, 0)


def test_a_cancel_that_told_the_business_is_refused_and_the_operation_runs(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record, entries: Entries
) -> None:
    """The first pass opened the record of what was only accepted; its second pass takes that for somebody else's."""

    def body(self: Any) -> str:
        self.session.execute(INSERT, {"account": "paid", "amount": 1})
        return "paid"

    task = make_task(bank, body, on_failed=commit_in_sql)
    with Session(engine) as session, session.begin():
        task.enqueue(session, idempotency_key="k")
    with pytest.raises(ChangeRefused, match="has begun meanwhile"):
        operators.cancel(bank, shown(connection, task), ANN)
    assert told == ["cancelled"]
    assert connection.execute(text("SELECT count(*) FROM failures")).scalar_one() == 1  # the business has it
    assert connection.execute(text("SELECT count(*) FROM idempotency.audit")).scalar_one() == 0
    assert deliver_row(deliveries, task, op.outbox(connection)[0]).value == "paid"
    assert (record("k").status, entries("paid")) == ("completed", 1)


def test_a_dead_message_fails_its_operation_without_a_letter(
    bank: Celery, connection: Connection, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed record is committed by `on_failed`; the second pass finds it failed and takes the message for a copy."""
    monkeypatch.setattr(bank.tasks[b.deposit.name], "on_failed", commit_in_sql)
    consumer = DeadLetterConsumer(bank)
    die(bank, consumer, headers={"task": b.deposit.name, "id": "t-1", "expires": "2001-01-01T00:00:00+00:00"})
    consumer.run_once()
    consumer.close()
    assert told == ["expired"]
    assert record("a1").status == "failed"
    assert op.dead_letters(connection) == []  # nobody is told, and nothing can be replayed
    id = OperationId("default", b.deposit.name, "a1")
    assert operators.read(connection, id).status == "failed"


@pytest.fixture
def tenant_role(connection: Connection) -> Iterator[str]:
    """A role of the application's own, with rights on its tables and none on the library's."""
    name = "breaker2_tenant"
    connection.execute(text(f"CREATE ROLE {name} NOLOGIN"))
    connection.execute(text(f"GRANT ALL ON failures TO {name}"))
    connection.execute(text(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {name}"))
    yield name
    connection.execute(text(f"DROP OWNED BY {name}"))
    connection.execute(text(f"DROP ROLE {name}"))


def test_an_on_failed_that_sets_its_role_keeps_the_operation_open_and_loses_the_cause(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, tenant_role: str
) -> None:
    """Row level security by `SET LOCAL ROLE`: it outlives the savepoint, so the letter and the record are refused."""
    states: list[str] = []

    def handler(session: Session, operation: Operation, error: PermanentError) -> None:
        told.append(error.code)
        session.execute(text(f"SET LOCAL ROLE {tenant_role}"))
        session.execute(text("INSERT INTO failures (account, code) VALUES ('told', 'x')"))

    def body(self: Any) -> None:
        raise PermanentError("no", "declined")

    task = make_task(bank, body, max_attempts=2, on_failed=handler)
    for _ in range(9):
        states.append(deliveries.deliver(task, key="k", origin="recover").state)
        if record("k").status == "failed":
            break
        connection.execute(
            text(
                "UPDATE idempotency.records SET locked_until = clock_timestamp() - interval '1s' WHERE status = 'started'"
            )
        )
        maintenance.recover(bank)
    assert states == ["REJECTED"] * 7 + ["FAILURE"]
    assert (code(record("k")), len(told)) == (("attempts_exhausted", None), 35)
    assert connection.execute(text("SELECT count(*) FROM failures")).scalar_one() == 0


def test_an_unreadable_fingerprint_header_occupies_a_worker_for_ever(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a surrogate pair (AMQP carries it) is no error of Postgres': each delivery waits five minutes and comes back."""
    monkeypatch.setattr(waiting, "PATIENCE", 0.1)
    outcome = deliveries.deliver(b.deposit, "a", 5, headers={FINGERPRINT_HEADER: "v1:\ud800"})
    for number in (1, 2, 3):
        assert outcome.state == "IGNORED"
        assert len(op.outbox(connection)) == number
        outcome = deliver_row(deliveries, b.deposit, op.outbox(connection)[-1])
    assert record("a") is None
    assert op.dead_letters(connection) == []
