"""Sagas that sagas call: a cancel reaches them at once, and what stops one is seen at the one that has called it."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

from idempotency import PermanentError
from idempotency.operate.change import Change
from idempotency.operate.saga import cancel_saga
from idempotency.sagas import call, saga
from idempotency.wire.keys import OperationId
from tests.sagas.application import enter, entering
from tests.sagas.conftest import Stage
from tests.support.commands import runner

DAY = 86400.0


@pytest.fixture
def nest(stage: Stage) -> Any:
    """`outer` has called `middle` twice at once, and each of these `inner`, which waits; everything has an undo."""
    void = entering(stage, "void")

    def does(saga: Any, id: str) -> None:
        saga.step("do", enter, id, undo=void)

    @saga("inner", key="{id}", app=stage.app)
    def inner(saga: Any, id: str) -> Any:
        does(saga, id)
        saga.sleep(DAY)
        if id in inner.refuses:
            raise PermanentError(f"{id} is refused", "refused")

    @saga("middle", key="{id}", app=stage.app)
    def middle(saga: Any, id: str) -> Any:
        does(saga, id)
        saga.call(inner, f"{id}i")
        saga.step("more", enter, f"{id} more")

    @saga("outer", key="{id}", app=stage.app)
    def outer(saga: Any, id: str) -> Any:
        does(saga, id)
        saga.gather(call(middle, "a"), call(middle, "b"))

    inner.refuses, outer.void = set(), void
    return outer


def statuses(stage: Stage, task: str) -> set[str]:
    query = text("SELECT DISTINCT status FROM idempotency.saga_instances WHERE saga_type = :task")
    with stage.engine.connect() as connection:
        return set(connection.execute(query, {"task": task}).scalars())


def cancel(stage: Stage) -> None:
    cancel_saga(stage.app, OperationId("default", "outer", "r1"), Change("ann", "the customer keeps it"))


@pytest.mark.long
def test_a_cancel_reaches_all_that_a_saga_has_called_at_once(stage: Stage, nest: Any) -> None:
    handle = stage.enqueue(nest, "r1")
    stage.run()
    assert sorted(stage.accounts()) == ["a", "ai", "b", "bi", "r1"]
    nest.void.refuses.add("bi")  # what is undone first
    cancel(stage)
    stage.run()
    assert sorted(stage.accounts()[5:]) == ["void:a", "void:ai"]
    assert {task: statuses(stage, task) for task in ("outer", "middle", "inner")} == {
        "outer": {"COMPENSATING"},
        "middle": {"FAILED", "COMPENSATING"},
        "inner": {"FAILED", "COMPENSATING"},
    }
    nest.void.refuses.clear()
    stage.replay("void")
    stage.run()
    assert (handle.status(), stage.accounts()[7:]) == ("failed", ["void:bi", "void:b", "void:r1"])


def test_a_cancel_before_what_was_called_has_begun_lets_it_do_nothing(stage: Stage, nest: Any) -> None:
    handle = stage.enqueue(nest, "r1")
    stage.deliver()
    with stage.engine.begin() as connection:  # the saga that has called them is the first to be delivered
        connection.execute(text("UPDATE idempotency.outbox SET available_at = available_at + interval '1 day'"))
    cancel(stage)
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", ["r1", "void:r1"])
    assert (statuses(stage, "middle"), statuses(stage, "inner")) == ({"FAILED"}, set())


@pytest.mark.long
def test_what_stops_a_called_saga_is_shown_of_its_caller(
    stage: Stage, nest: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runner(monkeypatch, capsys)
    handle = stage.enqueue(nest, "r1")
    stage.run()
    nest.void.refuses.update(("a", "bi"))
    cancel(stage)
    stage.run()
    assert stage.saga("r1").status == "COMPENSATING"
    shown = run("saga", "show", "r1").out
    stopped = {row["type"]: row["key"] for row in run("saga", "list", "--stopped", "--json").document}
    assert stopped.keys() == {"middle", "inner"}  # one that it has called, and one that this has called
    for task, key in stopped.items():
        assert f"{task} {key} has stopped: compensation_failed" in shown
    nest.void.refuses.clear()
    for key in stopped.values():
        assert run("saga", "retry", key, "--as", "ann").status == 0
    stage.run()
    assert (handle.status(), statuses(stage, "middle")) == ("failed", {"FAILED"})
    assert "has stopped" not in run("saga", "show", "r1").out


@pytest.mark.long
def test_a_called_saga_is_undone_by_a_saga_once(stage: Stage) -> None:
    """A gather of which one fails while another is undone at once by a cancel of its parent: everything is undone once."""
    void, make = entering(stage, "void"), entering(stage, "make")

    @saga("child", key=None, app=stage.app)
    def child(saga: Any, id: str) -> Any:
        saga.call(make, thing=id, undo=void)
        if id == "b":
            raise PermanentError("no", "no")
        return id

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.gather(call(child, "a", undo=void_child), call(child, "b", undo=void_child))

    @saga("void_child", key=None, app=stage.app)
    def void_child(saga: Any, id: str, result: str) -> Any:
        saga.step("void", enter, f"void child:{id}:{result}")

    handle = stage.enqueue(parent, "r1")
    stage.run()
    assert handle.status() == "failed"
    assert sorted(stage.accounts()) == sorted(["make:a", "make:b", "void:b", "void child:a:a"])
