"""What was used or undone stays so: letters of other sources, clocks that go back, commands at the same time."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from sqlalchemy import text

from idempotency import DidNotHappen, EffectUnknown, Happened, IdempotentTask, PermanentError
from idempotency.errors import ReplayRefused
from idempotency.operate import discard
from idempotency.operate import saga as operate
from idempotency.operate.people import Person
from idempotency.operate.replay import replay
from idempotency.sagas import call, saga
from idempotency.store import letters, saga_changes, sagas
from idempotency.upkeep import alerts, maintenance
from tests.sagas.application import enter, entering
from tests.sagas.conftest import Stage
from tests.sagas.test_calls_in_doubt import charging_of
from tests.sagas.test_letters import is_unpublishable
from tests.sagas.test_people import id_of, letter_of
from tests.sagas.test_replayed_calls import found, open_letters, shipping
from tests.sagas.test_used_letters import aged, purged
from tests.support.operators import ANN, act


@pytest.mark.long
def test_a_call_whose_replay_could_not_be_published_begins_nothing_once_its_first_letter_is_purged(
    stage: Stage,
) -> None:
    """The relay's letter is all that is left."""
    charging, shipped = shipping(stage)

    stage.goes_on_without(charging)
    found(stage, charging, Happened("ch_1"))
    replay(stage.app, letter_of(stage, charging), ANN)
    is_unpublishable(stage, charging)
    assert open_letters(stage, "charging") == ["unpublishable"]
    aged(stage)
    maintenance.purge(stage.app)  # the saga and the first letter
    purged(stage, "parent")
    replay(stage.app, letter_of(stage, charging), ANN)  # as it was: may only finish
    stage.run()
    assert (open_letters(stage, "charging"), shipped) == (["unfinished"], [])
    replay(stage.app, letter_of(stage, charging), ANN)
    stage.run()
    assert (open_letters(stage, "charging"), shipped) == (["unfinished"], [])  # the saga has gone on without it


def test_a_failure_that_no_code_has_seen_is_replayed_though_the_clock_has_gone_back(stage: Stage) -> None:
    """By a failover: what the former server has noted is ahead of the present one's time."""
    make, other = entering(stage, "make"), entering(stage, "other")
    make.refuses.add("x")

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.step("first", enter, "first")
        saga.sleep(60)
        saga.gather(call(make, thing="x"), call(other, thing="a"))

    handle = stage.enqueue(parent, "r1")
    stage.run()
    with stage.engine.connect() as connection:  # what the former server, a minute ahead, has noted
        connection.execute(
            text("UPDATE idempotency.saga_steps SET ended_at = ended_at + interval '3 minutes' WHERE kind = 'step'")
        )
    stage.pass_time(61)
    stage.deliver()
    stage.hold("other")
    stage.run()
    make.refuses.clear()
    replay(stage.app, letter_of(stage, make), ANN)
    stage.pass_time(3600)
    stage.run()
    assert handle.status() == "completed"


def test_an_undo_that_was_done_by_hand_is_not_run_again_once_its_saga_is_purged(stage: Stage) -> None:
    make = entering(stage, "make")

    def unknown(*, idempotency_key: str) -> str:
        raise EffectUnknown("no answer")

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
    assert open_letters(stage, "parent") == ["compensation_failed"]
    operate.mark_undone(stage.app, id_of(parent), "make", ANN)
    stage.run()
    assert handle.status() == "failed"
    assert found(stage, void, Happened("re_1"), end=True) == "unfinished"  # opens its letter again
    with pytest.raises(ReplayRefused, match="has been undone without it"):
        replay(stage.app, letter_of(stage, void), ANN)
    purged(stage, "parent")
    with pytest.raises(ReplayRefused, match="has been undone without it"):
        replay(stage.app, letter_of(stage, void), ANN)
    stage.run()
    assert stage.accounts() == ["make:x"]


@pytest.mark.long
def test_undone_by_hand_and_a_replay_of_its_letter_wait_for_each_other_in_one_order(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    charging = charging_of(stage)

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.call(charging)

    stage.enqueue(parent, "r1")
    stage.run()
    found(stage, charging, Happened("ch_1"))
    letter = letter_of(stage, charging)
    from idempotency.store import letters, saga_changes

    has_record, has_letter = threading.Event(), threading.Event()
    real_lock, real_close = saga_changes.lock_caller, letters.close_undone

    def locking(*args: Any) -> Any:
        real = real_lock(*args)
        has_record.set()
        has_letter.wait(1)
        return real

    def closing(*args: Any) -> None:
        real_close(*args)
        has_letter.set()

    monkeypatch.setattr(saga_changes, "lock_caller", locking)
    monkeypatch.setattr(letters, "close_undone", closing)
    errors: list[str] = []

    def act(command: Any, *args: Any) -> None:
        try:
            command(*args)
        except Exception as error:
            errors.append(type(getattr(error, "orig", error)).__name__)

    threads = [
        threading.Thread(target=act, args=(replay, stage.app, letter, ANN)),
        threading.Thread(target=act, args=(operate.mark_undone, stage.app, id_of(parent), "charging", ANN)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert "DeadlockDetected" not in errors
    assert len(errors) <= 1  # the one that came second was told so


def test_a_call_in_doubt_is_as_old_as_the_present_clock_says(
    stage: Stage,
) -> None:
    """After a failover from a server whose clock was ahead: what is recorded later has to say so, and is no older for it."""
    keys: list[str] = []

    def charge(*, idempotency_key: str) -> str:
        keys.append(idempotency_key)
        raise OSError("no answer")

    @saga("parent", key="{id}", app=stage.app, max_attempts=9)
    def parent(saga: Any, id: str) -> Any:
        saga.step("first", enter, "first")
        saga.sleep(60)
        saga.effect("charge", charge)

    stage.enqueue(parent, "r1")
    stage.run()
    with stage.engine.connect() as connection:  # what the former server, an hour ahead, has noted
        connection.execute(
            text("UPDATE idempotency.saga_steps SET ended_at = ended_at + interval '1 hour' WHERE kind = 'step'")
        )
    stage.pass_time(61)
    stage.deliver()
    assert len(keys) == 1
    with stage.engine.connect() as connection:  # a day and a minute pass
        connection.execute(
            text(
                "UPDATE idempotency.saga_steps SET entry = jsonb_set(entry, '{begun_at}',"
                " to_jsonb((entry ->> 'begun_at')::float8 - 86460)) WHERE kind = 'effect'"
            )
        )
    stage.pass_time(3600)
    stage.deliver()
    assert len(keys) == 1  # `provider_key_retention` is 24 hours: the provider would take it for a new call


FILL = """
INSERT INTO idempotency.dead_letters (source, tenant, task, key, generation, fingerprint, reason, payload, last_error, attempts, failed_at,
    status, closed_at)
SELECT 'operation', 'default', 'other', 'k' || n, 1, 'v2:' || repeat('0', 64), 'x', 'm', '{}', 1, clock_timestamp(),
    'replayed', clock_timestamp()
FROM generate_series(1, 50000) n
"""


@pytest.mark.long
@pytest.mark.parametrize("which", ["store a failure", "end of a saga", "replay", "undone by hand"])
def test_closed_letters_of_an_operation_are_found_by_an_index(stage: Stage, which: str) -> None:
    of = {"tenant": "default", "task": "t", "key": "k"}
    names: dict[str, Any] = {**of, "generation": 1, "fingerprint": "v2:" + "1" * 64, "queue": "q", "service": "s"}
    names |= {
        "reason": "r",
        "last_error": "{}",
        "attempts": 1,
        "headers": "{}",
        "message": "",
        "letter": 1,
        "saga": "p r1",
    }
    statements = {
        "store a failure": letters._STORE,
        "end of a saga": sagas._CLOSE_LETTERS,
        "replay": saga_changes._USED_BY,
        "undone by hand": letters._CLOSE_UNDONE,
    }
    with stage.engine.connect() as connection:
        connection.execute(text(FILL))
        connection.exec_driver_sql("ANALYZE idempotency.dead_letters")
        if which == "end of a saga":
            names["saga"] = "00000000-0000-0000-0000-000000000000"
        if which == "replay":
            (names["letter"],) = connection.exec_driver_sql("SELECT min(id) FROM idempotency.dead_letters").scalars()
        rows = connection.exec_driver_sql("EXPLAIN " + statements[which], names).scalars()
        plan = "\n".join(rows)
    assert "Seq Scan on dead_letters" not in plan


@pytest.mark.long
def test_a_corrected_answer_has_a_letter_though_the_closed_one_is_purged(stage: Stage) -> None:
    """The record lives longer, because a person's word prolongs it."""
    charging = charging_of(stage)

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.call(charging)

    handle = stage.enqueue(parent, "r1")
    stage.run()
    found(stage, charging, DidNotHappen(), end=True)
    stage.run()
    assert (handle.status(), open_letters(stage, "charging")) == ("failed", [])
    with stage.engine.connect() as connection:
        connection.execute(text("UPDATE idempotency.dead_letters SET closed_at = 'epoch' WHERE status <> 'open'"))
    maintenance.purge(stage.app)
    assert found(stage, charging, Happened("ch_1")) == "unfinished"
    assert open_letters(stage, "charging") == ["unfinished"]
    replay(stage.app, letter_of(stage, charging), ANN)
    stage.run()


def test_a_discarded_letter_that_a_corrected_answer_opens_again_is_told_and_can_be_discarded_again(
    stage: Stage,
) -> None:
    charging = charging_of(stage)
    stage.enqueue(charging, idempotency_key="k")
    stage.run()
    found(stage, charging, DidNotHappen(), end=True)
    letter = letter_of(stage, charging)
    for outcome, reason in ((Happened("ch_1"), "not charged"), (None, "posted by hand")):
        assert (alerts.run_once(stage.app), alerts.run_once(stage.app)) == (1, 0)
        act(stage.app, discard.request, Person("ann", "operator"), letter, reason)
        act(stage.app, discard.approve, Person("ben", "admin"), letter)
        assert open_letters(stage, "charging") == []
        if outcome is not None:
            found(stage, charging, outcome, end=True)
            assert open_letters(stage, "charging") == ["unfinished"]
    with stage.engine.connect() as connection:
        query = text("SELECT reason FROM idempotency.audit WHERE action = 'discard_approved' ORDER BY id")
        assert list(connection.execute(query).scalars()) == ["not charged", "posted by hand"]
