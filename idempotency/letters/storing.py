"""Storing a dead message: its letter and the end of its operation are one commit; or it is sent again for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from celery import Celery
from kombu import Message as BrokerMessage
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session

from ..application import runtime_of
from ..attempt import conclusions
from ..attempt.policy import Policy
from ..attempt.runtime import Runtime
from ..errors import CallRefused, PermanentError, TransactionEnded, UnknownVersion
from ..observe import metrics
from ..observe.logs import log
from ..store import claims, ends, letters, outbox, undelivered
from ..store.answers import Busy, Changed, Foreign, Mismatch
from ..store.ends import FailedEnd
from ..store.letters import BrokerLetter
from ..store.statements import describe
from ..store.undelivered import GivenUp, PutBack, UndeliveredMessage
from ..wire import keys
from ..wire.keys import OperationId
from ..wire.message import (
    FINGERPRINT_HEADER,
    MARKER_HEADER,
    SERVICE_HEADER,
)
from .examine import Examined, examine
from .letter import (
    EXPLANATIONS,
    PERHAPS_A_DEPLOY,
    body_of,
    dead_of,
    letter_of,
    reason_of,
    refused,
    shown,
    was_allowed_to_expire,
)

# How long a letter waits for one lock when it is retried; those behind it wait too.
LOCK_PATIENCE = "3s"
# How often a letter's `on_failed` may fail for lack of a lock or end its process, and how often handling a letter may
# fail for an unknown reason. With the consumer's pauses that is five minutes.
ON_FAILED_TRIES = 8
# What no worker took is sent again after PUT_BACK_PAUSE seconds, doubling up to PUT_BACK_CAP: within a minute of a deploy.
PUT_BACK_PAUSE = 1.0
PUT_BACK_CAP = 60.0
# Seconds: longer than anything lasts.
FOREVER = 1e9


def store(
    app: Celery, message: BrokerMessage, interrupted: set[str] | None = None, *, patience: str = LOCK_PATIENCE
) -> int | None:
    """Store a message that no worker will run, and end its operation, in one transaction.

    Returns the dead letter's id, or None if there was nothing to store: the message is stored already; it is a duplicate
    of an operation that has ended, is started, or will be delivered otherwise; it has no visible defect and is sent
    again; it is a plain task's and was allowed to expire; or it is a marker. `interrupted` collects the digests of
    letters that an outage of Postgres interrupted. `patience` is how long to wait for each lock, as Postgres reads it.
    Raises `OperationalError`: try again later.
    """
    if MARKER_HEADER in message.headers:
        return None  # sent by resend: nothing to do, another one follows
    if was_allowed_to_expire(app, message):
        log.info("expired", task=shown(message.headers.get("task")))
        return None
    examined = examine(app, message)
    fingerprints: list[str] = []
    if examined.id is not None:
        try:
            fingerprints = keys.fingerprints(examined.arguments, message.headers.get(FINGERPRINT_HEADER))
            fingerprints = _as_accepted(app, message, examined.id, fingerprints)
        except CallRefused:  # NaN, say: JSON to no reader but Python's
            examined = Examined("invalid_arguments", examined.task)
    letter = letter_of(app, message, message.headers, reason_of(message, examined), examined.id, examined.detail)
    dead = dead_of(app, message, examined, fingerprints, letter)
    sender = str(message.headers.get(SERVICE_HEADER))
    try:
        if dead is not None and letter.reason in PERHAPS_A_DEPLOY and _came_back(app, dead, letter, sender, patience):
            return None
        if dead is None or examined.task is None or examined.id is None:
            stored = _store_alone(app, letter, patience)
        else:
            stored = _give_up(app, examined.task, dead, examined.arguments, letter, interrupted, patience)
    except OperationalError:
        raise  # Postgres is away or a lock timed out: later
    except UnknownVersion:
        stored = _store_alone(app, letter, patience)
    except DBAPIError as error:
        # The record does not accept it; the letter must not be lost for that.
        log.error("give_up_failed", reason=letter.reason, task=letter.header_task, error=describe(error))
        stored = _store_alone(app, letter, patience)
    log.warning(
        "dead_letter" if stored is not None else "dead_letter_duplicate",
        letter=stored,
        reason=letter.reason,
        task=letter.header_task,
        key=letter.key,
        queue=letter.queue,
    )
    return stored


def store_unhandled(app: Celery, message: BrokerMessage) -> None:
    """Store a message without touching its operation: the body, and those headers that are text or numbers."""
    plain = {name: value for name, value in message.headers.items() if isinstance(value, str | int)}
    letter = letter_of(app, message, plain, "unhandled", None)
    stored = _store_alone(app, letter, LOCK_PATIENCE)
    log.error("dead_letter", letter=stored, reason=letter.reason, task=letter.header_task, queue=letter.queue)


def _as_accepted(app: Celery, message: BrokerMessage, id: OperationId, computed: list[str]) -> list[str]:
    """The message's fingerprints, the one it was accepted under first: a deploy may have renamed parameters since."""
    given = message.headers.get(FINGERPRINT_HEADER)
    if given in computed or not keys.is_fingerprint(given):
        return computed
    with runtime_of(app).autocommit() as connection:
        accepted = claims.is_accepted(connection, id, str(given), body_of(message.body)[0])
    return [str(given), *computed] if accepted else computed


def _store_alone(app: Celery, letter: BrokerLetter, patience: str) -> int | None:
    with runtime_of(app).engine.begin() as connection:
        _wait_at_most(connection, patience)
        letters.forget_tries(connection, letter.digest)
        return letters.store_message(connection, letter)


def _wait_at_most(connection: Connection, patience: str) -> None:
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{patience}'")


def _came_back(app: Celery, dead: UndeliveredMessage, letter: BrokerLetter, sender: str, patience: str) -> bool:
    """Send a message again that a worker of another version may have refused, or count it as a duplicate.

    Returns False once `unknown_task_grace` is over: then it has to be stored.
    """
    runtime = runtime_of(app)
    grace = runtime.settings.unknown_task_grace
    with runtime.engine.begin() as connection:
        if letter.reason == "other_service":  # it waits for that one, or until that one is renamed: not ours to end
            dead, grace = replace(dead, service=outbox.service_of(connection, dead.message_id) or sender), FOREVER
        if grace == 0:
            return False
        _wait_at_most(connection, patience)
        answer = undelivered.put_back(
            connection, dead, error=letter.last_error, pause=PUT_BACK_PAUSE, cap=PUT_BACK_CAP, grace=grace
        )
        if answer is PutBack.COPY:
            undelivered.count_copy(connection, dead)
    log.warning("dead_message", answer=answer.value, reason=letter.reason, task=letter.header_task, key=letter.key)
    return answer is not PutBack.OVER


def _give_up(
    app: Celery,
    task: Any,
    dead: UndeliveredMessage,
    arguments: Mapping[str, Any],
    letter: BrokerLetter,
    interrupted: set[str] | None,
    patience: str,
) -> int | None:
    letter = replace(letter, fingerprint=dead.fingerprint)
    end = FailedEnd(letter.reason, letter.last_error)
    try:
        return _end(app, task, dead, arguments, letter, end, interrupted, patience)
    except TransactionEnded as broken:
        return _end(app, task, dead, arguments, letter, end, interrupted, patience, skip=str(broken))


def _end(
    app: Celery,
    task: Any,
    dead: UndeliveredMessage,
    arguments: Mapping[str, Any],
    letter: BrokerLetter,
    end: FailedEnd,
    interrupted: set[str] | None,
    patience: str,
    *,
    skip: str | None = None,
) -> int | None:
    runtime = runtime_of(app)
    settings, policy, id = runtime.settings, Policy.of(task, runtime.settings), dead.id
    while True:
        with _noting_outages(runtime, letter, interrupted) as session:
            connection = session.connection()
            _wait_at_most(connection, patience)
            answer = undelivered.give_up(
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
                        PermanentError(EXPLANATIONS[letter.reason], letter.reason),
                        entries=ended.effects,
                        arguments=arguments,
                        attempts=ended.attempts,
                        on_failed=policy.on_failed,
                        skip=skip,
                    )
                    if concluded.end != end:
                        ends.conclude(connection, id, concluded.end, fence=ended.fence)
                    letter = replace(
                        letter,
                        reason=concluded.reason if skip is None else "on_failed_error",
                        last_error=concluded.end.error,
                        generation=ended.generation,
                        fingerprint=ended.fingerprint,
                        attempts=ended.attempts,
                        first_error=ended.first_error,
                    )
                    stored = letters.store_end(connection, letter)
                case Mismatch(generation):
                    stored = letters.store_message(connection, refused(letter, generation, "fingerprint_mismatch"))
                case Foreign(generation):
                    stored = letters.store_message(connection, refused(letter, generation, "service_mismatch"))
                case Busy():
                    undelivered.count_copy(connection, dead)
                case Changed():
                    continue
            letters.forget_tries(connection, letter.digest)
            session.commit()
            if concluded is not None:
                metrics.count_failed(id.task, concluded.error.code)
            return stored


def _may_try(runtime: Runtime, letter: BrokerLetter, interrupted: set[str] | None) -> bool:
    """Whether the application's part (undos, `on_failed`) may run once more for this letter. Counts the try."""
    counts = True
    if interrupted and letter.digest in interrupted:
        interrupted.discard(letter.digest)
        counts = False
    with runtime.autocommit() as connection:
        tries = letters.count_try(connection, letter.digest, counts=counts)
    if tries > ON_FAILED_TRIES:
        log.error("on_failed_error", task=letter.task, key=letter.key, tries=tries - 1)
    return tries <= ON_FAILED_TRIES


@contextmanager
def _noting_outages(runtime: Runtime, letter: BrokerLetter, interrupted: set[str] | None) -> Iterator[Session]:
    """The session that stores a letter. If an outage ends it, that is noted: it was not the letter's fault."""
    with Session(runtime.engine) as session:
        connection = session.connection()
        try:
            yield session
        except OperationalError:
            if connection.invalidated and interrupted is not None:
                interrupted.add(letter.digest)
            raise
