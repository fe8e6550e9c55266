"""The guard: what Celery would drop, lose or die on goes to the dead letters, and the worker lives.

Celery acknowledges and loses a body that it cannot decode (after writing it to the log) and a message that is past
its `expires`, and it ends the whole worker on a body that is JSON but no task's. So each message is looked at before
Celery's own handler sees it. A refused one is rejected, which a quorum queue's dead-lettering keeps; where the broker
keeps nothing (Redis, a queue without a dead-letter target) the guard stores it itself before it acknowledges.

Bodies never reach a log. Messages of protocol 1 (Celery 3) are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from celery import Celery, bootsteps
from kombu import Message
from sqlalchemy.exc import SQLAlchemyError

from ..application import runtime_of
from ..attempt.runtime import Runtime
from ..observe.logs import log
from ..queues import dead_letter_queues
from ..store import markers
from ..wire import message as task_message
from ..wire.foreign_headers import accept_any_timestamp
from ..wire.message import MARKER_HEADER
from ..worker.task import IdempotentTask
from . import storing
from .examine import examine

Handler = Callable[[Message], object]


class Guard(bootsteps.StartStopStep):
    """The worker's consumer step: every message is examined before Celery's handler."""

    requires = ("celery.worker.consumer.tasks:Tasks",)  # by name: only workers import it

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._app: Celery = consumer.app
        self._consumer = consumer
        self._broker_keeps = keeps_rejected(self._app)
        celerys_handler: Callable[..., Handler] = consumer.create_task_handler

        def create_task_handler(*args: Any, **kwargs: Any) -> Handler:
            return self._examined(celerys_handler(*args, **kwargs))

        consumer.create_task_handler = create_task_handler
        # Whatever else Celery finds wrong; its own answers write the body to the log.
        consumer.on_decode_error = lambda message, error: self._refuse(message, "undecodable")
        consumer.on_unknown_message = lambda body, message: self._refuse(message, "envelope")
        consumer.on_unknown_task = lambda body, message, error: self._refuse(message, "unknown_task")
        consumer.on_invalid_task = lambda body, message, error: self._refuse(message, "invalid")

    def start(self, consumer: Any) -> None:
        """Declare the dead-letter queues: until they exist the broker keeps dead letters back, and then for minutes."""
        if not self._broker_keeps:
            return
        try:
            with consumer.connection.channel() as channel:
                for queue in dead_letter_queues(self._app.amqp.queues.values()):
                    queue(channel).declare()
        except consumer.channel_errors as error:
            # declared with other arguments; it exists, which is all that a worker needs
            log.warning("dead_letter_queue_differs", error=type(error).__name__)

    def _examined(self, handle: Handler) -> Handler:
        def on_message(message: Message) -> None:
            if (marker := message.headers.get(MARKER_HEADER)) is not None:
                self._note(message, f"{marker}")
                return
            if not self._broker_keeps:
                self._store_when_rejected(message)
            reason = examine(self._app, message).reason
            if reason is not None:
                self._refuse(message, reason)
                return
            if isinstance(self._app.tasks.get(message.headers["task"]), IdempotentTask):
                _keep_out_of_memory(message)
            try:
                handle(message)
            except (ValueError, TypeError, LookupError, AttributeError):
                # a header that Celery trips over; without this the worker ends, and so does the next one
                if message.acknowledged:
                    raise
                self._refuse(message, "invalid")

        return on_message

    def _note(self, message: Message, marker: str) -> None:
        """A marker has done its work by arriving. Its own thread: Postgres must not keep the broker waiting."""
        message.ack_log_error(log, self._consumer.connection_errors)
        runtime = runtime_of(self._app)  # here, so that no fork finds its lock held
        threading.Thread(target=_note_marker, args=(runtime, marker), daemon=True).start()

    def _refuse(self, message: Message, reason: str) -> None:
        if not self._broker_keeps:
            self._store_when_rejected(message)
        log.warning(
            "refused",
            reason=reason,
            task=f"{message.headers.get('task')}"[:100],
            task_id=f"{message.headers.get('id')}"[:100],
            queue=(message.delivery_info or {}).get("routing_key"),
        )
        message.reject_log_error(log, self._consumer.connection_errors)

    def _store_when_rejected(self, message: Message) -> None:
        """The broker drops what is rejected: store it as a dead letter instead, then acknowledge it."""
        reject = message.reject

        def store(requeue: bool = False) -> None:
            if requeue:
                reject(requeue=True)
                return
            try:
                storing.store(self._app, message)
            except Exception as error:
                # Not stored, so not acknowledged: the broker hands it out again.
                log.error("dead_letter_not_stored", error=type(error).__name__)
            else:
                message.ack()

        message.reject = store


def _note_marker(runtime: Runtime, marker: str) -> None:
    try:
        with runtime.autocommit() as connection:
            markers.take(connection, marker)
    except SQLAlchemyError as error:  # another marker follows
        log.warning("marker_not_noted", error=type(error).__name__)


def _keep_out_of_memory(message: Message) -> None:
    """Take a delay away from Celery's worker, which would hold the message unacknowledged until its own clock says so.

    What came through the broker's delay queues has waited. The rest is told to the task, which asks the database's clock.
    """
    eta = message.headers.pop("eta", None)
    if eta is not None and not task_message.Message.was_delayed((message.delivery_info or {}).get("exchange")):
        message.headers[task_message.ETA_HEADER] = eta


def keeps_rejected(app: Celery) -> bool:
    """Whether the broker keeps what is rejected: every queue has a dead-letter target, and AMQP carries it out."""
    if app.connection_for_read().transport.driver_type != "amqp":
        return False
    return all("x-dead-letter-exchange" in (queue.queue_arguments or {}) for queue in app.amqp.queues.values())


def add_guard(sender: Any, **_: Any) -> None:
    """Put the guard into the worker of an application with idempotent tasks."""
    if any(isinstance(task, IdempotentTask) for task in sender.app.tasks.values()):
        accept_any_timestamp()
        sender.app.steps["consumer"].add(Guard)
