"""What was declined is replayed only by a person who confirms it, also through a saga, and also behind an open effect."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from sqlalchemy import text

from idempotency import DidNotHappen, IdempotentTask, OperationId, PermanentError
from idempotency.application import runtime_of
from idempotency.operate.change import read
from idempotency.operate.replay import NotConfirmed, replay, to_confirm
from idempotency.operate.resolve import resolve_effect
from idempotency.sagas import saga
from tests.sagas.conftest import Stage
from tests.sagas.test_people import letter_of
from tests.support.operators import ANN


def confirmable(stage: Stage, *letters: int) -> list[Any]:
    with runtime_of(stage.app).autocommit() as connection:
        return to_confirm(connection, letters)


def declined_call(stage: Stage, code: str) -> Any:
    @stage.app.task(base=IdempotentTask, bind=True, name="refuse", shared=False, key="{id}")
    def refuse(self: IdempotentTask, id: str) -> None:
        raise PermanentError("the buyer's address is none", code)

    @saga("buys", key="{id}", app=stage.app)
    def buys(saga: Any, id: str) -> Any:
        saga.call(refuse, id=id)

    return buys


@pytest.mark.long
@pytest.mark.parametrize("code", ["no_address", "invalid_result"])
def test_a_saga_that_fails_as_a_declined_call_is_replayed_only_on_purpose(stage: Stage, code: str) -> None:
    buys = declined_call(stage, code)
    handle = stage.enqueue(buys, "r1")
    stage.run()
    assert handle.status() == "failed"
    with stage.engine.connect() as connection:
        rows = connection.execute(text("SELECT task, error FROM idempotency.records ORDER BY task")).all()
    marks = {row.task: json.loads(row.error).get("declined", False) for row in rows}
    assert marks == {"refuse": True, "buys": True}
    caller = letter_of(stage, buys)
    with pytest.raises(NotConfirmed):
        replay(stage.app, caller, ANN, confirmed=())


@pytest.mark.long
@pytest.mark.parametrize("code", ["no_address", "invalid_result"])
def test_what_was_declined_over_an_open_effect_is_replayed_only_on_purpose_once_that_is_resolved(
    stage: Stage, code: str
) -> None:
    def call(*, idempotency_key: str) -> int:
        raise TimeoutError("no answer")

    @stage.app.task(base=IdempotentTask, bind=True, name="pays", shared=False, key="{id}")
    def pays(self: IdempotentTask, id: str) -> None:
        with contextlib.suppress(TimeoutError):
            self.effect("call", call)
        raise PermanentError("the buyer is blocked", code)

    stage.enqueue(pays, "r1")
    stage.run()
    id = OperationId("default", "pays", "r1")
    with runtime_of(stage.app).autocommit() as connection:
        seen = read(connection, id, runtime_of(stage.app).settings.service)
    assert resolve_effect(stage.app, seen, "call", DidNotHappen(), ANN, end=True) == code
    letter = letter_of(stage, pays)
    with pytest.raises(NotConfirmed):
        replay(stage.app, letter, ANN, confirmed=())
