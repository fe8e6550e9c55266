"""Erasure beside sagas: what others still need is refused, what nobody needs any more goes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from idempotency import IdempotentTask, PermanentError
from idempotency.attempt.effects import DidNotHappen, Happened
from idempotency.errors import ChangeRefused
from idempotency.operate import discard
from idempotency.operate.change import read
from idempotency.operate.erase import erase
from idempotency.operate.people import Person
from idempotency.operate.resolve import resolve_effect
from idempotency.sagas import saga
from idempotency.wire.keys import OperationId
from tests.sagas.application import enter
from tests.sagas.conftest import Stage
from tests.support.dump import holding
from tests.support.operators import ANN, act

CANARY = "canary-7f3a"


def finished_first(stage: Stage) -> Any:
    @saga("first", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def first(saga: Any, id: str) -> Any:
        return saga.wait_for("picked", match=id, timeout=timedelta(days=5)) and "picked"

    return stage.enqueue(first, "r1")


def test_the_event_of_a_running_saga_is_kept_however_its_key_is_joined(stage: Stage) -> None:
    @saga("second", key="shop-{id}", events={"picked": "{id}"}, app=stage.app)
    def second(saga: Any, id: str) -> Any:
        saga.sleep(3600)
        if saga.wait_for("picked", match=id, timeout=timedelta(days=5)) is None:
            raise PermanentError("never picked", "not_picked")
        saga.step("pay", enter, "paid")

    one, two = finished_first(stage), stage.enqueue(second, "r1")
    stage.run()
    stage.publish("picked", {"id": "r1"})
    stage.run()
    assert (one.status(), two.status()) == ("completed", "released")
    with pytest.raises(ChangeRefused, match="may come to wait for the same events"):
        erase(stage.app, OperationId("default", "first", "r1"), ANN)
    stage.pass_time(3700)
    stage.run()
    stage.pass_time(6 * 86400)
    stage.run()
    assert (two.status(), stage.accounts()) == ("completed", ["paid"])
    erase(stage.app, OperationId("default", "first", "r1"), ANN)


def test_the_event_of_a_saga_that_has_not_begun_is_kept(stage: Stage) -> None:
    @saga("second", key="{id}", entity="id", events={"picked": "{id}"}, app=stage.app)
    def second(saga: Any, id: str) -> Any:
        if saga.wait_for("picked", match=id, timeout=timedelta(days=5)) is None:
            raise PermanentError("never picked", "not_picked")
        saga.step("pay", enter, "paid")

    one = finished_first(stage)
    stage.run()
    two = stage.enqueue(second, "r1")
    stage.hold("second")  # its workers are busy, or down
    stage.publish("picked", {"id": "r1"})
    stage.run()
    assert (one.status(), two.status()) == ("completed", "accepted")
    with pytest.raises(ChangeRefused, match="may come to wait for the same events"):
        erase(stage.app, OperationId("default", "first", "r1"), ANN)
    stage.pass_time(3700)
    stage.run()
    stage.pass_time(6 * 86400)
    stage.run()
    assert (two.status(), stage.accounts()) == ("completed", ["paid"])
    erase(stage.app, OperationId("default", "first", "r1"), ANN)


def test_the_event_of_a_saga_that_is_replayed_is_kept(stage: Stage) -> None:
    fails = [True]

    @saga("second", key="{id}", entity="id", events={"picked": "{id}"}, app=stage.app)
    def second(saga: Any, id: str) -> Any:
        if fails:
            raise PermanentError("no", "no")
        if saga.wait_for("picked", match=id, timeout=timedelta(days=5)) is None:
            raise PermanentError("never picked", "not_picked")
        saga.step("pay", enter, "paid")

    one, two = finished_first(stage), stage.enqueue(second, "r1")
    stage.run()
    fails.clear()
    stage.publish("picked", {"id": "r1"})
    stage.run()
    assert (one.status(), two.status()) == ("completed", "failed")
    stage.replay("second")
    with pytest.raises(ChangeRefused, match="may come to wait for the same events"):
        erase(stage.app, OperationId("default", "first", "r1"), ANN)
    stage.run()
    stage.pass_time(6 * 86400)
    stage.run()
    assert (two.status(), stage.accounts()) == ("completed", ["paid"])
    erase(stage.app, OperationId("default", "first", "r1"), ANN)


def test_events_for_a_saga_that_it_did_not_come_to_are_erased(stage: Stage) -> None:
    @saga("second", key="{id}", entity="id", events={"picked": "{id}"}, app=stage.app)
    def second(saga: Any, id: str) -> Any:
        saga.sleep(60)
        if id == "r1":
            return "not needed"
        return saga.wait_for("picked", match=id, timeout=timedelta(days=5))

    handle = stage.enqueue(second, "r1")
    stage.run()
    stage.publish("picked", {"id": "r1", "name": CANARY})
    stage.pass_time(70)
    stage.run()
    assert handle.status() == "completed"
    erase(stage.app, OperationId("default", "second", "r1"), ANN)
    assert holding(stage.engine, CANARY) == set()


def test_the_second_event_of_a_saga_that_ended_at_its_first_wait_is_erased(stage: Stage) -> None:
    @saga("returning", key="{id}", entity="id", events={"collected": "{id}", "inspected": "{id}"}, app=stage.app)
    def returning(saga: Any, id: str) -> Any:
        if saga.wait_for("collected", match=id, timeout=timedelta(days=5)) is None:
            raise PermanentError("not collected", "not_collected")
        saga.wait_for("inspected", match=id, timeout=timedelta(days=14))

    handle = stage.enqueue(returning, "r1")
    stage.run()
    stage.publish("inspected", {"id": "r1", "name": CANARY})
    stage.pass_time(6 * 86400)
    stage.run()
    assert handle.status() == "failed"
    act(stage.app, discard.request, Person("ann", "operator"), 1, "over")
    act(stage.app, discard.approve, Person("ben", "admin"), 1)
    erase(stage.app, OperationId("default", "returning", "r1"), ANN)
    assert holding(stage.engine, CANARY) == set()


def test_a_late_event_is_erased_by_another_call(stage: Stage) -> None:
    one = finished_first(stage)
    stage.run()
    stage.publish("picked", {"id": "r1"})
    stage.run()
    assert one.status() == "completed"
    id = OperationId("default", "first", "r1")
    erase(stage.app, id, ANN)
    stage.publish("picked", {"id": "r1", "name": CANARY})  # the carrier repeats itself
    erase(stage.app, id, ANN)
    assert holding(stage.engine, CANARY) == set()


def test_an_answer_about_an_erased_operation_is_not_corrected(stage: Stage) -> None:
    def charge(*, idempotency_key: str) -> str:
        raise TimeoutError

    @stage.app.task(base=IdempotentTask, bind=True, name="charging", key="{id}", shared=False, max_attempts=1)
    def charging(self: IdempotentTask, id: str) -> None:
        self.effect("charge", charge)

    handle = stage.enqueue(charging, "k1")
    stage.run()
    assert handle.status() == "failed"
    id = OperationId("default", "charging", "k1")
    with stage.engine.connect() as connection:
        shown = read(connection, id, "bank")
        letter = connection.execute(text("SELECT id FROM idempotency.dead_letters")).scalar_one()
    resolve_effect(stage.app, shown, "charge", DidNotHappen(), ANN, end=True)
    act(stage.app, discard.request, Person("ann", "operator"), letter, "over")
    act(stage.app, discard.approve, Person("ben", "admin"), letter)
    erase(stage.app, id, ANN)
    with stage.engine.connect() as connection:
        shown = read(connection, id, "bank")
    with pytest.raises(ChangeRefused, match="its data was erased"):
        resolve_effect(stage.app, shown, "charge", Happened("ch_1"), ANN)
