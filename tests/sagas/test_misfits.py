"""Code that does not fit what a saga has recorded, or uses it wrongly, stops it: nothing is undone by such code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from idempotency import IdempotentTask, PermanentError
from idempotency.application import runtime_of
from idempotency.observe import crash_points
from idempotency.sagas import call, saga
from tests.sagas.application import enter, entering
from tests.sagas.conftest import Stage
from tests.sagas.test_attempts import release_the_started


@pytest.mark.long
@pytest.mark.parametrize("error", [ValueError("of new code"), PermanentError("of new code", "refused")])
def test_code_that_fails_before_what_is_recorded_is_no_reason_to_undo(stage: Stage, error: Exception) -> None:
    void, is_broken = entering(stage, "void"), list[bool]()

    @saga("breaking", key="{id}", app=stage.app, max_attempts=2)
    def breaking(saga: Any, id: str) -> Any:
        saga.step("one", enter, "one", undo=void)
        if is_broken:
            raise error
        saga.step("two", enter, "two", undo=void)
        saga.sleep(60.0)
        return "done"

    handle = stage.enqueue(breaking, "r1")
    stage.run()
    is_broken.append(True)
    stage.pass_time(61.0)
    stage.run()
    stage.pass_time(2.0)
    stage.run()
    assert (stage.saga("r1").status, stage.accounts()) == ("RUNNING", ["one", "two"])
    assert stage.letters() == [("breaking", "saga_mismatch", "open")]
    is_broken.clear()
    stage.pass_time(6.0)
    stage.run()
    assert handle.result() == "done"
    assert stage.letters() == [("breaking", "saga_mismatch", "replayed")]


@pytest.mark.few(1)
@pytest.mark.parametrize("is_early", [True, False])
def test_processes_that_die_before_what_is_recorded_are_no_reason_to_undo(stage: Stage, is_early: bool) -> None:
    void, dies = entering(stage, "void"), list[bool]()

    @saga("dying", key="{id}", app=stage.app, max_attempts=2)
    def dying(saga: Any, id: str) -> Any:
        if dies and is_early:
            raise SystemExit
        saga.step("one", enter, "one", undo=void)
        saga.sleep(60.0)
        if dies:
            raise SystemExit

    def deliver() -> None:
        with contextlib.suppress(SystemExit):
            stage.run()

    handle = stage.enqueue(dying, "r1")
    stage.run()
    dies.append(True)
    stage.pass_time(61.0)
    crash_points.install(lambda point: None)
    for _ in range(2):  # killed, so that it is not given back
        with as_if_killed(stage):
            deliver()
        release_the_started(stage)
    deliver()
    if is_early:
        assert (stage.saga("r1").status, stage.accounts()) == ("RUNNING", ["one"])
        assert stage.letters() == [("dying", "saga_mismatch", "open")]
        dies.clear()
        stage.pass_time(6.0)
        stage.run()
        assert handle.status() == "completed"
    else:
        assert (handle.status(), stage.accounts()) == ("failed", ["one", "void:one"])


@pytest.mark.long
def test_an_undo_is_never_too_large_to_be_called(stage: Stage) -> None:
    """The arguments of what it undoes and its result may each be as long as their limits."""
    settings, taken = runtime_of(stage.app).settings, list[tuple[int, int]]()

    @stage.app.task(base=IdempotentTask, bind=True, name="shorten", shared=False)
    def shorten(self: IdempotentTask, text: str, result: str) -> None:
        taken.append((len(text), len(result)))

    @saga("long", key="{id}", app=stage.app)
    def long(saga: Any, id: str) -> Any:
        given = "x" * (settings.arguments_limit - 100)
        saga.step("write", lambda session, text: "y" * (settings.result_limit - 100), given, undo=shorten)
        raise PermanentError("no", "no")

    handle = stage.enqueue(long, "r1")
    stage.run()
    assert (handle.status(), taken) == ("failed", [(settings.arguments_limit - 100, settings.result_limit - 100)])


@contextlib.contextmanager
def as_if_killed(stage: Stage) -> Any:
    """The end of a process releases nothing."""
    from idempotency.attempt.attempt import Attempt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Attempt, "release", lambda self, **_: None)
        yield


def no_task(session: Any) -> None:
    """Not an idempotent task."""


async def later(*_: Any, **__: Any) -> None: ...


MISUSES: dict[str, Callable[[Any, Any], Any]] = {
    "an undo that is no task": lambda saga, make: saga.step("two", enter, "two", undo=no_task),
    "an undo with other arguments": lambda saga, make: saga.step("two", enter, "two", "three", undo=make),
    "an undo with arguments of a megabyte": lambda saga, make: saga.step("two", enter, "x" * 2**20, undo=make),
    "a step that is async": lambda saga, make: saga.step("two", later),
    "an effect that takes other arguments": lambda saga, make: saga.effect("two", no_task, 1, 2),
    "a call of no task": lambda saga, make: saga.call(no_task),
    "a call with other arguments": lambda saga, make: saga.call(make, "one", "two", "three"),
    "an event that it does not name": lambda saga, make: saga.wait_for("other", match="x", timeout=1.0),
    "a time of centuries": lambda saga, make: saga.sleep(1e10),
    "a time beyond all": lambda saga, make: saga.wait_for("picked", match="x", timeout=1e15),
    "a wait without an end": lambda saga, make: saga.wait_for("picked", match="x", timeout=None),
    "a wait for nothing": lambda saga, make: saga.wait_for("picked", match=None, timeout=1.0),
    "a wait for a fraction": lambda saga, make: saga.wait_for("picked", match=1.5, timeout=1.0),
    "a step of what is not JSON": lambda saga, make: saga.step("two", enter, object()),
    "a call with what is not JSON": lambda saga, make: saga.call(make, thing=object()),
    "its session": lambda saga, make: saga.session.execute,
    "another task in its place": lambda saga, make: saga.replace(None),
}
# What the saga does not see if it is caught.
UNSEEN: dict[str, Callable[[Any, Any], Any]] = {
    "a call beside others": lambda saga, make: saga.gather(call(make, "x"), call(make, nothing=1)),
    "another thread": lambda saga, make: ThreadPoolExecutor(1).submit(saga.uuid).result(),
}


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("misuse", "is_caught"), [*((each, True) for each in MISUSES), *((each, False) for each in MISUSES | UNSEEN)]
)
def test_a_saga_that_is_used_wrongly_stops(stage: Stage, misuse: str, is_caught: bool) -> None:
    make, void, is_right = entering(stage, "make"), entering(stage, "void"), list[bool]()

    @saga("misusing", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def misusing(saga: Any, id: str) -> Any:
        saga.step("one", enter, "one", undo=void)
        if not is_right:
            with contextlib.suppress(Exception if is_caught else KeyError):
                (MISUSES | UNSEEN)[misuse](saga, make)
            if is_caught:
                saga.uuid()
        return "done"

    handle = stage.enqueue(misusing, "r1")
    stage.run()
    assert (stage.saga("r1").status, stage.accounts()) == ("RUNNING", ["one"])
    assert stage.letters() == [("misusing", "saga_mismatch", "open")]
    is_right.append(True)
    stage.pass_time(6.0)
    stage.run()
    assert handle.result() == "done"
    assert stage.letters() == [("misusing", "saga_mismatch", "replayed")]
