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
from tests.sagas.application import enter, paid_once_picked
from tests.sagas.conftest import Stage
from tests.support.operators import ANN, act


def finished_first(stage: Stage) -> Any:
    @saga("first", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def first(saga: Any, id: str) -> Any:
        return saga.wait_for("picked", match=id, timeout=timedelta(days=5)) and "picked"

    return stage.enqueue(first, "r1")


def erase_first(stage: Stage) -> None:
    erase(stage.app, OperationId("default", "first", "r1"), ANN)


def check_kept(stage: Stage) -> None:
    with pytest.raises(ChangeRefused, match="may come to wait for the same events"):
        erase_first(stage)


def test_the_event_of_a_running_saga_is_kept_however_its_key_is_joined(stage: Stage) -> None:
    second = paid_once_picked(stage, key="shop-{id}", entity=None, pause=3600)
    one, two = finished_first(stage), stage.enqueue(second, "r1")
    stage.run()
    stage.publish("picked", {"id": "r1"})
    stage.run()
    assert (one.status(), two.status()) == ("completed", "released")
    check_kept(stage)
    stage.pass_time(3700)
    stage.run()
    stage.pass_time(6 * 86400)
    stage.run()
    assert (two.status(), stage.accounts()) == ("completed", ["paid"])
    erase_first(stage)


@pytest.mark.long
def test_the_event_of_a_saga_that_has_not_begun_is_kept(stage: Stage) -> None:
    second = paid_once_picked(stage)
    one = finished_first(stage)
    stage.run()
    two = stage.enqueue(second, "r1")
    stage.hold("second")  # its workers are busy, or down
    stage.publish("picked", {"id": "r1"})
    stage.run()
    assert (one.status(), two.status()) == ("completed", "accepted")
    check_kept(stage)
    stage.pass_time(3700)
    stage.run()
    stage.pass_time(6 * 86400)
    stage.run()
    assert (two.status(), stage.accounts()) == ("completed", ["paid"])
    erase_first(stage)


@pytest.mark.long
def test_the_event_of_a_saga_that_is_replayed_is_kept(stage: Stage) -> None:
    fails = [True]
    second = paid_once_picked(stage, fails=fails)
    one, two = finished_first(stage), stage.enqueue(second, "r1")
    stage.run()
    fails.clear()
    stage.publish("picked", {"id": "r1"})
    stage.run()
    assert (one.status(), two.status()) == ("completed", "failed")
    stage.replay("second")
    check_kept(stage)
    stage.run()
    stage.pass_time(6 * 86400)
    stage.run()
    assert (two.status(), stage.accounts()) == ("completed", ["paid"])
    erase_first(stage)


@pytest.mark.long
def test_the_event_of_a_saga_whose_letter_is_open_is_kept(stage: Stage) -> None:
    fails = [True]
    second = paid_once_picked(stage, fails=fails)
    one, two = finished_first(stage), stage.enqueue(second, "r1")
    stage.run()
    fails.clear()
    stage.publish("picked", {"id": "r1"})
    stage.run()
    assert (one.status(), two.status()) == ("completed", "failed")
    check_kept(stage)
    stage.replay("second")
    stage.run()
    assert (two.status(), stage.accounts()) == ("completed", ["paid"])


def test_the_event_that_a_saga_whose_letter_is_open_has_waited_for_is_kept(stage: Stage) -> None:
    fails = [True]

    @saga("second", key="{order}", events={"picked": "{id}"}, app=stage.app)
    def second(saga: Any, order: str, id: str) -> Any:
        if saga.wait_for("picked", match=id, timeout=timedelta(days=5)) is None:
            raise PermanentError("never picked", "not_picked")
        if fails:
            raise PermanentError("the bank is closed", "closed")
        saga.step("pay", enter, "paid")

    one, two = finished_first(stage), stage.enqueue(second, "o77", "r1")
    stage.run()
    stage.publish("picked", {"id": "r1"})
    stage.run()
    assert (one.status(), two.status()) == ("completed", "failed")
    fails.clear()
    check_kept(stage)
    stage.replay("second")
    stage.run()
    assert (two.status(), stage.accounts()) == ("completed", ["paid"])


def test_a_saga_of_another_application_is_not_in_the_way(stage: Stage) -> None:
    """Its events are its own."""

    @saga("second", key="{id}", entity="id", events={"paid": "{id}"}, app=stage.app)
    def second(saga: Any, id: str) -> Any:
        saga.sleep(3600)

    stage.enqueue(second, "r1")
    one = finished_first(stage)
    stage.run()
    stage.publish("picked", {"id": "r1"})
    stage.run()
    assert one.status() == "completed"
    with stage.engine.begin() as connection:
        for table in ("records", "sagas", "outbox"):
            connection.execute(text(f"UPDATE idempotency.{table} SET service = 'other' WHERE task = 'second'"))
    erase_first(stage)


def test_the_event_of_a_saga_whose_message_died_is_kept(stage: Stage) -> None:
    second = paid_once_picked(stage)
    one = finished_first(stage)
    stage.run()
    two = stage.enqueue(second, "r1")
    stage.message_dies("second")
    stage.publish("picked", {"id": "r1"})
    stage.run()
    assert one.status() == "completed"
    check_kept(stage)
    stage.replay("second")
    stage.run()
    assert (two.status(), stage.accounts()) == ("completed", ["paid"])


def test_an_event_that_others_match_by_another_member_is_left(stage: Stage) -> None:
    @saga("first", key="{id}", entity="customer", events={"picked": "{id}"}, app=stage.app)
    def first(saga: Any, id: str, customer: str) -> Any:
        return "done"

    @saga("second", key="{id}", entity="id", events={"paid": "{customer}"}, app=stage.app)
    def second(saga: Any, id: str, customer: str) -> Any:
        saga.sleep(3600)
        if saga.wait_for("paid", match=customer, timeout=timedelta(days=5)) is None:
            raise PermanentError("never paid", "not_paid")
        saga.step("pay", enter, "paid")

    one, two = stage.enqueue(first, "r1", "c1"), stage.enqueue(second, "o1", "c1")
    stage.run()
    stage.publish("paid", {"customer": "c1"})
    stage.run()
    assert (one.status(), two.status()) == ("completed", "released")
    erase_first(stage)
    stage.pass_time(3700)
    stage.run()
    assert (two.status(), stage.accounts()) == ("completed", ["paid"])


def test_a_plain_task_that_has_not_begun_is_not_in_the_way(stage: Stage) -> None:
    @stage.app.task(base=IdempotentTask, bind=True, name="remind", key="{id}", shared=False)
    def remind(self: IdempotentTask, id: str) -> None: ...

    one = finished_first(stage)
    stage.run()
    stage.enqueue(remind, "r1")
    stage.hold("remind")
    stage.publish("picked", {"id": "r1"})
    stage.run()
    assert one.status() == "completed"
    erase_first(stage)


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
