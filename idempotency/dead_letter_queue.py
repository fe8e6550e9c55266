"""The dead-letter queue's consumer: what the broker gave up is stored as a dead letter, and its operation ends.

The letter and the failed record are one commit, and only after it the message is acknowledged: a crash in between
hands the message out again, which makes no second row. An operation that a living holder has, or that has ended, needs
no letter: the message was a duplicate. Any number of consumers at once; they run inside the relay.
"""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from amqp.exceptions import AMQPError
from celery import Celery
from kombu import Connection as BrokerConnection
from kombu import Message as BrokerMessage
from kombu.exceptions import KombuError
from kombu.serialization import prepare_accept_content
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session

from . import conclusions, dead_letters, keys, records
from .attempt import AttemptSession, Policy
from .crash_points import crash_point
from .dead_letters import BrokerLetter
from .errors import CallRefused, PermanentError
from .guard import Examined, examine
from .keys import OperationId
from .logs import log
from .message import KEY_HEADER, ORIGIN_HEADER, OUTBOX_HEADER, TENANT_HEADER, Message
from .queues import dead_letter_queues
from .records import Busy, Changed, FailedEnd, GivenUp, Mismatch
from .runtime import Runtime
from .statements import describe
from .task import IdempotentTask

# How often an empty queue is asked.
POLL = 1.0
# Messages per pass.
BATCH = 200
# What the letter says in a sentence; the word itself is its reason.
_EXPLANATIONS = {
    "content_type": "a content type that is not accepted; it was not decoded",
    "undecodable": "the body could not be decoded",
    "envelope": "the body is not a task's [args, kwargs, embed]",
    "protocol": "task message protocol 1 is not accepted",
    "missing_task": "no header 'task'",
    "missing_id": "no header 'id'",
    "unknown_task": "no task of this name is registered",
    "invalid_header": "eta or expires is not a time, or timelimit no pair of seconds",
    "missing_key": "no idempotency key: no header, and the task has no key template",
    "invalid_key": "the idempotency key breaks a rule",
    "invalid_arguments": "the arguments do not fit the task, or are not JSON",
    "expired": "past its expires",
    "delivery_limit": "delivered too often without an answer: each delivery lost its worker or its connection",
    "maxlen": "the queue was full",
    "rejected": "rejected by the worker",
    "fingerprint_mismatch": "this idempotency key was used with other arguments",
}
# Bodies that are not text are stored as base64; their headers say so.
BODY_HEADER = "idempotency-body"
# What belonged to that delivery alone; with its `expires` a replay would be refused again.
_NOT_REPLAYED = (ORIGIN_HEADER, OUTBOX_HEADER, "compression", "eta", "expires")
# As long as a name may be in a table and on a screen.
TEXT_LIMIT = 255


class DeadLetterConsumer:
    """`run()` around `run_once()`, with a connection to the broker of its own."""

    def __init__(self, app: Celery) -> None:
        app.loader.import_default_modules()
        app.finalize()
        self._app = app
        self._broker: BrokerConnection | None = None
        self._channel: Any = None

    def run(self, stop: threading.Event, periodic: Callable[[], object] = lambda: None) -> None:
        """Consume until `stop` is set. `periodic` is called between passes, whether the broker is there or not."""
        while not stop.is_set():
            taken = 0
            try:
                periodic()
                taken = self.run_once()
            except OperationalError as error:
                self.close()
                log.warning("postgres_unavailable", error=type(error.orig).__name__)
            except _BROKER_ERRORS as error:
                self.close()
                log.warning("broker_unavailable", error=type(error).__name__)
            except Exception:  # one surprise must not end the thread
                self.close()
                log.exception("dead_letter_pass_failed")
            if taken < BATCH:
                stop.wait(POLL)
        self.close()

    def run_once(self, *, limit: int = BATCH) -> int:
        """Take messages until the queues are empty; returns how many. Brokers other than AMQP keep no dead letters."""
        if self._app.connection_for_read().transport.driver_type != "amqp":
            return 0
        with Runtime.of(self._app).autocommit() as connection:
            # Nothing is taken while Postgres is away: each return to the queue counts towards a delivery limit.
            connection.exec_driver_sql("SELECT 1")
        channel, taken = self._connect(), 0
        accept = prepare_accept_content(["json"])
        for queue in dead_letter_queues(self._app.amqp.queues.values()):
            while taken < limit and (raw := channel.basic_get(queue.name, no_ack=False)) is not None:
                message = channel.message_to_python(raw)
                message.accept = accept
                store(self._app, message)
                crash_point("dead_letter.stored")
                message.ack()
                taken += 1
        return taken

    def close(self) -> None:
        """Drop the connection; what was taken and not acknowledged goes back to its queue."""
        broker, self._broker, self._channel = self._broker, None, None
        if broker is not None:
            broker.collect()

    def _connect(self) -> Any:
        if self._channel is None:
            self._broker = self._app.connection_for_read(connect_timeout=5)
            self._broker.connect()
            channel = self._broker.channel()
            for queue in dead_letter_queues(self._app.amqp.queues.values()):
                queue(channel).declare()
            self._channel = channel
        return self._channel


def consume_once(app: Celery) -> int:
    """Store what the dead-letter queues hold, until they are empty; returns how many messages."""
    consumer, total = DeadLetterConsumer(app), 0
    try:
        while taken := consumer.run_once():
            total += taken
    finally:
        consumer.close()
    return total


def store(app: Celery, message: BrokerMessage) -> int | None:
    """Store a message that no worker will run, and end its operation, in one transaction.

    Returns the dead letter's id; None when there was nothing to store: it is stored already, or a duplicate of an
    operation that has ended or that a living holder has; or a plain task's, which its sender allowed to expire.
    """
    if _was_allowed_to_expire(app, message):
        log.info("expired", task=_text(message.headers.get("task")))
        return None
    examined = examine(app, message)
    fingerprint = None
    if examined.id is not None:
        try:
            fingerprint = keys.fingerprint(examined.arguments)
        except CallRefused:  # NaN, say: JSON to Python's reader, and to no other
            examined = Examined("invalid_arguments", examined.task)
    letter = _letter(app, message, examined)
    try:
        if examined.id is None or examined.task is None or fingerprint is None:
            stored = _store_alone(app, letter)
        else:
            stored = _give_up(app, examined.task, examined.id, examined.arguments, fingerprint, letter)
    except OperationalError:
        raise  # Postgres is away, or a lock was not to be had: later
    except DBAPIError as error:
        # The record cannot take it; the letter must not be lost for that.
        log.error("give_up_failed", reason=letter.reason, task=letter.task, error=describe(error))
        stored = _store_alone(app, letter)
    log.warning(
        "dead_letter" if stored is not None else "dead_letter_duplicate",
        letter=stored,
        reason=letter.reason,
        task=letter.task,
        key=letter.key,
        queue=letter.queue,
    )
    return stored


def _store_alone(app: Celery, letter: BrokerLetter) -> int | None:
    with Runtime.of(app).engine.begin() as connection:
        return dead_letters.store_message(connection, letter)


def _give_up(
    app: Celery, task: Any, id: OperationId, arguments: Mapping[str, Any], fingerprint: str, letter: BrokerLetter
) -> int | None:
    runtime = Runtime.of(app)
    settings, policy = runtime.settings, Policy.of(task, runtime.settings)
    letter = replace(letter, fingerprint=fingerprint)
    while True:
        with AttemptSession(runtime.engine, expire_on_commit=False) as session:
            connection = session.connection()
            answer = records.give_up(
                connection,
                id,
                fingerprint=fingerprint,
                message=letter.payload,
                queue=letter.queue or "",
                end=FailedEnd(letter.reason, letter.last_error),
                retention=policy.retention_failed,
                lease=settings.lease,
            )
            stored: int | None = None
            match answer:
                case GivenUp() as ended:
                    concluded = conclusions.conclude(
                        session,
                        id,
                        PermanentError(_EXPLANATIONS[letter.reason], letter.reason),
                        entries=ended.effects,
                        arguments=arguments,
                        attempts=ended.attempts,
                        on_failed=policy.on_failed,
                    )
                    records.conclude(connection, id, concluded.end, fence=ended.fence)
                    letter = replace(
                        letter,
                        reason=concluded.reason,
                        last_error=concluded.end.error,
                        generation=ended.generation,
                        attempts=ended.attempts,
                        first_error=ended.first_error,
                    )
                    stored = dead_letters.store_end(connection, letter)
                case Mismatch(generation):
                    stored = dead_letters.store_message(connection, _refused(letter, generation))
                case Busy() if not records.count_duplicate(connection, id, fingerprint)[0]:
                    continue  # its lease ended meanwhile
                case Changed():
                    continue
            Session.commit(session)
            return stored


# ---------------------------------------------------------------- from a message to a letter


def _letter(app: Celery, message: BrokerMessage, examined: Examined) -> BrokerLetter:
    headers = message.headers
    delivery = message.delivery_info or {}
    queue = headers.get("x-first-death-queue") or delivery.get("routing_key")
    reason = _reason(message, examined)
    own = {name: value for name, value in headers.items() if not name.startswith("x-") and name not in _NOT_REPLAYED}
    body, is_text = _body(message.body)
    properties = {"correlation_id": headers["id"]} if isinstance(headers.get("id"), str) else {}
    payload = Message(json.loads(dead_letters.headers_text(own)), body, _route(app, headers, delivery), properties)
    shown = dict(headers) | {"content-type": message.content_type, "content-encoding": message.content_encoding}
    if not is_text:
        shown[BODY_HEADER] = "base64"
    id = examined.id
    return BrokerLetter(
        event_id=_text(headers.get(OUTBOX_HEADER)),
        tenant=id.tenant if id else _text(headers.get(TENANT_HEADER)),
        operation=id.operation if id else None,
        key=id.key if id else _text(headers.get(KEY_HEADER)),
        generation=None,
        fingerprint=None,
        queue=_text(queue),
        task=_text(headers.get("task")),
        service=Runtime.of(app).settings.service,
        reason=reason,
        first_error=None,
        last_error=records.error_text(reason, _EXPLANATIONS[reason]),
        attempts=0,
        headers=dead_letters.headers_text(shown),
        payload=payload.to_text(),
        digest=_digest(headers, message.body, queue),
    )


def _was_allowed_to_expire(app: Celery, message: BrokerMessage) -> bool:
    """Whether this is a tick of beat's, say, that nobody took in time: the next one does its work.

    Celery gives a message with `expires` a time to live in the broker, too. A plain task promises nothing beyond it;
    an accepted operation is never just dropped.
    """
    task = app.tasks.get(name) if isinstance(name := message.headers.get("task"), str) else None
    is_plain = task is not None and not isinstance(task, IdempotentTask)
    return is_plain and message.headers.get("x-first-death-reason") == "expired"


def _reason(message: BrokerMessage, examined: Examined) -> str:
    death = message.headers.get("x-first-death-reason")
    if death in ("delivery_limit", "maxlen"):
        return str(death)
    # "expired" in the broker is a message's time to live; in a message it is Celery's `expires`
    return examined.reason or ("expired" if death == "expired" else "rejected")


def _route(app: Celery, headers: Mapping[str, Any], delivery: Mapping[str, Any]) -> dict[str, Any]:
    """Where a replay goes: the queue it died in, or its first exchange and routing key."""
    queue = headers.get("x-first-death-queue")
    if isinstance(queue, str) and queue in app.amqp.queues:
        return {"queue": queue}
    deaths = headers.get("x-death")
    first = deaths[-1] if isinstance(deaths, list) and deaths and isinstance(deaths[-1], dict) else {}
    routing_keys = first.get("routing-keys") or [delivery.get("routing_key")]
    return {
        "exchange": _text(first.get("exchange", delivery.get("exchange"))) or "",
        "routing_key": _text(routing_keys[0]) or "",
    }


def _body(body: Any) -> tuple[str, bool]:
    """The body as text, and whether it is one; a NUL is none for Postgres."""
    raw = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else bytes(body or b"")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return base64.b64encode(raw).decode("ascii"), False
    return text, True


def _digest(headers: Mapping[str, Any], body: Any, queue: object) -> str:
    """What makes two hand-outs of one dead message the same; the broker's own notes on it do not count."""
    own = {name: value for name, value in headers.items() if not name.startswith("x-")}
    raw = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else bytes(body or b"")
    head = json.dumps([own, queue], sort_keys=True, default=str)
    return hashlib.sha256(head.encode() + b"\0" + raw).hexdigest()


def _text(value: object) -> str | None:
    """A header as a column takes it: text, no NUL, no lone surrogate, not too long."""
    if value is None:
        return None
    return str(value).encode("utf-8", "replace").decode().replace("\0", "\ufffd")[:TEXT_LIMIT]


def _refused(letter: BrokerLetter, generation: int) -> BrokerLetter:
    reason = "fingerprint_mismatch"
    error = records.error_text(reason, _EXPLANATIONS[reason])
    return replace(letter, reason=reason, generation=generation, last_error=error)


_BROKER_ERRORS = (AMQPError, KombuError, OSError, socket.timeout)
