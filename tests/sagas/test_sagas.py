"""A saga's steps, effects, calls and waits: what it records, what it does once, and how it ends."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sqlalchemy import text

from idempotency import IdempotentTask, PermanentError
from idempotency.sagas import call, saga
from tests.sagas.conftest import Stage

INSERT = text("INSERT INTO entries (account, amount) VALUES (:account, 1)")


def enter(session: Any, account: str) -> str:
    session.execute(INSERT, {"account": account})
    return account


def entering(stage: Stage, name: str) -> Any:
    """A task that writes `name:thing`."""

    @stage.app.task(base=IdempotentTask, bind=True, name=name)
    def task(self: IdempotentTask, thing: str, result: Any = None) -> str:
        if thing == "bad":
            raise PermanentError("it does not work", f"no_{name}")
        return enter(self.session, f"{name}:{thing}")

    return task


def test_a_saga_runs_its_steps_and_calls_once_and_returns_a_result(stage: Stage) -> None:
    make, void = entering(stage, "make"), entering(stage, "void")
    runs: list[str] = []

    @saga("returning", key="{id}", entity="id", app=stage.app)
    def returning(saga: Any, id: str) -> Any:
        runs.append(id)
        opened = saga.step("open", enter, f"open:{id}")
        made = saga.call(make, thing=id, undo=void)
        both = saga.gather(call(make, "x"), call(void, "y"))
        return [opened, made, *both, saga.now() == saga.now(), str(saga.uuid())]

    handle = stage.enqueue(returning, "r1")
    stage.run()
    result = handle.result()
    assert result[:4] == ["open:r1", "make:r1", "make:x", "void:y"]
    assert stage.accounts() == ["open:r1", "make:r1", "make:x", "void:y"]
    row = stage.saga("r1")
    assert (row.status, row.entity_id, row.saga_type) == ("COMPLETED", "r1", "returning")
    assert row.context["make"] == "make:r1"
    assert len(runs) == 3


def test_a_failure_undoes_what_was_recorded_in_reverse_order(stage: Stage) -> None:
    make, void = entering(stage, "make"), entering(stage, "void")

    @saga("failing", key="{id}", app=stage.app)
    def failing(saga: Any, id: str) -> Any:
        saga.step("open", enter, f"open:{id}", undo=closing)
        saga.call(make, thing="a", undo=void)
        saga.call(make, thing="bad", undo=void)

    @stage.app.task(base=IdempotentTask, bind=True, name="closing")
    def closing(self: IdempotentTask, account: str, result: Any) -> str:
        return enter(self.session, f"close {account} {result}")

    handle = stage.enqueue(failing, "r1")
    stage.run()
    assert handle.status() == "failed"
    assert stage.accounts() == ["open:r1", "make:a", "void:a", "close open:r1 open:r1"]
    assert stage.saga("r1").status == "FAILED"
    assert ("failing", "no_make", "open") in stage.letters()


def test_an_event_ends_a_wait_whether_it_comes_before_or_after(stage: Stage) -> None:
    @saga("waiting", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def waiting(saga: Any, id: str) -> Any:
        event = saga.wait_for("picked", match=id, timeout=timedelta(days=5))
        return None if event is None else event["data"]

    before, after, never = (stage.enqueue(waiting, id) for id in ("before", "after", "never"))
    stage.publish("picked", {"id": "before", "n": 1})
    stage.run()
    assert before.result() == {"id": "before", "n": 1}
    assert (after.status(), never.status()) == ("released", "released")
    stage.publish("picked", {"id": "after", "n": 2})
    stage.publish("picked", {"id": "after", "n": 3})
    stage.run()
    assert after.result() == {"id": "after", "n": 2}
    stage.pass_time(5 * 86400 + 1)
    stage.run()
    assert never.result() is None
    stage.publish("picked", {"id": "never"})
    assert stage.run() == []
    assert stage.steps("never") == [("wait", "picked", "timed_out")]
