"""Whose dead message it is: applications may share a dead-letter queue, and each stores its own alone."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from celery import Celery
from kombu import Message

from ..application import runtime_of
from ..queues import SHARED_DEAD_LETTERS, forwarded_dead_letters
from ..settings import SERVICE_LIMIT
from ..wire.message import SERVICE_HEADER


def owner_of(app: Celery, message: Message, queue: str) -> str | None:
    """The service whose message this is, found in this dead-letter queue. None: it is not known, leave it to others.

    A queue belongs to one application, so what died in one of this application's is its own. Other messages name their
    application, unless an earlier version or another producer has sent them. Those are this application's if they are
    for one of its tasks, or in a dead-letter queue of its own. In the shared one, the others have `unknown_task_grace`
    seconds to take them; then this application keeps them, so that they are not there forever.
    """
    settings, headers = runtime_of(app).settings, message.headers
    if queue == forwarded_dead_letters(settings.service) or _is_one_of(app.amqp.queues, headers, "x-first-death-queue"):
        return settings.service
    named = headers.get(SERVICE_HEADER)
    if isinstance(named, str) and 0 < len(named.encode(errors="replace")) <= SERVICE_LIMIT and named.isprintable():
        return named
    if queue != SHARED_DEAD_LETTERS or _is_one_of(app.tasks, headers, "task"):
        return settings.service
    died_at = _died_at(headers)
    waited = None if died_at is None else (datetime.now(UTC) - died_at).total_seconds()
    return settings.service if waited is None or waited > settings.unknown_task_grace else None


def _is_one_of(known: Any, headers: Any, name: str) -> bool:
    return isinstance(value := headers.get(name), str) and value in known


def _died_at(headers: Any) -> datetime | None:
    match headers.get("x-death"):
        case [*_, {"time": datetime() as time}]:
            return time.replace(tzinfo=time.tzinfo or UTC)
    return None
