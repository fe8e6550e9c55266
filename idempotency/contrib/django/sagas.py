"""Sagas of a Django project: enqueued on Django's connection, and what the ORM writes in a step is committed with its row."""

from __future__ import annotations

from typing import Any

from celery import Celery

from ... import sagas
from ...sagas import Call, CallFailed, call
from .integration import celery_app
from .task import IdempotentTask, MakesTask

__all__ = ["Call", "CallFailed", "SagaTask", "call", "saga"]


class SagaTask(sagas.SagaTask, IdempotentTask[..., Any]):
    """`idempotency.sagas.SagaTask`, enqueued without a session: `take_back.enqueue(order_id=order.pk)`."""

    abstract = True


def saga(name: str, *, key: Any, app: Celery | None = None, **options: Any) -> MakesTask[SagaTask]:
    """Make a saga of a function, as `idempotency.sagas.saga` does; `app` is the project's Celery application.

    Raises `SettingsError` if none was made.
    """
    made: Any = sagas.saga(name, key=key, app=app or celery_app(), **{"base": SagaTask, **options})
    return made  # type: ignore[no-any-return]
