"""The bank after a deployment: `transfer` has one more argument and another body, under the same name."""

from __future__ import annotations

from typing import Any

from idempotency import IdempotentTask
from tests.support.bank import INSERT, app, call, record_failure

app.tasks.pop("tests.support.bank.transfer")


@app.task(base=IdempotentTask, bind=True, key="{account}", on_failed=record_failure, name="tests.support.bank.transfer")
def transfer(self: IdempotentTask, account: str, url: str, fee: int = 1) -> dict[str, Any]:
    """The same step and the same call; the final row shows who wrote it."""
    self.step("reserve", lambda session: session.execute(INSERT, {"account": f"{account}/step", "amount": 1}) and None)
    answer: dict[str, Any] = self.effect("call", call, url)
    self.session.execute(INSERT, {"account": account, "amount": answer["amount"] + fee})
    return answer
