"""The guard: what Celery would drop, lose or die on goes to the dead letters, and the worker lives.

Celery acknowledges and loses a body that it cannot decode (after writing it to the log) and a message that is past
its `expires`, and it ends the whole worker on a body that is JSON but no task's. So each message is looked at before
Celery's own handler sees it. A refused one is rejected, which a quorum queue's dead-lettering keeps; where the broker
keeps nothing (Redis, a queue without a dead-letter target) the guard stores it itself before it acknowledges.

Bodies never reach a log. Messages of protocol 1 (Celery 3) are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from celery import Celery, bootsteps
from celery.signals import worker_init
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu import Message
from sqlalchemy.exc import SQLAlchemyError

from ..application import runtime_of
from ..attempt.runtime import Runtime
from ..errors import CallRefused, InvalidArguments, MissingKey, SettingsError
from ..observe.logs import log
from ..queues import dead_letter_queues
from ..relay.reconcile import marker_taken
from ..wire import message as task_message
from ..wire.foreign_headers import read_any_time
from ..wire.keys import OperationId
from ..wire.message import MARKER_HEADER, MESSAGE_VERSION, VERSION_HEADER
from .task import IdempotentTask

Handler = Callable[[Message], object]


@dataclass(frozen=True, slots=True)
class Examined:
    """What a message is: the operation it names, or in one word why no worker can run it."""

    reason: str | None
    task: IdempotentTask | None = None
    id: OperationId | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


def examine(app: Celery, message: Message) -> Examined:
    """Say whether a worker can run this message. A content type that is not accepted is never decoded."""
    headers = message.headers
    name = headers.get("task")
    version = headers.get(VERSION_HEADER, MESSAGE_VERSION)
    if type(version) is int and version > MESSAGE_VERSION:
        return Examined("unknown_version")  # nothing else about it is known: not even how it is encoded
    task = app.tasks.get(name) if isinstance(name, str) else None
    accepted = {"application/json"} if isinstance(task, IdempotentTask) else message.accept
    if accepted is not None and message.content_type not in accepted:
        return Examined("content_type")
    try:
        if message.errors:
            raise message.errors[0][1]
        payload = message.decode()
    except Exception:
        return Examined("undecodable")
    if name is None and isinstance(payload, dict) and "task" in payload:
        return Examined("protocol")
    if not _is_envelope(payload):
        return Examined("envelope")
    if not isinstance(name, str) or not name:
        return Examined("missing_task")
    if task is None:
        return Examined("unknown_task")
    if not isinstance(headers.get("id"), str) or not headers["id"]:
        return Examined("missing_id")
    if type(version) is not int:
        return Examined("invalid_header")
    try:
        times = {name: _time(app, headers[name]) for name in ("eta", "expires") if headers.get(name) is not None}
        hard, soft = headers.get("timelimit") or (None, None)
        float(hard or 0), float(soft or 0)
    except (ValueError, TypeError, AttributeError, OverflowError):
        return Examined("invalid_header")
    if not isinstance(task, IdempotentTask):
        return Examined(None)
    examined = _named(task, payload, headers)
    if examined.reason is None and "expires" in times and times["expires"] < datetime.now(UTC):
        # Celery would acknowledge it; an accepted operation is never just dropped
        return replace(examined, reason="expired")
    return examined


def _is_envelope(payload: object) -> bool:
    match payload:
        case [list(), dict(), dict() | None]:
            return True
    return False


def _time(app: Celery, value: Any) -> datetime:
    time: datetime = maybe_make_aware(maybe_iso8601(value), app.timezone)
    time.timestamp()
    return time


def _named(task: IdempotentTask, payload: Any, headers: Mapping[str, Any]) -> Examined:
    args, kwargs, _ = payload
    try:
        named = task.named_by(args, kwargs, headers)
    except MissingKey:
        return Examined("missing_key", task)
    except InvalidArguments:
        return Examined("invalid_arguments", task)
    except CallRefused:
        return Examined("invalid_key", task)
    except SettingsError:
        return Examined(None)  # not the message's fault
    except Exception:  # the application's own key function
        return Examined("invalid_key", task)
    return Examined(None, task, named.id, named.arguments)


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
            return self._guarded(celerys_handler(*args, **kwargs))

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
            # declared otherwise by somebody else; it is there, which is all that a worker needs
            log.warning("dead_letter_queue_differs", error=type(error).__name__)

    def _guarded(self, handle: Handler) -> Handler:
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
        from ..letters import dead_letter_queue  # it examines messages too

        reject = message.reject

        def store(requeue: bool = False) -> None:
            if requeue:
                reject(requeue=True)
                return
            try:
                dead_letter_queue.store(self._app, message)
            except Exception as error:
                # Not stored, so not acknowledged: the broker hands it out again.
                log.error("dead_letter_not_stored", error=type(error).__name__)
            else:
                message.ack()

        message.reject = store


def _note_marker(runtime: Runtime, marker: str) -> None:
    try:
        marker_taken(runtime, marker)
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


@worker_init.connect
def install(sender: Any, **_: Any) -> None:
    """Put the guard into the worker of an application with idempotent tasks."""
    if any(isinstance(task, IdempotentTask) for task in sender.app.tasks.values()):
        read_any_time()
        sender.app.steps["consumer"].add(Guard)
