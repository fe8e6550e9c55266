"""Reconcile: what the broker has lost is sent again from the outbox.

A row stays unsettled until its operation has ended, so that deleting every queue loses nothing. Age alone says little:
a long backlog is not a lost one, and re-sending it would only make it longer (in simulation a backlog of 60,000 then
never drained). So no queue is sent more than it lacks: its unsettled operations that wait, less the messages ready in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from celery import Celery
from sqlalchemy import Connection

from . import metrics
from .logs import log
from .publisher import BrokerAway, Publisher
from .runtime import Runtime

# Rows per statement: short transactions.
BATCH = 1000
# The longest pause between two sends of one operation.
RESEND_CAP = 3600.0

# Fingerprints of two rules cannot be compared here, where the arguments are not known; the worker that is given the
# message does it.
_OTHER_RULE = "split_part(r.fingerprint, ':', 1) <> split_part(o.fingerprint, ':', 1)"

# Settled by a terminal record with the same fingerprint; another request's end says nothing about this one.
_SETTLE = f"""
WITH ended AS MATERIALIZED (
    SELECT o.id FROM idempotency.outbox o
    JOIN idempotency.records r ON (r.tenant, r.operation, r.key) = (o.tenant, o.operation, o.key)
    WHERE o.status = 'published' AND o.settled_at IS NULL
      AND r.status IN ('completed', 'failed') AND (r.fingerprint = o.fingerprint OR {_OTHER_RULE})
    LIMIT %(batch)s FOR UPDATE OF o SKIP LOCKED
)
UPDATE idempotency.outbox o SET settled_at = clock_timestamp() FROM ended WHERE o.id = ended.id
"""

# The key belongs to another request: this one will never run under it, and somebody has to know.
_REFUSE = f"""
WITH refused AS (
    UPDATE idempotency.outbox o SET settled_at = clock_timestamp()
    FROM idempotency.records r
    WHERE o.status = 'published' AND o.settled_at IS NULL AND o.published_at < clock_timestamp() - make_interval(secs => %(after)s)
      AND (r.tenant, r.operation, r.key) = (o.tenant, o.operation, o.key) AND r.fingerprint <> o.fingerprint
      AND NOT {_OTHER_RULE}
    RETURNING o.*, r.generation AS of_record
)
INSERT INTO idempotency.dead_letters
    (source, outbox_id, event_id, tenant, operation, key, generation, fingerprint, queue, task, reason, first_error,
     last_error, attempts, payload, consumer_service)
SELECT 'relay', id, event_id, tenant, operation, key, of_record, fingerprint, queue, operation,
       'fingerprint_mismatch', %(error)s, %(error)s, 0, message, %(service)s
FROM refused ON CONFLICT DO NOTHING
"""

# What waits in a queue: published, and its record missing, or released and due. `started` is recover's business.
_WAITING = """
WITH newest AS MATERIALIZED (
    SELECT DISTINCT ON (o.tenant, o.operation, o.key, o.fingerprint)
           o.id, o.tenant, o.operation, o.key, o.fingerprint, o.queue, o.published_at, o.resends, o.status
    FROM idempotency.outbox o
    WHERE o.settled_at IS NULL AND o.status <> 'failed'
    ORDER BY o.tenant, o.operation, o.key, o.fingerprint, o.id DESC
)
SELECT n.id, n.operation, n.queue,
       n.published_at < clock_timestamp()
           - make_interval(secs => least(%(after)s * power(2, least(n.resends, 20)), %(cap)s)) AS overdue
FROM newest n LEFT JOIN idempotency.records r ON (r.tenant, r.operation, r.key) = (n.tenant, n.operation, n.key)
WHERE n.status = 'published'
  AND (r.status IS NULL OR r.status = 'released' AND r.available_at <= clock_timestamp())
  AND NOT EXISTS (SELECT FROM idempotency.dead_letters d
                  WHERE (d.tenant, d.operation, d.key, d.fingerprint) = (n.tenant, n.operation, n.key, n.fingerprint)
                    AND d.status = 'open')
ORDER BY n.published_at
"""

_RESEND = """
UPDATE idempotency.outbox SET status = 'pending', origin = 'reconcile', resends = resends + 1,
    available_at = clock_timestamp(), relayed_until = NULL
WHERE id = ANY(%(ids)s) AND status = 'published' AND settled_at IS NULL
"""


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What one pass did: rows whose operation has ended, and operations sent again."""

    settled: int
    resent: int


def reconcile(app: Celery, depth: Callable[[str], int] | None = None) -> Reconciled:
    """Settle what has ended, and send again what its queue lacks.

    `depth` tells how many messages are ready in a queue; by default the broker is asked, and nothing is sent again
    while it is away. Any number at once.
    """
    runtime = Runtime.of(app)
    after = runtime.settings.resend_after
    with runtime.autocommit() as connection:
        settled = _settle(connection, after, runtime.settings.service)
        if depth is not None:
            return Reconciled(settled, _resend(app, connection, depth, after))
        publisher = Publisher(app, confirm_timeout=10.0)
        try:
            return Reconciled(settled, _resend(app, connection, publisher.depth, after))
        finally:
            publisher.close()


def _settle(connection: Connection, after: float, service: str | None) -> int:
    total = 0
    while True:
        settled = connection.exec_driver_sql(_SETTLE, {"batch": BATCH}).rowcount
        total += settled
        if settled < BATCH:
            break
    connection.exec_driver_sql(
        _REFUSE,
        {
            "after": after,
            "service": service,
            "error": '{"code": "fingerprint_mismatch", "message": "this idempotency key was used with other arguments"}',
        },
    )
    return total


def _resend(app: Celery, connection: Connection, depth: Callable[[str], int], after: float) -> int:
    waiting: dict[str, list[tuple[int, bool]]] = {}
    for row in connection.exec_driver_sql(_WAITING, {"after": after, "cap": RESEND_CAP}):
        waiting.setdefault(row.queue or _routed(app, row.operation), []).append((row.id, row.overdue))
    total = 0
    for queue, rows in waiting.items():
        overdue = [id for id, is_overdue in rows if is_overdue]
        if not overdue:
            continue
        try:
            lacking = len(rows) - depth(queue)
        except BrokerAway:
            break
        for start in range(0, min(lacking, len(overdue)), BATCH):
            ids = overdue[start : min(start + BATCH, lacking)]
            total += connection.exec_driver_sql(_RESEND, {"ids": ids}).rowcount
    if total:
        metrics.resent.inc(total)
        log.warning("resent", operations=total)
    return total


def _routed(app: Celery, operation: str) -> str:
    queue = app.amqp.router.route({}, operation).get("queue")
    return str(getattr(queue, "name", queue or app.conf.task_default_queue))
