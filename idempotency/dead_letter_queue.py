"""The dead-letter queue's consumer: what the broker gave up is stored as a dead letter, and its operation ends.

The letter and the failed record are one commit, and only after it the message is acknowledged: a crash in between
hands the message out again, which makes no second row. An operation that a living holder has, or that has ended, needs
no letter: the message was a duplicate. What was rejected without a visible defect (a worker from before a deploy, say)
comes back for a while before its operation ends. Any number of consumers at once; they run inside the relay.
"""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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

from . import conclusions, dead_letters, keys, metrics, records
from .attempt import Policy
from .crash_points import crash_point
from .dead_letters import BrokerLetter
from .errors import CallRefused, PermanentError, UnknownVersion
from .guard import Examined, examine
from .keys import OperationId
from .logs import log
from .message import (
    FINGERPRINT_HEADER,
    GENERATION_HEADER,
    KEY_HEADER,
    MARKER_HEADER,
    MARKS,
    OUTBOX_HEADER,
    TENANT_HEADER,
    Message,
)
from .queues import dead_letter_queues
from .records import Busy, Changed, Dead, FailedEnd, GivenUp, Mismatch, PutBack
from .runtime import Runtime
from .statements import describe
from .task import IdempotentTask

# How often an empty queue is asked.
POLL = 1.0
# Messages per pass.
BATCH = 200
# No letter waits longer for one lock: those behind it wait too.
LOCK_PATIENCE = "3s"
# A letter that could not be stored although Postgres answers (a lock, say) is left unacknowledged while others go on.
# It is tried again in the next pass, then after so many seconds, and after twice as many each further time.
HELD_PAUSE = 5.0
# Held letters tried in one pass, each for as long as LOCK_PATIENCE: new letters come in between.
HELD_TRIES = 5
# Beyond so many, kept in memory, no new ones are taken until some are stored.
HELD_LIMIT = 2_000
# How often a letter's `on_failed` may fail for lack of a lock, or end its process: with the pauses above, five minutes.
ON_FAILED_TRIES = 8
# What no worker took comes back after so many seconds, doubling up to the second number: within a minute of a deploy.
PUT_BACK_PAUSE = 1.0
PUT_BACK_CAP = 60.0
# Nothing is wrong with such a message that can be seen: a worker of another version has met it, perhaps.
_PERHAPS_A_DEPLOY = ("rejected", "unknown_task", "unknown_version")
# What the letter says in a sentence; the word itself is its reason.
_EXPLANATIONS = {
    "content_type": "a content type that is not accepted; it was not decoded",
    "undecodable": "the body could not be decoded",
    "envelope": "the body is not a task's [args, kwargs, embed]",
    "protocol": "task message protocol 1 is not accepted",
    "missing_task": "no header 'task'",
    "missing_id": "no header 'id'",
    "unknown_task": "no task of this name is registered",
    "unknown_version": "made by newer code than this",
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
_NOT_REPLAYED = (*MARKS, "compression", "eta", "expires")
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
        # unacknowledged, for another try: when, how often held, the message
        self._held: list[tuple[float, int, BrokerMessage]] = []
        # what the last outage of Postgres interrupted: not a try that counts
        self._interrupted: set[str] = set()

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
        """Take messages until the queues are empty; returns how many. Brokers other than AMQP keep no dead letters.

        A letter that has to wait for a lock keeps none of the others waiting: it stays unacknowledged until its next try.
        """
        if self._app.connection_for_read().transport.driver_type != "amqp":
            return 0
        with Runtime.of(self._app).autocommit() as connection:
            # Nothing is taken while Postgres is away: each return to the queue counts towards a delivery limit.
            connection.exec_driver_sql("SELECT 1")
        channel, taken = self._connect(), 0
        accept = prepare_accept_content(["json"])
        now = time.monotonic()
        due = [held for held in self._held if held[0] <= now][:HELD_TRIES]
        for held in due:
            self._held.remove(held)
            self._settle(held[2], held[1])
        for queue in dead_letter_queues(self._app.amqp.queues.values()):
            while (
                taken < limit
                and len(self._held) < HELD_LIMIT
                and (raw := channel.basic_get(queue.name, no_ack=False)) is not None
            ):
                message = channel.message_to_python(raw)
                message.accept = accept
                taken += 1
                self._settle(message)
        return taken

    def _settle(self, message: BrokerMessage, times: int = 0) -> None:
        try:
            store(self._app, message, self._interrupted)
        except OperationalError as error:
            with Runtime.of(self._app).autocommit() as connection:
                connection.exec_driver_sql("SELECT 1")  # raises when Postgres is away: no letter is to blame
            self._held.append((time.monotonic() + HELD_PAUSE * (2 ** min(times, 20) - 1), times + 1, message))
            log.warning("dead_letter_waits", error=describe(error), times=times + 1)
        else:
            crash_point("dead_letter.stored")
            message.ack()

    def close(self) -> None:
        """Drop the connection; what was taken and not acknowledged goes back to its queue."""
        broker, self._broker, self._channel, self._held = self._broker, None, None, []
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


def store(app: Celery, message: BrokerMessage, interrupted: set[str] | None = None) -> int | None:
    """Store a message that no worker will run, and end its operation, in one transaction.

    Returns the dead letter's id; None when there was nothing to store: it is stored already, or a duplicate of an
    operation that has ended, that is started, or that something else will deliver; or it was put back, since nothing
    is wrong with it that can be seen; or a plain task's, which its sender allowed to expire; or a marker. `interrupted` collects the
    digests of letters that an outage of Postgres interrupted. Raises `OperationalError`: later.
    """
    if MARKER_HEADER in message.headers:
        return None  # of reconcile's: it brings nothing, and another one follows
    if _was_allowed_to_expire(app, message):
        log.info("expired", task=_text(message.headers.get("task")))
        return None
    examined = examine(app, message)
    like, fingerprints = message.headers.get(FINGERPRINT_HEADER), []
    if examined.id is not None:
        try:
            fingerprint = keys.fingerprint(examined.arguments, like=like)
            fingerprints = [fingerprint, *keys.other_fingerprints(examined.arguments, fingerprint)]
        except CallRefused:  # NaN, say: JSON to Python's reader, and to no other
            examined = Examined("invalid_arguments", examined.task)
    letter = _letter(app, message, examined)
    dead = _dead(app, message, examined, fingerprints, letter)
    try:
        if dead is not None and letter.reason in _PERHAPS_A_DEPLOY and _came_back(app, dead, letter):
            return None
        if dead is None or examined.task is None:
            stored = _store_alone(app, letter)
        else:
            stored = _give_up(app, examined.task, dead, examined.arguments, letter, interrupted)
    except OperationalError:
        raise  # Postgres is away, or a lock timed out: later
    except UnknownVersion:
        stored = _store_alone(app, letter)
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


def _came_back(app: Celery, dead: Dead, letter: BrokerLetter) -> bool:
    """Put a message back that a worker of another version may have refused; or count it as a duplicate.

    False: it has come back for the time of grace, and is to be stored.
    """
    runtime = Runtime.of(app)
    if runtime.settings.unknown_task_grace == 0:
        return False
    with runtime.engine.begin() as connection:
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{LOCK_PATIENCE}'")
        answer = records.put_back(
            connection, dead, pause=PUT_BACK_PAUSE, cap=PUT_BACK_CAP, grace=runtime.settings.unknown_task_grace
        )
        if answer is PutBack.COPY:
            records.count_copy(connection, dead)
    log.warning("dead_message", answer=answer.value, reason=letter.reason, task=letter.task, key=letter.key)
    return answer is not PutBack.OVER


def _give_up(
    app: Celery,
    task: Any,
    dead: Dead,
    arguments: Mapping[str, Any],
    letter: BrokerLetter,
    interrupted: set[str] | None,
) -> int | None:
    letter = replace(letter, fingerprint=dead.fingerprint)
    end = FailedEnd(letter.reason, letter.last_error)
    try:
        return _end(app, task, dead, arguments, letter, end, interrupted)
    except conclusions.PartBroken as broken:
        return _end(app, task, dead, arguments, letter, end, interrupted, skip=str(broken))


def _end(
    app: Celery,
    task: Any,
    dead: Dead,
    arguments: Mapping[str, Any],
    letter: BrokerLetter,
    end: FailedEnd,
    interrupted: set[str] | None,
    *,
    skip: str | None = None,
) -> int | None:
    runtime = Runtime.of(app)
    settings, policy, id = runtime.settings, Policy.of(task, runtime.settings), dead.id
    while True:
        with _noting_outages(runtime, letter, interrupted) as session:
            connection = session.connection()
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{LOCK_PATIENCE}'")
            answer = records.give_up(
                connection,
                dead,
                end=end,
                retention=policy.retention_failed,
                lease=settings.lease,
            )
            stored: int | None = None
            concluded: conclusions.Concluded | None = None
            match answer:
                case GivenUp() as ended:
                    has_part = policy.on_failed is not None or conclusions.has_undo(ended.effects)
                    if skip is None and has_part and not _may_try(runtime, letter, interrupted):
                        skip = "it has ended its process too often"
                    concluded = conclusions.conclude(
                        connection,
                        id,
                        PermanentError(_EXPLANATIONS[letter.reason], letter.reason),
                        entries=ended.effects,
                        arguments=arguments,
                        attempts=ended.attempts,
                        on_failed=policy.on_failed,
                        skip=skip,
                    )
                    if concluded.end != end:
                        records.conclude(connection, id, concluded.end, fence=ended.fence)
                    letter = replace(
                        letter,
                        reason=concluded.reason if skip is None else "on_failed_error",
                        last_error=concluded.end.error,
                        generation=ended.generation,
                        fingerprint=ended.fingerprint,
                        attempts=ended.attempts,
                        first_error=ended.first_error,
                    )
                    stored = dead_letters.store_end(connection, letter)
                case Mismatch(generation):
                    stored = dead_letters.store_message(connection, _refused(letter, generation))
                case Busy():
                    records.count_copy(connection, dead)
                case Changed():
                    continue
            connection.exec_driver_sql(_FORGET_TRIES, {"digest": letter.digest})
            session.commit()
            if concluded is not None:
                metrics.count_failed(id.operation, concluded.error.code)
            return stored


# Counted before the try, and by itself: one that ends the process counts too, and so does one that is rolled back.
_COUNT_TRY = """
INSERT INTO idempotency.dead_letter_tries AS t (digest, tries) VALUES (%(digest)s, 1)
ON CONFLICT (digest) DO UPDATE SET tries = t.tries + %(counts)s
RETURNING tries
"""
_FORGET_TRIES = "DELETE FROM idempotency.dead_letter_tries WHERE digest = %(digest)s"


def _may_try(runtime: Runtime, letter: BrokerLetter, interrupted: set[str] | None) -> bool:
    """Whether the application's part (undos, `on_failed`) is to be run once more for this letter."""
    counts = 1
    if interrupted and letter.digest in interrupted:
        interrupted.discard(letter.digest)
        counts = 0
    with runtime.autocommit() as connection:
        tries: int = connection.exec_driver_sql(_COUNT_TRY, {"digest": letter.digest, "counts": counts}).scalar_one()
    if tries > ON_FAILED_TRIES:
        log.error("on_failed_error", operation=letter.operation, key=letter.key, tries=tries - 1)
    return tries <= ON_FAILED_TRIES


@contextmanager
def _noting_outages(runtime: Runtime, letter: BrokerLetter, interrupted: set[str] | None) -> Iterator[Session]:
    """The session in which a letter is stored. An outage that ends it is noted: the letter is not to blame."""
    with Session(runtime.engine) as session:
        connection = session.connection()
        try:
            yield session
        except OperationalError:
            if connection.invalidated and interrupted is not None:
                interrupted.add(letter.digest)
            raise


# ---------------------------------------------------------------- from a message to a letter


def _dead(
    app: Celery, message: BrokerMessage, examined: Examined, fingerprints: list[str], letter: BrokerLetter
) -> Dead | None:
    """The operation that a dead message names: by its task, or by its own headers where the task is not known here."""
    headers = message.headers
    id = examined.id
    if id is None and letter.reason in ("unknown_task", "unknown_version"):
        given = headers.get(FINGERPRINT_HEADER)
        tenant = headers.get(TENANT_HEADER, Runtime.of(app).settings.tenant)
        try:
            # the same rules hold for a fingerprint: short, printable
            fingerprints = [keys.check_key(given, field="fingerprint")]
            operation = keys.check_key(headers.get("task"), field="task")
            id = OperationId(keys.check_key(tenant), operation, keys.check_key(headers.get(KEY_HEADER)))
        except CallRefused:
            return None  # no message of ours
        if keys.fingerprint_version(given) is None or not _body(message.body)[1]:
            return None
    if id is None or not fingerprints:
        return None
    generation = headers.get(GENERATION_HEADER)
    return Dead(
        id,
        fingerprints[0],
        fingerprints[1:],
        event_id=letter.event_id,
        generation=generation if type(generation) is int else None,
        message=letter.payload,
        queue=letter.queue or "",
    )


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
