"""The sagas that the benchmarks run, and their deliveries in this process."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from celery.app.trace import build_tracer

from idempotency.sagas import saga

from .jobs import INSERT, app

STEPS = 10
# The type of the event that `waiting` waits for.
EVENT = "benchmarks.happened"


@saga("benchmarks.ten_steps", key="{number}", app=app)
def ten_steps(saga: Any, number: int) -> int:
    """Ten steps, each of which inserts a row in the commit that records it."""
    for _ in range(STEPS):
        saga.step("insert", insert, number)
    return number


# The seconds of each step of the last run of `long`, if it did them.
step_seconds: list[float] = []


@saga("benchmarks.long", key="{number}", app=app)
def long(saga: Any, number: int, steps: int) -> None:
    """So many steps, each of which inserts a row, and then it sleeps."""
    step_seconds.clear()
    for _ in range(steps):
        began = time.perf_counter()
        saga.step("insert", insert, number)
        step_seconds.append(time.perf_counter() - began)
    saga.sleep(timedelta(days=365))


@saga("benchmarks.waiting", key="{number}", events={EVENT: "{number}"}, app=app)
def waiting(saga: Any, number: int) -> Any:
    """Wait for an event."""
    return saga.wait_for(EVENT, match=str(number), timeout=timedelta(days=365))


def insert(session: Any, number: int) -> int:
    session.execute(INSERT, {"job": "saga", "number": number})
    return number


def deliver(task: Any, key: str, *args: Any) -> Any:
    """Deliver a message to a task, as a thread of a worker's pool gets it. Returns what the task returns."""
    route = {"exchange": "bench", "routing_key": "unique", "priority": None}
    request = {"id": key, "task": task.name, "root_id": key, "correlation_id": key, "delivery_info": route}
    request |= {"idempotency-key": key, "args": list(args), "kwargs": {}}
    return build_tracer(task.name, task, app=app)(key, list(args), {}, request).retval
