"""The test application, with a task that runs in batches, for a worker of its own."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from sqlalchemy import text

from idempotency import IdempotentTask, PermanentError
from tests.support import crashing
from tests.support.bank import INSERT, app, record_failure

__all__ = ["app"]

BATCH = 20
# Seconds, of a whole batch. Celery writes a task's limits into each of its messages.
LIMIT = 300


def call(*, idempotency_key: str) -> int:
    return 1


@app.task(
    base=IdempotentTask,
    bind=True,
    key="{account}",
    on_failed=record_failure,
    batch=BATCH,
    batch_wait=1.0,
    soft_time_limit=LIMIT,
)
def post_entry(self: IdempotentTask, account: str, how: str = "") -> Any:
    """One row, and then what `how` says."""
    return post(self, account, how)


@app.task(base=IdempotentTask, bind=True, key="{account}", on_failed=record_failure, batch=BATCH, batch_commit="each")
def post_each(self: IdempotentTask, account: str, how: str = "") -> Any:
    """The same, each in its own transaction."""
    return post(self, account, how)


@app.task(base=IdempotentTask, bind=True, key="{account}", batch=BATCH, batch_wait=0.001)
def post_slowly(self: IdempotentTask, account: str, how: str = "") -> Any:
    """A body that takes longer than a message takes to arrive."""
    time.sleep(0.01)
    return post(self, account, how)


def post(self: IdempotentTask, account: str, how: str) -> Any:
    """One row, and then what `how` says."""
    self.session.execute(INSERT, {"account": account, "amount": 1})
    match how:
        case "once":
            if self.request.retries == 0:
                raise ValueError("not yet")
        case "permanent":
            raise PermanentError("not today", "closed")
        case "effect":
            self.session.rollback()
            self.effect("call", call)
            self.session.execute(INSERT, {"account": account, "amount": 1})
        case "step":
            self.session.rollback()
            self.step(
                "first", lambda session: session.execute(INSERT, {"account": f"{account}/step", "amount": 1}) and None
            )
            self.session.execute(INSERT, {"account": account, "amount": 1})
        case "rolled back":
            self.session.rollback()
            self.session.execute(INSERT, {"account": account, "amount": 1})
        case "caught":
            try:
                self.session.execute(text("SELECT 1 / 0"))
            except Exception:
                self.session.rollback()
                self.session.execute(INSERT, {"account": account, "amount": 1})
        case "swallowed":
            try:
                self.session.execute(text("SELECT 1 / 0"))
            except Exception:
                return "swallowed"
        case "sets":
            self.session.execute(text("SET LOCAL search_path = pg_catalog"))
        case "later":  # a constraint that is checked at COMMIT only
            self.session.execute(text("INSERT INTO twice VALUES (1), (1)"))
        case "not json":
            return object()
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            raise SystemExit(0)
        case "retry":
            raise self.retry(countdown=0)
        case "works":
            crashing.reach("working")
    return account
