"""Calls in doubt whose message died: their end is corrected before anything reads it, and what people find of them has a letter."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

from idempotency import DidNotHappen, Happened, IdempotentTask
from idempotency.errors import CallFailed
from idempotency.sagas import saga
from tests.sagas.application import enter
from tests.sagas.conftest import Stage
from tests.sagas.test_replayed_calls import found, open_letters


@pytest.fixture
def charging(stage: Stage) -> Any:
    def lost(*, idempotency_key: str) -> str:
        raise OSError("no answer")

    @stage.app.task(
        base=IdempotentTask, bind=True, name="charging", key=None, shared=False, effect_types={"charge": str}
    )
    def charging(self: IdempotentTask) -> None:
        self.effect("charge", lost)

    return charging


def code_of_the_record(stage: Stage) -> str:
    with stage.engine.connect() as connection:
        query = text("SELECT error_code FROM idempotency.records WHERE task = 'charging'")
        return str(connection.execute(query).scalar_one())


def test_a_saga_stops_for_a_call_in_doubt_whose_message_died(stage: Stage, charging: Any) -> None:
    """It first fails as rejected, and the same transaction corrects that before anything can read it."""

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.call(charging)

    handle = stage.enqueue(parent, "r1")
    stage.deliver()
    stage.deliver()
    stage.message_dies("charging")
    assert code_of_the_record(stage) == "effect_unknown"
    stage.run()
    assert (handle.status(), stage.saga("r1").status) == ("released", "COMPENSATING")
    assert ("parent", "compensation_failed", "open") in stage.letters()


def test_code_that_goes_on_from_a_refusal_sees_that_the_charge_is_in_doubt(stage: Stage, charging: Any) -> None:
    """As `returns.process_return` does: only what is in doubt is raised."""

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        try:
            saga.call(charging)
        except CallFailed as refused:
            if refused.code in ("effect_unknown", "unfinished"):
                raise
            saga.step("instead", enter, "instead")

    handle = stage.enqueue(parent, "r1")
    stage.deliver()
    stage.deliver()
    stage.message_dies("charging")
    stage.run()
    assert (handle.status(), stage.accounts()) == ("released", [])
    assert ("parent", "compensation_failed", "open") in stage.letters()
    assert open_letters(stage, "charging") == ["effect_unknown"]


def test_a_corrected_answer_about_a_call_whose_message_died_opens_its_letter(stage: Stage, charging: Any) -> None:
    """Which the broker has stored, and not its operation."""

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        try:
            saga.call(charging)
        except CallFailed:
            saga.sleep(60)

    handle = stage.enqueue(parent, "r1")
    stage.deliver()
    stage.deliver()
    stage.message_dies("charging")
    stage.run()
    found(stage, charging, DidNotHappen(), end=True)
    stage.pass_time(61)
    stage.run()
    assert (handle.status(), open_letters(stage, "charging")) == ("completed", [])
    assert found(stage, charging, Happened("ch_1")) == "unfinished"
    assert open_letters(stage, "charging") == ["unfinished"]
