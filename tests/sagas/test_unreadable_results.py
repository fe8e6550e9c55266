"""A saga whose conductor cannot read what a call has returned: a process without the extra `zstd`, or of the release before."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

from idempotency import IdempotentTask
from idempotency.sagas import saga
from tests.sagas.conftest import Stage


@pytest.mark.long
def test_a_saga_goes_no_further_while_its_process_cannot_read_the_result_of_a_call(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that ran the call has `zstandard`, the one that conducts the saga has not (or is the release before: a rolling deploy)."""
    undone: list[str] = []

    @stage.app.task(base=IdempotentTask, bind=True, name="tests.report", key="{id}", shared=False)
    def make(self: IdempotentTask, id: str) -> dict[str, str]:
        return {"text": "long " * 40_000}

    @stage.app.task(base=IdempotentTask, bind=True, name="tests.unreport", shared=False)
    def unmake(self: IdempotentTask, id: str) -> None:
        undone.append(id)

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> int:
        saga.call(make, id, undo=unmake)
        return 1

    handle = stage.enqueue(parent, "r1")
    stage.deliver()  # the saga calls
    stage.deliver()  # the call, compressed
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    for _ in range(20):
        stage.pass_time(4000.0)
        stage.run()
    monkeypatch.undo()  # the extra is installed, or the deploy is over
    with stage.engine.connect() as connection:
        (saga_row,) = connection.execute(text("SELECT status, stopped FROM idempotency.sagas")).all()
    assert tuple(saga_row) == ("RUNNING", "result_unreadable")
    waiting = handle.lookup()
    assert (waiting.status, waiting.attempts) == ("released", 0)
    assert stage.letters() == [("parent", "result_unreadable", "open")]
    stage.pass_time(4000.0)
    stage.run()
    assert (handle.result(), undone) == (1, [])
    assert [status for _, _, status in stage.letters()] == ["replayed"]
