"""Many events: how long they are kept, which is as long as a saga runs that may use them, and what finding one costs."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

from idempotency.application import runtime_of
from idempotency.sagas import observe, saga
from idempotency.store import forgetting, saga_steps
from tests.sagas.conftest import Stage

DAY = 86400.0
# As many waits of the only saga that have ended, each with its event; and as many events again.
USED = text("""
WITH events AS (
    INSERT INTO idempotency.saga_events (tenant, service, event_type, match, event_id, event, signalled)
    SELECT 'default', 'bank', 'picked', 'id=r1', gen_random_uuid()::text, '{}', true
    FROM generate_series(1, :used * 2) RETURNING id
), used AS (
    SELECT id, row_number() OVER (ORDER BY id) AS number FROM events
)
INSERT INTO idempotency.saga_steps (saga_id, generation, position, tenant, name, kind, state, event_type, match, event_id)
SELECT g.id, 1, :used + number, 'default', 'picked', 'wait', 'done', 'picked', 'id=r1', used.id
FROM used, idempotency.sagas g WHERE number <= :used
""")


@pytest.fixture
def late(stage: Stage) -> Any:
    """A saga that comes to its wait after fifty days."""

    @saga("late", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def late(saga: Any, id: str) -> Any:
        saga.sleep(50 * DAY)
        return saga.wait_for("picked", match=id, timeout=DAY) is not None

    return late


def age(stage: Stage, days: float) -> None:
    """Let time pass, also for what is kept."""
    stage.pass_time(days * DAY)
    with stage.engine.begin() as connection:
        for table, columns in (("saga_events", ("received_at",)), ("sagas", ("accepted_at", "created_at"))):
            for column in columns:
                connection.execute(
                    text(f"UPDATE idempotency.{table} SET {column} = {column} - make_interval(secs => :seconds)"),
                    {"seconds": days * DAY},
                )


def kept(stage: Stage) -> list[str]:
    """The events that are left after a purge."""
    with runtime_of(stage.app).autocommit() as connection:
        forgetting.events(connection, "bank", retention=30 * DAY, limit=1000)
        return list(connection.execute(text("SELECT match FROM idempotency.saga_events ORDER BY id")).scalars())


def test_an_event_stays_while_a_saga_runs_that_may_still_wait_for_it(stage: Stage, late: Any) -> None:
    stage.publish("picked", {"id": "before"})
    handle = stage.enqueue(late, "r1")
    stage.run()
    age(stage, 10.0)
    stage.publish("picked", {"id": "r1"})
    stage.publish("picked", {"id": "of another"})
    age(stage, 25.0)
    assert kept(stage) == ["id=r1", "id=of another"]
    age(stage, 16.0)
    assert kept(stage) == ["id=r1", "id=of another"]  # older than the setting says
    stage.run()
    assert handle.result() is True
    assert kept(stage) == []


def test_neither_what_is_undone_nor_what_an_observer_notes_keeps_events(stage: Stage, late: Any) -> None:
    with runtime_of(stage.app).engine.begin() as connection:
        observe(connection, "placement", "o1", "paid", {}, app=stage.app)
    stage.enqueue(late, "r1")
    stage.run()
    stage.publish("picked", {"id": "r1"})
    age(stage, 29.0)
    assert kept(stage) == ["id=r1"]
    age(stage, 2.0)
    assert kept(stage) == ["id=r1"]
    with stage.engine.begin() as connection:
        connection.execute(text("UPDATE idempotency.sagas SET status = 'COMPENSATING' WHERE task = 'late'"))
    assert kept(stage) == []


def test_a_saga_of_another_application_keeps_no_events(stage: Stage, late: Any) -> None:
    """Of one that is gone, for example, whose sagas never end."""
    stage.enqueue(late, "r1")
    stage.run()
    stage.publish("picked", {"id": "r1"})
    age(stage, 31.0)
    assert kept(stage) == ["id=r1"]
    with stage.engine.begin() as connection:
        connection.execute(text("UPDATE idempotency.sagas SET service = 'another'"))
    assert kept(stage) == []


FIELDS = {"service": "bank", "retention": DAY, "batch": 1000}


def test_the_bound_is_read_from_an_index(stage: Stage) -> None:
    with stage.engine.connect() as connection:
        connection.execute(text("SET enable_seqscan = off"))
        plan = connection.exec_driver_sql("EXPLAIN " + forgetting.EVENTS.batch, FIELDS).scalars().all()
    assert "sagas_running" in "\n".join(plan)
    assert "saga_events_received" in "\n".join(plan)


def rows_read(plan: dict[str, Any]) -> int:
    """The rows that all parts of a plan have read."""
    own = plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)
    return int(own * plan["Actual Loops"]) + sum(map(rows_read, plan.get("Plans", [])))


def test_the_thousandth_wait_for_one_kind_of_event_reads_as_little_as_the_tenth(stage: Stage) -> None:
    @saga("many", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def many(saga: Any, id: str) -> Any:
        saga.wait_for("picked", match=id, timeout=DAY)

    stage.enqueue(many, "r1")
    stage.run()
    read, fields = (
        [],
        {"tenant": "default", "service": "bank", "event_type": "picked", "match": "id=r1", "generation": 1},
    )
    with stage.engine.connect() as connection:
        fields["saga"] = connection.execute(text("SELECT id FROM idempotency.sagas")).scalar_one()
        for used in (10, 1000):
            connection.execute(text("DELETE FROM idempotency.saga_events"))
            connection.execute(text("DELETE FROM idempotency.saga_steps"))
            connection.execute(USED, {"used": used})
            connection.execute(text("ANALYZE idempotency.saga_events, idempotency.saga_steps"))
            explain = "EXPLAIN (ANALYZE, FORMAT json) " + saga_steps._FIND_EVENT
            plan = connection.exec_driver_sql(explain, fields).scalar_one()[0]["Plan"]
            assert plan["Actual Rows"] == 1
            read.append(rows_read(plan))
    assert read[1] <= 2 * read[0], read
