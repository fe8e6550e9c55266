"""What handlers and headers do to an end: each test passes while the bug is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from sqlalchemy import Connection, Engine, Row, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from idempotency import Operation, PermanentError, operators
from idempotency.operators import Change
from tests import operations as op
from tests.deliveries import Deliveries
from tests.services.test_conclusions import code, unwrite, write
from tests.services.test_core import make_task
from tests.services.test_proven_ends import recover_now, shown

ANN = Change("ann", "ticket 42")
Record = Callable[[str], Row[Any]]
Entries = Callable[[str], int]
NOTE = text("INSERT INTO failures (account, code) VALUES ('note', 'x')")


@pytest.fixture
def connection(engine: Engine) -> Any:
    with engine.connect() as connection:
        yield connection


def commit_the_connection(session: Session, operation: Operation, error: PermanentError) -> None:
    session.execute(NOTE)
    session.connection().commit()


def roll_the_connection_back(session: Session, operation: Operation, error: PermanentError) -> None:
    session.execute(NOTE)
    session.connection().rollback()


def invalidate(session: Session, operation: Operation, error: PermanentError) -> None:
    """SQLAlchemy's advice after a gevent time-out."""
    session.execute(NOTE)
    session.invalidate()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("handler", [commit_the_connection, roll_the_connection_back, invalidate])
def test_an_on_failed_that_ends_its_transaction_keeps_the_operation_open(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, handler: Any
) -> None:
    """The refusal (SessionNotYours) is followed by `session.rollback()` in `_run`, which raises for itself; that error is no
    OperationalError and leaves everything: cancel answers with SQLAlchemy's error and changes nothing, however often; a
    declined payment is rejected, stays `started` until its lease is over, and its body runs again. Breaks: an on_failed that
    raises leaves no rows, and the end goes on without it.
    """
    runs: list[int] = []

    def waiting(self: Any) -> None:
        raise ValueError("again")

    def declined(self: Any) -> None:
        runs.append(1)
        raise PermanentError("no", "declined")

    task = make_task(bank, waiting, on_failed=handler)
    deliveries.deliver(task, key="k")
    for _ in range(3):
        with pytest.raises(SQLAlchemyError):
            operators.cancel(bank, shown(connection, task), ANN)
    assert record("k").status == "released"

    task = make_task(bank, declined, on_failed=handler, max_attempts=3)
    for _ in range(3):
        assert deliveries.deliver(task, key="k2", origin="recover").state == "REJECTED"
        recover_now(bank, connection)
    assert (record("k2").status, len(runs), op.dead_letters(connection)) == ("released", 3, [])


def commit_in_sql(session: Session, operation: Operation, error: PermanentError) -> None:
    """Hand-written SQL, or a procedure that commits."""
    session.execute(NOTE)
    session.execute(text("COMMIT"))


@pytest.mark.filterwarnings("ignore")
def test_an_on_failed_with_a_commit_in_sql_tells_the_business_again_and_again(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, entries: Entries
) -> None:
    """What it wrote, and the undo of the step before it, is committed without the record's end; the savepoint is gone, the
    OperationalError counts as Postgres' fault, and the end is tried again in five rounds: the money is freed five times in
    one delivery, the operation still `started`, the step still recorded. Breaks: undos, on_failed and end are one commit.
    """

    def body(self: Any) -> None:
        self.step("reserve", write, "reserved", undo=unwrite)
        raise PermanentError("no", "declined")

    task = make_task(bank, body, on_failed=commit_in_sql)
    assert deliveries.deliver(task, key="k").state == "REJECTED"
    assert (record("k").status, "reserve" in record("k").effects) == ("started", True)
    assert (entries("undone reserved"), entries("reserved")) == (5, 0)
    assert connection.execute(text("SELECT count(*) FROM failures")).scalar_one() == 5


def test_a_soft_time_limit_in_on_failed_ends_the_operation_without_it(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, entries: Entries
) -> None:
    """The soft limit passes while on_failed (or an undo) runs: it counts as the application's error, so the operation ends
    at once, the business untold; in an undo it ends as `unfinished` with the reservation kept. A lock time-out at the same
    place is tried again. README: "a soft limit is an ordinary error"; it is the delivery's, and no bug of on_failed.
    """
    told: list[str] = []

    def on_failed(session: Session, operation: Operation, error: PermanentError) -> None:
        told.append(error.code)
        raise SoftTimeLimitExceeded

    def body(self: Any) -> None:
        self.step("reserve", write, "reserved", undo=undo_within_the_limit)
        raise PermanentError("no", "declined")

    task = make_task(bank, body, on_failed=on_failed)
    deliveries.deliver(task, key="k")
    assert (record("k").status, code(record("k")), record("k").attempts) == ("failed", ("unfinished", "declined"), 1)
    assert (entries("reserved"), told) == (1, ["unfinished"])
    assert [letter.reason for letter in op.dead_letters(connection)] == ["on_failed_error"]


def undo_within_the_limit(session: Session, result: Any) -> None:
    raise SoftTimeLimitExceeded
