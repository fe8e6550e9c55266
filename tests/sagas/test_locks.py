"""A record is locked before its letters by everyone: commands and publishers wait for each other, and none is aborted."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from idempotency import Happened
from idempotency.operate import discard
from idempotency.operate import saga as operate
from idempotency.operate.people import Person
from idempotency.sagas import saga
from idempotency.store import discards
from tests.sagas.conftest import Stage
from tests.sagas.test_calls_in_doubt import charging_of
from tests.sagas.test_letters import is_unpublishable
from tests.sagas.test_people import id_of, letter_of
from tests.sagas.test_replayed_calls import found
from tests.support.operators import ANN, act


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
    from idempotency.operate.erase import erase
    from idempotency.store import erasure

    charging = charging_of(stage)

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.call(charging)

    stage.enqueue(parent, "r1")
    stage.run()
    found(stage, charging, Happened("ch_1"))
    with stage.engine.connect() as connection:
        key = connection.execute(text("SELECT key FROM idempotency.records WHERE task = 'charging'")).scalar_one()
    *before, last = erasure._LOCKS
    monkeypatch.setattr(erasure, "_LOCKS", (*before, "SELECT pg_sleep(0.6)", last))
    errors = both(
        lambda: erase(stage.app, id_of(charging, key), ANN),
        lambda: operate.mark_undone(stage.app, id_of(parent), "charging", ANN),
    )
    assert "DeadlockDetected" not in [error for _, error in errors]
    assert len(errors) <= 1  # the second is told what has become of it
