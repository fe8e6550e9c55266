"""Dead letters of sagas and of what they have called: what people may do with them, and what becomes of the saga."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from idempotency import DidNotHappen, EffectUnknown, Happened, IdempotentTask, PermanentError
from idempotency.errors import CallFailed, ChangeRefused, DiscardRefused, ReplayRefused
from idempotency.operate import discard
from idempotency.operate import saga as operate
from idempotency.operate.cancel import cancel
from idempotency.operate.change import Change
from idempotency.operate.people import Person
from idempotency.operate.replay import replay
from idempotency.operate.resolve import resolve_effect
from idempotency.sagas import saga
from idempotency.store import outbox
from idempotency.store.answers import error_text
from idempotency.upkeep import maintenance
from idempotency.wire.keys import OperationId
from tests.sagas.application import enter, entering
from tests.sagas.conftest import Stage
from tests.sagas.test_people import id_of, letter_of, shown
from tests.support.operators import ANN, act


def is_unpublishable(stage: Stage, task: Any) -> OperationId:
    """The broker refuses the message of a task that waits to be sent. Returns its operation."""
    taken = """UPDATE idempotency.outbox
        SET relayed_until = now() + interval '1 minute', available_at = least(available_at, now())
        WHERE task = :task AND status = 'pending' RETURNING *"""
    with stage.engine.connect() as connection:
        row = connection.execute(text(taken), {"task": task.name}).one()
        outbox.give_up(connection, row, error_text("unpublishable", "no queue"), service="bank")
    return OperationId(row.tenant, row.task, row.key)


def discarded(stage: Stage, letter: int) -> None:
    act(stage.app, discard.request, Person("ann", "operator"), letter, "no longer wanted")
    act(stage.app, discard.approve, Person("ben", "admin"), letter)


@pytest.mark.long
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


@pytest.mark.few(1)
@pytest.mark.parametrize("outcome", [Happened("ch_1"), DidNotHappen()], ids=["happened", "not happened"])
def test_a_call_of_which_a_person_has_found_that_it_happened_is_finished_by_a_replay(
    stage: Stage, outcome: Happened | DidNotHappen
) -> None:
    calls = []

    def charge(*, idempotency_key: str) -> str:
        calls.append(idempotency_key)
        raise EffectUnknown("no answer")

    @stage.app.task(
        base=IdempotentTask, bind=True, name="charging", key=None, shared=False, effect_types={"charge": str}
    )
    def charging(self: IdempotentTask) -> None:
        self.effect("charge", charge)
        enter(self.session, "posted")

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        try:
            saga.call(charging)
        except CallFailed:
            saga.step("instead", enter, "instead")

    stage.enqueue(parent, "r1")
    stage.run()
    letter = letter_of(stage, charging)
    with stage.engine.connect() as connection:
        key = connection.execute(text("SELECT key FROM idempotency.records WHERE task = 'charging'")).scalar_one()
    with pytest.raises(ReplayRefused, match="gone on from its failure"):
        replay(stage.app, letter, ANN)
    resolve_effect(stage.app, shown(stage, id_of(charging, key)), "charge", outcome, ANN)
    if isinstance(outcome, DidNotHappen):
        with pytest.raises(ReplayRefused, match="gone on from its failure"):
            replay(stage.app, letter, ANN)
    else:
        replay(stage.app, letter, Change("ann", "found it"))
        stage.run()
        assert (len(calls), stage.accounts()) == (1, ["instead", "posted"])


@pytest.mark.long
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


def test_a_call_whose_message_cannot_be_published_is_cancelled_and_its_saga_undone(stage: Stage) -> None:
    make, void, other = entering(stage, "make"), entering(stage, "void"), entering(stage, "other")

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.call(make, thing="a", undo=void)
        saga.call(other, thing="b", undo=void)

    handle = stage.enqueue(parent, "r1")
    for _ in range(3):  # as far as the second call
        stage.deliver()
    id = is_unpublishable(stage, other)
    letter = letter_of(stage, other)
    with pytest.raises(
        DiscardRefused, match="the saga parent r1 waits for this operation; replay the letter, or cancel"
    ):
        discarded(stage, letter)
    cancel(stage.app, shown(stage, id), ANN)
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", ["make:a", "void:a"])
    assert [letter for letter in stage.letters() if letter[2] == "open"] == [("parent", "cancelled", "open")]


def test_an_undo_whose_message_cannot_be_published_is_made_by_hand(stage: Stage) -> None:
    void = entering(stage, "void")

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.step("one", enter, "one", undo=void)
        raise PermanentError("no", "no")

    handle = stage.enqueue(parent, "r1")
    for _ in range(2):  # as far as the undo's message
        stage.deliver()
    id = is_unpublishable(stage, void)
    with pytest.raises(DiscardRefused, match="the saga parent r1 waits"):
        discarded(stage, letter_of(stage, void))
    cancel(stage.app, shown(stage, id), ANN)
    stage.run()
    operate.mark_undone(stage.app, id_of(parent), "one", ANN)
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", ["one"])
    assert [letter for letter in stage.letters() if letter[2] == "open"] == [("parent", "no", "open")]


@pytest.mark.long
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_called_saga_whose_message_cannot_be_published_is_ended(stage: Stage, is_cancelled: bool) -> None:
    void = entering(stage, "void")

    @saga("child", key=None, app=stage.app)
    def child(saga: Any) -> Any:
        saga.sleep(60.0)

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.step("one", enter, "one", undo=void)
        saga.call(child)

    handle = stage.enqueue(parent, "r1")
    stage.deliver()
    id = is_unpublishable(stage, child)
    if is_cancelled:
        operate.cancel_saga(stage.app, id_of(parent), ANN)
        stage.run()
    else:
        with pytest.raises(ChangeRefused, match="could not be published; replay its dead letter, or end it"):
            operate.cancel_saga(stage.app, id, ANN)
    cancel(stage.app, shown(stage, id), ANN)
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", ["one", "void:one"])
    assert stage.saga("r1").status == "FAILED"


@pytest.mark.long
def test_the_dead_message_of_a_cancelled_saga_is_not_discarded_while_its_caller_waits(stage: Stage) -> None:
    void = entering(stage, "void")

    @saga("child", key=None, app=stage.app)
    def child(saga: Any, id: str) -> Any:
        saga.sleep(60.0)

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.step("open", enter, "open", undo=void)
        saga.call(child, id)

    handle = stage.enqueue(parent, "r1")
    stage.deliver()
    operate.cancel_saga(stage.app, id_of(parent), ANN)
    with stage.engine.connect() as connection:  # the child's workers are slower
        slower = "UPDATE idempotency.outbox SET available_at = now() + interval '5 seconds' WHERE task = 'child'"
        connection.execute(text(slower))
    stage.deliver()
    stage.message_dies("child")
    with pytest.raises(DiscardRefused, match="the saga parent r1 waits"):
        discarded(stage, letter_of(stage, child))
    replay(stage.app, letter_of(stage, child), ANN)
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", ["open", "void:open"])
