"""The dead-letter queue's consumer: what the broker gave up is stored as a dead letter, and its operation ends.

The letter and the failed record are one commit, and only after it the message is acknowledged: a crash in between
hands the message out again, which makes no second row. An operation that a living holder has, or that has ended, needs
no letter: the message was a duplicate. What was rejected without a visible defect (a worker from before a deploy, say)
comes back for a while before its operation ends. Any number of consumers at once; they run inside the relay.

A message comes from anywhere, so its headers may hold anything. Whatever goes wrong with one message, it is held
unacknowledged for another try while others go on.
"""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from amqp.exceptions import AccessRefused, AMQPError, PreconditionFailed
from celery import Celery
from kombu import Connection as BrokerConnection
from kombu import Message as BrokerMessage
from kombu.exceptions import KombuError
from kombu.serialization import prepare_accept_content
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from . import conclusions, dead_letters, keys, metrics, records
from .attempt import Policy
from .crash_points import crash_point
from .dead_letters import BrokerLetter
from .errors import CallRefused, PermanentError, SettingsError, UnknownVersion
from .foreign_headers import read_any_time
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
# Seconds after which a pass begins no further letter, so that the relay's sign of life and stop are looked at. Letters
# that are tried again get half of it, and at least one of each kind has its turn.
PASS = 5.0
# How long a letter waits for one lock: those behind it wait too, and most meet no lock that lasts.
FIRST_PATIENCE = "500ms"
LOCK_PATIENCE = "3s"
# A letter that could not be stored although Postgres answers (a lock, say) is left unacknowledged while others go on.
# It is tried again in the next pass, then after so many seconds, and after twice as many each further time, up to the
# second number: a lock that was held for a day costs minutes more.
HELD_PAUSE = 5.0
HELD_CAP = 600.0
# So many are kept in memory. Beyond them the one held longest is parked: it stays unacknowledged too, but only its number
# is kept. Returned to the queue it would come first again (RabbitMQ 3), and no letter behind it would be looked at. What
# is parked returns once the queue is empty: a batch at a time, or this few while as many are held as may be.
HELD_LIMIT = 2_000
PARKED_TRIES = 20
# Beyond so many unacknowledged letters no new ones are taken; the broker keeps an entry for each.
PARKED_LIMIT = 100_000
# How often a letter's `on_failed` may fail for lack of a lock, or end its process, and how often the handling of a
# letter may fail for a reason that is not known here: with the pauses above, five minutes.
ON_FAILED_TRIES = 8
# What no worker took comes back after so many seconds, doubling up to the second number: within a minute of a deploy.
PUT_BACK_PAUSE = 1.0
PUT_BACK_CAP = 60.0
# Nothing is wrong with such a message that can be seen: a worker of another version has met it, perhaps.
_PERHAPS_A_DEPLOY = (
    "rejected", "unknown_task", "unknown_version", "invalid_arguments", "missing_key", "invalid_key",
)  # fmt: skip
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
    "unhandled": "the relay could not handle it; its operation was not touched",
    "fingerprint_mismatch": "this idempotency key was used with other arguments",
}
# Bodies that are not text are stored as base64; their headers say so.
BODY_HEADER = "idempotency-body"
# What belonged to that delivery alone; with its `expires` a replay would be refused again.
_NOT_REPLAYED = (*MARKS, "compression", "eta", "expires")
# As long as a name may be in a table and on a screen.
TEXT_LIMIT = 255


@dataclass(slots=True, eq=False)
class _Taken:
    """A message that is not acknowledged yet."""

    message: BrokerMessage
    due: float = 0.0  # by time.monotonic()
    tries: int = 0
    surprises: int = 0  # of these tries, those that neither Postgres nor a lock can be blamed for


class DeadLetterConsumer:
    """`run()` around `run_once()`, with a connection to the broker of its own."""

    def __init__(self, app: Celery) -> None:
        app.loader.import_default_modules()
        app.finalize()
        read_any_time()
        self._app = app
        self._broker: BrokerConnection | None = None
        self._channel: Any = None
        self._held: list[_Taken] = []
        # delivery tags
        self._parked: list[Any] = []
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
            if not taken:
                stop.wait(POLL)
        self.close()

    def run_once(self, *, limit: int = BATCH) -> int:
        """Take messages until the queues are empty or `PASS` is over; returns how many, those held for later included.

        Brokers other than AMQP keep no dead letters. A letter that cannot be stored now keeps none of the others
        waiting: it stays unacknowledged until its next try.
        """
        if self._app.connection_for_read().transport.driver_type != "amqp":
            return 0
        with Runtime.of(self._app).autocommit() as connection:
            # Nothing is taken while Postgres is away: each return to the queue counts towards a delivery limit.
            connection.exec_driver_sql("SELECT 1")
        channel, taken, began = self._connect(), 0, time.monotonic()
        accept = prepare_accept_content(["json"])
        for again in sorted((held for held in self._held if held.due <= began), key=lambda held: held.due):
            self._held.remove(again)
            self._settle(again)
            if time.monotonic() - began >= PASS / 2:
                break
        queues = dead_letter_queues(self._app.amqp.queues.values())
        while queues and taken < limit and len(self._parked) < PARKED_LIMIT:
            if taken and time.monotonic() - began >= PASS:
                break
            for queue in list(queues):  # in turns: a long one does not keep the next one waiting
                if (raw := channel.basic_get(queue.name, no_ack=False)) is None:
                    queues.remove(queue)
                    continue
                message = channel.message_to_python(raw)
                message.accept = accept
                taken += 1
                self._settle(_Taken(message))
        if not taken:
            self._unpark()
        return taken

    def _settle(self, taken: _Taken) -> None:
        try:
            if taken.surprises < ON_FAILED_TRIES:
                patience = LOCK_PATIENCE if taken.tries else FIRST_PATIENCE
                store(self._app, taken.message, self._interrupted, patience=patience)
            else:
                _store_unhandled(self._app, taken.message)
        except Exception as error:
            with Runtime.of(self._app).autocommit() as connection:
                connection.exec_driver_sql("SELECT 1")  # raises when Postgres is away: no letter is to blame
            taken.surprises += not isinstance(error, _NOT_THE_LETTERS)
            self._hold(taken, error)
        else:
            crash_point("dead_letter.stored")
            taken.message.ack()

    def _hold(self, taken: _Taken, error: Exception) -> None:
        pause = HELD_PAUSE * 2 ** min(taken.tries - 1, 20) if taken.tries else 0.0
        taken.due = time.monotonic() + min(pause, HELD_CAP)
        taken.tries += 1
        self._held.append(taken)
        if len(self._held) > HELD_LIMIT:
            self._parked.append(self._held.pop(0).message.delivery_tag)
        if isinstance(error, _NOT_THE_LETTERS):
            log.warning("dead_letter_waits", error=describe(error), times=taken.tries)
        else:
            # not the error's text, which may quote the message
            place = traceback.extract_tb(error.__traceback__)[-1]
            at = f"{place.filename.rpartition('/')[2]}:{place.lineno}"
            log.error("dead_letter_not_handled", error=type(error).__name__, at=at, times=taken.tries)

    def _unpark(self) -> None:
        returning = self._parked[: BATCH if len(self._held) < HELD_LIMIT else PARKED_TRIES]
        for tag in returning:
            self._channel.basic_reject(tag, requeue=True)
        del self._parked[: len(returning)]

    def close(self) -> None:
        """Drop the connection; what was taken and not acknowledged goes back to its queue."""
        broker, self._broker, self._channel = self._broker, None, None
        self._held, self._parked = [], []
        if broker is not None:
            broker.collect()

    def _connect(self) -> Any:
        if self._channel is None:
            self._broker = self._app.connection_for_read(connect_timeout=5)
            self._broker.connect()
            channel = self._broker.channel()
            for queue in dead_letter_queues(self._app.amqp.queues.values()):
                try:
                    queue(channel).declare()
                except (PreconditionFailed, AccessRefused) as error:
                    # declared with other arguments: it exists, which is all that a consumer needs
                    log.warning("dead_letter_queue_differs", queue=queue.name, error=type(error).__name__)
                    channel = self._broker.channel()
            self._channel = channel
        return self._channel


def consume_once(app: Celery) -> int:
    """Go through the dead-letter queues until they are empty; returns how many messages were taken.

    What could not be stored now is back in its queue afterwards, and counted too.
    """
    consumer, total = DeadLetterConsumer(app), 0
    try:
        while taken := consumer.run_once():
            total += taken
    finally:
        consumer.close()
    return total


def store(
    app: Celery, message: BrokerMessage, interrupted: set[str] | None = None, *, patience: str = LOCK_PATIENCE
) -> int | None:
    """Store a message that no worker will run, and end its operation, in one transaction.

    Returns the dead letter's id; None when there was nothing to store: it is stored already, or a duplicate of an
    operation that has ended, that is started, or that something else will deliver; or it was put back, since nothing
    is wrong with it that can be seen; or a plain task's, which its sender allowed to expire; or a marker. `interrupted`
    collects the digests of letters that an outage of Postgres interrupted; `patience` is how long each lock is waited
    for, as Postgres reads it. Raises `OperationalError`: later.
    """
    if MARKER_HEADER in message.headers:
        return None  # of reconcile's: it brings nothing, and another one follows
    if _was_allowed_to_expire(app, message):
        log.info("expired", task=_text(message.headers.get("task")))
        return None
    examined = examine(app, message)
    fingerprints: list[str] = []
    if examined.id is not None:
        try:
            fingerprints = keys.fingerprints(examined.arguments, message.headers.get(FINGERPRINT_HEADER))
            fingerprints = _as_accepted(app, message, examined.id, fingerprints)
        except CallRefused:  # NaN, say: JSON to Python's reader, and to no other
            examined = Examined("invalid_arguments", examined.task)
    letter = _letter(app, message, message.headers, _reason(message, examined), examined.id)
    dead = _dead(app, message, examined, fingerprints, letter)
    try:
        if dead is not None and letter.reason in _PERHAPS_A_DEPLOY and _came_back(app, dead, letter, patience):
            return None
        if dead is None or examined.task is None or examined.id is None:
            stored = _store_alone(app, letter, patience)
        else:
            stored = _give_up(app, examined.task, dead, examined.arguments, letter, interrupted, patience)
    except OperationalError:
        raise  # Postgres is away, or a lock timed out: later
    except UnknownVersion:
        stored = _store_alone(app, letter, patience)
    except DBAPIError as error:
        # The record cannot take it; the letter must not be lost for that.
        log.error("give_up_failed", reason=letter.reason, task=letter.task, error=describe(error))
        stored = _store_alone(app, letter, patience)
    log.warning(
        "dead_letter" if stored is not None else "dead_letter_duplicate",
        letter=stored,
        reason=letter.reason,
        task=letter.task,
        key=letter.key,
        queue=letter.queue,
    )
    return stored


def _store_unhandled(app: Celery, message: BrokerMessage) -> None:
    """Store a message raw, without a look at its operation: its body, and of its headers what is text or a number."""
    plain = {name: value for name, value in message.headers.items() if isinstance(value, str | int)}
    letter = _letter(app, message, plain, "unhandled", None)
    stored = _store_alone(app, letter, LOCK_PATIENCE)
    log.error("dead_letter", letter=stored, reason=letter.reason, task=letter.task, queue=letter.queue)


def _as_accepted(app: Celery, message: BrokerMessage, id: OperationId, computed: list[str]) -> list[str]:
    """The fingerprints of a message, first the one it was accepted under: a deploy may have renamed parameters since."""
    given = message.headers.get(FINGERPRINT_HEADER)
    if given in computed or not keys.is_fingerprint(given):
        return computed
    with Runtime.of(app).autocommit() as connection:
        accepted = records.is_accepted(connection, id, str(given), _body(message.body)[0])
    return [str(given), *computed] if accepted else computed


def _store_alone(app: Celery, letter: BrokerLetter, patience: str) -> int | None:
    with Runtime.of(app).engine.begin() as connection:
        _wait_at_most(connection, patience)
        connection.exec_driver_sql(_FORGET_TRIES, {"digest": letter.digest})
        return dead_letters.store_message(connection, letter)


def _wait_at_most(connection: Connection, patience: str) -> None:
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{patience}'")


def _came_back(app: Celery, dead: Dead, letter: BrokerLetter, patience: str) -> bool:
    """Put a message back that a worker of another version may have refused; or count it as a duplicate.

    False: it has come back for the time of grace, and is to be stored.
    """
    runtime = Runtime.of(app)
    if runtime.settings.unknown_task_grace == 0:
        return False
    with runtime.engine.begin() as connection:
        _wait_at_most(connection, patience)
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
    patience: str,
) -> int | None:
    letter = replace(letter, fingerprint=dead.fingerprint)
    end = FailedEnd(letter.reason, letter.last_error)
    try:
        return _end(app, task, dead, arguments, letter, end, interrupted, patience)
    except conclusions.PartBroken as broken:
        return _end(app, task, dead, arguments, letter, end, interrupted, patience, skip=str(broken))


def _end(
    app: Celery,
    task: Any,
    dead: Dead,
    arguments: Mapping[str, Any],
    letter: BrokerLetter,
    end: FailedEnd,
    interrupted: set[str] | None,
    patience: str,
    *,
    skip: str | None = None,
) -> int | None:
    runtime = Runtime.of(app)
    settings, policy, id = runtime.settings, Policy.of(task, runtime.settings), dead.id
    while True:
        with _noting_outages(runtime, letter, interrupted) as session:
            connection = session.connection()
            _wait_at_most(connection, patience)
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
    if id is None and letter.reason in _PERHAPS_A_DEPLOY:  # newer code may have made it: its headers name the operation
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


def _letter(
    app: Celery, message: BrokerMessage, headers: Mapping[str, Any], reason: str, id: OperationId | None
) -> BrokerLetter:
    delivery = message.delivery_info or {}
    queue = headers.get("x-first-death-queue")
    if not isinstance(queue, str) or not queue:
        queue = delivery.get("routing_key")
    own = {name: value for name, value in headers.items() if not name.startswith("x-") and name not in _NOT_REPLAYED}
    body, is_text = _body(message.body)
    properties = {"correlation_id": headers["id"]} if isinstance(headers.get("id"), str) else {}
    payload = Message(json.loads(dead_letters.headers_text(own)), body, _route(app, headers, delivery), properties)
    shown = dict(headers) | {"content-type": message.content_type, "content-encoding": message.content_encoding}
    if not is_text:
        shown[BODY_HEADER] = "base64"
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
    exchange, routing_key = delivery.get("exchange"), delivery.get("routing_key")
    match headers.get("x-death"):
        case [*_, {"exchange": str(first_exchange), "routing-keys": [str(first_key), *_]}]:
            exchange, routing_key = first_exchange, first_key
    return {"exchange": _text(exchange) or "", "routing_key": _text(routing_key) or ""}


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


# What may be wrong with the database or with the set-up, but never with one letter.
_NOT_THE_LETTERS = (OperationalError, PoolTimeout, SettingsError)
_BROKER_ERRORS = (AMQPError, KombuError, OSError, socket.timeout)
