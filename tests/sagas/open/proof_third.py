"""Proofs of a breaker, third batch. Each asserts the good outcome."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from idempotency import IdempotentTask, PermanentError
from idempotency.application import runtime_of
from idempotency.errors import IdempotencyError
from idempotency.sagas import observe, saga
from idempotency.upkeep import maintenance
from tests.sagas.application import enter, entering
from tests.sagas.conftest import Stage


def noted(stage: Stage, type: str, key: str, status: str) -> None:
    with runtime_of(stage.app).engine.begin() as connection, contextlib.suppress(IdempotencyError):
        observe(connection, type, key, f"as {status}", None, status=status, app=stage.app)


def run(stage: Stage, times: int = 3) -> None:
    for _ in range(times):
        with contextlib.suppress(Exception):
            stage.run()
        maintenance.recover(stage.app)
        stage.pass_time(400.0)


@pytest.mark.parametrize("status", ["COMPENSATING", "COMPLETED", "FAILED"])
@pytest.mark.parametrize("fails", [False, True])
def test_what_an_observer_notes_elsewhere_changes_no_saga(stage: Stage, status: str, fails: bool) -> None:
    """The observer is in a process that has not imported the saga: the name is taken, and nothing tells it."""
    void = entering(stage, "void")

    @saga("waiting", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def waiting(saga: Any, id: str) -> Any:
        saga.step("one", enter, "one", undo=void)
        saga.wait_for("picked", match=id, timeout=timedelta(days=5))
        if fails:
            raise PermanentError("no", "no")

    handle = stage.enqueue(waiting, "r1")
    stage.run()
    task = stage.app.tasks.pop("waiting")
    noted(stage, "waiting", "r1", status)
    stage.app.tasks["waiting"] = task
    stage.publish("picked", {"id": "r1"})
    run(stage)
    wanted = ("failed", ["one", "void:one"]) if fails else ("completed", ["one"])
    assert (handle.status(), stage.accounts()) == wanted, (stage.saga("r1").status, stage.letters())


@pytest.mark.parametrize("fails", [False, True])
def test_a_process_that_is_noted_before_its_task_does_not_keep_it_from_ending(stage: Stage, fails: bool) -> None:
    """Observed as `order_placement` o1; the task of that name and key is no saga."""

    @stage.app.task(
        base=IdempotentTask, bind=True, name="order_placement", key="{order_id}", shared=False, max_attempts=2
    )
    def place(self: IdempotentTask, order_id: str) -> str:
        if fails:
            raise PermanentError("out of stock", "out_of_stock")
        return enter(self.session, f"order:{order_id}")

    noted(stage, "order_placement", "o1", "RUNNING")
    handle = stage.enqueue(place, "o1")
    run(stage, 4)
    assert handle.status() == ("failed" if fails else "completed"), (stage.letters(), stage.accounts())


def test_one_saga_with_much_data_does_not_break_the_view_for_all(stage: Stage) -> None:
    @saga("small", key="{id}", app=stage.app)
    def small(saga: Any, id: str) -> Any:
        saga.step("one", enter, "one")
        saga.sleep(60.0)

    for key in ("r1", "r2"):
        stage.enqueue(small, key)
    stage.run()
    with stage.engine.begin() as connection:  # 1,100 calls whose results have the allowed 256 KiB
        connection.execute(
            text("""
            INSERT INTO idempotency.saga_steps (saga_id, generation, position, tenant, name, kind, state, result, ended_at)
            SELECT g.id, 1, n + 10, 'default', 'call#' || n, 'call', 'done', to_json(repeat('x', 262000))::text, now()
            FROM idempotency.sagas g, generate_series(1, 1100) n WHERE g.key = 'r1'""")
        )
    with stage.engine.connect() as connection:
        rows = connection.execute(
            text("SELECT key, status, pg_column_size(context) FROM idempotency.saga_instances ORDER BY key")
        ).all()
    assert [row.key for row in rows] == ["r1", "r2"]


def test_the_purge_does_not_read_all_ended_sagas_in_every_pass(stage: Stage) -> None:
    """`retention_completed` is longer than `retention_failed`: what has ended stays, and is looked at every minute."""
    with stage.engine.begin() as connection:
        connection.execute(
            text("""
            INSERT INTO idempotency.records (tenant, task, key, status, fence, attempts, fingerprint, message, result,
                response_code, completed_at, expires_at, service)
            SELECT 'default', 's', n::text, 'completed', n, 1, 'v1:x', '', '1', 200, now() - interval '60 days',
                   now() + interval '300 days', 'bank' FROM generate_series(1, 20000) n""")
        )
        connection.execute(
            text("""
            INSERT INTO idempotency.sagas (tenant, task, key, entity_id, status, updated_at)
            SELECT 'default', 's', n::text, 'e', 'COMPLETED', now() - interval '60 days' FROM generate_series(1, 20000) n""")
        )
        connection.execute(text("ANALYZE idempotency.sagas"))
        connection.execute(text("ANALYZE idempotency.records"))
    from idempotency.store import purge

    statement = purge._FORGET_OBSERVED.replace("%(retention)s", "2592000")
    with stage.engine.connect() as connection:
        plan = [
            row[0] for row in connection.exec_driver_sql(f"EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) {statement}").all()
        ]
    loops = max(int(line.split("loops=")[1].rstrip(")")) for line in plan if "loops=" in line)
    assert loops <= 1001, loops
