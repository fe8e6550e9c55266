"""What a saga's next attempt finds of the one before it: calls of unknown outcome, caught failures, waits, and the undoing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from idempotency.application import runtime_of
from idempotency.attempt.effects import Happened, StillUnknown
from idempotency.errors import CallFailed, PermanentError
from idempotency.observe import crash_points
from idempotency.sagas import saga
from idempotency.store import sagas
from idempotency.store.answers import error_text
from idempotency.upkeep.maintenance import recover
from idempotency.wire.keys import OperationId
from tests.sagas.application import enter, entering
from tests.sagas.conftest import Stage

Arm = Callable[[str, Callable[[], None]], None]


@pytest.fixture
def once() -> Iterator[Arm]:
    """Do something when a crash point is passed for the first time."""
    armed: dict[str, Callable[[], None]] = {}
    crash_points.install(lambda point: armed.pop(point)() if point in armed else None)
    yield armed.__setitem__
    crash_points.install(None)


def release_the_started(stage: Stage) -> None:
    """As if their lease was over."""
    with stage.engine.connect() as connection:
        connection.execute(text("UPDATE idempotency.records SET locked_until = 'epoch' WHERE status = 'started'"))
    assert recover(stage.app) == 1


@pytest.mark.parametrize(
    "reconcile", [None, lambda thing, doubt: Happened("found"), lambda thing, doubt: StillUnknown()]
)
def test_an_effect_of_unknown_outcome_is_asked_about_or_repeated(stage: Stage, reconcile: Any) -> None:
    keys: list[str] = []

    def charge(thing: str, *, idempotency_key: str) -> str:
        keys.append(idempotency_key)
        if len(keys) == 1:
            raise ConnectionError("the answer was lost")
        return "charged"

    @saga("charging", key="{id}", app=stage.app)
    def charging(saga: Any, id: str) -> Any:
        return saga.effect("charge", charge, id, reconcile=reconcile)

    handle = stage.enqueue(charging, "r1")
    for _ in range(2):
        stage.run()
        stage.pass_time(1.0)
    stage.run()
    is_found = reconcile is not None and isinstance(reconcile("r1", None), Happened)
    assert handle.result() == ("found" if is_found else "charged")
    assert (len(keys), len(set(keys))) == (1 if is_found else 2, 1)


class OutOfStock(PermanentError):
    """An error of the application's own, with an attribute."""

    left = 0


def test_a_refused_step_that_the_code_catches_is_refused_again_after_a_wait(stage: Stage) -> None:
    def reserve(session: Any, thing: str) -> None:
        enter(session, thing)
        error = OutOfStock("none left", "out_of_stock")
        error.left = 7
        raise error

    @saga("catching", key="{id}", app=stage.app)
    def catching(saga: Any, id: str) -> Any:
        try:
            saga.step("reserve", reserve, id)
        except OutOfStock as refused:
            saga.sleep(60.0)
            return [refused.code, refused.left]

    handle = stage.enqueue(catching, "r1")
    stage.run()
    stage.pass_time(61.0)
    stage.run()
    assert handle.result() == ["out_of_stock", 7]
    assert stage.steps("r1") == [("step", "reserve", "failed"), ("timer", "sleep", "done")]
    assert stage.accounts() == []


def test_a_swallowed_error_is_not_followed_by_a_failure_for_good(stage: Stage) -> None:
    tried: list[int] = []

    def fail_once(session: Any) -> str:
        tried.append(1)
        if len(tried) == 1:
            raise ConnectionError("for a while")
        return enter(session, "did it")

    @saga("swallowing", key="{id}", app=stage.app)
    def swallowing(saga: Any, id: str) -> Any:
        with contextlib.suppress(ConnectionError):
            saga.step("try", fail_once)
        raise PermanentError("in any case", "refused")

    handle = stage.enqueue(swallowing, "r1")
    stage.run()
    stage.pass_time(1.0)
    stage.run()
    assert (handle.status(), stage.steps("r1")) == ("failed", [("step", "try", "done")])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["step", "effect"])
def test_an_error_that_is_not_recorded_cannot_be_swallowed(stage: Stage, kind: str) -> None:
    void, tried = entering(stage, "void"), list[str]()

    def try_it(*_: Any, **__: Any) -> str:
        tried.append(kind)
        if len(tried) == 1:
            raise ConnectionError("for a while")
        return "did it"

    @saga("swallowing", key="{id}", app=stage.app)
    def swallowing(saga: Any, id: str) -> Any:
        try:
            result = saga.step("try", try_it) if kind == "step" else saga.effect("try", try_it)
        except ConnectionError:
            result = "swallowed"
        if result == "swallowed":
            saga.step("instead", enter, "instead", undo=void)
        saga.sleep(60.0)
        return result

    handle = stage.enqueue(swallowing, "r1")
    for _ in range(3):
        stage.run()
        stage.pass_time(61.0)
    stage.run()
    assert (handle.result(), stage.accounts()) == ("did it", [])
    assert [name for _, name, _ in stage.steps("r1")] == ["try", "sleep"]


def test_a_refusal_before_an_effect_of_unknown_outcome_may_be_caught_again(stage: Stage) -> None:
    make, tried = entering(stage, "make"), list[str]()
    make.refuses.add("r1")

    def charge(*, idempotency_key: str) -> str:
        tried.append(idempotency_key)
        if len(tried) == 1:
            raise ConnectionError("the answer was lost")
        return "charged"

    @saga("catching", key="{id}", app=stage.app)
    def catching(saga: Any, id: str) -> Any:
        with contextlib.suppress(CallFailed):
            saga.call(make, thing=id)
        return saga.effect("charge", charge)

    handle = stage.enqueue(catching, "r1")
    stage.run()
    stage.pass_time(1.0)
    stage.run()
    assert handle.result() == "charged"


def test_a_swallowed_error_does_not_complete_a_saga_and_another_may_take_its_place(stage: Stage) -> None:
    def fail(*_: Any) -> None:
        raise ConnectionError("for ever")

    @saga("swallowing", key="{id}", app=stage.app, max_attempts=2)
    def swallowing(saga: Any, id: str) -> Any:
        try:
            saga.step("try", fail)
        except ConnectionError:
            if id == "given up":
                raise PermanentError("given up", "given_up") from None
        return "completed"

    handles = [stage.enqueue(swallowing, id) for id in ("given up", "swallowed")]
    for _ in range(3):
        stage.run()
        stage.pass_time(60.0)
    assert [handle.status() for handle in handles] == ["failed", "failed"]
    assert [reason for _, reason, _ in stage.letters()] == ["given_up", "attempts_exhausted"]


def test_an_attempt_that_was_overtaken_does_not_forget_what_the_saga_waits_for(stage: Stage, once: Arm) -> None:
    make = entering(stage, "make")

    @saga("calling", key="{id}", app=stage.app)
    def calling(saga: Any, id: str) -> Any:
        return saga.call(make, thing=id)

    def overtake() -> None:
        release_the_started(stage)
        thread = threading.Thread(target=stage.deliver)  # goes as far as the wait
        thread.start()
        thread.join()

    handle = stage.enqueue(calling, "r1")
    once("claimed", overtake)
    stage.run()
    assert handle.result() == "make:r1"


@pytest.mark.long
@pytest.mark.parametrize("point", ["saga.compensating", "saga.waits", "saga.waiting"])
def test_a_saga_without_attempts_left_that_dies_as_it_is_undone_goes_on(stage: Stage, once: Arm, point: str) -> None:
    void = entering(stage, "void")

    @saga("failing", key="{id}", app=stage.app, max_attempts=1)
    def failing(saga: Any, id: str) -> Any:
        saga.step("open", enter, f"open:{id}", undo=void)
        raise ValueError("of the code's own")

    def die() -> None:
        raise SystemExit

    handle = stage.enqueue(failing, "r1")
    once(point, die)
    with contextlib.suppress(SystemExit):
        stage.run()
    if point != "saga.waiting":  # after the commit nothing is held
        release_the_started(stage)
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", ["open:r1", "void:open:r1"])
    assert stage.letters() == [("failing", "attempts_exhausted", "open")]


def test_a_saga_that_was_cancelled_before_it_began_says_what_it_was_about(stage: Stage) -> None:
    @saga("about", key="{id}", entity="order", app=stage.app)
    def about(saga: Any, id: str, order: str) -> Any:
        saga.step("open", enter, id)

    stage.enqueue(about, "r1", order="o1")
    with runtime_of(stage.app).engine.begin() as connection:
        sagas.cancel(connection, OperationId("default", "about", "r1"), error_text("cancelled", "by a person"))
    stage.run()
    assert (stage.saga("r1").entity_id, stage.saga("r1").status) == ("o1", "FAILED")


def test_a_steps_function_does_not_commit_by_itself(stage: Stage) -> None:
    def put(session: Any) -> None:
        enter(session, "put")
        session.commit()

    @saga("storing", key="{id}", app=stage.app, max_attempts=1)
    def storing(saga: Any, id: str) -> Any:
        saga.step("put", put)

    handle = stage.enqueue(storing, "r1")
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", [])


def test_a_function_may_have_parameters_that_are_called_as_those_of_step_and_effect(stage: Stage) -> None:
    def put(session: Any, *, self: str, name: str, fn: str, policy: str) -> str:
        return enter(session, f"{self}:{name}:{fn}:{policy}")

    def charge(*, self: str, name: str, fn: str, idempotency_key: str) -> str:
        return f"{self}:{name}:{fn}"

    @saga("naming", key="{id}", app=stage.app, max_attempts=1)
    def naming(saga: Any, id: str) -> Any:
        saga.step("put", put, self="s", name=id, fn="f", policy="p")
        return saga.effect("charge", charge, self="s", name=id, fn="f")

    handle = stage.enqueue(naming, "r1")
    stage.run()
    assert (handle.result(), stage.accounts()) == ("s:r1:f", ["s:r1:f:p"])


def test_what_a_former_holder_has_reached_says_nothing_of_a_replay(stage: Stage) -> None:
    attempts: list[Any] = []

    @saga("failing", key="{id}", app=stage.app)
    def failing(saga: Any, id: str) -> Any:
        attempts.append(saga._saga)
        if len(attempts) == 1:
            raise PermanentError("no", "no")
        saga.sleep(60.0)

    stage.enqueue(failing, "r1")
    stage.run()
    stage.replay("failing")
    stage.run()
    former, now = attempts[0], attempts[-1]
    with stage.engine.connect() as connection:
        for attempt, reached in ((former, 0), (now, 7)):
            sagas.note_reached(connection, attempt.claim, attempt.saga, 7)
            assert connection.execute(text("SELECT reached FROM idempotency.sagas")).scalar_one() == reached


def test_swallowing_the_wait_does_no_harm(stage: Stage) -> None:
    @saga("waiting", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def waiting(saga: Any, id: str) -> Any:
        try:
            saga.wait_for("picked", match=id, timeout=timedelta(days=5))
        finally:
            return "done"  # noqa: B012

    handle = stage.enqueue(waiting, "r1")
    stage.run()
    assert handle.status() == "released"
    stage.publish("picked", {"id": "r1"})
    stage.run()
    assert handle.result() == "done"
