"""The guard: messages that Celery would lose, or that would end the worker, become dead letters instead.

Celery acknowledges and loses a body that it cannot decode (after writing it to the log) and a message past its
`expires`; a body that is JSON but not a task's ends the whole worker. So each message is examined before Celery's own
handler sees it. A refused one is rejected, and the broker dead-letters it; if the broker keeps nothing (Redis, or a
queue without a dead-letter target), the guard stores it before acknowledging it.

Bodies never reach a log. Messages of protocol 1 (Celery 3) are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Full, Queue
from typing import Any

from celery import Celery, bootsteps
from kombu import Message

from ..application import runtime_of
from ..attempt.runtime import Runtime
from ..broker.queues import declare_queues
from ..observe.logs import log
from ..queues import dead_letter_queues
from ..store import markers as stored_markers
from ..text import one_line
from ..wire.arriving import bound_what_arrives
from ..wire.headers import DUE_HEADER, ETA_HEADER, MARKER_HEADER
from ..worker.task import IdempotentTask
from . import storing
from .examine import examine

# What a sender says of itself and of the arguments, in its own words, for a log and for Flower.
_DESCRIPTIONS = frozenset(("argsrepr", "kwargsrepr", "origin"))
# Markers that wait to be noted. Our relays send one at a time for each queue and priority.
_MARKERS = 100
Handler = Callable[[Message], object]


class Guard(bootsteps.StartStopStep):
    """The worker's consumer step: examines every message before Celery's handler."""

    requires = ("celery.worker.consumer.tasks:Tasks",)  # by name: only workers import it

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._app: Celery = consumer.app
        self._consumer = consumer
        self._broker_keeps = keeps_rejected(self._app)
        self._markers: Queue[tuple[Runtime, str]] = Queue(_MARKERS)
        self._notes_markers = False
        celerys_handler: Callable[..., Handler] = consumer.create_task_handler

        def create_task_handler(*args: Any, **kwargs: Any) -> Handler:
            return self._examined(celerys_handler(*args, **kwargs))

        consumer.create_task_handler = create_task_handler
        # For whatever else Celery finds wrong: its own handlers write the body to the log.
        consumer.on_decode_error = lambda message, error: self._refuse_unread(message)
        consumer.on_unknown_message = lambda body, message: self._refuse(message, "envelope")
        consumer.on_unknown_task = lambda body, message, error: self._refuse(message, "unknown_task")
        consumer.on_invalid_task = lambda body, message, error: self._refuse(message, "invalid")

    def start(self, consumer: Any) -> None:
        """Declare the dead-letter queues: until they exist, and for minutes after, the broker keeps dead letters back."""
        if not self._broker_keeps:
            return
        declare_queues(consumer.connection, dead_letter_queues(self._app.amqp.queues.values())).close()

    def _examined(self, handle: Handler) -> Handler:
        def on_message(message: Message) -> None:
            if (marker := message.headers.get(MARKER_HEADER)) is not None:
                self._note(message, f"{marker}")  # made by our relay, or unknown: it is random
                return
            if not self._broker_keeps:
                self._store_when_rejected(message)
            examined = examine(self._app, message)
            if examined.reason is not None:
                self._refuse(message, examined.reason, examined.detail)
                return
            for name in _DESCRIPTIONS & message.headers.keys():
                message.headers[name] = one_line(str(message.headers[name]))
            if isinstance(self._app.tasks.get(message.headers["task"]), IdempotentTask):
                _keep_out_of_memory(message)
            try:
                handle(message)
            except (ValueError, TypeError, LookupError, AttributeError):
                # a header that Celery fails on; without this it would end the worker, and then the next one
                if message.acknowledged:
                    raise
                self._refuse(message, "invalid")

        return on_message

    def _note(self, message: Message, marker: str) -> None:
        """Note that a marker has arrived. In a thread, one for all of them: Postgres must not delay the consumer.

        While too many wait, as forged ones may, a marker is dropped: another one follows.
        """
        self._answer(message.ack)
        if not self._notes_markers:
            self._notes_markers = True
            threading.Thread(target=_note_markers, args=(self._markers,), daemon=True).start()
        with suppress(Full):
            # the runtime is taken here: a fork must not copy its lock while it is held
            self._markers.put_nowait((runtime_of(self._app), marker))

    def _refuse_unread(self, message: Message) -> None:
        examined = examine(self._app, message)
        self._refuse(message, examined.reason or "undecodable", examined.detail)

    def _refuse(self, message: Message, reason: str, detail: str | None = None) -> None:
        if not self._broker_keeps:
            self._store_when_rejected(message)
        log.warning(
            "refused",
            reason=reason,
            **({} if detail is None else {"detail": detail}),
            task=f"{message.headers.get('task')}"[:100],
            task_id=f"{message.headers.get('id')}"[:100],
            queue=f"{(message.delivery_info or {}).get('routing_key')}"[:100],
        )
        self._answer(message.reject)

    def _answer(self, answer: Callable[[], object]) -> None:
        """Acknowledge or reject a message. If its connection is gone, the broker delivers it again."""
        try:
            answer()
        except self._consumer.connection_errors as error:
            log.warning("not_answered", error=type(error).__name__)

    def _store_when_rejected(self, message: Message) -> None:
        """When the message is rejected, store it as a dead letter and acknowledge it: the broker would drop it."""
        reject = message.reject

        def store(requeue: bool = False) -> None:
            if requeue:
                reject(requeue=True)
                return
            try:
                storing.store(self._app, message)
            except Exception as error:
                # Not stored, so not acknowledged: the broker delivers it again.
                log.error("dead_letter_not_stored", error=type(error).__name__)
            else:
                message.ack()

        message.reject = store


def _note_markers(markers: Queue[tuple[Runtime, str]]) -> None:
    while True:
        _note_marker(*markers.get())


def _note_marker(runtime: Runtime, marker: str) -> None:
    try:
        with runtime.autocommit() as connection:
            stored_markers.take(connection, marker)
    except Exception as error:  # another marker follows, and this thread notes it
        log.warning("marker_not_noted", error=type(error).__name__)


def _keep_out_of_memory(message: Message) -> None:
    """Hide a message's `eta` from Celery's worker, which would hold it unacknowledged until then by its own clock.

    The task gets it and compares it with the database's clock, after the broker's delay queues, too: they count in
    whole seconds and round down.
    """
    eta = message.headers.pop("eta", None)
    if eta is not None:
        message.headers[DUE_HEADER] = message.headers[ETA_HEADER] = eta


def keeps_rejected(app: Celery) -> bool:
    """Whether the broker keeps rejected messages: it speaks AMQP, and every queue has a dead-letter target."""
    if app.connection_for_read().transport.driver_type != "amqp":
        return False
    return all("x-dead-letter-exchange" in (queue.queue_arguments or {}) for queue in app.amqp.queues.values())


def add_guard(sender: Any, **_: Any) -> None:
    """Add the guard to a worker whose application has idempotent tasks."""
    if any(isinstance(task, IdempotentTask) for task in sender.app.tasks.values()):
        bound_what_arrives()
        runtime_of(sender.app)  # opened before the pool forks: no child copies its lock while it is held
        sender.app.steps["consumer"].add(Guard)
