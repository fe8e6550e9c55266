"""Attempts in this process, as a pool process makes them, without a broker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from celery import Task
from celery.app.trace import build_tracer
from celery.states import EXCEPTION_STATES

_ROUTE = {"exchange": "bench", "routing_key": "unique", "priority": None}


class Delivered(NamedTuple):
    """One message of a task. `headers`: with Celery's `id`."""

    headers: Mapping[str, Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


def carry_out(task: Task, deliveries: Iterable[Delivered]) -> None:
    """Run a task for each. Raises `RuntimeError` for one that fails or is to be repeated: its cost is not what was asked for."""
    tracer = build_tracer(task.name, task, app=task.app)
    for headers, args, kwargs in deliveries:
        request = {**headers, "delivery_info": _ROUTE, "args": args, "kwargs": kwargs}
        outcome = tracer(headers["id"], args, kwargs, request).info
        if outcome is not None and outcome.state in EXCEPTION_STATES:  # a copy is ignored
            raise RuntimeError(f"{task.name}: {outcome.state}")
