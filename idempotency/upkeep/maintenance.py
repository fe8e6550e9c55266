"""Recover operations that have lost their holder, and purge what is past its retention.

Both are safe to run anywhere and concurrently: every row is locked with SKIP LOCKED and changed only if it still is as
it was found. The relay runs them, so that recovery does not depend on the broker; beat may too. A row that Postgres
refuses to change stops neither (`store/sweeps.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from celery import Celery
from sqlalchemy import Connection, Row

from ..application import runtime_of
from ..attempt import conclusions
from ..attempt.conclusions import Concluded, NotDeclined
from ..attempt.liveness import is_provably_dead
from ..attempt.runtime import Runtime
from ..errors import AttemptsExhausted, PermanentError
from ..observe import metrics
from ..observe.logs import log
from ..reasons import ABANDONED, COMPENSATION_FAILED, SAGA_MISMATCH
from ..settings import Settings
from ..store import asleep, ends, forgetting, letters, partitions, sagas, waiters
from ..store import purge as past
from ..store import recover as recovery
from ..store.answers import Claimed, claim_of, error_text
from ..store.recover import Bounds
from ..store.sweeps import BATCH, Pace
from ..streams.declaring import stream_of
from ..wire.keys import OperationId
from ..worker.task import IdempotentTask
from . import alerts

# Why an operation ends, or a saga is undone, that no process survives.
PASSED_OVER = "its message is not known"
DIED = "the process died in every attempt, and in every claim that would have ended it"


def recover(app: Celery, *, limit: int = 10 * BATCH) -> int:
    """Release this application's operations whose lease has run out or whose holder is provably dead; returns how many.

    The same statement writes the next delivery to the outbox. The attempt stays used up, so that a message that kills
    its worker comes to an end; one that also kills the claims that would end it is failed here. Death can be proven only
    on this host; for other hosts the lease decides.
    """
    runtime = runtime_of(app)
    with runtime.autocommit() as connection:
        dead = [holder for holder in recovery.holders(connection) if is_provably_dead(holder)]
        bounds = _bounds(app, runtime, dead)
        exhausted = recovery.end_spent(connection, bounds, lambda names: _end_spent(app, runtime, bounds, names))
        total, of_dead = recovery.release(connection, bounds, limit=limit)
        asleep.wake(connection)
    if exhausted:
        metrics.recovered.labels("attempts_exhausted").inc(exhausted)
        log.warning("attempts_exhausted", operations=exhausted)
    if of_dead:
        metrics.recovered.labels("dead_holder").inc(of_dead)
    if total > of_dead:
        metrics.recovered.labels("lease_over").inc(total - of_dead)
    return exhausted + total


def _end_spent(app: Celery, runtime: Runtime, bounds: Bounds, names: Mapping[str, Any]) -> int:
    """Fail one operation without attempts left, in its own transaction. Returns 0 if it was renewed or is locked."""
    with runtime.engine.begin() as connection:
        record, saga = recovery.lock_spent(connection, bounds, names)
        if record is None:
            return 0
        if saga is not None:
            id = OperationId(record.tenant, record.task, record.key)
            _let_go(connection, runtime.settings, record, id, saga)
        else:
            _conclude(connection, runtime.settings, record, app.tasks.get(record.task))
    return 1


def _let_go(connection: Connection, settings: Settings, record: Row[Any], id: OperationId, saga: Row[Any]) -> None:
    """A saga does not end before it is undone. It stops, with a dead letter, if its undoing kills its processes, or code
    that does not get as far as what is recorded."""
    error = error_text(AttemptsExhausted.default_code, DIED)
    reason: str | None = None
    pause: float | None = 0.0
    if saga.status == sagas.COMPENSATING:
        reason, pause = COMPENSATION_FAILED, None
    elif not saga.has_reached:
        reason, pause, error = SAGA_MISMATCH, sagas.LONGEST_PAUSE, error_text(SAGA_MISMATCH, sagas.NOT_REACHED)
    if reason is not None:
        if saga.stopped not in (None, reason):
            letters.close(connection, id, saga.stopped)  # a person has seen to what had stopped it before
        letters.update_error(connection, id, reason, error)
        claim, delivery = claim_of(id, record), letters.kept_delivery(id, record, {})
        letters.store_failure(connection, delivery, claim, reason=reason, last_error=error, service=settings.service)
    sagas.let_go(connection, id, error, stopped=reason, seconds=pause)


def _conclude(connection: Connection, settings: Settings, record: Row[Any], task: Any) -> None:
    """Fail an operation whose process died in every attempt, and store its dead letter. The record must be locked."""
    claim, concluded = _with_letter(connection, settings, record, AttemptsExhausted(DIED), task, skip=DIED)
    retention = getattr(task, "retention_failed", None) or settings.retention_failed
    ends.fail(connection, claim, concluded.end, retention=retention, lease=settings.lease)


def _end_abandoned(runtime: Runtime, names: Mapping[str, Any]) -> int:
    """Fail one request whose client has left it half done, in its own transaction. Returns 0 if it was asked for again."""
    settings = runtime.settings
    with runtime.engine.begin() as connection:
        record = past.lock_abandoned(connection, settings.service, names, retention=settings.retention_http)
        if record is None:
            return 0
        error = NotDeclined("it was begun, and no client has asked for it again", ABANDONED)
        claim, concluded = _with_letter(connection, settings, record, error, None)
        ends.cancel(connection, claim.id, concluded.end, fence=record.fence, retention=settings.retention_failed)
    return 1


def _end_passed_over(runtime: Runtime, names: Mapping[str, Any]) -> int:
    """Fail one operation of a stream whose message was passed over, in its own transaction. Returns 0 if it has been claimed since."""
    settings = runtime.settings
    with runtime.engine.begin() as connection:
        record = past.lock_abandoned(
            connection, settings.service, names, retention=settings.redelivery_horizon, sweep=past.PASSED
        )
        if record is None:
            return 0
        error = NotDeclined("its stream has gone on without it: a person has moved the position, or its key", ABANDONED)
        claim, concluded = _with_letter(connection, settings, record, error, stream_of(record.task), skip=PASSED_OVER)
        ends.cancel(connection, claim.id, concluded.end, fence=record.fence, retention=settings.retention_failed)
    return 1


def _with_letter(
    connection: Connection,
    settings: Settings,
    record: Row[Any],
    error: PermanentError,
    task: Any,
    *,
    skip: str | None = None,
) -> tuple[Claimed, Concluded]:
    """Say how an operation without a holder ends, and store its dead letter."""
    id = OperationId(record.tenant, record.task, record.key)
    claim = claim_of(id, record)
    concluded = conclusions.conclude(
        connection,
        id,
        error,
        entries=record.effects,
        arguments={},
        attempts=record.attempts,
        on_failed=getattr(task, "on_failed", None),
        skip=skip,
    )
    letters.store_failure(
        connection,
        letters.kept_delivery(id, record, {}),
        claim,
        reason=concluded.reason,
        last_error=concluded.end.error,
        service=settings.service,
    )
    metrics.count_failed(id.task, concluded.error.code)
    return claim, concluded


def _bounds(app: Celery, runtime: Runtime, dead: list[str]) -> Bounds:
    known = {name: task for name, task in app.tasks.items() if isinstance(task, IdempotentTask)}
    own = {name: task.max_attempts for name, task in known.items() if task.max_attempts}
    settings = runtime.settings
    return Bounds(
        settings.service,
        dead,
        list(known),
        list(own),
        list(own.values()),
        list(app.amqp.queues),
        otherwise=settings.max_attempts,
    )


@dataclass(frozen=True, slots=True)
class Purged:
    """How much one pass of the purge deleted, and whether it stopped at its limit with more to do."""

    operations: int
    rows: int
    letters: int
    more: bool


def purge(app: Celery, *, limit: int = 100 * BATCH) -> int:
    """Delete what is past its retention, as `purge_once` does; returns the number of operations."""
    return purge_once(app, limit=limit).operations


def purge_once(app: Celery, *, limit: int, pace: Pace = past.RESTING) -> Purged:
    """Delete operations past their retention with their outbox rows, settled rows without operations, and closed letters.

    Of this application, and those without a name; at most about `limit` of each kind, and at this pace. An operation
    stays while it has an open dead letter, an unpublished outbox row, or one published within the `redelivery_horizon`.
    An HTTP request that did not end, and that no client repeats, goes after `retention_http`; one that has begun an
    effect or a step fails then, with a dead letter. The audit table is never purged.

    Where the records are in partitions, the missing ones are made, and those that are over are dropped whole.
    """
    runtime = runtime_of(app)
    settings, service = runtime.settings, runtime.settings.service
    with runtime.autocommit() as connection:
        kept = settings.retention_dead_letters
        deleted_letters, more_letters = past.letters(connection, service, retention=kept, limit=limit, pace=pace)
        operations, more_operations = _purge_operations(connection, settings, limit, pace)
        _end_what_nobody_repeats(runtime, connection, pace)
        kept = settings.retention_http
        requests, more_requests = past.requests(connection, service, retention=kept, limit=limit, pace=pace)
        rows, more_rows = _purge_rows(connection, settings, limit, pace)
        more_beside = _forget_beside(connection, settings, limit, pace)
    metrics.purged.inc(operations + requests)
    more = more_letters or more_operations or more_requests or more_rows or more_beside
    return Purged(operations + requests, rows, deleted_letters, more)


def _purge_operations(connection: Connection, settings: Settings, limit: int, pace: Pace) -> tuple[int, bool]:
    """How many are deleted, those in dropped partitions too, and whether there are more."""
    service, horizon = settings.service, settings.redelivery_horizon
    dropped, more_partitions, late = partitions.keep_up(
        connection, service, retention=settings.retention_completed, horizon=horizon, limit=limit, pace=pace
    )
    pace.progressed()
    deleted, more = past.operations(connection, service, horizon=horizon, limit=limit, late=late, pace=pace)
    pace.progressed()
    return dropped + deleted, more_partitions or more


def _end_what_nobody_repeats(runtime: Runtime, connection: Connection, pace: Pace) -> None:
    """HTTP requests that were abandoned, and messages of streams that were passed over."""
    settings, service = runtime.settings, runtime.settings.service
    abandoned = past.end_abandoned(
        connection,
        service,
        retention=settings.retention_http,
        end=lambda names: _end_abandoned(runtime, names),
        pace=pace,
    )
    if abandoned:
        log.warning("requests_abandoned", operations=abandoned)
    passed = past.end_passed_over(
        connection,
        service,
        retention=settings.redelivery_horizon,
        end=lambda names: _end_passed_over(runtime, names),
        pace=pace,
    )
    if passed:
        log.warning("stream_messages_passed_over", operations=passed)


def _purge_rows(connection: Connection, settings: Settings, limit: int, pace: Pace) -> tuple[int, bool]:
    """How many rows of the outbox without operations are deleted, and whether there are more."""
    service, horizon, rows, more = settings.service, settings.redelivery_horizon, 0, False
    for status, kept in (("published", settings.retention_completed), ("failed", settings.retention_failed)):
        deleted, more_rows = past.rows(
            connection, service, status, retention=kept, horizon=horizon, limit=limit, pace=pace
        )
        rows, more = rows + deleted, more or more_rows
    return rows, more


def _forget_beside(connection: Connection, settings: Settings, limit: int, pace: Pace) -> bool:
    """Forget what is kept beside operations. Returns whether there is more."""
    service, more = settings.service, False
    for forget, kept in (
        (forgetting.events, settings.retention_events),
        (forgetting.observed, settings.retention_failed),
        (forgetting.deliveries, settings.retention_webhooks),
    ):
        more |= forget(connection, service, retention=kept, limit=limit, pace=pace)
    more |= forgetting.former_requests(connection, limit=limit, pace=pace)
    waiters.forget(connection)
    alerts_kept = max(settings.retention_dead_letters, settings.alert_interval * alerts.ALARM_INTERVALS)
    forgetting.alerts(connection, retention=alerts_kept)
    forgetting.set_aside(connection)
    return more
