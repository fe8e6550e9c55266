"""Proofs of a breaker, second batch: outages, sweeps, other applications, nested sagas. Each asserts the good outcome."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

from celery import Celery
from sqlalchemy.orm import Session

from idempotency import IdempotentTask, publish
from idempotency.application import close_runtime, runtime_of
from idempotency.sagas import observe, saga
from tests.sagas.application import enter
from tests.sagas.conftest import Stage


def test_an_observer_in_a_process_without_the_saga_does_not_write_over_it(
    stage: Stage, environment: dict[str, str]
) -> None:
    @saga("waiting", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def waiting(saga: Any, id: str) -> Any:
        return saga.wait_for("picked", match=id, timeout=timedelta(days=5)) is not None

    handle = stage.enqueue(waiting, "r1")
    stage.run()
    task = stage.app.tasks.pop("waiting")  # a web process that has not imported it
    with runtime_of(stage.app).engine.begin() as connection, contextlib.suppress(Exception):
        observe(connection, "waiting", "r1", "picked", None, status="COMPLETED", app=stage.app)
    stage.app.tasks["waiting"] = task
    stage.publish("picked", {"id": "r1"})
    ran = stage.run()
    assert handle.status() == "completed", (ran, stage.saga("r1").status)


def test_a_task_may_note_the_process_that_it_is_a_step_of(stage: Stage) -> None:
    """The task that begins a process is called as the process, and has its key: what is more natural?"""

    @stage.app.task(
        base=IdempotentTask, bind=True, name="order_placement", key="{order_id}", shared=False, max_attempts=2
    )
    def place(self: IdempotentTask, order_id: str) -> str:
        observe(self.session, "order_placement", order_id, "requested", {}, app=stage.app)
        return enter(self.session, f"order:{order_id}")

    handle = stage.enqueue(place, "o1")
    for _ in range(5):
        with contextlib.suppress(Exception):
            stage.run()
        stage.pass_time(400.0)
    assert handle.status() == "completed", stage.letters()


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

    handle = stage.enqueue(taking_back, "r1")
    stage.run()
    try:
        with Session(runtime_of(other).engine) as session:
            publish(session, "parcel.collected", {"return_id": "r1"}, app=other)
            session.commit()
    finally:
        close_runtime(other)
    stage.run()
    assert handle.status() == "released", "the parcel of the other shop's return r1 has ended this shop's wait"
