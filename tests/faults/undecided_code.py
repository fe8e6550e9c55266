"""The bank whose provider takes each call and decides it later: until the file $DECIDED is there, it has not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from idempotency import IdempotentTask, Undecided
from tests.support import bank
from tests.support.bank import INSERT, app

app.tasks.pop("tests.support.bank.transfer")


@app.task(
    base=IdempotentTask, bind=True, key="{account}", on_failed=bank.record_failure, name="tests.support.bank.transfer"
)
def transfer(self: IdempotentTask, account: str, url: str) -> dict[str, Any]:
    """The same step, a call that is decided later, and the final row."""
    self.step("reserve", lambda session: session.execute(INSERT, {"account": f"{account}/step", "amount": 1}) and None)
    answer: dict[str, Any] = self.effect("call", call, url)
    self.session.execute(INSERT, {"account": account, "amount": answer["amount"]})
    return answer


def call(url: str, *, idempotency_key: str) -> dict[str, Any]:
    answer = bank.call(url, idempotency_key=idempotency_key)
    if not Path(os.environ["DECIDED"]).exists():
        raise Undecided(3600, "processing")
    return answer
