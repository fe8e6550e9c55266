"""What the sagas of tests are made of: tasks that write a row, refuse a thing, or fail for a while."""

from __future__ import annotations

from typing import Any

from sqlalchemy import text

from idempotency import IdempotentTask, PermanentError
from tests.sagas.conftest import Stage

INSERT = text("INSERT INTO entries (account, amount) VALUES (:account, 1)")


def enter(session: Any, account: str) -> str:
    """Write a row, in a step."""
    session.execute(INSERT, {"account": account})
    return account


def entering(stage: Stage, name: str) -> Any:
    """A task that writes `name:thing`, and refuses the things that its test names in `.refuses`."""

    @stage.app.task(base=IdempotentTask, bind=True, name=name, shared=False)
    def task(self: IdempotentTask, thing: str) -> str:
        if thing in task.refuses:
            raise PermanentError(f"{name} refuses {thing}", f"no_{name}")
        return enter(self.session, f"{name}:{thing}")

    task.refuses = set()
    return task
