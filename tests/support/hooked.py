"""The test application, with tasks whose base has hooks that fail, for a worker of their own."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from idempotency import IdempotentTask, PermanentError
from idempotency.application import runtime_of
from tests.support.bank import INSERT, app, record_failure

__all__ = ["app"]


class Checked(IdempotentTask):
    """Notes each start, fails the first ones as `how` says, and keeps to its own transaction."""

    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        account, how = args
        with runtime_of(self.app).autocommit() as connection:
            connection.execute(INSERT, {"account": f"start {account}", "amount": 1})
        if how == "permanent":
            raise PermanentError("not today", "closed")
        if how == "once" and self.request.retries == 0:
            raise ValueError("not yet")


@app.task(base=Checked, bind=True, key="{account}", on_failed=record_failure)
def checked(self: IdempotentTask, account: str, how: str) -> str:
    self.session.execute(INSERT, {"account": account, "amount": 1})
    return account


@app.task(base=IdempotentTask, bind=True, key=lambda arguments: f"{arguments['account']}-{uuid4()}")
def named_at_random(self: IdempotentTask, account: str, fails: int = 0) -> str:
    """Its key is another one whenever it is asked for."""
    self.session.execute(INSERT, {"account": account, "amount": 1})
    if self.request.retries < fails:
        with runtime_of(self.app).autocommit() as connection:
            connection.execute(INSERT, {"account": f"failed {account}", "amount": 1})
        raise self.retry(countdown=0, exc=ValueError("again"))
    return account
