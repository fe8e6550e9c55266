"""Handing a message to Celery's own tracer, as a child of a worker's pool does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery import Celery
from celery.app.trace import build_tracer
from celery.exceptions import Reject
from kombu.utils.json import loads

from ..wire.message import Message


@dataclass(frozen=True, slots=True)
class Traced:
    """What Celery saw: `state` is SUCCESS, FAILURE, RETRY, IGNORED or REJECTED; `value` the result or the exception."""

    state: str
    value: Any


def trace(app: Celery, task: Any, message: Message) -> Traced:
    """Run the task for this message in this process. Nothing is acknowledged, and no result backend is written."""
    args, kwargs, _ = loads(message.body)
    request = {
        **message.headers,
        **message.properties,
        "args": args,
        "kwargs": kwargs,
        "is_eager": False,
        "ignore_result": True,
        "delivery_info": {"exchange": "", "routing_key": message.queue(app), "priority": None},
    }
    try:
        value, info, _, _ = build_tracer(task.name, task, app=app)(message.headers["id"], args, kwargs, request)
    except Reject as error:
        return Traced("REJECTED", error)
    return Traced("SUCCESS", value) if info is None else Traced(info.state, info.retval)
