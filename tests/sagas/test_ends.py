"""What else ends a saga, or may not: a cancel, a dead process, a dead message, the purge."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from idempotency import publish
from idempotency.application import runtime_of
from idempotency.errors import InvalidArguments
from idempotency.sagas import observe, saga
from idempotency.store import sagas
from idempotency.store.answers import error_text
from idempotency.upkeep import maintenance
from idempotency.wire.keys import OperationId
from tests.sagas.application import enter, entering
from tests.sagas.conftest import Stage

CANCELLED = error_text("cancelled", "the customer has changed her mind")


def cancel(stage: Stage, task: str, key: str) -> bool:
    with runtime_of(stage.app).autocommit() as connection:
        return sagas.cancel(connection, OperationId("default", task, key), CANCELLED)


def waiting_saga(stage: Stage) -> Any:
    """A saga that has called a task, and waits for an event."""
    make, void = entering(stage, "make"), entering(stage, "void")

    @saga("waiting", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def waiting(saga: Any, id: str) -> Any:
        saga.call(make, thing=id, undo=void)
        saga.wait_for("picked", match=id, timeout=timedelta(days=5))
        saga.step("close", enter, f"close:{id}")

    return waiting


def test_a_cancelled_saga_is_undone(stage: Stage) -> None:
    handle = stage.enqueue(waiting_saga(stage), "r1")
    stage.run()
    assert cancel(stage, "waiting", "r1")
    assert not cancel(stage, "waiting", "r1")
    stage.run()
    assert (handle.status(), stage.saga("r1").status) == ("failed", "FAILED")
    assert stage.accounts() == ["make:r1", "void:r1"]
    assert stage.letters() == [("waiting", "cancelled", "open")]


def test_a_saga_that_is_cancelled_before_it_begins_does_nothing(stage: Stage) -> None:
    handle = stage.enqueue(waiting_saga(stage), "r1")
    assert cancel(stage, "waiting", "r1")
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", [])


@pytest.mark.parametrize("is_late", [False, True])
def test_a_cancel_and_a_forward_step_have_one_order(stage: Stage, is_late: bool) -> None:
    void = entering(stage, "void")

    @saga("racing", key="{id}", app=stage.app)
    def racing(saga: Any, id: str) -> Any:
        saga.step("first", enter, f"first:{id}", undo=void)
        if not is_late:
            cancel(stage, "racing", id)
        saga.step("second", enter, f"second:{id}", undo=void)
        if is_late:
            cancel(stage, "racing", id)
        return "done"

    handle = stage.enqueue(racing, "r1")
    stage.run()
    assert handle.status() == "failed"
    second = ["second:r1"] if is_late else []
    undone = ["void:second:r1"] if is_late else []
    assert stage.accounts() == ["first:r1", *second, *undone, "void:first:r1"]


def test_a_saga_that_kills_every_process_is_undone(stage: Stage) -> None:
    handle = stage.enqueue(waiting_saga(stage), "r1")
    stage.run()
    with stage.engine.begin() as connection:
        connection.execute(
            text("""UPDATE idempotency.records SET status = 'started', token = 't', locked_by = 'a|b|c|1|1',
                    locked_until = clock_timestamp() - interval '1 second', available_at = NULL, attempts = 100
                    WHERE key = 'r1'""")
        )
    assert maintenance.recover(stage.app) == 1
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", ["make:r1", "void:r1"])
    assert stage.letters() == [("waiting", "attempts_exhausted", "open")]


def test_nothing_but_its_own_code_ends_a_saga(stage: Stage) -> None:
    stage.enqueue(waiting_saga(stage), "r1")
    stage.run()
    with pytest.raises(IntegrityError, match="a saga that has not ended"), stage.engine.begin() as connection:
        connection.execute(
            text("""UPDATE idempotency.records SET status = 'failed', available_at = NULL, error = '{}', error_code = 'x',
                    completed_at = clock_timestamp(), expires_at = clock_timestamp() WHERE key = 'r1'""")
        )


def test_what_a_saga_has_called_outlives_it(stage: Stage) -> None:
    handle = stage.enqueue(waiting_saga(stage), "r1")
    stage.run()
    age = text("""UPDATE idempotency.records SET expires_at = clock_timestamp() - interval '1 day'
                  WHERE expires_at IS NOT NULL""")
    rows = text("UPDATE idempotency.outbox SET published_at = published_at - interval '30 days'")
    with stage.engine.begin() as connection:
        connection.execute(age)
        connection.execute(rows)
    assert maintenance.purge(stage.app) == 0
    stage.publish("picked", {"id": "r1"})
    stage.run()
    assert handle.status() == "completed"
    with stage.engine.begin() as connection:
        connection.execute(age)
        connection.execute(rows)
        connection.execute(text("UPDATE idempotency.records SET kept_until = NULL"))
    assert maintenance.purge(stage.app) == 2
    with stage.engine.connect() as connection:
        counted = connection.execute(text("SELECT count(*) FROM idempotency.saga_steps")).scalar_one()
    assert counted == 0


def test_an_observer_notes_each_step_once(stage: Stage) -> None:
    for step, status in (("placed", "RUNNING"), ("paid", "RUNNING"), ("placed", "RUNNING"), ("done", "COMPLETED")):
        with runtime_of(stage.app).engine.begin() as connection:
            observe(connection, "order_placement", "o1", step, {"step": step}, status=status, app=stage.app)
    row = stage.saga("o1")
    assert (row.status, row.current_step) == ("COMPLETED", "done")
    assert row.context == {step: {"step": step} for step in ("placed", "paid", "done")}
    assert [name for _, name, _ in stage.steps("o1")] == ["placed", "paid", "done"]


def test_an_observer_does_not_write_over_a_saga(stage: Stage) -> None:
    waiting_saga(stage)
    with runtime_of(stage.app).engine.begin() as connection, pytest.raises(InvalidArguments, match="is a saga"):
        observe(connection, "waiting", "r1", "seen", None, app=stage.app)


def test_an_event_of_a_publisher_with_an_old_snapshot_wakes_the_saga_at_the_next_recovery(stage: Stage) -> None:
    handle = stage.enqueue(waiting_saga(stage), "r1")
    with stage.engine.connect().execution_options(isolation_level="REPEATABLE READ") as publisher, publisher.begin():
        publisher.execute(text("SELECT 1 FROM idempotency.records"))
        stage.run()
        publish(publisher, "picked", {"id": "r1"}, app=stage.app)
    assert (stage.run(), handle.status()) == ([], "released")
    maintenance.recover(stage.app)
    stage.run()
    assert handle.status() == "completed"
