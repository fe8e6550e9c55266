"""Recover what has lost its holder, purge what is past its time.

Both are safe to run anywhere, any number at once: every row is taken with SKIP LOCKED and changed only if it still
is what was seen. Beat schedules them and the relay runs them too, because recovery must not depend on the broker
it recovers from.
"""

from __future__ import annotations

from celery import Celery
from sqlalchemy import Connection

from . import dead_letters, metrics
from .runtime import Runtime, is_provably_dead

# Rows per statement: short transactions, so that nothing waits long behind a sweep.
BATCH = 500

_HOLDERS = (
    "SELECT DISTINCT locked_by FROM idempotency.records WHERE status = 'started' AND locked_until >= clock_timestamp()"
)

_RECOVER = """
WITH orphan AS MATERIALIZED (
    SELECT tenant, operation, key FROM idempotency.records
    WHERE status = 'started' AND (locked_until < clock_timestamp() OR locked_by = ANY(%(dead)s))
    ORDER BY tenant, operation, key LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED
), released AS (
    UPDATE idempotency.records r
    SET status = 'released', token = NULL, locked_until = NULL, locked_by = NULL,
        available_at = clock_timestamp(), updated_at = clock_timestamp()
    FROM orphan o WHERE (r.tenant, r.operation, r.key) = (o.tenant, o.operation, o.key)
    RETURNING r.tenant, r.operation, r.key, r.fingerprint, r.message, r.queue
), next_delivery AS (
    INSERT INTO idempotency.outbox (event_id, tenant, operation, key, fingerprint, message, queue, origin)
    SELECT gen_random_uuid()::text, tenant, operation, key, fingerprint, message, queue, 'recover' FROM released
)
SELECT count(*) FROM released
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
    kills its worker must come to an end. Death is proven only on this host; elsewhere the lease decides.
    """
    with Runtime.of(app).autocommit() as connection:
        dead = [holder for (holder,) in connection.exec_driver_sql(_HOLDERS) if is_provably_dead(holder)]
        total = 0
        while total < limit:
            recovered = connection.exec_driver_sql(_RECOVER, {"dead": dead, "batch": BATCH}).scalar_one()
            total += recovered
            if recovered < BATCH:
                break
    if total:
        metrics.recovered.labels("dead_holder" if dead else "lease_over").inc(total)
    return total


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
