"""A saga reads the large results of what it calls, and is not undone because their place does not answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import text

from idempotency import IdempotentTask
from idempotency.application import close_runtime
from idempotency.errors import PermanentError
from idempotency.sagas import saga
from tests.integration.test_large_results import Down, large, sweep_all
from tests.sagas.conftest import Stage
from tests.support.tasks import make_task


def test_a_large_result_of_a_call_is_read_by_the_saga_and_by_its_undo(
    stage: Stage, tmp_path: Path, monkeypatch: Any
) -> None:
    app = stage.app
    close_runtime(app)
    (tmp_path / "results").mkdir()
    app.conf.idempotency_large_results_at = f"file://{tmp_path}/results"
    app.conf.idempotency_compress_results_above = None
    undone: list[int] = []

    def body(self: IdempotentTask, account: str) -> Any:
        return large()

    def undo_body(self: IdempotentTask, account: str, result: Any) -> None:
        undone.append(len(result["document"]))

    call, undo = make_task(app, body, key="{account}"), make_task(app, undo_body, key="{account}")

    @saga("reading", key="{id}", app=app)
    def reading(saga: Any, id: str) -> Any:
        found = saga.call(call, "e0", undo=undo)
        raise PermanentError(f"{len(found['document'])}", "no_more")

    handle = stage.enqueue(reading, "r1")
    stage.deliver()
    stage.deliver()
    close_runtime(app)
    app.conf.idempotency_large_results_at = Down()
    stage.run()
    assert (handle.status(), undone) == ("released", [])
    close_runtime(app)
    app.conf.idempotency_large_results_at = f"file://{tmp_path}/results"
    stage.pass_time(4000.0)
    stage.run()
    assert handle.status() == "failed"
    assert undone == [len(large()["document"])]
    # the saga's step refers to it, too
    with stage.engine.connect() as connection:
        connection.execute(text("UPDATE idempotency.records SET result = '1' WHERE task = :task"), {"task": call.name})
    assert sweep_all(app, monkeypatch) == 0
