"""A saga that moves money, by its own word or by what it has called, is changed only with a token."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from idempotency import Defer, EffectUnknown, IdempotentTask
from idempotency.operate.change import Change
from idempotency.operate.people import add_operator
from idempotency.sagas import saga
from tests.sagas.application import enter, entering
from tests.sagas.conftest import Stage
from tests.support.commands import Answer, runner
from tests.support.tasks import transactional

NEEDED = "moves money, or its task is not known here, so a change needs an operator's token"


@pytest.fixture
def ask(stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    run = runner(monkeypatch, capsys)
    with transactional(stage.engine).begin() as connection:
        token = add_operator(connection, Change("setup", "tests"), "ann", "operator", days=1)

    def ask(*arguments: object, is_ann: bool) -> Answer:
        monkeypatch.delenv("IDEMPOTENCY_TOKEN", raising=False)
        if is_ann:
            monkeypatch.setenv("IDEMPOTENCY_TOKEN", token)
        return run(*arguments, "--reason", "they rang")

    return ask


@pytest.fixture(params=["its own word", "what it has called", "what that has called"])
def moving(stage: Stage, request: pytest.FixtureRequest) -> Any:
    """A saga that waits for an event, and whose undo fails."""
    void = entering(stage, "void")

    @stage.app.task(
        base=IdempotentTask, bind=True, name="make", shared=False, moves_money=request.param != "its own word"
    )
    def make(self: IdempotentTask, thing: str) -> str:
        return enter(self.session, f"make:{thing}")

    @saga("inner", key="{thing}", app=stage.app)
    def inner(saga: Any, thing: str) -> Any:
        return saga.call(make, thing)

    called = inner if request.param == "what that has called" else make
    options: dict[str, Any] = {"moves_money": True} if request.param == "its own word" else {}

    @saga("moving", key="{id}", events={"picked": "{id}"}, app=stage.app, **options)
    def moving(saga: Any, id: str) -> Any:
        saga.call(called, id, undo=void)
        return saga.wait_for("picked", match=id, timeout=timedelta(days=5))["data"]

    moving.void, moving.called = void, called
    stage.enqueue(moving, "r1")
    stage.run()
    return moving


@pytest.mark.few(1)
def test_a_saga_that_moves_money_is_changed_with_a_token(stage: Stage, ask: Callable[..., Answer], moving: Any) -> None:
    moving.void.refuses.add("r1")

    def changed(*arguments: object) -> None:
        refused = ask(*arguments, is_ann=False)
        assert (refused.status, f"moving r1: {NEEDED}" in refused.error) == (1, True)
        done = ask(*arguments, is_ann=True)
        assert done.status == 0, done.error

    changed("saga", "signal", "r1", "picked", "--match", "later")
    changed("saga", "cancel", "r1")
    stage.run()
    assert stage.saga("r1").status == "COMPENSATING"
    changed("saga", "retry", "r1")
    stage.run()
    changed("saga", "retry", "r1", "--undone", moving.called.name)
    stage.run()
    with stage.engine.connect() as connection:
        rows = connection.execute(
            text("SELECT actor, action FROM idempotency.audit WHERE action LIKE 'saga%' ORDER BY id")
        )
        actions = ["saga_signal", "saga_cancel", "saga_retry", "saga_undone"]
        assert [tuple(row) for row in rows] == [("ann", action) for action in actions]


def test_an_effect_of_a_saga_that_moves_money_is_resolved_with_a_token(
    stage: Stage, ask: Callable[..., Answer]
) -> None:
    def charge(*, idempotency_key: str) -> None:
        raise EffectUnknown("no answer")

    @saga("charging", key="{id}", max_attempts=1, moves_money=True, app=stage.app)
    def charging(saga: Any, id: str) -> None:
        saga.effect("charge", charge)

    stage.enqueue(charging, "r1")
    stage.run()
    resolving = ("effects", "resolve", "r1", "charge", "--not-happened")
    refused = ask(*resolving, is_ann=False)
    assert (refused.status, f"charging r1: {NEEDED}" in refused.error) == (1, True)
    assert stage.saga("r1").status == "COMPENSATING"
    assert ask(*resolving, is_ann=True).status == 0
    stage.run()
    assert stage.saga("r1").status == "FAILED"


@pytest.mark.few(1)
@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_saga_that_moves_money_has_called_is_cancelled_with_a_token(
    stage: Stage, ask: Callable[..., Answer], depth: int
) -> None:
    """The end of a call has the saga undone, and so refunded."""
    moving = {"base": IdempotentTask, "bind": True, "shared": False, "moves_money": True}

    @stage.app.task(name="charge", **moving)
    def charge(self: IdempotentTask, id: str) -> str:
        return enter(self.session, f"charge:{id}")

    @stage.app.task(name="refund", **moving)
    def refund(self: IdempotentTask, id: str) -> str:
        return enter(self.session, f"refund:{id}")

    @stage.app.task(base=IdempotentTask, bind=True, name="pack", shared=False, key="{id}")
    def pack(self: IdempotentTask, id: str) -> None:
        raise Defer(3600, "the warehouse is closed")

    @saga("packing", key="{id}", app=stage.app)
    def packing(saga: Any, id: str) -> Any:
        saga.call(pack, id)

    @saga("paying", key="{id}", app=stage.app)
    def paying(saga: Any, id: str) -> Any:
        saga.call(charge, id, undo=refund)
        saga.call({1: pack, 2: packing}[depth], id)

    stage.enqueue(paying, "r1")
    stage.run()
    with stage.engine.connect() as connection:
        key = connection.execute(text("SELECT key FROM idempotency.records WHERE task = 'pack'")).scalar_one()
    refused = ask("cancel", key, is_ann=False)
    assert (refused.status, f"pack {key}: {NEEDED}" in refused.error) == (1, True)
    stage.run()
    assert stage.accounts() == ["charge:r1"]
    assert ask("cancel", key, is_ann=True).status == 0
    stage.run()
    assert [each.split(":")[0] for each in stage.accounts()] == ["charge", "refund"]


def test_a_saga_that_moves_none_is_changed_without_a_token(stage: Stage, ask: Callable[..., Answer]) -> None:
    make = entering(stage, "make")

    @saga("harmless", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def harmless(saga: Any, id: str) -> Any:
        saga.call(make, id)
        return saga.wait_for("picked", match=id, timeout=timedelta(days=5))["data"]

    stage.enqueue(harmless, "r1")
    stage.run()
    assert ask("saga", "signal", "r1", "picked", is_ann=False).status == 0
