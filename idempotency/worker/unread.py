"""Messages that would end the worker, in an application whose records are all in a store: they are rejected, and others go on.

RabbitMQ keeps what is rejected if its queue has a dead-letter target. There is no guard here, which would store it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import bootsteps
from kombu import Message

from ..observe.logs import log
from ..wire.arriving import bound_what_arrives, unreadable
from ..wire.limits import BODY_LIMIT, beyond_limits
from .task import IdempotentTask


class Unread(bootsteps.StartStopStep):
    """The worker's consumer step: sees every message before Celery's handler."""

    requires = ("celery.worker.consumer.tasks:Tasks",)  # by name: only workers import it

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._consumer = consumer
        celerys_handler: Callable[..., Callable[[Message], object]] = consumer.create_task_handler

        def create_task_handler(*args: Any, **kwargs: Any) -> Callable[[Message], None]:
            handle = celerys_handler(*args, **kwargs)
            return lambda message: self._handle(message, handle)

        consumer.create_task_handler = create_task_handler

    def _handle(self, message: Message, handle: Callable[[Message], object]) -> None:
        if (why := _unread(message)) is not None:
            self._reject(message, why)
            return
        try:
            handle(message)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            # a header that Celery fails on
            if message.acknowledged:
                raise
            self._reject(message, type(error).__name__)

    def _reject(self, message: Message, why: str) -> None:
        log.warning("refused", detail=why)
        try:
            message.reject()
        except self._consumer.connection_errors as error:  # the broker delivers it again
            log.warning("not_answered", error=type(error).__name__)


def _unread(message: Message) -> str | None:
    said = unreadable(message.properties, message.delivery_info)
    return said or beyond_limits(message.headers, None, body_limit=BODY_LIMIT)


def reject_unread(sender: Any, **_: Any) -> None:
    """Add the step to a worker whose application has no idempotent tasks, and so no guard."""
    if not any(isinstance(task, IdempotentTask) for task in sender.app.tasks.values()):
        bound_what_arrives()
        sender.app.steps["consumer"].add(Unread)
