"""Sagas in the tests of an application: its outbox runs them, a test publishes and lets time pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from sqlalchemy.orm import Session

from idempotency import PermanentError, publish
from idempotency.application import runtime_of
from idempotency.sagas import call, saga
from idempotency.testing import AssertIdempotent, Outbox, RecordingServer, rolled_back
from tests.sagas.application import enter, entering
from tests.sagas.conftest import Stage

DAY = timedelta(days=1)


@pytest.fixture
def outbox(stage: Stage) -> Outbox:
    return Outbox(stage.app)


def committed(app: Celery) -> AbstractContextManager[Any]:
    return nullcontext()


@pytest.mark.few(1)
@pytest.mark.parametrize("around", [committed, rolled_back])
def test_a_test_publishes_and_lets_time_pass(stage: Stage, around: Callable[[Celery], Any]) -> None:
    make = entering(stage, "make")

    @saga("waiting", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def waiting(saga: Any, id: str) -> Any:
        saga.gather(call(make, f"{id}1"), call(make, f"{id}2"))
        event = saga.wait_for("picked", match=id, timeout=5 * DAY)
        saga.sleep(DAY)
        return event and event["data"]

    with around(stage.app):
        outbox = Outbox(stage.app)
        handles = [stage.enqueue(waiting, id) for id in "ab"]
        # a saga that waits is not delivered
        assert "".join(one.task[0] for one in outbox.run()) == "wwmmwmmw"
        with Session(runtime_of(stage.app).engine) as session:
            publish(session, "picked", {"id": "a"}, app=stage.app)
            session.commit()
        assert [(one.key, one.status, one.error) for one in outbox.run()] == [("a", "released", None)]
        assert (outbox.run(), outbox.waiting) == ([], [])
        outbox.pass_time(DAY - timedelta(minutes=1))
        assert outbox.run() == []
        outbox.pass_time(60.0)
        assert [(one.key, one.status, one.result) for one in outbox.run()] == [("a", "completed", {"id": "a"})]
        outbox.pass_time(5 * DAY)
        assert [one.key for one in outbox.run()] == ["b"]
        outbox.pass_time(DAY)
        outbox.run()
        assert [handle.result() for handle in handles] == [{"id": "a"}, None]
        with pytest.raises(ValueError, match="does not go back"):
            outbox.pass_time(-1.0)


def test_a_pause_before_an_attempt_passes_at_once_after_a_wait_that_is_over(stage: Stage, outbox: Outbox) -> None:
    tried: list[int] = []

    @saga("retrying", key="{id}", app=stage.app, retry_base=3600.0, retry_max=3600.0)
    def retrying(saga: Any, id: str) -> Any:
        saga.sleep(DAY)
        tried.append(1)
        if len(tried) < 3:
            raise ConnectionError("for a while")

    handle = stage.enqueue(retrying, "r1")
    outbox.run()
    assert (handle.status(), tried) == ("released", [])
    outbox.pass_time(DAY)
    outbox.run()
    assert (handle.status(), tried) == ("completed", [1, 1, 1])


@pytest.mark.long
def test_a_failure_that_a_saga_handles_does_not_reach_the_test_and_its_own_does(stage: Stage, outbox: Outbox) -> None:
    make, void = entering(stage, "make"), entering(stage, "void")
    make.refuses.add("bad")

    @saga("failing", key="{id}", app=stage.app)
    def failing(saga: Any, id: str) -> Any:
        saga.step("open", enter, "open", undo=void)
        saga.call(make, "bad")

    stage.enqueue(failing, "r1")
    with pytest.raises(PermanentError, match="make refuses bad"):
        outbox.run()
    assert stage.accounts() == ["open", "void:open"]
    void.refuses.add("open")
    stage.enqueue(failing, "r2")
    with pytest.raises(PermanentError, match="the undo of step 'open' has failed: void refuses open") as stopped:
        outbox.run()
    assert stopped.value.code == "compensation_failed"
    assert outbox.run() == []


def test_code_that_does_not_fit_reaches_the_test_once(stage: Stage, outbox: Outbox) -> None:
    names = ["one"]

    @saga("changing", key="{id}", app=stage.app)
    def changing(saga: Any, id: str) -> Any:
        saga.step(names[0], enter, id)
        saga.sleep(DAY)

    handle = stage.enqueue(changing, "r1")
    outbox.run()
    names[:] = ["two"]
    outbox.pass_time(DAY)
    with pytest.raises(PermanentError, match="recorded as number 1 is the step 'one'; the code has the step 'two'"):
        outbox.run()
    assert outbox.run() == []
    names[:] = ["one"]
    outbox.pass_time(DAY)
    outbox.run()
    assert handle.status() == "completed"


def test_assert_idempotent_refuses_a_saga(stage: Stage) -> None:
    @saga("refused", key="{id}", app=stage.app)
    def refused(saga: Any, id: str) -> Any:
        saga.sleep(DAY)

    server = RecordingServer()
    with pytest.raises(ValueError, match="check the tasks that it calls"):
        AssertIdempotent(server)(refused, "r1")
    server.close()
