"""A saga reads the large results of what it calls, and is not undone because their place does not answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from idempotency import IdempotentTask
from idempotency.application import close_runtime, runtime_of
from idempotency.errors import PermanentError
from idempotency.operate.saga import cancel_saga, mark_undone
from idempotency.sagas import saga
from idempotency.wire import encoding
from idempotency.wire.keys import OperationId
from tests.sagas.conftest import Stage
from tests.support.large_results import LIMIT, Down, large, sweep_all
from tests.support.operators import ANN
from tests.support.tasks import make_task


@pytest.mark.long
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
    assert stage.letters() == [("reading", "result_unreadable", "open")]
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


class Refused(Down):
    def get(self, name: str, at_most: int) -> bytes:
        raise ConnectionError("https://results:hunter2@minio:9000/shop")


@pytest.mark.long
def test_one_that_is_gone_stops_the_saga_and_a_person_ends_it(
    stage: Stage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At first the place does not answer, and what it says of itself is in no letter and no log; then the object is gone."""
    app = stage.app
    close_runtime(app)
    app.conf.idempotency_large_results_at = f"file://{tmp_path}"
    app.conf.idempotency_compress_results_above = None
    undone: list[str] = []

    def first(self: IdempotentTask, account: str) -> Any:
        return {"charged": account}

    def body(self: IdempotentTask, account: str) -> Any:
        return large()

    def undo_first(self: IdempotentTask, account: str) -> None:
        undone.append("first")

    def undo_body(self: IdempotentTask, account: str, result: Any) -> None:
        undone.append("second")

    one, undo_one = make_task(app, first, key="{account}"), make_task(app, undo_first, key="{account}")
    call, undo = make_task(app, body, key="{account}"), make_task(app, undo_body, key="{account}")

    @saga("reading", key="{id}", app=app)
    def reading(saga: Any, id: str) -> Any:
        saga.call(one, "money", undo=undo_one)
        return len(saga.call(call, "e0", undo=undo)["document"])

    handle = stage.enqueue(reading, "r1")
    for _ in range(4):  # the saga, `one`, the saga, `call`
        stage.deliver()
    caplog.set_level("INFO")
    set_place(stage, Refused())
    stage.run()
    stored = handle.lookup()
    assert stored is not None
    assert "hunter2" not in f"{stored.error} {caplog.text}"
    assert stage.letters() == [("reading", "result_unreadable", "open")]

    set_place(stage, f"file://{tmp_path}")
    for path in tmp_path.glob("*/*"):
        path.unlink()
    stage.pass_time(4000.0)
    stage.run()
    assert (handle.status(), stage.letters()) == ("released", [("reading", "result_unreadable", "open")])
    id = OperationId("default", reading.name, "r1")
    cancel_saga(app, id, ANN)
    stage.run()
    assert undone == []
    assert stage.letters()[1:] == [("reading", "result_unreadable", "open")]
    (name,) = [name for kind, name, _ in stage.steps("r1") if kind == "call" and name.startswith(call.name)]
    mark_undone(app, id, name, ANN)
    stage.run()
    assert (handle.status(), undone) == ("failed", ["first"])


def test_one_that_has_done_everything_is_not_undone_because_its_own_result_cannot_be_kept(stage: Stage) -> None:
    app = stage.app
    set_place(stage, Down())
    app.conf.idempotency_compress_results_above = None
    done: list[str] = []

    def charge(self: IdempotentTask, account: str) -> Any:
        done.append("charged")

    def refund(self: IdempotentTask, account: str) -> None:
        done.append("refunded")

    call, undo = make_task(app, charge, key="{account}"), make_task(app, refund, key="{account}")

    @saga("selling", key="{id}", app=app)
    def selling(saga: Any, id: str) -> Any:
        saga.call(call, "money", undo=undo)
        return large()

    handle = stage.enqueue(selling, "r1")
    budget = runtime_of(app).settings.defer_budget
    for _ in range(8):
        stage.run()
        with stage.engine.begin() as connection:
            older = "UPDATE idempotency.records SET opened_at = opened_at - make_interval(secs => :s) WHERE task = 'selling'"
            connection.execute(text(older), {"s": budget})
        stage.pass_time(budget)
    assert (handle.status(), done) == ("released", ["charged"])


@pytest.mark.long
@pytest.mark.parametrize("spare", [100, 5])
def test_a_replacement_just_below_the_limit_is_seen_before_anything_is_undone(
    stage: Stage, tmp_path: Path, spare: int
) -> None:
    """It is longer once it is wrapped: then it is refused, and not kept where SQL does not see it."""
    app = stage.app
    set_place(stage, f"file://{tmp_path}")
    app.conf.idempotency_compress_results_above = None
    undone: list[str] = []

    def first(self: IdempotentTask, account: str) -> int:
        return 1

    def undo_first(self: IdempotentTask, account: str) -> None:
        undone.append("first")

    def other(self: IdempotentTask, account: str, padding: str) -> None: ...

    later = make_task(app, other, key="{account}")

    def replaced(self: IdempotentTask, account: str) -> None:
        room = LIMIT - len(encoding.dumps(later.s("r", "")))
        self.replace(later.s("r", "x" * (room - spare)))

    one, undo_one = make_task(app, first, key="{account}"), make_task(app, undo_first, key="{account}")
    call = make_task(app, replaced, key="{account}")

    @saga("parent", key="{id}", app=app)
    def parent(saga: Any, id: str) -> None:
        saga.call(one, "money", undo=undo_one)
        saga.call(call, "e0")

    handle = stage.enqueue(parent, "r1")
    for _ in range(10):
        stage.run()
        stage.pass_time(60)
    with stage.engine.connect() as connection:
        query = text("SELECT status FROM idempotency.records WHERE task = :task")
        status = connection.execute(query, {"task": call.name}).scalar_one()
    if spare == 100:
        assert (status, handle.status(), undone) == ("completed", "released", [])
        assert stage.letters() == [("parent", "compensation_failed", "open")]
    else:
        assert (status, handle.status(), undone) == ("failed", "failed", ["first"])


def set_place(stage: Stage, place: Any) -> None:
    close_runtime(stage.app)
    stage.app.conf.idempotency_large_results_at = place
