"""Batches that write what others write, too: Postgres ends one transaction of a deadlock."""

from __future__ import annotations

import threading

import pytest
from celery import Celery
from sqlalchemy import Engine, text

from idempotency import IdempotentTask
from tests.support.batches import accounts, many, run, states, together
from tests.support.tasks import transactional

UPDATE = text("UPDATE entries SET amount = amount + 1 WHERE account = :account")


def test_a_batch_that_meets_anothers_lock_is_run_one_by_one(
    bank: Celery, engine: Engine, superuser: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """And not behind savepoints, which would keep what its first bodies have locked."""
    rows = {"e0": "first", "e1": "second"}
    has_first, entered = threading.Event(), list[str]()

    def body(self: IdempotentTask, account: str) -> None:
        entered.append(account)
        self.session.execute(UPDATE, {"account": rows[account]})
        has_first.set()

    with engine.connect() as connection:
        for name in rows.values():
            connection.execute(text("INSERT INTO entries (account, amount) VALUES (:name, 0)"), {"name": name})
    other = transactional(superuser).connect()
    other.execute(text("SET LOCAL deadlock_timeout = '60s'"))  # the batch is what Postgres ends
    other.execute(UPDATE, {"account": "second"})

    def go_on() -> None:
        assert has_first.wait(30)
        other.execute(UPDATE, {"account": "first"})
        other.commit()

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        task = together(bank, body)
        run(bank, task, *many(bank, task, 2))
    finally:
        thread.join()
        other.close()
    assert entered == ["e0", "e1", "e0", "e1"]
    assert states(engine) == {"e0": "completed", "e1": "completed"}
    assert accounts(engine) == {"first": [2], "second": [2]}
    assert [r.getMessage() for r in caplog.records if "batch_contended" in r.getMessage()]
