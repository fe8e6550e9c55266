"""A record is locked before its letters by everyone: commands and publishers wait for each other, and none is aborted."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from idempotency import Happened
from idempotency.errors import CallFailed
from idempotency.operate import discard
from idempotency.operate import saga as operate
from idempotency.operate.erase import erase
from idempotency.operate.people import Person
from idempotency.operate.replay import replay
from idempotency.sagas import saga
from idempotency.store import discards, ends, erasure, letter_messages, letters, sagas
from idempotency.upkeep import maintenance
from tests.sagas.application import enter
from tests.sagas.conftest import Stage
from tests.sagas.test_calls_in_doubt import charging_of
from tests.sagas.test_letters import is_unpublishable
from tests.sagas.test_people import id_of, letter_of
from tests.sagas.test_replayed_calls import found
from tests.support.operations import deaths
from tests.support.operators import ANN, act

pytestmark = pytest.mark.long


def both(first: Any, second: Any) -> list[tuple[str, str]]:
    errors: list[tuple[str, str]] = []

    def run(name: str, command: Any) -> None:
        try:
            command()
        except Exception as error:
            errors.append((name, type(getattr(error, "orig", error)).__name__))

    threads = [
        threading.Thread(target=run, args=("first", first)),
        threading.Thread(target=run, args=("second", second)),
    ]
    threads[0].start()
    time.sleep(0.4)
    threads[1].start()
    for thread in threads:
        thread.join(30)
    return errors


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    real = discards.lock

    def lock(*args: Any) -> Any:
        row = real(*args)
        time.sleep(0.6)
        return row

    monkeypatch.setattr(discards, "lock", lock)


def test_undone_by_hand_and_a_discard_of_the_letter_wait_for_each_other(stage: Stage, slowly: None) -> None:
    charging = charging_of(stage)

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.call(charging)

    stage.enqueue(parent, "r1")
    stage.run()
    found(stage, charging, Happened("ch_1"))
    letter = letter_of(stage, charging)
    act(stage.app, discard.request, Person("ann", "operator"), letter, "no longer wanted")
    errors = both(
        lambda: act(stage.app, discard.approve, Person("ben", "admin"), letter),
        lambda: operate.mark_undone(stage.app, id_of(parent), "charging", ANN),
    )
    assert "DeadlockDetected" not in [error for _, error in errors]
    assert len(errors) <= 1  # the second is told what has become of it


def test_a_publisher_and_a_discard_of_the_letter_of_the_saga_that_waits_wait_for_each_other(
    stage: Stage, slowly: None
) -> None:
    @saga("parent", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.wait_for("picked", match=id, timeout=timedelta(hours=1))

    stage.enqueue(parent, "r1")
    stage.run()
    is_unpublishable(stage, parent)
    letter = letter_of(stage, parent)
    act(stage.app, discard.request, Person("ann", "operator"), letter, "no longer wanted")
    approve = lambda: act(stage.app, discard.approve, Person("ben", "admin"), letter)  # noqa: E731
    publish = lambda: stage.publish("picked", {"id": "r1"})  # noqa: E731
    errors = both(approve, publish)
    assert "DeadlockDetected" not in [error for _, error in errors]
    assert len(errors) <= 1  # the second is told what has become of it


def test_undone_by_hand_and_an_erasure_wait_for_each_other(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    charging = charging_of(stage)

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.call(charging)

    stage.enqueue(parent, "r1")
    stage.run()
    found(stage, charging, Happened("ch_1"))
    with stage.engine.connect() as connection:
        key = connection.execute(text("SELECT key FROM idempotency.records WHERE task = 'charging'")).scalar_one()
    monkeypatch.setattr(erasure, "_LOCKS", (*erasure._LOCKS, "SELECT pg_sleep(0.6)"))
    errors = both(
        lambda: erase(stage.app, id_of(charging, key), ANN),
        lambda: operate.mark_undone(stage.app, id_of(parent), "charging", ANN),
    )
    assert "DeadlockDetected" not in [error for _, error in errors]
    assert len(errors) <= 1  # the second is told what has become of it


def failed_charging(stage: Stage) -> Any:
    """An operation that has failed, and of whose charge a person has found that it happened."""
    charging = charging_of(stage)
    stage.enqueue(charging, idempotency_key="k")
    stage.run()
    found(stage, charging, Happened("ch_1"))
    return charging


def test_a_request_to_discard_and_an_erasure_wait_for_each_other(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request locks the letter by its foreign key."""
    charging = failed_charging(stage)
    letter = letter_of(stage, charging)
    real = discards.request

    def slowly(*args: Any, **kwargs: Any) -> bool:
        asked = real(*args, **kwargs)
        time.sleep(0.6)
        return asked

    monkeypatch.setattr(discards, "request", slowly)
    errors = both(
        lambda: act(stage.app, discard.request, Person("ann", "operator"), letter, "no longer wanted"),
        lambda: erase(stage.app, id_of(charging, "k"), ANN),
    )
    assert errors == [("second", "ChangeRefused")]  # the letter is open


@pytest.mark.parametrize("other", ["replay", "resolve"])
def test_the_erasure_of_a_saga_and_a_change_of_its_call_wait_for_each_other(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """The end of a call, and its replay, lock the call's record and then the saga."""
    charging = charging_of(stage)

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        with contextlib.suppress(CallFailed):
            saga.call(charging)

    stage.enqueue(parent, "r1")
    stage.run()
    if other == "replay":
        found(stage, charging, Happened("ch_1"))
    letter = letter_of(stage, charging)
    monkeypatch.setattr(erasure, "_LOCKS", (*erasure._LOCKS, "SELECT pg_sleep(0.6)"))
    changes = {
        "replay": lambda: replay(stage.app, letter, ANN),
        "resolve": lambda: found(stage, charging, Happened("ch_1"), end=True),
    }
    errors = both(lambda: erase(stage.app, id_of(parent), ANN), changes[other])
    assert errors == [("first", "ChangeRefused")]  # the letter is open


def test_the_replay_of_a_letter_whose_task_is_in_its_header_alone_and_an_erasure_wait_for_each_other(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of a message that could not be examined to its end is a letter of its operation, too."""
    charging = failed_charging(stage)
    with stage.engine.begin() as connection:
        copy = connection.execute(
            text("""INSERT INTO idempotency.dead_letters (source, tenant, key, header_task, consumer_service, reason,
                        last_error, first_error, attempts, headers, payload, queue, digest)
                    SELECT 'broker', tenant, key, task, consumer_service, 'invalid_header', 'x', 'x', 0, headers, payload, queue, 'd'
                    FROM idempotency.dead_letters WHERE task = 'charging' RETURNING id""")
        ).scalar_one()
    real = letter_messages.sent_for

    def slowly(*args: Any) -> Any:
        time.sleep(0.6)
        return real(*args)

    monkeypatch.setattr(letter_messages, "sent_for", slowly)
    errors = both(
        lambda: replay(stage.app, copy, ANN),
        lambda: erase(stage.app, id_of(charging, "k"), ANN),
    )
    # the copy has nothing to deliver, and letters are open
    assert errors == [("first", "ReplayRefused"), ("second", "ChangeRefused")]


@pytest.fixture
def code() -> list[str]:
    """What is deployed."""
    return ["first"]


@pytest.fixture
def stopped(stage: Stage, code: list[str]) -> Any:
    """A saga that has stopped, because other code was deployed."""

    @saga("parent", key="{id}", events={"picked": "{id}", "put": "{id}"}, app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.step(code[0], enter, "first")
        saga.wait_for("picked", match=id, timeout=timedelta(hours=1))
        saga.wait_for("put", match=id, timeout=timedelta(days=1))

    stage.enqueue(parent, "r1")
    stage.run()
    code[0] = "other"
    stage.pass_time(3700)
    stage.run()
    assert stage.letters() == [("parent", "saga_mismatch", "open")]
    return parent


def test_the_cancel_of_a_stopped_saga_and_an_erasure_wait_for_each_other(
    stage: Stage, stopped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasure, "_LOCKS", (*erasure._LOCKS, "SELECT pg_sleep(0.6)"))
    errors = both(
        lambda: erase(stage.app, id_of(stopped), ANN),
        lambda: operate.cancel_saga(stage.app, id_of(stopped), ANN),
    )
    assert errors == [("first", "ChangeRefused")]  # the saga has not ended


@pytest.mark.parametrize("fits", [True, False])
def test_the_cancel_of_a_stopped_saga_and_its_next_attempt_wait_for_each_other(
    stage: Stage, stopped: Any, code: list[str], monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    """A person has it tried again, and another one cancels it; its attempt goes on, or stops once more."""
    code[0] = "first" if fits else "a third"
    operate.retry_saga(stage.app, id_of(stopped), ANN)
    name = "close" if fits else "update_error"
    real, aborted = getattr(letters, name), []

    def slowly(*args: Any) -> None:
        time.sleep(0.6 if fits else 0.0)
        try:
            real(*args)
        except Exception as error:
            aborted.append(error)
            raise
        time.sleep(0.0 if fits else 0.6)

    monkeypatch.setattr(letters, name, slowly)
    errors = both(lambda: stage.run(), lambda: operate.cancel_saga(stage.app, id_of(stopped), ANN))
    assert (errors, aborted) == ([], [])
    stage.run()
    assert stage.saga("r1").status == "FAILED"


def test_a_persons_word_about_a_call_and_the_end_of_its_saga_wait_for_each_other(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a saga locks it, and then the letters of the calls that it has gone on from."""
    charging = charging_of(stage)

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        with contextlib.suppress(CallFailed):
            saga.call(charging)

    handle = stage.enqueue(parent, "r1")
    stage.deliver()
    stage.deliver()  # the call has failed
    conclude, close, aborted = ends.conclude, sagas.close_letters, []

    def concluding(*args: Any, **kwargs: Any) -> int | None:
        time.sleep(1.5)
        return conclude(*args, **kwargs)

    def closing(*args: Any) -> None:
        try:
            close(*args)
        except Exception as error:
            aborted.append(error)
            raise

    monkeypatch.setattr(ends, "conclude", concluding)
    monkeypatch.setattr(sagas, "close_letters", closing)
    errors = both(lambda: found(stage, charging, Happened("ch_1"), end=True), lambda: stage.run())
    assert (errors, aborted, handle.status()) == ([], [], "completed")


def test_recovery_of_a_saga_whose_processes_died_and_a_publisher_wait_for_each_other(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its wait is over by its time-out; the event comes as recovery lets it go."""

    @saga("parent", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.wait_for("picked", match=id, timeout=timedelta(hours=1))

    stage.enqueue(parent, "r1")
    stage.run()
    deaths(stage.engine, "r1", 100)
    real = sagas.locked

    def slowly(*args: Any) -> Any:
        time.sleep(0.6)
        return real(*args)

    monkeypatch.setattr(sagas, "locked", slowly)
    errors = both(lambda: maintenance.recover(stage.app), lambda: stage.publish("picked", {"id": "r1"}))
    assert errors == []
    with stage.engine.connect() as connection:
        assert connection.execute(text("SELECT error FROM idempotency.set_aside")).all() == []
    assert stage.letters() == [("parent", "saga_mismatch", "open")]
