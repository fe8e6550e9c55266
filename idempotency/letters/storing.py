"""Storing a dead message: as a letter, with the end of its operation or alone; or it is sent again for a while."""

from __future__ import annotations

from dataclasses import replace

from celery import Celery
from kombu import Message as BrokerMessage
from sqlalchemy.exc import DBAPIError, OperationalError

from ..application import runtime_of
from ..attempt.policy import Policy
from ..errors import CallRefused, UnknownVersion
from ..observe.logs import log
from ..reasons import EXPIRED_EARLY, UNHANDLED
from ..store import claims, letters, outbox, undelivered
from ..store.letters import BrokerLetter
from ..store.statements import describe, repeatable
from ..store.undelivered import PutBack, UndeliveredMessage
from ..wire import keys
from ..wire.headers import FINGERPRINT_HEADER, MARKER_HEADER, SERVICE_HEADER
from ..wire.keys import OperationId
from ..wire.signing import claimed_at
from .ending import Ending, wait_at_most
from .examine import Examined, disbelieved, examine
from .letter import (
    PERHAPS_A_DEPLOY,
    body_of,
    dead_of,
    has_expired_early,
    letter_of,
    named_by_headers,
    reason_of,
    shown,
    was_allowed_to_expire,
)

# How long a letter waits for one lock when it is retried; those behind it wait too.
LOCK_PATIENCE = "3s"
# What no worker took is sent again after PUT_BACK_PAUSE seconds, doubling up to PUT_BACK_CAP: within a minute of a deploy.
PUT_BACK_PAUSE = 1.0
PUT_BACK_CAP = 60.0
# Seconds: longer than anything lasts.
FOREVER = 1e9


def store(
    app: Celery, message: BrokerMessage, interrupted: set[str] | None = None, *, patience: str = LOCK_PATIENCE
) -> int | None:
    """Store a message that no worker will run, and end its operation, in one transaction.

    Returns the dead letter's id, or None if there was nothing to store: the message is stored already; it is a duplicate of an
    operation that has ended, is started, or will be delivered otherwise; it has no visible defect and is sent again; it is a
    plain task's and was allowed to expire, or a signed one's of a known operation and was not; or it is a marker. `interrupted`
    collects the digests of letters that an outage of Postgres interrupted. `patience` is how long to wait for each lock, as
    Postgres reads it. Raises `OperationalError`: try again later.
    """
    if MARKER_HEADER in message.headers:
        return None  # sent by resend: nothing to do, another one follows
    if was_allowed_to_expire(app, message):
        log.info("expired", task=shown(message.headers.get("task")))
        return None
    examined = examine(app, message)
    if examined.reason in (None, *PERHAPS_A_DEPLOY) and has_expired_early(app, message):
        # perhaps its task is newer than this process; no worker has refused it for that
        meant = examined.id or named_by_headers(app, message)[0]
    else:
        meant = None
    if meant is not None:
        if _is_known(app, meant):
            log.info(EXPIRED_EARLY, task=shown(message.headers.get("task")), key=meant.key)
            return None
        is_stale = _is_stale(app, message, meant)
        examined = Examined("stale" if is_stale else EXPIRED_EARLY, examined.task)
    fingerprints: list[str] = []
    if examined.id is not None:
        try:
            fingerprints = keys.fingerprints(examined.arguments, message.headers.get(FINGERPRINT_HEADER))
            fingerprints = _as_accepted(app, message, examined.id, fingerprints)
        except CallRefused:  # NaN, say: JSON to no reader but Python's
            examined = Examined("invalid_arguments", examined.task)
    letter = letter_of(app, message, message.headers, reason_of(message, examined), examined.id, examined.detail)
    dead = dead_of(app, message, examined, fingerprints, letter)
    # also if its headers alone name the operation: what comes back is signed anew
    if dead is not None and _is_stale(app, message, dead.id):
        examined, dead = Examined("stale", examined.task), None
        letter = letter_of(app, message, message.headers, "stale", None)
    sender = str(message.headers.get(SERVICE_HEADER))
    try:
        if dead is not None and letter.reason in PERHAPS_A_DEPLOY and _came_back(app, dead, letter, sender, patience):
            return None
        if dead is None or examined.task is None or examined.id is None:
            stored = _store_alone(app, letter, patience)
        else:
            runtime = runtime_of(app)
            policy = Policy.of(examined.task, runtime.settings)
            ending = Ending(runtime, policy, dead, examined.arguments, letter, patience, interrupted)
            stored = ending.commit()
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


def _is_known(app: Celery, id: OperationId) -> bool:
    with runtime_of(app).autocommit() as connection:
        return undelivered.is_known(connection, id)


def _is_stale(app: Celery, message: BrokerMessage, id: OperationId) -> bool:
    """Whether a signed message is so old that its operation may have ended and been purged. Its letter then ends nothing."""
    runtime = runtime_of(app)
    if not runtime.settings.message_secrets or (signed := claimed_at(message.headers)) is None:
        return False
    with runtime.autocommit() as connection:
        return claims.is_stale(connection, id, signed_at=signed, horizon=runtime.settings.redelivery_horizon)


def store_unhandled(app: Celery, message: BrokerMessage) -> None:
    """Store a message without touching its operation. Its letter names that only if the message is believed."""
    examined = disbelieved(app, message) or Examined(UNHANDLED)
    letter = letter_of(app, message, message.headers, reason_of(message, examined), None, examined.detail)
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
        wait_at_most(connection, patience)
        letters.forget_tries(connection, letter.digest)
        return letters.store_message(connection, letter)


@repeatable
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
        wait_at_most(connection, patience)
        answer = undelivered.put_back(
            connection, dead, error=letter.last_error, pause=PUT_BACK_PAUSE, cap=PUT_BACK_CAP, grace=grace
        )
        if answer is PutBack.COPY:
            undelivered.count_copy(connection, dead)
    log.warning("dead_message", answer=answer.value, reason=letter.reason, task=letter.header_task, key=letter.key)
    return answer is not PutBack.OVER
