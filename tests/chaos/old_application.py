"""The application before a deploy: it lacks `novel`, and its `changed` has no `fee`."""

from __future__ import annotations

from typing import Any

from idempotency import IdempotentTask
from tests.chaos.application import _OPTIONS, _write_last, app

app.tasks.pop("chaos.novel")
app.tasks.pop("chaos.changed")


@app.task(name="chaos.changed", **_OPTIONS)
def changed(self: IdempotentTask, number: str, account: str, amount: int) -> dict[str, Any]:
    """The same row, by the body as it was."""
    self.step("look", lambda session: None)
    return _write_last(self, account, amount)
