"""Calls whose end a saga has used, and which somebody replays, corrects or undoes afterwards; and ends that do not come about."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from idempotency import DidNotHappen, Happened, IdempotentTask, PermanentError
from idempotency.errors import CallFailed, ChangeRefused, ReplayRefused
from idempotency.operate import saga as operate
from idempotency.operate.cancel import cancel
from idempotency.operate.replay import replay
from idempotency.operate.resolve import resolve_effect
from idempotency.sagas import call, saga
from idempotency.upkeep import maintenance
from tests.sagas.application import enter, entering
from tests.sagas.conftest import Stage
from tests.sagas.test_calls_in_doubt import charging_of, key_of, unknown
from tests.sagas.test_letters import is_unpublishable
from tests.sagas.test_people import id_of, letter_of, shown
from tests.support.operations import deaths
from tests.support.operators import ANN


def shipping(stage: Stage) -> tuple[Any, list[str]]:
    """A call whose charge is in doubt, and which ships after it."""
    shipped: list[str] = []

    @stage.app.task(
        base=IdempotentTask, bind=True, name="charging", key=None, shared=False, effect_types={"charge": str}
    )
    def charging(self: IdempotentTask) -> None:
        self.effect("charge", unknown)
        self.effect("ship", lambda *, idempotency_key: shipped.append(idempotency_key))

    return charging, shipped


def open_letters(stage: Stage, task: str) -> list[str]:
    return [reason for name, reason, status in stage.letters() if name == task and status == "open"]


def found(stage: Stage, task: Any, outcome: Any, **options: Any) -> str:
    """A person has found out what became of the charge of a call."""
    return str(
        resolve_effect(
            stage.app, shown(stage, id_of(task, key_of(stage, task.name))), "charge", outcome, ANN, **options
        )
    )


@pytest.fixture
def charging(stage: Stage) -> Any:
    return charging_of(stage)


@pytest.fixture
def parent(stage: Stage, charging: Any) -> Any:
    """Goes on without its call, and waits."""

    @saga("parent", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        try:
            saga.call(charging)
        except CallFailed:
            saga.step("instead", enter, "instead")
        saga.wait_for("picked", match=id, timeout=timedelta(days=5))

    return parent


@pytest.mark.long
def test_a_replay_whose_message_cannot_be_published_stays_on_the_list(stage: Stage, charging: Any, parent: Any) -> None:
    """The charge happened, a person has asked for its books; the saga ends meanwhile."""
    handle = stage.enqueue(parent, "r1")
    stage.run()
    found(stage, charging, Happened("ch_1"))
    replay(stage.app, letter_of(stage, charging), ANN)
    is_unpublishable(stage, charging)
    assert open_letters(stage, "charging") == ["unpublishable"]
    stage.publish("picked", {"id": "r1"})
    stage.run()
    assert handle.status() == "completed"
    assert open_letters(stage, "charging") == ["unpublishable"]
    replay(stage.app, letter_of(stage, charging), ANN)  # the broker takes messages again
    stage.run()
    assert stage.accounts() == ["instead", "posted"]


@pytest.mark.long
def test_what_is_being_replayed_is_not_undone_by_hand(stage: Stage, charging: Any) -> None:
    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.call(charging)

    stage.enqueue(parent, "r1")
    stage.run()
    found(stage, charging, Happened("ch_1"))
    replay(stage.app, letter_of(stage, charging), ANN)
    with pytest.raises(ChangeRefused, match="is being replayed, and released"):
        operate.mark_undone(stage.app, id_of(parent), "charging", ANN)


def test_an_answer_that_is_corrected_after_the_saga_has_ended_is_on_the_list(stage: Stage, charging: Any) -> None:
    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.call(charging)

    handle = stage.enqueue(parent, "r1")
    stage.run()
    found(stage, charging, DidNotHappen(), end=True)
    stage.run()
    assert (handle.status(), open_letters(stage, "charging")) == ("failed", [])
    assert found(stage, charging, Happened("ch_1")) == "unfinished"
    assert open_letters(stage, "charging") == ["unfinished"]


@pytest.mark.long
def test_a_second_replay_begins_nothing_either(stage: Stage) -> None:
    charging, shipped = shipping(stage)

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        with contextlib.suppress(CallFailed):
            saga.call(charging)

    stage.enqueue(parent, "r1")
    stage.run()
    found(stage, charging, Happened("ch_1"))
    replay(stage.app, letter_of(stage, charging), ANN)
    stage.run()
    with stage.engine.connect() as connection:  # the purge
        for table in ("outbox", "records"):
            connection.execute(text(f"DELETE FROM idempotency.{table} WHERE task = 'parent'"))
    replay(stage.app, letter_of(stage, charging), ANN)
    stage.run()
    assert shipped == []


def test_a_saga_that_has_caught_a_refusal_and_cannot_be_published_can_be_ended(stage: Stage) -> None:
    make = entering(stage, "make")
    make.refuses.add("x")

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        with contextlib.suppress(CallFailed):
            saga.call(make, thing="x")
        saga.sleep(60)

    handle = stage.enqueue(parent, "r1")
    stage.run()
    stage.pass_time(100)
    is_unpublishable(stage, parent)
    cancel(stage.app, shown(stage, id_of(parent)), ANN)
    stage.run()
    assert handle.status() == "failed"
    assert open_letters(stage, "make") == []


@pytest.mark.long
def test_a_foreign_letter_under_the_key_of_an_undo_does_not_keep_it_from_being_retried(stage: Stage) -> None:
    make, void = entering(stage, "make"), entering(stage, "void")
    void.refuses.add("x")

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.call(make, thing="x", undo=void)
        raise PermanentError("no", "no")

    handle = stage.enqueue(parent, "r1")
    stage.run()
    foreign = """INSERT INTO idempotency.dead_letters (source, tenant, task, key, fingerprint, consumer_service, reason, payload,
            headers, attempts, last_error, digest, queue, failed_at)
        SELECT source, tenant, task, key, 'v2:' || repeat('0', 64), consumer_service, 'fingerprint_mismatch', payload, headers, 0,
            '{}', 'another', queue, clock_timestamp() FROM idempotency.dead_letters WHERE task = 'void'"""
    with stage.engine.connect() as connection:
        connection.execute(text(foreign))
    void.refuses.clear()
    operate.retry_saga(stage.app, id_of(parent), ANN)
    stage.run()
    assert handle.status() == "failed"


class Died(BaseException):
    """The process is killed: out of memory, a hard time limit."""


@pytest.mark.long
def test_an_on_failed_that_kills_its_process_does_not_do_so_for_ever(stage: Stage) -> None:
    make, void = entering(stage, "make"), entering(stage, "void")
    killed: list[str] = []

    def on_failed(session: Any, operation: Any, error: PermanentError) -> None:
        killed.append(error.code)
        raise Died

    @saga("parent", key="{id}", app=stage.app, on_failed=on_failed)
    def parent(saga: Any, id: str) -> Any:
        saga.call(make, thing="x", undo=void)
        raise PermanentError("no", "no")

    handle = stage.enqueue(parent, "r1")
    for _ in range(40):
        with contextlib.suppress(Died):
            stage.run()
        if handle.status() == "failed":
            break
        with stage.engine.connect() as connection:
            row = connection.execute(text("SELECT status, attempts FROM idempotency.records WHERE key = 'r1'")).one()
        if row.status == "started":
            deaths(stage.engine, "r1", row.attempts)
            maintenance.recover(stage.app)
        stage.pass_time(400)
    assert handle.status() == "failed"
    assert set(killed) == {"no"}
    assert stage.accounts() == ["make:x", "void:x"]


def test_an_undo_that_was_replaced_is_not_taken_for_done_until_a_person_says_so(stage: Stage) -> None:
    make, refund = entering(stage, "make"), entering(stage, "refund")

    @stage.app.task(base=IdempotentTask, bind=True, name="void", shared=False)
    def void(self: IdempotentTask, thing: str) -> Any:
        return self.replace(refund.s(thing=thing).set(idempotency_key="another"))

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.call(make, thing="x", undo=void)
        raise PermanentError("no", "no")

    handle = stage.enqueue(parent, "r1")
    stage.run()
    assert (handle.status(), open_letters(stage, "parent")) == ("released", ["compensation_failed"])
    with pytest.raises(ChangeRefused, match="was replaced by another task"):
        operate.retry_saga(stage.app, id_of(parent), ANN)
    operate.mark_undone(stage.app, id_of(parent), "make", ANN)
    stage.run()
    assert handle.status() == "failed"


@pytest.mark.few(1)
@pytest.mark.parametrize("is_caught", [True, False])
def test_a_gather_waits_for_the_replay_of_a_failure_it_has_not_seen(
    stage: Stage, charging: Any, is_caught: bool
) -> None:
    """The charge happened; while another call runs, a person says so and replays it."""
    make = entering(stage, "make")

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        try:
            saga.gather(call(charging), call(make, thing="a"))
        except CallFailed:
            if not is_caught:
                raise
            saga.step("instead", enter, "instead")

    handle = stage.enqueue(parent, "r1")
    stage.deliver()
    stage.hold("make")
    stage.run()
    found(stage, charging, Happened("ch_1"))
    replay(stage.app, letter_of(stage, charging), ANN)
    stage.hold("charging")
    stage.pass_time(3600)
    stage.hold("charging")
    stage.run()
    assert stage.accounts() == ["make:a"]
    stage.pass_time(3600)
    stage.run()
    assert (handle.status(), stage.accounts()) == ("completed", ["make:a", "posted"])
    assert [letter for letter in stage.letters() if letter[2] == "open"] == []


def test_a_gather_is_replayed_whole_though_its_call_has_failed_for_good(stage: Stage) -> None:
    """Its saga has not seen that yet, so it waits for how the replay ends."""
    make, other = entering(stage, "make"), entering(stage, "other")
    make.refuses.add("x")

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.gather(call(make, thing="x"), call(other, thing="a"))

    handle = stage.enqueue(parent, "r1")
    stage.deliver()
    stage.hold("other")
    stage.run()
    make.refuses.clear()
    replay(stage.app, letter_of(stage, make), ANN)
    stage.run()
    stage.pass_time(3600)
    stage.run()
    assert (handle.status(), sorted(stage.accounts())) == ("completed", ["make:x", "other:a"])


def test_what_was_undone_by_hand_is_not_replayed_once_its_saga_is_purged(stage: Stage, charging: Any) -> None:
    """An answer that is corrected afterwards opens its letter again."""

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.call(charging)

    handle = stage.enqueue(parent, "r1")
    stage.run()
    operate.mark_undone(stage.app, id_of(parent), "charging", ANN)
    stage.run()
    assert handle.status() == "failed"
    assert found(stage, charging, Happened("ch_1"), end=True) == "unfinished"
    with stage.engine.connect() as connection:
        for table in ("outbox", "records"):
            connection.execute(text(f"DELETE FROM idempotency.{table} WHERE task = 'parent'"))
    with pytest.raises(ReplayRefused, match="the saga parent r1 has been undone without it"):
        replay(stage.app, letter_of(stage, charging), ANN)


@pytest.mark.long
def test_a_replacement_is_seen_to_before_what_came_earlier_is_undone(stage: Stage) -> None:
    """The call has no undo, but what replaced it may still run, and needs what the earlier step has made."""
    void, late = entering(stage, "void"), entering(stage, "late")

    @stage.app.task(base=IdempotentTask, bind=True, name="make", key=None, shared=False)
    def make(self: IdempotentTask) -> Any:
        return self.replace(late.s(thing="x").set(idempotency_key="another"))

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.step("one", enter, "one", undo=void)
        saga.call(make)

    handle = stage.enqueue(parent, "r1")
    stage.run()
    assert (handle.status(), open_letters(stage, "parent")) == ("released", ["compensation_failed"])
    assert "void:one" not in stage.accounts()
    operate.mark_undone(stage.app, id_of(parent), "make", ANN)
    stage.run()
    assert handle.status() == "failed"
    assert stage.accounts()[-1] == "void:one"
