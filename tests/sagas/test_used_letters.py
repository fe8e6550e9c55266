"""Dead letters of calls that a saga has used: they say so for as long as they are open, whatever is purged before."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from idempotency import Happened, IdempotentTask, PermanentError
from idempotency.errors import CallFailed, ReplayRefused
from idempotency.operate import saga as operate
from idempotency.operate.replay import replay
from idempotency.sagas import saga
from idempotency.upkeep import maintenance
from tests.sagas.application import enter, entering
from tests.sagas.conftest import Stage
from tests.sagas.test_calls_in_doubt import unknown
from tests.sagas.test_people import id_of, letter_of
from tests.sagas.test_replayed_calls import found, open_letters, shipping
from tests.support.operators import ANN


def purged(stage: Stage, task: str) -> None:
    """As the purge does: the record with its rows; the saga goes with it."""
    with stage.engine.connect() as connection:
        for table in ("outbox", "records"):
            connection.execute(text(f"DELETE FROM idempotency.{table} WHERE task = :task"), {"task": task})


def aged(stage: Stage) -> None:
    """Everything that has ended did so long ago."""
    with stage.engine.connect() as connection:
        for statement in (
            "UPDATE idempotency.dead_letters SET closed_at = 'epoch' WHERE status <> 'open'",
            "UPDATE idempotency.records SET expires_at = 'epoch', kept_until = NULL WHERE status IN ('completed', 'failed')",
            "UPDATE idempotency.outbox SET published_at = 'epoch' WHERE status = 'published'",
        ):
            connection.execute(text(statement))


@pytest.mark.long
def test_a_call_replayed_as_its_saga_ends_is_not_replayed_whole_after_the_purge(stage: Stage) -> None:
    """The saga ends while the replay that may only finish is under way, so no letter names the saga."""
    charging, shipped = shipping(stage)

    @saga("parent", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        with contextlib.suppress(CallFailed):
            saga.call(charging)
        saga.wait_for("picked", match=id, timeout=timedelta(days=5))

    handle = stage.enqueue(parent, "r1")
    stage.run()
    found(stage, charging, Happened("ch_1"))
    replay(stage.app, letter_of(stage, charging), ANN)
    stage.hold("charging")
    stage.publish("picked", {"id": "r1"})
    stage.run()
    assert handle.status() == "completed"
    stage.pass_time(3600)
    stage.run()
    assert (open_letters(stage, "charging"), shipped) == (["unfinished"], [])
    purged(stage, "parent")
    replay(stage.app, letter_of(stage, charging), ANN)  # which may only finish
    stage.run()
    assert (open_letters(stage, "charging"), shipped) == (["unfinished"], [])


@pytest.mark.long
def test_a_letter_of_a_call_knows_its_saga_once_that_is_purged(stage: Stage) -> None:
    """The closed letter of before names the saga that has gone on, and stays for that."""
    charging, shipped = shipping(stage)

    stage.goes_on_without(charging)
    found(stage, charging, Happened("ch_1"))
    replay(stage.app, letter_of(stage, charging), ANN)
    stage.run()
    assert (open_letters(stage, "charging"), shipped) == (["unfinished"], [])
    aged(stage)
    maintenance.purge(stage.app)
    assert stage.letters() == [("charging", "effect_unknown", "replayed"), ("charging", "unfinished", "open")]
    replay(stage.app, letter_of(stage, charging), ANN)  # which may only finish
    stage.run()
    assert (open_letters(stage, "charging"), shipped) == (["unfinished"], [])


def test_a_clock_that_goes_back_makes_no_failure_unseen(stage: Stage) -> None:
    """Postgres fails over to a server whose clock is an hour behind, before the saga goes on from the failure."""
    make = entering(stage, "make")
    make.refuses.add("x")

    @saga("parent", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        try:
            saga.call(make, thing="x")
        except CallFailed:
            saga.step("instead", enter, "instead")
        saga.wait_for("picked", match=id, timeout=timedelta(days=5))

    handle = stage.enqueue(parent, "r1")
    stage.deliver()
    stage.deliver()
    with stage.engine.connect() as connection:  # what the former server has noted
        connection.execute(
            text("UPDATE idempotency.saga_steps SET ended_at = ended_at + interval '1 hour' WHERE state = 'failed'")
        )
    stage.run()
    assert stage.accounts() == ["instead"]
    make.refuses.clear()
    with pytest.raises(ReplayRefused, match="has called this and gone on from its failure"):
        replay(stage.app, letter_of(stage, make), ANN)
    stage.publish("picked", {"id": "r1"})
    stage.run()
    assert (handle.status(), stage.accounts()) == ("completed", ["instead"])


def closed_letters_are_purged(stage: Stage) -> None:
    with stage.engine.begin() as connection:
        connection.execute(text("UPDATE idempotency.dead_letters SET closed_at = 'epoch' WHERE status <> 'open'"))
    maintenance.purge(stage.app)


@pytest.mark.long
def test_what_was_undone_by_hand_is_not_done_again_though_a_persons_word_outlives_its_saga(stage: Stage) -> None:
    """Each word prolongs the record's retention, and not that of the closed letter."""
    make = entering(stage, "make")

    @stage.app.task(base=IdempotentTask, bind=True, name="void", shared=False, effect_types={"charge": str})
    def void(self: IdempotentTask, thing: str) -> None:
        self.effect("charge", unknown)
        enter(self.session, "void")

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.call(make, thing="x", undo=void)
        raise PermanentError("no", "no")

    handle = stage.enqueue(parent, "r1")
    stage.run()
    operate.mark_undone(stage.app, id_of(parent), "make", ANN)
    stage.run()
    assert handle.status() == "failed"
    purged(stage, "parent")
    closed_letters_are_purged(stage)
    assert found(stage, void, Happened("re_1"), end=True) == "unfinished"
    with pytest.raises(ReplayRefused, match="has been undone without it"):
        replay(stage.app, letter_of(stage, void), ANN)
    assert stage.accounts() == ["make:x"]


@pytest.mark.long
def test_a_call_that_a_saga_has_gone_on_from_may_only_finish_though_its_letter_is_past_its_retention(
    stage: Stage,
) -> None:
    charging, shipped = shipping(stage)

    stage.goes_on_without(charging)
    found(stage, charging, Happened("ch_0"), end=True)
    purged(stage, "parent")
    with stage.engine.begin() as connection:  # by two people
        connection.execute(text("UPDATE idempotency.dead_letters SET status = 'discarded', closed_at = 'epoch'"))
    closed_letters_are_purged(stage)
    assert found(stage, charging, Happened("ch_1"), end=True) == "unfinished"
    replay(stage.app, letter_of(stage, charging), ANN)
    stage.run()
    assert (open_letters(stage, "charging"), shipped) == (["unfinished"], [])
    with stage.engine.begin() as connection:
        connection.execute(text("UPDATE idempotency.dead_letters SET status = 'discarded', closed_at = 'epoch'"))
    purged(stage, "charging")
    closed_letters_are_purged(stage)
    assert stage.letters() == []  # once nothing can replay it
