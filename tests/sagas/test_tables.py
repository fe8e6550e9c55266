"""What the database itself keeps within bounds: locks of events, the view, and whose event it is."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from celery import Celery
from sqlalchemy import text
from sqlalchemy.orm import Session

from idempotency import publish
from idempotency.application import close_runtime, runtime_of
from idempotency.sagas import saga
from idempotency.store import renaming
from tests.sagas.application import enter
from tests.sagas.conftest import Stage

LOCKS = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()")


def test_an_event_of_another_application_is_not_for_this_ones_sagas(stage: Stage) -> None:
    @saga("taking_back", key="{id}", events={"parcel.collected": "{return_id}"}, app=stage.app)
    def taking_back(saga: Any, id: str) -> Any:
        return saga.wait_for("parcel.collected", match=id, timeout=timedelta(days=5)) is not None

    other = Celery("other_shop", set_as_current=False)
    other.conf.update(
        broker_url=stage.app.conf.broker_url,
        task_queues=stage.app.conf.task_queues,
        task_default_queue=stage.app.conf.task_default_queue,
        task_create_missing_queues=False,
        broker_transport_options={"confirm_publish": True},
        worker_prefetch_multiplier=1,
        worker_enable_prefetch_count_reduction=False,
        idempotency_database_url=stage.app.conf.idempotency_database_url,
    )

    @saga("other.taking_back", key="{id}", events={"parcel.collected": "{return_id}"}, app=other)
    def others(saga: Any, id: str) -> Any:
        saga.wait_for("parcel.collected", match=id, timeout=timedelta(days=5))

    early, late = stage.enqueue(taking_back, "r1"), "r2"
    stage.run()
    try:
        with Session(runtime_of(other).engine) as session:
            for return_id in ("r1", late):
                publish(session, "parcel.collected", {"return_id": return_id}, app=other)
            session.commit()
    finally:
        close_runtime(other)
    after = stage.enqueue(taking_back, late)
    stage.run()
    assert [early.status(), after.status()] == ["released", "released"]
    for return_id in ("r1", late):
        stage.publish("parcel.collected", {"return_id": return_id})
    stage.run()
    assert [early.result(), after.result()] == [True, True]


def test_a_transaction_with_many_events_holds_a_bounded_number_of_locks(stage: Stage) -> None:
    """One for each event, and 25,000 events would use up all locks that Postgres has room for."""
    with runtime_of(stage.app).engine.connect() as connection:
        connection.execute(
            text("""
            SELECT idempotency.keep_event('default', 'bank', 'picked', 'id=r' || n, n::text, '{}')
            FROM generate_series(1, 3000) n""")
        )
        assert 512 < connection.execute(LOCKS).scalar_one() <= 1024


def test_a_wait_behind_a_publisher_of_something_else_is_tried_again(stage: Stage) -> None:
    """That holds its lock by chance, which is not the saga's fault: it costs no attempt."""

    @saga("waiting", key="{id}", events={"picked": "{id}"}, app=stage.app, max_attempts=1)
    def waiting(saga: Any, id: str) -> Any:
        return saga.wait_for("picked", match=id, timeout=timedelta(days=5)) is not None

    handle = stage.enqueue(waiting, "r1")
    with runtime_of(stage.app).engine.connect() as publisher:
        publisher.execute(
            text(
                "SELECT pg_advisory_xact_lock_shared(idempotency.event_lock('default', 'bank', 'picked', m)) "
                "FROM (SELECT 'id=s' || n AS m FROM generate_series(1, 20000) n) a"
            )
        )
        stage.run()
        assert stage.steps("r1") == []
    stage.pass_time(60.0)
    stage.run()
    stage.publish("picked", {"id": "r1"})
    stage.run()
    assert handle.result() is True


def test_a_saga_with_much_data_does_not_break_the_view_of_all(stage: Stage) -> None:
    @saga("small", key="{id}", app=stage.app)
    def small(saga: Any, id: str) -> Any:
        saga.step("one", enter, "one")
        saga.sleep(60.0)

    for key in ("r1", "r2"):
        stage.enqueue(small, key)
    stage.run()
    with (
        stage.engine.begin() as connection
    ):  # calls whose results have the allowed 256 KiB; a thousand are more than one jsonb holds
        connection.execute(
            text("""
            INSERT INTO idempotency.saga_steps (saga_id, generation, position, tenant, name, kind, state, result, ended_at)
            SELECT g.id, 1, n + 10, 'default', 'call#' || n, 'call', 'done', to_json(repeat('x', 262000))::text, now()
            FROM idempotency.sagas g, generate_series(1, 80) n WHERE g.key = 'r1'""")
        )
    with stage.engine.connect() as connection:
        rows = connection.execute(
            text(
                "SELECT key, current_step, (SELECT count(*) FROM jsonb_object_keys(context)) AS steps "
                "FROM idempotency.saga_instances ORDER BY key"
            )
        ).all()
    assert [(row.key, row.current_step) for row in rows] == [("r1", "call#80"), ("r2", "sleep")]
    assert 60 < rows[0].steps < 70


def test_a_saga_and_its_events_go_on_under_another_name_of_their_application(stage: Stage) -> None:
    @saga("waiting", key="{id}", events={"picked": "{id}", "packed": "{id}"}, app=stage.app)
    def waiting(saga: Any, id: str) -> Any:
        saga.wait_for("picked", match=id, timeout=timedelta(days=5))
        return saga.wait_for("packed", match=id, timeout=timedelta(days=5)) is not None

    handle = stage.enqueue(waiting, "r1")
    stage.run()
    stage.publish("packed", {"id": "r1"})  # before its wait
    with stage.engine.begin() as connection:
        renamed = {
            table: renaming.rename(connection, table, "bank", "ledger", after=None)[0] for table in renaming.TABLES
        }
    assert (renamed["sagas"], renamed["saga_events"]) == (1, 1)
    close_runtime(stage.app)
    stage.app.conf.idempotency_service = "ledger"
    try:
        stage.publish("picked", {"id": "r1"})
        stage.run()
        assert handle.result() is True
    finally:
        close_runtime(stage.app)
        for settings in (stage.app.conf, stage.app.conf.changes):
            settings.pop("idempotency_service", None)
