"""The queue of a test, seen from the broker."""

from __future__ import annotations

from typing import Any

from celery import Celery

from idempotency.wire.headers import KEY_HEADER


def drained(app: Celery) -> list[Any]:
    """Every message in the queue, taken out of it."""
    messages = []
    with app.connection_for_write() as broker:
        queue = app.amqp.queues[app.conf.task_default_queue](broker.default_channel)
        queue.declare()
        while (message := queue.get(no_ack=True)) is not None:
            messages.append(message)
    return messages


def keys(messages: list[Any]) -> list[str]:
    return [message.headers[KEY_HEADER] for message in messages]


def depth(app: Celery) -> int:
    """How many messages are ready in the queue."""
    with app.connection_for_write() as connection:
        return int(connection.default_channel.queue_declare(app.conf.task_default_queue, passive=True).message_count)
