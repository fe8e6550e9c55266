"""Dead letters of sagas and of what they have called: what people may do with them, and what becomes of the saga."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from idempotency import EffectUnknown, IdempotentTask, PermanentError
from idempotency.errors import CallFailed, ReplayRefused
from idempotency.operate import saga as operate
from idempotency.operate.replay import replay
from idempotency.sagas import saga
from idempotency.upkeep import maintenance
from tests.sagas.application import enter, entering
from tests.sagas.conftest import Stage
from tests.sagas.test_people import id_of, letter_of
from tests.support.operators import ANN


@pytest.mark.parametrize(
    ("called", "left"),
    [
        ("task", "step mail of failing"),
        ("saga", "step mail of calling"),
        ("purged", "step mail of calling, what is no longer known of refuse of calling"),
    ],
)
def test_a_replay_does_not_do_again_what_a_failed_call_has_left_done(stage: Stage, called: str, left: str) -> None:
    refuse = entering(stage, "refuse")
    refuse.refuses.add("x")

    @stage.app.task(base=IdempotentTask, bind=True, name="failing", key=None, shared=False)
    def failing(self: IdempotentTask) -> None:
        self.step("mail", enter, "mail")  # has no undo
        raise PermanentError("no", "no")

    @saga("calling", key=None, app=stage.app)
    def calling(saga: Any) -> Any:
        saga.step("mail", enter, "mail")
        saga.call(refuse, thing="x")

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.call(failing if called == "task" else calling)

    handle = stage.enqueue(parent, "r1")
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", ["mail"])
    if called == "purged":
        with stage.engine.begin() as connection:
            connection.execute(text("DELETE FROM idempotency.records WHERE task = 'refuse'"))
    with pytest.raises(ReplayRefused, match=f"undone except for {left}, which would be done again"):
        replay(stage.app, letter_of(stage, parent), ANN)


def test_a_failure_that_a_saga_has_used_is_not_replayed_after_the_saga_was_purged(stage: Stage) -> None:
    def charge(*, idempotency_key: str) -> str:
        raise EffectUnknown("no answer")

    @stage.app.task(base=IdempotentTask, bind=True, name="charging", key=None, shared=False, max_attempts=1)
    def charging(self: IdempotentTask) -> None:
        self.effect("charge", charge)

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        try:
            saga.call(charging)
        except CallFailed:
            saga.step("instead", enter, "instead")

    handle = stage.enqueue(parent, "r1")
    stage.run()
    assert (handle.status(), stage.letters()) == ("completed", [("charging", "effect_unknown", "open")])
    with stage.engine.begin() as connection:
        connection.execute(text("UPDATE idempotency.records SET expires_at = now() - interval '1 day'"))
        connection.execute(text("UPDATE idempotency.outbox SET published_at = published_at - interval '90 days'"))
    assert maintenance.purge(stage.app) == 1
    with pytest.raises(ReplayRefused, match="the saga parent r1 has called this and gone on from its failure"):
        replay(stage.app, letter_of(stage, charging), ANN)


@pytest.mark.parametrize("how", ["cancel", "event"])
def test_what_wakes_a_saga_does_so_after_its_message_has_died(stage: Stage, how: str) -> None:
    void = entering(stage, "void")

    @saga("waiting", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def waiting(saga: Any, id: str) -> Any:
        saga.step("one", enter, "one", undo=void)
        saga.wait_for("picked", match=id, timeout=timedelta(minutes=1))

    handle = stage.enqueue(waiting, "r1")
    stage.run()
    stage.pass_time(61.0)
    stage.message_dies("waiting")  # no worker had its code for longer than the grace
    assert stage.letters() == [("waiting", "rejected", "open")]
    if how == "cancel":
        operate.cancel_saga(stage.app, id_of(waiting), ANN)
    else:
        stage.publish("picked", {"id": "r1"})
    assert stage.letters() == [("waiting", "rejected", "replayed")]
    stage.run()
    ended = ("failed", ["one", "void:one"]) if how == "cancel" else ("completed", ["one"])
    assert (handle.status(), stage.accounts()) == ended
