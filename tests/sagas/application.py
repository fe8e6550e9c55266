"""What the sagas of tests are made of: tasks that write a row, refuse a thing, or fail for a while."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import text

from idempotency import IdempotentTask, PermanentError
from idempotency.sagas import saga
from tests.sagas.conftest import Stage

INSERT = text("INSERT INTO entries (account, amount) VALUES (:account, 1)")


def enter(session: Any, account: str) -> str:
    """Write a row, in a step."""
    session.execute(INSERT, {"account": account})
    return account


def paid_once_picked(
    stage: Stage, *, key: str = "{id}", entity: str | None = "id", pause: float = 0.0, fails: Sequence[object] = ()
) -> Any:
    """The saga `second`: it writes `paid` once `picked` has come, and fails first while its test has it fail."""

    @saga("second", key=key, entity=entity, events={"picked": "{id}"}, app=stage.app)
    def second(saga: Any, id: str) -> Any:
        if fails:
            raise PermanentError("no", "no")
        if pause:
            saga.sleep(pause)
        if saga.wait_for("picked", match=id, timeout=timedelta(days=5)) is None:
            raise PermanentError("never picked", "not_picked")
        saga.step("pay", enter, "paid")

    return second


def entering(stage: Stage, name: str) -> Any:
    """A task that writes `name:thing`, and refuses the things that its test names in `.refuses`."""

    @stage.app.task(base=IdempotentTask, bind=True, name=name, shared=False)
    def task(self: IdempotentTask, thing: str) -> str:
        if thing in task.refuses:
            raise PermanentError(f"{name} refuses {thing}", f"no_{name}")
        return enter(self.session, f"{name}:{thing}")

    task.refuses = set()
    return task
