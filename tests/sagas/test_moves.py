"""In partitions: a saga, or an undo, whose record moves at this moment is woken all the same, and undone once."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

from idempotency import OperationId
from idempotency.errors import ChangeRefused
from idempotency.operate import saga as operate
from idempotency.operate.replay import replay
from idempotency.sagas import saga
from tests.partitions.conftest import template as template
from tests.sagas.conftest import Stage
from tests.sagas.test_events import picking
from tests.sagas.test_people import id_of, letter_of
from tests.sagas.test_people import stuck as stuck
from tests.sagas.test_people import things as things
from tests.support.operators import ANN
from tests.support.partitions import while_it_moves


def test_what_is_being_replayed_is_not_undone_by_hand(stage: Stage, stuck: Any) -> None:
    handle = stage.enqueue(stuck, "r1")
    stage.run()
    stuck.void.refuses.clear()
    replay(stage.app, letter_of(stage, stuck.void), ANN)  # the undo waits for a worker
    with stage.engine.connect() as connection:
        query = text("SELECT tenant, task, key FROM idempotency.records WHERE task = 'void' AND status = 'released'")
        undo = OperationId(*connection.execute(query).one())
        with pytest.raises(ChangeRefused, match="wait for its end"):
            while_it_moves(
                stage.engine,
                connection,
                undo,
                lambda: operate.mark_undone(stage.app, id_of(stuck), "make#2", ANN),
            )
    stage.run()
    assert stage.accounts() == ["make:a", "make:b", "void:b", "void:a"]
    assert handle.status() == "failed"


@pytest.mark.long
def test_an_event_wakes_it_in_its_publisher_s_transaction(stage: Stage) -> None:
    task = picking(stage)
    handle = stage.enqueue(task, "r1")
    stage.run()
    with stage.engine.connect() as connection:
        while_it_moves(stage.engine, connection, id_of(task), lambda: stage.publish("picked", {"id": "r1", "n": 1}))
    stage.run()
    assert handle.result() == 1


@pytest.mark.long
def test_what_it_has_called_ends_and_wakes_it(stage: Stage, things: tuple[Any, Any]) -> None:
    make, _ = things

    @saga("calling", key="{id}", app=stage.app)
    def calling(saga: Any, id: str) -> Any:
        return saga.call(make, thing=id)

    handle = stage.enqueue(calling, "r1")
    stage.deliver()  # as far as its call
    assert handle.status() == "released"
    with stage.engine.connect() as connection:
        while_it_moves(stage.engine, connection, id_of(calling), stage.deliver)
    stage.run()
    assert (handle.status(), stage.accounts()) == ("completed", ["make:r1"])
