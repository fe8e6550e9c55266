"""Deliveries in this process: Celery's own tracer is handed a message as a pool child is."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from celery import Celery
from celery.app.trace import build_tracer
from celery.exceptions import Reject
from kombu.utils.json import dumps, loads
from sqlalchemy import Row

from idempotency.wire.headers import KEY_HEADER, ORIGIN_HEADER, TENANT_HEADER
from idempotency.wire.message import Message


def request_of(app: Celery, task: Any, id: str) -> dict[str, Any]:
    """The headers of a message's first delivery, and where it came from."""
    return {
        "id": id,
        "task": task.name,
        "lang": "py",
        "origin": "test",
        "root_id": id,
        "correlation_id": id,
        "retries": 0,
        "delivery_info": {"exchange": "", "routing_key": app.conf.task_default_queue, "priority": None},
    }


@dataclass(frozen=True)
class Outcome:
    """What the worker would see: SUCCESS, FAILURE, RETRY, IGNORED or REJECTED, and the value or exception."""

    state: str
    value: Any


class Deliveries:
    def __init__(self, app: Celery) -> None:
        self.app = app
        app.finalize()

    def deliver(
        self,
        task: Any,
        *args: Any,
        key: str | None = None,
        tenant: str | None = None,
        origin: str | None = None,
        headers: dict[str, Any] | None = None,
        task_id: str | None = None,
        **kwargs: Any,
    ) -> Outcome:
        """Deliver one message to the task and say what became of it."""
        marks = {KEY_HEADER: key, TENANT_HEADER: tenant, ORIGIN_HEADER: origin}
        id = task_id or str(uuid4())
        request = {
            **request_of(self.app, task, id),
            **(headers or {}),
            **{name: value for name, value in marks.items() if value is not None},
        }
        wire_args, wire_kwargs = loads(dumps([args, kwargs]))  # as the arguments arrive
        request |= {"args": wire_args, "kwargs": wire_kwargs, "is_eager": False}
        seen: list[Outcome] = []
        original = task.__class__.__call__

        def call(*call_args: Any, **call_kwargs: Any) -> Any:
            try:
                value = original(task, *call_args, **call_kwargs)
            except Exception as error:
                seen.append(Outcome(_state(error), error))
                raise
            seen.append(Outcome("SUCCESS", value))
            return value

        tracer = build_tracer(task.name, _Calling(task, call), app=self.app)
        with contextlib.suppress(Reject):
            tracer(id, wire_args, wire_kwargs, request)
        return seen[-1]


class _Calling:
    """The task, except that its call is seen by the test."""

    # Celery looks here for the hooks that a task defines
    __class__ = property(lambda self: self._task.__class__)

    def __init__(self, task: Any, call: Any) -> None:
        self.__dict__["_task"] = task
        self.__dict__["__call__"] = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["__call__"](*args, **kwargs)


def _state(error: Exception) -> str:
    from celery.exceptions import Ignore, Retry

    match error:
        case Reject():
            return "REJECTED"
        case Ignore():
            return "IGNORED"
        case Retry():
            return "RETRY"
        case _:
            return "FAILURE"


def deliver_row(deliveries: Deliveries, task: Any, row: Row[Any]) -> Outcome:
    """Deliver what the relay would publish for this outbox row."""
    message = Message.from_text(row.message).marked(origin=row.origin, outbox_id=row.message_id)
    args, kwargs, _ = json.loads(message.body)
    return deliveries.deliver(task, *args, headers=message.headers, task_id=message.headers["id"], **kwargs)
