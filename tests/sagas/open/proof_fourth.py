"""Proofs of a breaker, fourth batch. Each asserts the good outcome."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

from idempotency import PermanentError, publish
from idempotency.application import runtime_of
from idempotency.sagas import call, saga
from tests.sagas.application import enter, entering
from tests.sagas.conftest import Stage


def test_a_batch_of_events_is_published_in_one_transaction(stage: Stage) -> None:
    @saga("waiting", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def waiting(saga: Any, id: str) -> Any:
        return saga.wait_for("picked", match=id, timeout=timedelta(days=5)) is not None

    with stage.engine.connect():
        pass
    with Session(runtime_of(stage.app).engine) as session:
        for n in range(40_000):
            try:
                publish(session, "picked", {"id": f"r{n}"}, app=stage.app)
            except Exception as error:
                pytest.fail(f"event {n}: {error}"[:300])
        session.commit()


def test_a_called_saga_is_undone_by_a_saga_once(stage: Stage) -> None:
    """A gather of which one fails while another is undone at once by a cancel of its parent: everything is undone once."""
    void, make = entering(stage, "void"), entering(stage, "make")

    @saga("child", key=None, app=stage.app)
    def child(saga: Any, id: str) -> Any:
        saga.call(make, thing=id, undo=void)
        if id == "b":
            raise PermanentError("no", "no")
        return id

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.gather(call(child, "a", undo=void_child), call(child, "b", undo=void_child))

    @saga("void_child", key=None, app=stage.app)
    def void_child(saga: Any, id: str, result: str) -> Any:
        saga.step("void", enter, f"void child:{id}:{result}")

    handle = stage.enqueue(parent, "r1")
    stage.run()
    assert handle.status() == "failed"
    assert sorted(stage.accounts()) == sorted(["make:a", "make:b", "void:b", "void child:a:a"])
