"""Whose dead message it is: applications may share a dead-letter queue, and each stores its own alone."""

from __future__ import annotations

from datetime import UTC, datetime

from celery import Celery
from kombu import Message

from ..application import runtime_of
from ..queues import forwarded_dead_letters, own_dead_letter_queue
from ..setting_values import SERVICE_LIMIT
from ..wire.headers import SERVICE_HEADER
from .death import death_of


def owner_of(app: Celery, message: Message, queue: str) -> str | None:
    """The service whose message this is, found in this dead-letter queue. None: nothing says so.

    A queue belongs to one application, and so does the dead-letter queue with its name. What is there, or died in a
    queue of this application, is its own, even if a header names another one: its sender may have another name. In a
    dead-letter queue that several may have, a message names its application, unless an earlier version or another
    producer has sent it. Such a message is this application's if it is for one of its tasks.
    """
    service, headers = runtime_of(app).settings.service, message.headers
    own = [forwarded_dead_letters(service), *map(own_dead_letter_queue, app.amqp.queues)]
    if queue in own or death_of(headers).queue in app.amqp.queues:
        return service
    named = headers.get(SERVICE_HEADER)
    if isinstance(named, str) and 0 < len(named.encode(errors="replace")) <= SERVICE_LIMIT and named.isprintable():
        return named
    return service if isinstance(task := headers.get("task"), str) and task in app.tasks else None


def is_left_to_others(app: Celery, message: Message) -> bool:
    """Whether other applications still have time to take a message that is not known to be this one's.

    They have `unknown_task_grace` seconds. Then this application keeps it, so that it is not there forever; at once, if a
    forged time of death lies further ahead than that.
    """
    died_at = death_of(message.headers).time
    if died_at is None:
        return False
    return abs((datetime.now(UTC) - died_at).total_seconds()) <= runtime_of(app).settings.unknown_task_grace
