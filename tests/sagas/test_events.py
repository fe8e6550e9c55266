"""Which events end a saga's wait, and which do not: earlier ones, those of another process, those that come too late."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from idempotency import PermanentError, SettingsError, publish
from idempotency.application import runtime_of
from idempotency.sagas import saga
from idempotency.store import saga_reading
from tests.sagas.conftest import Stage


def picking(stage: Stage, name: str = "picking") -> Any:
    """A saga that waits for an event, and returns its number, or None once the time is over."""

    @saga(name, key="{id}", events={"picked": "{id}"}, app=stage.app)
    def picking(saga: Any, id: str) -> Any:
        event = saga.wait_for("picked", match=id, timeout=timedelta(days=5))
        return None if event is None else event["data"]["n"]

    return picking


def test_an_event_from_before_a_saga_was_accepted_is_not_for_it(stage: Stage) -> None:
    task = picking(stage)
    stage.publish("picked", {"id": "r1", "n": 1})
    handle = stage.enqueue(task, "r1")
    stage.run()
    assert handle.status() == "released"
    stage.publish("picked", {"id": "r1", "n": 2})
    stage.run()
    assert handle.result() == 2


def test_an_event_of_the_transaction_that_enqueues_a_saga_is_for_it(stage: Stage) -> None:
    task = picking(stage)
    with Session(runtime_of(stage.app).engine) as session:
        publish(session, "picked", {"id": "r1", "n": 1}, app=stage.app)
        handle = task.enqueue(session, "r1")
        session.commit()
    stage.run()
    assert handle.result() == 1


def test_an_event_after_a_saga_was_accepted_is_for_its_replay_too(stage: Stage) -> None:
    is_open: list[bool] = []

    @saga("twice", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def twice(saga: Any, id: str) -> Any:
        if not is_open:
            raise PermanentError("not yet", "closed")
        event = saga.wait_for("picked", match=id, timeout=timedelta(days=5))
        return event["data"]["n"]

    stage.publish("picked", {"id": "r1", "n": 1})
    handle = stage.enqueue(twice, "r1")
    stage.publish("picked", {"id": "r1", "n": 2})
    stage.run()
    assert handle.status() == "failed"
    is_open.append(True)
    stage.replay("twice")
    stage.run()
    assert handle.result() == 2


def test_an_event_from_before_a_saga_was_called_is_not_for_it(stage: Stage) -> None:
    picks = picking(stage)

    @saga("calling", key="{id}", app=stage.app)
    def calling(saga: Any, id: str) -> Any:
        saga.sleep(60.0)
        return saga.call(picks, id)

    handle = stage.enqueue(calling, "r1")
    stage.run()
    stage.publish("picked", {"id": "r1", "n": 1})
    stage.pass_time(61.0)
    stage.run()
    assert stage.steps("r1")[-1] == ("call", "picking", "begun")
    stage.publish("picked", {"id": "r1", "n": 2})
    stage.run()
    assert handle.result() == 2


def test_a_wait_is_for_one_member_of_an_event_and_nothing_around_it(stage: Stage) -> None:
    def around(saga: Any, id: str) -> None: ...

    for template in ("order-{id}", "{id}/{part}", "{id} "):
        with pytest.raises(SettingsError, match="must be one member and nothing else"):
            saga("around", key="{id}", events={"picked": template}, app=stage.app)(around)


def test_an_event_ends_no_wait_for_another_member_with_its_value(stage: Stage) -> None:
    tasks = []
    for member in ("order_id", "return_id"):

        @saga(f"by.{member}", key="{id}", events={"picked": f"{{{member}}}"}, app=stage.app)
        def waiting(saga: Any, id: str) -> Any:
            event = saga.wait_for("picked", match=id, timeout=timedelta(days=5))
            return event["id"]

        tasks.append(waiting)
    handles = [stage.enqueue(task, "7") for task in tasks]
    stage.run()
    first = stage.publish("picked", {"order_id": "7", "return_id": "8"})
    stage.run()
    assert [handles[0].result(), handles[1].status()] == [first, "released"]
    second = stage.publish("picked", {"order_id": "8", "return_id": 7})
    stage.run()
    assert handles[1].result() == second


def test_no_publisher_fails_by_a_value_that_matches_no_saga(stage: Stage) -> None:
    handle = stage.enqueue(picking(stage), "r1")
    stage.run()
    values: list[Any] = [None, True, 1.5, "", " ", [], {}, "Zo\u00eb", "a\x00b", "\ud800", "x" * 300, " r1", 10**400]
    for value in values:
        stage.publish("picked", {"id": value})
    stage.run()
    assert handle.status() == "released"
    with stage.engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM idempotency.saga_events")).scalar_one() == 0


def test_an_event_that_ended_a_wait_is_there_for_the_replay(stage: Stage) -> None:
    """A replay begins anew, and 'what has happened meanwhile is about it': the parcel was collected once."""
    is_open: list[bool] = []

    @saga("picking", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def picking(saga: Any, id: str) -> Any:
        if is_open:
            saga.sleep(60.0)
        event = saga.wait_for("picked", match=id, timeout=timedelta(days=5))
        if not is_open:
            raise PermanentError("not yet", "closed")
        return event["data"]["n"] if event else None

    handle = stage.enqueue(picking, "r1")
    stage.run()
    stage.publish("picked", {"id": "r1", "n": 1})
    stage.run()
    assert handle.status() == "failed"
    is_open.append(True)
    stage.replay("picking")
    used_by = []
    for _ in range(2):
        stage.run()
        with stage.engine.connect() as connection:
            used_by += [event["used_by"] for event in saga_reading.show(connection, handle.id)["events"]]
        stage.pass_time(61.0)
    assert (handle.status(), handle.result(), used_by) == ("completed", 1, [None, "picked"])
