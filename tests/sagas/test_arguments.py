"""The same arguments in another spelling after a deploy; a saga used inside of what it does; a person at the same moment."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from idempotency import IdempotentTask, PermanentError
from idempotency.application import runtime_of
from idempotency.sagas import saga
from idempotency.store import sagas
from idempotency.store.answers import error_text
from idempotency.wire.keys import OperationId
from tests.sagas.application import enter
from tests.sagas.conftest import Stage

HOUR = 3600.0


def enter_account(session: Any, thing: str) -> str:
    """`enter`, with another name for its parameter."""
    return enter(session, thing)


def charge(thing: str, *, idempotency_key: str) -> str:
    return f"charged {thing}"


def charge_all(*things: str, idempotency_key: str) -> str:
    return f"charged {things}"


@pytest.fixture
def make(stage: Stage) -> Any:
    @stage.app.task(base=IdempotentTask, bind=True, name="make", shared=False)
    def make(self: IdempotentTask, thing: str, colour: str = "red") -> str:
        return enter(self.session, f"{thing} {colour}")

    return make


USES: dict[str, list[Any]] = {
    "step": [
        lambda saga, make: saga.step("do", enter, "a"),
        lambda saga, make: saga.step("do", enter, account="a"),
        lambda saga, make: saga.step("do", enter_account, "a"),
    ],
    "effect": [
        lambda saga, make: saga.effect("do", charge, "a"),
        lambda saga, make: saga.effect("do", charge, thing="a"),
        lambda saga, make: saga.effect("do", charge_all, "a"),
    ],
    "call": [
        lambda saga, make: saga.call(make, "a", "red"),
        lambda saga, make: saga.call(make, "a", colour="red"),
        lambda saga, make: saga.call(make, colour="red", thing="a"),
    ],
}
OTHERS: dict[str, list[Any]] = {
    "step": [
        lambda saga, make: saga.step("do", enter, "b"),
        lambda saga, make: saga.step("do", lambda session, *all: enter(session, *all), "b"),
        lambda saga, make: saga.step("do", enter_account, thing="a"),
    ],
    "effect": [lambda saga, make: saga.effect("do", charge, thing="b")],
    "call": [lambda saga, make: saga.call(make, "red", "a"), lambda saga, make: saga.call(make, "a")],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", USES)
def test_the_same_arguments_in_another_spelling_fit_after_a_deploy(stage: Stage, make: Any, kind: str) -> None:
    code = [USES[kind][0]]

    @saga("spelt", key="{id}", app=stage.app)
    def spelt(saga: Any, id: str) -> Any:
        result = code[0](saga, make)
        saga.sleep(HOUR)
        return result

    handles = []
    for number, use in enumerate([*USES[kind][1:], *OTHERS[kind]]):
        code[0] = USES[kind][0]
        handles.append(stage.enqueue(spelt, f"r{number}"))
        stage.run()
        code[0] = use
        stage.pass_time(HOUR + 1)
        stage.run()
        done = "completed" if number < len(USES[kind]) - 1 else "released"
        assert handles[-1].status() == done, number
    assert {reason for _, reason, _ in stage.letters()} == {"saga_mismatch"}


@pytest.mark.long
@pytest.mark.parametrize("steps", [0, 1])
def test_on_failed_of_a_saga_runs_once_with_its_end(stage: Stage, make: Any, steps: int) -> None:
    def on_failed(session: Any, operation: Any, error: PermanentError) -> None:
        enter(session, f"told {operation.key} {error.code}")

    @stage.app.task(base=IdempotentTask, bind=True, name="void", shared=False)
    def void(self: IdempotentTask, account: str) -> str:
        return enter(self.session, "void")

    @saga("failing", key="{id}", app=stage.app, on_failed=on_failed)
    def failing(saga: Any, id: str) -> Any:
        for _ in range(steps):
            saga.step("do", enter, "done", undo=void)
        raise PermanentError("no", "refused")

    stage.enqueue(failing, "r1")
    stage.run()
    stage.enqueue(failing, "r2")
    cancel(stage, "failing", "r2")
    stage.run()
    done = ["done", "void"] if steps else []
    assert stage.accounts() == [*done, "told r1 refused", "told r2 cancelled"]


WITHIN: dict[str, Any] = {
    "step": lambda saga, use: saga.step("do", lambda session: use(saga)),
    "effect": lambda saga, use: saga.effect("do", lambda idempotency_key: use(saga)),
    "undo": None,
}


@pytest.mark.long
@pytest.mark.parametrize("is_swallowed", [True, False])
@pytest.mark.parametrize("where", WITHIN)
def test_a_saga_that_is_used_inside_of_what_it_does_stops(
    stage: Stage, make: Any, where: str, is_swallowed: bool
) -> None:
    used: list[Any] = []

    def use(saga: Any) -> None:
        with contextlib.suppress(Exception) if is_swallowed else contextlib.nullcontext():
            used.append(saga)
            saga.call(make, "a")

    @saga("nesting", key="{id}", app=stage.app, max_attempts=1)
    def nesting(saga: Any, id: str) -> Any:
        if where == "undo":
            saga.step("do", enter, "done", undo=undo)
            raise PermanentError("no", "refused")
        WITHIN[where](saga, use)
        return "not stopped"

    @stage.app.task(base=IdempotentTask, bind=True, name="undo", shared=False)
    def undo(self: IdempotentTask, account: str) -> str:
        use(nesting)
        return enter(self.session, "undone")

    handle = stage.enqueue(nesting, "r1")
    stage.run()
    assert (used, [name for _, name, _ in stage.steps("r1") if name == "make"]) == ([nesting], [])
    if where == "undo":
        assert stage.accounts() == (["done", "undone"] if is_swallowed else ["done"])
        return
    assert (handle.status(), stage.letters()) == ("released", [("nesting", "saga_mismatch", "open")])
    assert stage.steps("r1") == ([] if where == "step" else [("effect", "do", "done" if is_swallowed else "begun")])


def cancel(stage: Stage, task: str, key: str) -> None:
    with runtime_of(stage.app).engine.begin() as connection:
        sagas.cancel(connection, OperationId("default", task, key), error_text("cancelled", "by a person"))


@pytest.mark.long
@pytest.mark.parametrize("where", ["in the code", "in a step"])
def test_a_cancel_while_the_worker_shuts_down_is_done_by_the_next(stage: Stage, make: Any, where: str) -> None:
    def shut_down(session: Any) -> None:
        cancel(stage, "stopping", "r1")
        raise SystemExit

    @saga("stopping", key="{id}", app=stage.app)
    def stopping(saga: Any, id: str) -> Any:
        saga.step("do", enter, "done", undo=void)
        if where == "in a step":
            saga.step("last", shut_down)
        shut_down(None)

    @stage.app.task(base=IdempotentTask, bind=True, name="void", shared=False)
    def void(self: IdempotentTask, account: str) -> str:
        return enter(self.session, "void")

    handle = stage.enqueue(stopping, "r1")
    with contextlib.suppress(SystemExit):
        stage.run()
    assert handle.status() == "released"  # at once, not when its lease is over
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", ["done", "void"])
