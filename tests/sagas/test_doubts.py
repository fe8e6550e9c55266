"""What is in doubt when a saga stops or is undone: a lost connection, an outcome that is found out, a call that was replaced."""

from __future__ import annotations

import math
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from idempotency import EffectUnknown, Happened, IdempotentTask, PermanentError, Undecided
from idempotency.operate import saga as operate
from idempotency.sagas import call, saga
from idempotency.store import sagas
from tests.sagas.application import enter, entering
from tests.sagas.conftest import Stage
from tests.sagas.test_people import id_of
from tests.support.documents import blocks
from tests.support.operators import ANN


def test_an_outage_while_code_that_does_not_fit_stops_does_not_undo(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    void, is_broken = entering(stage, "void"), list[bool]()

    @saga("breaking", key="{id}", app=stage.app)
    def breaking(saga: Any, id: str) -> Any:
        saga.step("one", enter, "one", undo=void)
        if is_broken:
            raise PermanentError("of new code", "refused")
        saga.step("two", enter, "two", undo=void)
        saga.sleep(60.0)
        return "done"

    stage.enqueue(breaking, "r1")
    stage.run()
    is_broken.append(True)
    stage.pass_time(61.0)
    original, failed = sagas.wait, list[bool]()

    def wait(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("stopped") and not failed:
            failed.append(True)
            raise OperationalError("UPDATE", {}, Exception("server closed the connection unexpectedly"))
        return original(*args, **kwargs)

    monkeypatch.setattr(sagas, "wait", wait)
    stage.run()
    assert failed
    assert (stage.saga("r1").status, stage.accounts()) == ("RUNNING", ["one", "two"]), stage.letters()


@pytest.mark.long
def test_a_call_that_is_replaced_stops_its_saga_before_the_undo(stage: Stage) -> None:
    void, make = entering(stage, "void"), entering(stage, "make")

    @stage.app.task(base=IdempotentTask, bind=True, name="first", key=None, shared=False)
    def first(self: IdempotentTask, thing: str) -> None:
        self.replace(make.s(thing=thing).set(idempotency_key="m1"))

    @saga("calling", key="{id}", app=stage.app)
    def calling(saga: Any, id: str) -> Any:
        saga.call(first, thing=id, undo=void)

    handle = stage.enqueue(calling, "r1")
    stage.run()
    # its replacement is in the broker: what it makes after this would never be undone
    assert (handle.status(), stage.accounts()) == ("released", [])
    assert ("calling", "compensation_failed", "open") in stage.letters()
    operate.mark_undone(stage.app, id_of(calling), "first", ANN)  # a person has seen to it
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", [])


def test_an_effect_that_was_found_out_and_undone_does_not_end_as_unknown(stage: Stage) -> None:
    refund = entering(stage, "refund")

    def charge(thing: str, *, idempotency_key: str) -> str:
        raise EffectUnknown("timed out")

    def reconcile(thing: str, doubt: Any) -> Any:
        return Happened("ch_1")

    @saga("charging", key="{id}", app=stage.app)
    def charging(saga: Any, id: str) -> Any:
        saga.effect("charge", charge, id, reconcile=reconcile, undo=refund)

    handle = stage.enqueue(charging, "r1")
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", ["refund:r1"])
    # the provider has said what became of it, and it was undone: nobody has to look it up
    assert stage.letters() == [("charging", "resolved", "open")]


def test_a_call_whose_effect_was_found_out_does_not_stop_its_saga(stage: Stage) -> None:
    refund, void = entering(stage, "refund"), entering(stage, "void")

    def charge(thing: str, *, idempotency_key: str) -> str:
        raise EffectUnknown("timed out")

    @saga("child", key=None, app=stage.app)
    def child(saga: Any, id: str) -> Any:
        saga.effect("charge", charge, id, reconcile=lambda thing, doubt: Happened("ch_1"), undo=refund)

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.step("open", enter, "open", undo=void)
        saga.call(child, id)

    handle = stage.enqueue(parent, "r1")
    stage.run()
    # the child is undone altogether
    assert (handle.status(), stage.accounts()) == ("failed", ["open", "refund:r1", "void:open"]), (
        stage.steps("r1"),
        stage.letters(),
    )


@pytest.mark.long
def test_the_letter_of_a_stopped_saga_says_why_it_is_stopped_now(stage: Stage) -> None:
    """Two calls at once have left something unknown: the second is seen to, and the letter has to name the first."""

    def charge(*, idempotency_key: str) -> None:
        raise EffectUnknown("no answer")

    @stage.app.task(base=IdempotentTask, bind=True, name="charge", max_attempts=1, shared=False)
    def charging(self: IdempotentTask, thing: str) -> None:
        self.effect("charge", charge)

    @saga("calling", key="{id}", app=stage.app)
    def calling(saga: Any, id: str) -> Any:
        saga.gather(call(charging, "a"), call(charging, "b"))

    stage.enqueue(calling, "r1")
    stage.run()
    operate.mark_undone(stage.app, id_of(calling), "charge#2", ANN)
    stage.run()
    with stage.engine.connect() as connection:
        whys = list(
            connection.execute(
                text("SELECT last_error FROM idempotency.dead_letters WHERE task = 'calling' AND status = 'open'")
            ).scalars()
        )
    assert len(whys) == 1
    assert "'charge'" in whys[0], whys


def test_the_letter_of_a_mismatch_names_the_code_of_now(stage: Stage) -> None:
    code = ["one"]

    @saga("misfit", key="{id}", app=stage.app)
    def misfit(saga: Any, id: str) -> Any:
        saga.step(code[0], enter, "x")
        saga.sleep(3600.0)

    stage.enqueue(misfit, "r1")
    stage.run()
    for name in ("two", "three"):
        code[:] = [name]
        stage.pass_time(3601.0)
        stage.run()
    with stage.engine.connect() as connection:
        why = connection.execute(
            text("SELECT last_error FROM idempotency.dead_letters WHERE task = 'misfit' AND status = 'open'")
        ).scalar_one()
    assert "'three'" in why, why


def test_after_a_restore_a_saga_asks_for_what_only_a_webhook_decides(stage: Stage) -> None:
    """The backup is of before the webhook. A saga that sleeps for another reason sleeps on."""
    asked = list[bool]()

    def charge(thing: str, *, idempotency_key: str) -> str:
        raise Undecided(math.inf, "the bank decides")

    def reconcile(thing: str, doubt: Any) -> Any:
        asked.append(True)
        return Happened("ch_1")

    @saga("charging", key="{id}", app=stage.app)
    def charging(saga: Any, id: str) -> Any:
        return saga.effect("charge", charge, id, reconcile=reconcile)

    @saga("sleeping", key="{id}", app=stage.app)
    def sleeping(saga: Any, id: str) -> Any:
        saga.sleep(3600.0)

    charged, slept = stage.enqueue(charging, "r1"), stage.enqueue(sleeping, "s1")
    stage.run()
    assert (charged.status(), slept.status(), asked) == ("released", "released", [])
    for statement in blocks("docs/restore.md", "sql"):
        with stage.engine.begin() as owner:
            owner.exec_driver_sql(statement)
    stage.run()
    assert (charged.status(), slept.status(), asked) == ("completed", "released", [True])
