"""What an observer notes about a process: for people, whatever bears the same name."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from idempotency import IdempotentTask, PermanentError
from idempotency.application import runtime_of
from idempotency.errors import ChangeRefused
from idempotency.operate import saga as operate
from idempotency.sagas import observe, saga
from idempotency.store import forgetting
from tests.sagas.application import enter, entering
from tests.sagas.conftest import Stage
from tests.sagas.test_people import id_of
from tests.support.operators import ANN


def note(stage: Stage, type: str, key: str, status: str) -> None:
    with runtime_of(stage.app).engine.begin() as connection:
        observe(connection, type, key, f"as {status}", None, status=status, app=stage.app)


@pytest.mark.long
@pytest.mark.parametrize("status", ["COMPENSATING", "COMPLETED", "FAILED"])
def test_an_observer_that_does_not_know_the_saga_does_not_write_over_it(stage: Stage, status: str) -> None:
    void = entering(stage, "void")

    @saga("waiting", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def waiting(saga: Any, id: str) -> Any:
        saga.step("one", enter, "one", undo=void)
        saga.wait_for("picked", match=id, timeout=timedelta(days=5))
        raise PermanentError("no", "no")

    handle = stage.enqueue(waiting, "r1")
    stage.run()
    stage.app.tasks.pop("waiting")  # a web process that has not imported it
    note(stage, "waiting", "r1", status)
    stage.app.tasks["waiting"] = waiting
    stage.publish("picked", {"id": "r1"})
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", ["one", "void:one"])


def test_a_saga_begins_though_its_process_was_noted_before(stage: Stage) -> None:
    @saga("waiting", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def waiting(saga: Any, id: str) -> Any:
        saga.step("one", enter, "one")
        return saga.wait_for("picked", match=id, timeout=timedelta(days=5)) is not None

    stage.app.tasks.pop("waiting")
    note(stage, "waiting", "r1", "COMPLETED")
    stage.app.tasks["waiting"] = waiting
    handle = stage.enqueue(waiting, "r1")
    stage.run()
    assert stage.saga("r1").status == "RUNNING"
    stage.publish("picked", {"id": "r1"})
    stage.run()
    assert (handle.result(), stage.accounts()) == (True, ["one"])


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("by_itself", [False, True])
def test_a_task_that_is_called_as_an_observed_process_ends(stage: Stage, fails: bool, by_itself: bool) -> None:
    @stage.app.task(base=IdempotentTask, bind=True, name="placement", key="{order_id}", shared=False)
    def place(self: IdempotentTask, order_id: str) -> str:
        if by_itself:
            observe(self.session, "placement", order_id, "requested", {}, app=stage.app)
        if fails:
            raise PermanentError("out of stock", "out_of_stock")
        return enter(self.session, f"order:{order_id}")

    if not by_itself:
        note(stage, "placement", "o1", "RUNNING")
    handle = stage.enqueue(place, "o1")
    stage.run()
    assert handle.status() == ("failed" if fails else "completed")


def test_what_an_observer_has_noted_is_neither_cancelled_nor_signalled(stage: Stage) -> None:
    place = entering(stage, "placement")
    stage.enqueue(place, "o1", idempotency_key="o1")
    note(stage, "placement", "o1", "RUNNING")
    with pytest.raises(ChangeRefused, match="an observer has noted it"):
        operate.cancel_saga(stage.app, id_of(place, "o1"), ANN)
    with pytest.raises(ChangeRefused, match="an observer has noted it"):
        operate.signal_saga(stage.app, id_of(place, "o1"), "picked", {}, ANN)
    stage.run()
    assert stage.accounts() == ["placement:o1"]


def test_the_purge_of_what_was_observed_reads_no_ended_saga(stage: Stage) -> None:
    with stage.engine.begin() as connection:
        connection.execute(
            text("""
            INSERT INTO idempotency.sagas (tenant, task, key, service, entity_id, status, updated_at)
            SELECT 'default', 's', n::text, 'bank', 'e', 'COMPLETED', now() - interval '60 days'
            FROM generate_series(1, 5000) n""")
        )
        connection.execute(text("ANALYZE idempotency.sagas"))
    statement = forgetting.OBSERVED.batch.replace("%(retention)s", "2592000").replace("%(batch)s", "1000")
    statement = statement.replace("%(service)s", "'bank'")
    with stage.engine.connect() as connection:
        explained = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}").scalar_one()
    plan = explained[0]["Plan"]
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 20, explained
