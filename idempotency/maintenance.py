"""Recover what has lost its holder, purge what is past its time.

Both are safe to run anywhere, any number at once: every row is taken with SKIP LOCKED and changed only if it still
is what was seen. Beat schedules them and the relay runs them too, because recovery must not depend on the broker
it recovers from.
"""

from __future__ import annotations

from celery import Celery
from sqlalchemy import Connection

from . import dead_letters, metrics, records
from .attempt import RESPONSE_FAILED
from .logs import log
from .runtime import Runtime, is_provably_dead
from .task import IdempotentTask

# Rows per statement: short transactions, so that nothing waits long behind a sweep.
BATCH = 500

# What has used up its attempts is ended by its next claim, in a worker that knows `on_failed` and tries it five times.
# An operation whose process dies in this many claims beyond its last attempt is ended by the sweep, without `on_failed`.
SPARE_CLAIMS = 10

_HOLDERS = (
    "SELECT DISTINCT locked_by FROM idempotency.records WHERE status = 'started' AND locked_until >= clock_timestamp()"
)

# More attempts than a claim would have ended: the attempts of the task's own, or those of the settings, and the spare ones.
_BOUND = """%(spare)s + coalesce(
          (SELECT bound.attempts FROM unnest(%(operations)s::text[], %(attempts)s::int[]) bound(operation, attempts)
           WHERE bound.operation = r.operation), %(otherwise)s)"""

# The index of what is held is found by the first condition alone.
_ORPHANED = """locked_until IS NOT NULL AND status = 'started'
      AND (locked_until < clock_timestamp() OR locked_by = ANY(%(dead)s))"""

# What is to be exhausted and was skipped, because somebody had it locked, is not released instead.
_RECOVER = f"""
WITH orphan AS MATERIALIZED (
    SELECT tenant, operation, key FROM idempotency.records r
    WHERE {_ORPHANED}
      AND attempts < {_BOUND}
    ORDER BY tenant, operation, key LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED
), released AS (
    UPDATE idempotency.records r
    SET status = 'released', token = NULL, locked_until = NULL, locked_by = NULL,
        available_at = clock_timestamp(), updated_at = clock_timestamp()
    FROM orphan o WHERE (r.tenant, r.operation, r.key) = (o.tenant, o.operation, o.key)
    RETURNING r.tenant, r.operation, r.key, r.fingerprint, r.message, r.queue, r.generation
), next_delivery AS (
    INSERT INTO idempotency.outbox (event_id, tenant, operation, key, fingerprint, message, queue, origin, generation)
    SELECT gen_random_uuid()::text, tenant, operation, key, fingerprint, message, queue, 'recover', generation
    FROM released
)
SELECT count(*) FROM released
"""

_EXHAUST = f"""
WITH spent AS MATERIALIZED (
    SELECT tenant, operation, key FROM idempotency.records r
    WHERE {_ORPHANED}
      AND attempts >= {_BOUND}
    ORDER BY tenant, operation, key LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED
), failed AS (
    UPDATE idempotency.records r
    SET status = 'failed', fence = nextval('idempotency.fence'), token = NULL, locked_until = NULL, locked_by = NULL,
        error = %(error)s, first_error = coalesce(first_error, %(error)s), response_code = %(response_code)s,
        completed_at = clock_timestamp(), expires_at = clock_timestamp() + make_interval(secs => %(retention)s),
        updated_at = clock_timestamp()
    FROM spent s WHERE (r.tenant, r.operation, r.key) = (s.tenant, s.operation, s.key)
    RETURNING r.*
), letter AS (
    INSERT INTO idempotency.dead_letters
        (source, tenant, operation, key, generation, fingerprint, queue, task, consumer_service, reason, first_error,
         last_error, attempts, headers, payload)
    SELECT 'operation', tenant, operation, key, generation, fingerprint, queue, operation, %(service)s,
           'attempts_exhausted', first_error, error, attempts, message::json ->> 'headers', message FROM failed
    ON CONFLICT DO NOTHING
)
SELECT count(*) FROM failed
"""

# The outbox rows go with their record: a row that outlived it would be sent again and run a second time. An
# unpublished row or an open dead letter keeps the record.
_PURGE = """
WITH expired AS MATERIALIZED (
    SELECT r.tenant, r.operation, r.key FROM idempotency.records r
    WHERE r.status IN ('completed', 'failed') AND r.expires_at < clock_timestamp()
      AND NOT EXISTS (SELECT FROM idempotency.outbox o
                      WHERE (o.tenant, o.operation, o.key) = (r.tenant, r.operation, r.key)
                        AND o.settled_at IS NULL AND (o.status <> 'published' OR o.fingerprint <> r.fingerprint))
      AND NOT EXISTS (SELECT FROM idempotency.dead_letters d
                      WHERE (d.tenant, d.operation, d.key) = (r.tenant, r.operation, r.key) AND d.status = 'open')
    ORDER BY r.expires_at LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED
), rows AS (
    DELETE FROM idempotency.outbox o USING expired e
    WHERE (o.tenant, o.operation, o.key) = (e.tenant, e.operation, e.key)
), purged AS (
    DELETE FROM idempotency.records r USING expired e
    WHERE (r.tenant, r.operation, r.key) = (e.tenant, e.operation, e.key)
      AND r.status IN ('completed', 'failed') AND r.expires_at < clock_timestamp()
    RETURNING 1
)
SELECT count(*) FROM purged
"""


def recover(app: Celery, *, limit: int = 10 * BATCH) -> int:
    """Release operations whose lease is over or whose holder is provably dead; returns how many.

    Each is delivered again by the outbox, in the same statement. Its attempt stays used: a poison message that
    kills its worker must come to an end, and one that kills even the claims which would end it is failed here. Death
    is proven only on this host; elsewhere the lease decides.
    """
    runtime = Runtime.of(app)
    with runtime.autocommit() as connection:
        dead = [holder for (holder,) in connection.exec_driver_sql(_HOLDERS) if is_provably_dead(holder)]
        parameters = {"dead": dead} | _bounds(app, runtime)
        exhausted: int = connection.exec_driver_sql(_EXHAUST, parameters).scalar_one()
        total = 0
        while total < limit:
            recovered = connection.exec_driver_sql(_RECOVER, parameters).scalar_one()
            total += recovered
            if recovered < BATCH:
                break
    if exhausted:
        metrics.recovered.labels("attempts_exhausted").inc(exhausted)
        log.warning("attempts_exhausted", operations=exhausted)
    if total:
        metrics.recovered.labels("dead_holder" if dead else "lease_over").inc(total)
    return exhausted + total


def _bounds(app: Celery, runtime: Runtime) -> dict[str, object]:
    settings = runtime.settings
    own = {
        name: task.max_attempts
        for name, task in app.tasks.items()
        if isinstance(task, IdempotentTask) and task.max_attempts
    }
    return {
        "spare": SPARE_CLAIMS,
        "operations": list(own),
        "attempts": list(own.values()),
        "otherwise": settings.max_attempts,
        "batch": BATCH,
        "error": records.error_text(
            "attempts_exhausted", "its process died in every attempt, and in what would end it"
        ),
        "response_code": RESPONSE_FAILED,
        "retention": settings.retention_failed,
        "service": settings.service,
    }


def purge(app: Celery, *, limit: int = 100 * BATCH) -> int:
    """Delete ended operations past their retention, with their outbox rows, and settled dead letters; returns how many.

    Never one that has not ended, is younger than its retention, has an unpublished outbox row or an open dead letter.
    """
    runtime = Runtime.of(app)
    with runtime.autocommit() as connection:
        # first, because an open letter keeps its record and a settled one does not
        while dead_letters.purge(connection, retention=runtime.settings.retention_dead_letters, batch=BATCH) == BATCH:
            pass
        total = _in_batches(connection, limit)
    metrics.purged.inc(total)
    return total


def _in_batches(connection: Connection, limit: int) -> int:
    total = 0
    while total < limit:
        purged: int = connection.exec_driver_sql(_PURGE, {"batch": BATCH}).scalar_one()
        total += purged
        if purged < BATCH:
            break
    return total
