"""Bodies that end or leave the transaction that they are given."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from sqlalchemy import text
from sqlalchemy.orm import Session

from idempotency import SessionNotYours
from tests.support import bank as b
from tests.support.bank import INSERT
from tests.support.deliveries import Deliveries
from tests.support.operations import Entries, Record, code
from tests.support.tasks import make_task, pay


def commit_its_connection(session: Session) -> None:
    session.connection().commit()


def commit_the_transaction(session: Session) -> None:
    transaction = session.get_transaction()
    assert transaction is not None
    transaction.commit()


def leave_the_session(session: Session) -> None:
    """SQLAlchemy's own idiom; its end closes, which rolls back."""
    with session:
        pass


@pytest.mark.parametrize("end", [commit_its_connection, commit_the_transaction, leave_the_session])
def test_a_body_that_ends_its_transaction_is_refused_and_leaves_nothing(
    bank: Celery, deliveries: Deliveries, record: Record, entries: Entries, end: Any
) -> None:
    def body(self: Any) -> str:
        self.session.execute(INSERT, {"account": "row", "amount": 1})
        end(self.session)
        return "paid"

    assert isinstance(deliveries.deliver(make_task(bank, body), key="k").value, SessionNotYours)
    assert (record("k").status, code(record("k"))[0], entries("row")) == ("failed", "session_not_yours", 0)


# ---------------------------------------------------------------- transactions ended in SQL


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "statement", ["COMMIT", "/* done */ end", "-- done\nROLLBACK WORK", "abort", "PREPARE TRANSACTION 'x'"]
)
def test_a_body_that_ends_its_transaction_in_sql_is_refused(
    bank: Celery, deliveries: Deliveries, record: Record, entries: Entries, statement: str
) -> None:
    def body(self: Any) -> None:
        pay(self)
        self.session.execute(text(statement))

    assert isinstance(deliveries.deliver(make_task(bank, body), key="k").value, SessionNotYours)
    assert (code(record("k")), entries("paid")) == (("session_not_yours", None), 0)


def test_a_body_may_roll_back_to_its_own_savepoint_in_sql(
    bank: Celery, deliveries: Deliveries, entries: Entries
) -> None:
    def body(self: Any) -> str:
        self.session.execute(text("SAVEPOINT mine"))
        pay(self)
        self.session.execute(text("ROLLBACK TO SAVEPOINT mine"))
        return pay(self)

    assert deliveries.deliver(make_task(bank, body), key="k").value == "paid"
    assert entries("paid") == 1


# ---------------------------------------------------------------- execution options


def test_a_session_cannot_be_set_to_autocommit(
    bank: Celery, deliveries: Deliveries, record: Record, entries: Entries
) -> None:
    """COMMIT is refused in this spelling too: the execution option that VACUUM or a long report is run with."""

    def body(self: Any, account: str) -> None:
        self.session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        self.session.execute(b.INSERT, {"account": account, "amount": 1})
        raise ValueError("again")

    deliveries.deliver(make_task(bank, body, key="{account}"), "a1")
    assert (record("a1").status, record("a1").error_code) == ("failed", "session_not_yours")
    assert entries("a1") == 0
