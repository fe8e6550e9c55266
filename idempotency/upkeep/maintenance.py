"""Recover what has lost its holder, purge what is past its time.

Both are safe to run anywhere, any number at once: every row is taken with SKIP LOCKED and changed only if it still is
what was seen. The relay runs them, because recovery must not depend on the broker it recovers from; beat may, too. A
row that Postgres refuses to change stops neither (`sweeps.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery import Celery
from sqlalchemy import Connection, Row

from ..application import runtime_of
from ..attempt import conclusions
from ..attempt.liveness import is_provably_dead
from ..attempt.runtime import Runtime
from ..errors import AttemptsExhausted
from ..observe import metrics
from ..observe.logs import log
from ..settings import Settings
from ..store import dead_letters, records, sweeps
from ..store.records import Claimed
from ..store.sweeps import BATCH, RECORD_ID, THIS_RECORD, Sweep
from ..wire.delivery import Delivery
from ..wire.keys import OperationId
from ..worker.task import IdempotentTask
from . import alerts

# What has used up its attempts is ended by its next claim, in a worker that knows `on_failed` and tries it five times.
# An operation whose process dies in this many claims beyond its last attempt is ended by the sweep, without `on_failed`.
SPARE_CLAIMS = 10
# A record that is past its time and must stay is looked at again after an hour: what stays costs no pass anything.
KEEP = 3600.0
# How long a row that was set aside and is due no more is remembered, for people to see what happened.
REMEMBER = 86400.0

_HOLDERS = (
    "SELECT DISTINCT locked_by FROM idempotency.records WHERE status = 'started' AND locked_until >= clock_timestamp()"
)

# The attempts of the task's own, or those of the settings.
_MOST = """coalesce(
          (SELECT bound.attempts FROM unnest(%(operations)s::text[], %(attempts)s::int[]) bound(operation, attempts)
           WHERE bound.operation = r.operation), %(otherwise)s)"""

# Whether this application knows the task: another service on this database does not know how many attempts it has.
_KNOWN = """coalesce(
          (SELECT true FROM unnest(%(known)s::text[]) known(operation) WHERE known.operation = r.operation), false)"""

# So many claims have found the attempts used up, counted from the first one. Where none lived to say so, twice as many:
# by the limit of this process, which in the middle of a deploy may not be the workers'.
_SPENT = f"""{_KNOWN} AND r.attempts > {_MOST}
      AND r.attempts >= coalesce(r.spent_at + %(spare)s - 1, {_MOST} + 2 * %(spare)s)"""

# The index of what is held is found by the first condition alone.
_ORPHANED = """r.locked_until IS NOT NULL AND r.status = 'started'
      AND (r.locked_until < clock_timestamp() OR r.locked_by = ANY(%(dead)s))"""

# Spent operations that `EXHAUST` skipped because they were locked must not be released here.
RECOVER = Sweep(
    "recover",
    table="records",
    columns="r.attempts",
    due=f"{_ORPHANED} AND NOT ({_SPENT})",
    order="r.locked_until",
    one=THIS_RECORD,
    id=RECORD_ID,
    then="""
, released AS (
    UPDATE idempotency.records r
    SET status = 'released', token = NULL, locked_until = NULL, locked_by = NULL,
        available_at = clock_timestamp(), updated_at = clock_timestamp()
    FROM due o WHERE (r.tenant, r.operation, r.key) = (o.tenant, o.operation, o.key)
    RETURNING r.tenant, r.operation, r.key, r.fingerprint, r.message, r.queue, r.generation
), next_delivery AS (
    INSERT INTO idempotency.outbox (event_id, tenant, operation, key, fingerprint, message, queue, origin, generation)
    SELECT gen_random_uuid()::text, tenant, operation, key, fingerprint, message, queue, 'recover', generation
    FROM released
)
SELECT (SELECT count(*) FROM released)""",
)

# Each is ended in Python, in its own transaction (`_end_spent`): rare, and what an end may conclude is said there.
EXHAUST = Sweep(
    "exhaust",
    table="records",
    columns="r.message, r.fingerprint, r.queue, r.fence, r.token, r.attempts, r.generation, r.effects",
    due=f"{_ORPHANED} AND {_SPENT}",
    order="r.locked_until",
    one=THIS_RECORD,
    id=RECORD_ID,
    then="",
)

# The outbox rows go with their record: a row that outlived it would be sent again and run a second time. A row that
# is not published, or not settled and another request's, keeps the record, and so does an open dead letter. A row that
# was published may still be delivered for as long as the redelivery horizon says, whatever it is settled by: the record
# is what keeps that delivery from running.
OPERATIONS = Sweep(
    "purge",
    table="records",
    columns="""greatest(
        (SELECT clock_timestamp() + make_interval(secs => %(keep)s) FROM idempotency.outbox o
         WHERE o.tenant = r.tenant AND o.operation = r.operation AND o.key = r.key
           AND (o.status = 'pending' OR o.settled_at IS NULL AND (o.status <> 'published' OR o.fingerprint <> r.fingerprint))
         LIMIT 1),
        (SELECT clock_timestamp() + make_interval(secs => %(keep)s) FROM idempotency.dead_letters d
         WHERE d.tenant = r.tenant AND d.operation = r.operation AND d.key = r.key AND d.status = 'open' LIMIT 1),
        (SELECT max(o.published_at) + make_interval(secs => %(horizon)s) FROM idempotency.outbox o
         WHERE o.tenant = r.tenant AND o.operation = r.operation AND o.key = r.key)) AS stays_until""",
    due="r.status IN ('completed', 'failed') AND greatest(r.expires_at, r.kept_until) < (SELECT clock_timestamp())",
    order="greatest(r.expires_at, r.kept_until)",
    one=THIS_RECORD,
    id=RECORD_ID,
    then="""
, judged AS MATERIALIZED (
    SELECT tenant, operation, key, stays_until, coalesce(stays_until > clock_timestamp(), false) AS stays FROM due
), kept AS (
    UPDATE idempotency.records r SET kept_until = j.stays_until
    FROM judged j WHERE j.stays AND (r.tenant, r.operation, r.key) = (j.tenant, j.operation, j.key)
), rows AS (
    DELETE FROM idempotency.outbox o USING judged j
    WHERE NOT j.stays AND (o.tenant, o.operation, o.key) = (j.tenant, j.operation, j.key)
), purged AS (
    DELETE FROM idempotency.records r USING judged j
    WHERE NOT j.stays AND (r.tenant, r.operation, r.key) = (j.tenant, j.operation, j.key)
    RETURNING 1
)
SELECT (SELECT count(*) FROM purged)""",
)

# Settled rows whose operation has ended or has no record: duplicates of what is asked for again and again, events for
# consumers outside, what a person discarded, what could never be published. One that was published late, and may still
# be delivered, keeps its record. One that stays is looked at again after another retention.
ROWS = Sweep(
    "purge_rows",
    table="outbox",
    columns="""r.id, coalesce(
        (SELECT true FROM idempotency.records p
         WHERE p.tenant = r.tenant AND p.operation = r.operation AND p.key = r.key
           AND (p.status NOT IN ('completed', 'failed')
                OR r.published_at > clock_timestamp() - make_interval(secs => %(horizon)s)) LIMIT 1),
        (SELECT true FROM idempotency.dead_letters d WHERE d.outbox_id = r.id AND d.status = 'open' LIMIT 1),
        (SELECT true FROM idempotency.dead_letters d
         WHERE d.tenant = r.tenant AND d.operation = r.operation AND d.key = r.key AND d.status = 'open' LIMIT 1),
        false) AS stays""",
    due="""r.settled_at IS NOT NULL AND r.status = %(status)s AND r.status <> 'pending'
      AND greatest(r.settled_at, r.kept_at) < (SELECT clock_timestamp() - make_interval(secs => %(retention)s))""",
    order="greatest(r.settled_at, r.kept_at)",
    one="r.id = %(id)s",
    id="r.id::text",
    then="""
, kept AS (
    UPDATE idempotency.outbox o SET kept_at = clock_timestamp() FROM due WHERE due.stays AND o.id = due.id
), purged AS (
    DELETE FROM idempotency.outbox o USING due WHERE NOT due.stays AND o.id = due.id RETURNING 1
)
SELECT (SELECT count(*) FROM purged)""",
)

# Only what a person has settled: an open letter stays as long as it takes. The request to discard it goes with it.
LETTERS = Sweep(
    "purge_letters",
    table="dead_letters",
    columns="r.id",
    due="r.status <> 'open' AND r.settled_at < (SELECT clock_timestamp() - make_interval(secs => %(retention)s))",
    order="r.settled_at",
    one="r.id = %(id)s",
    id="r.id::text",
    then="""
, purged AS (DELETE FROM idempotency.dead_letters d USING due WHERE d.id = due.id RETURNING 1)
SELECT (SELECT count(*) FROM purged)""",
)

# When an alert was last sent matters for its interval only; the report's turn, for a week.
_FORGET_ALERTS = (
    "DELETE FROM idempotency.alerts WHERE sent_at < (SELECT clock_timestamp() - make_interval(secs => %(retention)s))"
)
_FORGET_SET_ASIDE = (
    "DELETE FROM idempotency.set_aside WHERE until < (SELECT clock_timestamp() - make_interval(secs => %(remember)s))"
)


def recover(app: Celery, *, limit: int = 10 * BATCH) -> int:
    """Release operations whose lease is over or whose holder is provably dead; returns how many.

    Each is delivered again by the outbox, in the same statement. Its attempt stays used: a poison message that
    kills its worker must come to an end, and one that kills even the claims which would end it is failed here. Death
    is proven only on this host; elsewhere the lease decides.
    """
    runtime = runtime_of(app)
    with runtime.autocommit() as connection:
        dead = [holder for (holder,) in connection.exec_driver_sql(_HOLDERS) if _is_dead(holder)]
        parameters = {"dead": dead} | _bounds(app, runtime)
        spent = sweeps.find(connection, EXHAUST, parameters)
        exhausted, _ = sweeps.one_by_one(
            connection, EXHAUST, spent, lambda row: _end_spent(app, runtime, parameters | sweeps.names(row))
        )
        total, _ = sweeps.run(connection, RECOVER, parameters, limit=limit)
    if exhausted:
        metrics.recovered.labels("attempts_exhausted").inc(exhausted)
        log.warning("attempts_exhausted", operations=exhausted)
    if total:
        metrics.recovered.labels("dead_holder" if dead else "lease_over").inc(total)
    return exhausted + total


def _is_dead(holder: str) -> bool:
    try:
        return is_provably_dead(holder)
    except ValueError:  # not a name that a process of ours gives itself: its lease decides
        return False


def _end_spent(app: Celery, runtime: Runtime, parameters: dict[str, Any]) -> int:
    """End one spent operation in its own transaction. 0: its holder came back, or another sweep has it."""
    with runtime.engine.begin() as connection:
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = {sweeps.LOCK_TIMEOUT_MS}")
        record = connection.exec_driver_sql(EXHAUST.find_one, parameters).one_or_none()
        if record is None:
            return 0
        _conclude(connection, runtime.settings, record, app.tasks.get(record.operation))
    return 1


def _conclude(connection: Connection, settings: Settings, record: Row[Any], task: Any) -> None:
    """Fail an operation whose process died in every attempt, with its dead letter. The record is locked."""
    id = OperationId(record.tenant, record.operation, record.key)
    claim = Claimed(id, record.fence, record.token, record.attempts, record.generation, 0.0, record.effects, False)
    concluded = conclusions.conclude(
        connection,
        id,
        AttemptsExhausted("its process died in every attempt, and in what would end it"),
        entries=record.effects,
        arguments={},
        attempts=record.attempts,
        on_failed=getattr(task, "on_failed", None),
        skip="its process died in every attempt, and in what would end it",
    )
    delivery = Delivery(id, record.fingerprint, {}, "", record.message, {}, record.queue)
    dead_letters.store_failure(
        connection,
        id,
        delivery,
        claim,
        reason=concluded.reason,
        last_error=concluded.end.error,
        service=settings.service,
    )
    retention = getattr(task, "retention_failed", None) or settings.retention_failed
    records.fail(connection, claim, concluded.end, retention=retention, lease=settings.lease)
    metrics.count_failed(id.operation, concluded.error.code)


def _bounds(app: Celery, runtime: Runtime) -> dict[str, object]:
    known = {name: task for name, task in app.tasks.items() if isinstance(task, IdempotentTask)}
    own = {name: task.max_attempts for name, task in known.items() if task.max_attempts}
    return {
        "known": list(known),
        "spare": SPARE_CLAIMS,
        "operations": list(own),
        "attempts": list(own.values()),
        "otherwise": runtime.settings.max_attempts,
        "batch": BATCH,
    }


@dataclass(frozen=True, slots=True)
class Purged:
    """What one pass of the purge deleted, and whether it ended at its limit with more to do."""

    operations: int
    rows: int
    letters: int
    more: bool


def purge(app: Celery, *, limit: int = 100 * BATCH) -> int:
    """Delete what is past its retention (`purge_once`); returns how many operations."""
    return purge_once(app, limit=limit).operations


def purge_once(app: Celery, *, limit: int) -> Purged:
    """Delete ended operations past their retention with their outbox rows, settled rows without one, settled letters.

    At most about `limit` of each kind. Never an operation that has not ended, is younger than its retention, has an
    open dead letter, or an outbox row that is not published or was within the `redelivery_horizon`; never a row that is
    not published or not settled. The audit stays.
    """
    runtime = runtime_of(app)
    settings = runtime.settings
    letters_kept = settings.retention_dead_letters
    with runtime.autocommit() as connection:
        # first, because an open letter keeps its operation and a settled one does not
        letters, more = sweeps.run(connection, LETTERS, {"retention": letters_kept}, limit=limit)
        kept = {"keep": KEEP, "horizon": settings.redelivery_horizon}
        operations, more_operations = sweeps.run(connection, OPERATIONS, kept, limit=limit)
        more, rows = more or more_operations, 0
        for status, retention in (
            ("published", settings.retention_completed),
            ("failed", settings.retention_failed),
        ):
            bounds = {"status": status, "retention": retention, "horizon": settings.redelivery_horizon}
            deleted, more_rows = sweeps.run(connection, ROWS, bounds, limit=limit)
            more, rows = more or more_rows, rows + deleted
        alerts_kept = max(letters_kept, settings.alert_interval * alerts.ALARM_INTERVALS)
        connection.exec_driver_sql(_FORGET_ALERTS, {"retention": alerts_kept})
        connection.exec_driver_sql(_FORGET_SET_ASIDE, {"remember": REMEMBER})
    metrics.purged.inc(operations)
    return Purged(operations, rows, letters, more)
