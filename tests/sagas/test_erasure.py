"""The data of a saga is erased with what it has called, and the events that were for it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from idempotency import IdempotentTask
from idempotency.errors import ChangeRefused
from idempotency.operate.erase import erase
from idempotency.sagas import saga
from idempotency.wire.keys import OperationId
from tests.sagas.application import enter, entering
from tests.sagas.conftest import Stage
from tests.support.dump import holding
from tests.support.operators import ANN

CANARY = "canary-7f3a"


@pytest.fixture
def welcoming(stage: Stage) -> Any:
    """A saga with a person's data in everything that it records."""
    make, void = entering(stage, "make"), entering(stage, "void")

    def tell(*, to: str, idempotency_key: str) -> str:
        return f"told {to}"

    @saga("welcoming", key="{id}", entity="id", events={"picked": "{name}"}, app=stage.app)
    def welcoming(saga: Any, id: str, name: str) -> Any:
        saga.step("note", enter, name)
        saga.effect("tell", tell, to=name)
        saga.call(make, name, undo=void)
        return saga.wait_for("picked", match=name, timeout=timedelta(days=5))["data"]

    welcoming.make = make
    return welcoming


def finished(stage: Stage, welcoming: Any, key: str, name: str = CANARY) -> OperationId:
    stage.enqueue(welcoming, key, name)
    stage.run()
    stage.publish("picked", {"id": key, "name": name})
    stage.run()
    stage.publish("picked", {"id": key, "name": name})  # which nothing waits for any more
    return OperationId("default", "welcoming", key)


@pytest.mark.long
def test_a_saga_is_erased_with_its_calls_and_events(stage: Stage, welcoming: Any) -> None:
    id = finished(stage, welcoming, "r1")
    assert holding(stage.engine, CANARY) == {
        *("records", "outbox", "saga_steps", "saga_events", "saga_instances"),
    }
    with stage.engine.connect() as connection:
        steps = connection.execute(text("SELECT kind, name, state FROM idempotency.saga_steps ORDER BY position")).all()
    erased = erase(stage.app, id, ANN).operations
    assert [each.task for each in erased] == ["welcoming", "make"]
    assert holding(stage.engine, CANARY) == set()
    with stage.engine.connect() as connection:
        after = connection.execute(text("SELECT kind, name, state FROM idempotency.saga_steps ORDER BY position")).all()
        audits = connection.execute(text("SELECT task, details FROM idempotency.audit ORDER BY id")).all()
    assert (after, stage.saga("r1").status) == (steps, "COMPLETED")
    assert [tuple(row) for row in audits] == [("welcoming", {}), ("make", {"called_by": "welcoming r1"})]
    stage.enqueue(welcoming, "r1", CANARY)  # asked for again: nothing runs
    entries = stage.accounts()
    stage.run()
    assert stage.accounts() == entries


def test_a_saga_that_has_not_ended_keeps_its_data_and_that_of_its_calls(stage: Stage, welcoming: Any) -> None:
    stage.enqueue(welcoming, "r1", CANARY)
    stage.run()
    with pytest.raises(ChangeRefused, match="welcoming r1: is released; only what has ended is erased"):
        erase(stage.app, OperationId("default", "welcoming", "r1"), ANN)
    with stage.engine.connect() as connection:
        key = connection.execute(text("SELECT key FROM idempotency.records WHERE task = 'make'")).scalar_one()
    with pytest.raises(ChangeRefused, match="the saga welcoming r1, which has called it, has not ended"):
        erase(stage.app, OperationId("default", "make", key), ANN)


@pytest.mark.long
def test_events_that_another_saga_waits_for_are_not_erased(stage: Stage, welcoming: Any) -> None:
    id = finished(stage, welcoming, "r1")
    stage.enqueue(welcoming, "r2", CANARY)
    stage.run()
    with pytest.raises(ChangeRefused, match="the saga welcoming r2, which waits for the same events, has not ended"):
        erase(stage.app, id, ANN)


def test_what_an_erased_call_has_left_in_its_saga_is_erased_too(stage: Stage) -> None:
    @stage.app.task(base=IdempotentTask, bind=True, name="tell", shared=False)
    def tell(self: IdempotentTask, name: str) -> str:
        return name

    @saga("telling", key="{id}", app=stage.app)
    def telling(saga: Any, id: str) -> None:
        saga.call(tell, CANARY)

    stage.enqueue(telling, "r1")
    stage.run()
    with stage.engine.connect() as connection:
        key = connection.execute(text("SELECT key FROM idempotency.records WHERE task = 'tell'")).scalar_one()
    erase(stage.app, OperationId("default", "tell", key), ANN)
    assert holding(stage.engine, CANARY) == set()


def test_an_event_is_kept_for_a_running_saga_that_has_not_come_to_it_yet(stage: Stage) -> None:
    """Two sagas are about one parcel. The first one has used the event; the second still sleeps before its wait."""

    @saga("first", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def first(saga: Any, id: str) -> Any:
        return saga.wait_for("picked", match=id, timeout=timedelta(days=5)) and "picked"

    @saga("second", key="shop:{id}", events={"picked": "{id}"}, app=stage.app)
    def second(saga: Any, id: str) -> Any:
        saga.sleep(3600)
        assert saga.wait_for("picked", match=id, timeout=timedelta(days=5)) is not None
        saga.step("pay", enter, "paid")

    one, two = stage.enqueue(first, "r1"), stage.enqueue(second, "r1")
    stage.run()
    stage.publish("picked", {"id": "r1"})
    stage.run()
    assert (one.status(), two.status()) == ("completed", "released")
    id = OperationId("default", "first", "r1")
    refused = "first r1: the saga second shop:r1, which may come to wait for the same events, has not ended"
    with pytest.raises(ChangeRefused, match=refused):
        erase(stage.app, id, ANN)
    stage.pass_time(3700)
    stage.run()
    assert (two.status(), stage.accounts()) == ("completed", ["paid"])
    erase(stage.app, id, ANN)
