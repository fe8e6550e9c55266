"""A saga's steps, effects, calls and waits: what it records, what it does once, and how it ends."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from celery.app.task import Context
from sqlalchemy import text

from idempotency import CallRefused, IdempotentTask
from idempotency.errors import CallFailed
from idempotency.sagas import call, saga
from tests.sagas.application import enter, entering
from tests.sagas.conftest import Stage


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
    make.refuses.add("bad")

    @saga("failing", key="{id}", app=stage.app)
    def failing(saga: Any, id: str) -> Any:
        saga.step("open", enter, f"open:{id}", undo=closing)
        saga.call(make, thing="a", undo=void)
        saga.call(make, thing="bad", undo=void)

    @stage.app.task(base=IdempotentTask, bind=True, name="closing", shared=False)
    def closing(self: IdempotentTask, account: str, result: Any) -> str:
        return enter(self.session, f"close {account} {result}")

    handle = stage.enqueue(failing, "r1")
    stage.run()
    assert handle.status() == "failed"
    assert stage.accounts() == ["open:r1", "make:a", "void:a", "close open:r1 open:r1"]
    assert stage.saga("r1").status == "FAILED"
    assert stage.letters() == [("make", "no_make", "discarded"), ("failing", "no_make", "open")]


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


def test_a_failure_that_the_code_catches_undoes_nothing(stage: Stage) -> None:
    make, void = entering(stage, "make"), entering(stage, "void")
    make.refuses.add("bad")

    @saga("catching", key="{id}", app=stage.app)
    def catching(saga: Any, id: str) -> Any:
        saga.call(make, thing="a", undo=void)
        try:
            saga.call(make, thing="bad", undo=void)
        except CallFailed as failure:
            return failure.code

    handle = stage.enqueue(catching, "r1")
    stage.run()
    assert handle.result() == "no_make"
    assert stage.accounts() == ["make:a"]


def test_calls_at_once_are_all_awaited_before_the_first_failure_is_raised(stage: Stage) -> None:
    make, void = entering(stage, "make"), entering(stage, "void")
    make.refuses.add("bad")

    @saga("gathering", key="{id}", app=stage.app)
    def gathering(saga: Any, id: str) -> Any:
        saga.gather(call(make, "bad", undo=void), call(make, "b", undo=void), call(make, "c", undo=void))

    handle = stage.enqueue(gathering, "r1")
    stage.run()
    assert handle.status() == "failed"
    assert stage.accounts() == ["make:b", "make:c", "void:c", "void:b"]


def test_an_undo_that_fails_stops_the_saga_until_it_has_been_replayed(stage: Stage) -> None:
    make, void = entering(stage, "make"), entering(stage, "void")
    make.refuses.add("bad")
    void.refuses.add("b")

    @saga("stuck", key="{id}", app=stage.app)
    def stuck(saga: Any, id: str) -> Any:
        for thing in ("a", "b", "bad"):
            saga.call(make, thing=thing, undo=void)

    handle = stage.enqueue(stuck, "r1")
    stage.run()
    assert (handle.status(), stage.saga("r1").status) == ("released", "COMPENSATING")
    assert stage.letters() == [
        ("make", "no_make", "open"),
        ("void", "no_void", "open"),
        ("stuck", "compensation_failed", "open"),
    ]
    stage.pass_time(86400.0)
    stage.run()
    assert stage.accounts() == ["make:a", "make:b"]
    void.refuses.clear()
    stage.replay("void")
    stage.run()
    assert (handle.status(), stage.saga("r1").status) == ("failed", "FAILED")
    assert stage.accounts() == ["make:a", "make:b", "void:b", "void:a"]
    assert ("stuck", "compensation_failed", "replayed") in stage.letters()


def test_code_that_no_longer_fits_stops_the_saga_and_the_next_deploy_lets_it_go_on(stage: Stage) -> None:
    make, void = entering(stage, "make"), entering(stage, "void")
    code: list[str] = ["make", "void"]

    @saga("changing", key="{id}", app=stage.app)
    def changing(saga: Any, id: str) -> Any:
        for name in code:
            saga.call({"make": make, "void": void}[name], thing=id, undo=void)
            saga.sleep(timedelta(hours=1))
        return "done"

    handle = stage.enqueue(changing, "r1")
    stage.run()
    code[:] = ["void", "make"]
    stage.pass_time(3601.0)
    before = stage.steps("r1")
    stage.run()
    assert stage.letters() == [("changing", "saga_mismatch", "open")]
    assert (stage.steps("r1"), stage.saga("r1").status, handle.status()) == (before, "RUNNING", "released")
    code[:] = []  # ends before what is recorded: the same
    stage.pass_time(400.0)
    stage.run()
    assert (stage.steps("r1"), handle.status()) == (before, "released")
    code[:] = ["make", "void"]
    stage.pass_time(400.0)
    stage.run()
    assert stage.letters() == [("changing", "saga_mismatch", "replayed")]
    stage.pass_time(3601.0)
    stage.run()
    assert (handle.result(), stage.accounts()) == ("done", ["make:r1", "void:r1"])


def test_new_code_keeps_old_sagas_on_their_path(stage: Stage) -> None:
    make, void = entering(stage, "make"), entering(stage, "void")
    is_new = [False]

    @saga("versions", key="{id}", app=stage.app)
    def versions(saga: Any, id: str) -> Any:
        if is_new[0] and saga.version("void first"):
            saga.call(void, thing=id)
        saga.call(make, thing=id)
        saga.sleep(3600.0)
        return is_new[0] and saga.version("void first")

    old = stage.enqueue(versions, "old")
    stage.run()
    is_new[0] = True
    new = stage.enqueue(versions, "new")
    stage.run()
    stage.pass_time(3601.0)
    stage.run()
    assert (old.result(), new.result()) == (False, True)
    assert stage.accounts() == ["make:old", "void:new", "make:new"]


def test_waiting_uses_no_attempt_and_no_time(stage: Stage) -> None:
    @saga("patient", key="{id}", app=stage.app, max_attempts=2)
    def patient(saga: Any, id: str) -> Any:
        for _ in range(5):
            saga.sleep(timedelta(days=30))
        attempt = saga.request.attempt
        return [attempt.claim.attempts, attempt.claim.age < 60]

    handle = stage.enqueue(patient, "r1")
    for _ in range(5):
        stage.run()
        stage.pass_time(31 * 86400.0)
    stage.run()
    assert handle.result() == [1, True]


def test_an_effect_that_has_happened_is_undone_by_its_task(stage: Stage, outside: Any) -> None:
    refunds = entering(stage, "refund")

    @saga("charging", key="{id}", app=stage.app, max_attempts=2)
    def charging(saga: Any, id: str) -> Any:
        saga.effect("charge", charge, thing=id, undo=refunds)
        raise ValueError("of the code's own")

    calls: list[str] = []

    def charge(thing: str, *, idempotency_key: str) -> str:
        calls.append(idempotency_key)
        return f"ch:{thing}"

    handle = stage.enqueue(charging, "r1")
    for _ in range(4):
        stage.run()
        stage.pass_time(60.0)
    assert (handle.status(), len(calls), stage.accounts()) == ("failed", 1, ["refund:r1"])
    assert stage.saga("r1").context["charge"] == "ch:r1"


def test_sagas_call_sagas(stage: Stage) -> None:
    make, void = entering(stage, "make"), entering(stage, "void")

    @saga("inner", key="{id}", app=stage.app)
    def inner(saga: Any, id: str) -> Any:
        saga.call(make, thing=id, undo=void)
        saga.sleep(3600.0)
        return "inner done"

    @saga("outer", key="{id}", app=stage.app)
    def outer(saga: Any, id: str) -> Any:
        saga.step("open", enter, f"open:{id}")
        return saga.call(inner, id=f"{id}-inner")

    handle = stage.enqueue(outer, "r1")
    stage.run()
    assert [stage.saga_of(task).status for task in ("outer", "inner")] == ["RUNNING", "RUNNING"]
    stage.pass_time(3601.0)
    stage.run()
    assert handle.result() == "inner done"


def test_a_saga_is_not_run_where_it_is_called(stage: Stage) -> None:
    @saga("anything", key="{id}", app=stage.app)
    def anything(saga: Any, id: str) -> Any: ...

    with pytest.raises(CallRefused, match="may wait for days"):
        anything("now")


def test_a_wait_is_not_ended_by_an_event_that_another_saga_matches_by_another_member(stage: Stage) -> None:
    @saga("by.return", key="{id}", events={"picked": "{return_id}"}, app=stage.app)
    def by_return(saga: Any, id: str) -> Any:
        return saga.wait_for("picked", match=id, timeout=3600.0) and "its own"

    @saga("by.order", key="{id}", events={"picked": "{order_id}"}, app=stage.app)
    def by_order(saga: Any, id: str) -> Any:
        return saga.wait_for("picked", match=id, timeout=3600.0) and "its own"

    handles = [stage.enqueue(task, "7") for task in (by_return, by_order)]
    stage.run()
    stage.publish("picked", {"order_id": "7"})
    stage.run()
    assert [handle.status() for handle in handles] == ["released", "completed"]
    stage.publish("picked", {"order_id": "8", "return_id": "7"})
    stage.run()
    assert handles[0].result() == "its own"


def test_a_wait_until_a_time_that_is_over_is_over(stage: Stage) -> None:
    @saga("waiting", key="{id}", app=stage.app)
    def waiting(saga: Any, id: str) -> Any:
        until = saga.now() + timedelta(seconds=50)
        saga.sleep(60.0)
        saga.sleep(until - saga.now())
        return "done"

    handle = stage.enqueue(waiting, "r1")
    stage.run()
    with stage.engine.begin() as connection:  # the saga's own clock does not follow `pass_time`
        connection.execute(
            text("""UPDATE idempotency.saga_steps SET result = (result::float8 - 100)::text WHERE name = 'now'""")
        )
    stage.pass_time(61.0)
    stage.run()
    assert handle.status() == "completed", stage.letters()


def test_a_saga_is_refused_as_an_errback(stage: Stage) -> None:
    @saga("clean_up", key=None, app=stage.app)
    def clean_up(saga: Any, *args: Any) -> Any:
        saga.step("one", enter, "one")
        saga.sleep(60.0)

    with pytest.raises(
        CallRefused, match="no errback"
    ):  # as Celery calls one in the worker in which the task has failed
        clean_up(Context(id="t1"), ValueError("x"), None)
    stage.run()
    assert stage.accounts() == []
