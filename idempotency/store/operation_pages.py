"""Operations in pages, by how far they are; and those that have a key.

A page begins after the last row of the one before, by what it is ordered by. Of what has ended, a page looks through a bounded
number of rows for those that match: where they are rare, it may have none, and says where to go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row

from .visible import VISIBLE, parameters

# The most rows that one page looks through.
WINDOW = 5_000
# The most pairs of a tenant and a task that are asked for a key.
KINDS = 2_000

_FILTER = "(%(task)s::text IS NULL OR o.task = %(task)s) AND (%(tenant)s::text IS NULL OR o.tenant = %(tenant)s)"
_COLUMNS = "tenant, task, key, status, queue, attempts, spent_at, error_code, created_at, service"

# By the columns of an index that begins the order; the key makes it complete.
_WINDOWS = {
    "ended": (
        "completed_at",
        "completed_at IS NOT NULL AND (%(at)s::timestamptz IS NULL OR completed_at <= %(at)s AND"
        " (completed_at, tenant, task, key) < (%(at)s, %(after_tenant)s, %(after_task)s, %(after_key)s))",
        "completed_at DESC, tenant DESC, task DESC, key DESC",
    ),
    "running": (
        "locked_until",
        "locked_until IS NOT NULL AND (%(at)s::timestamptz IS NULL OR"
        " (locked_until, tenant, task, key) > (%(at)s, %(after_tenant)s, %(after_task)s, %(after_key)s))",
        "locked_until, tenant, task, key",
    ),
    "released": (
        "available_at",
        "available_at IS NOT NULL AND (%(at)s::timestamptz IS NULL OR (queue, available_at, tenant, task, key) >"
        " (%(after_queue)s, %(at)s, %(after_tenant)s, %(after_task)s, %(after_key)s))",
        "queue, available_at, tenant, task, key",
    ),
}

_PAGE = f"""
SELECT o.*, count(*) OVER () AS looked_at, {VISIBLE} AND {_FILTER} AND (%(status)s::text IS NULL OR o.status = %(status)s) AS fits
FROM (SELECT {_COLUMNS}, {{at}} AS at FROM idempotency.records WHERE {{condition}} ORDER BY {{order}} LIMIT %(window)s) o
"""
_FITTING = """
SELECT * FROM ({page}) seen WHERE fits LIMIT %(limit)s
"""
_LAST_SEEN = """
SELECT {columns}, {at} AS at FROM idempotency.records WHERE {condition} ORDER BY {order} OFFSET %(window)s - 1 LIMIT 1
"""

_ACCEPTED = f"""
SELECT o.id, o.tenant, o.task, o.key, o.status, o.queue, o.attempts, o.origin, o.created_at, o.available_at, o.published_at,
       o.last_error, o.service
FROM (SELECT * FROM idempotency.outbox o WHERE o.settled_at IS NULL
        AND (%(after)s::bigint IS NULL OR (o.queue, o.id) > (%(after_queue)s, %(after)s))
      ORDER BY o.queue, o.id LIMIT %(window)s) o
WHERE {VISIBLE} AND {_FILTER}
  AND NOT EXISTS (SELECT FROM idempotency.records r WHERE (r.tenant, r.task, r.key) = (o.tenant, o.task, o.key))
ORDER BY o.queue, o.id LIMIT %(limit)s
"""

_LAST_ACCEPTED = """
SELECT o.queue, o.id FROM idempotency.outbox o
WHERE o.settled_at IS NULL AND (%(after)s::bigint IS NULL OR (o.queue, o.id) > (%(after_queue)s, %(after)s))
ORDER BY o.queue, o.id OFFSET %(window)s - 1 LIMIT 1
"""

# A key alone begins no index: the pairs of tenant and task are found by skipping through one, and each is asked.
_KINDS = """
WITH RECURSIVE kinds(tenant, task) AS (
    (SELECT k.tenant, k.task FROM idempotency.{table} k WHERE k.task IS NOT NULL AND k.tenant IS NOT NULL
     ORDER BY k.tenant, k.task LIMIT 1)
    UNION ALL
    SELECT next.tenant, next.task FROM kinds CROSS JOIN LATERAL (
        SELECT k.tenant, k.task FROM idempotency.{table} k
        WHERE (k.tenant, k.task) > (kinds.tenant, kinds.task) ORDER BY k.tenant, k.task LIMIT 1) next
)
SELECT k.tenant, k.task, o.key, count(*) OVER () >= %(kinds)s AS stopped FROM (SELECT * FROM kinds LIMIT %(kinds)s) k
LEFT JOIN LATERAL (
    SELECT o.key FROM idempotency.{table} o
    WHERE o.tenant = k.tenant AND o.task = k.task AND o.key = %(key)s AND {mine}
      AND (%(tenants)s::text[] IS NULL OR k.tenant = ANY(%(tenants)s)) LIMIT 1) o ON true
"""
_OWN = "(o.{service} = %(service)s) IS NOT FALSE"

_IS_MINE = """
SELECT EXISTS (SELECT FROM idempotency.records o WHERE {row} AND {own}) OR EXISTS (
    SELECT FROM idempotency.outbox o WHERE {row} AND {own}) OR EXISTS (
    SELECT FROM idempotency.dead_letters o WHERE {row} AND (o.consumer_service = %(service)s) IS NOT FALSE)
""".format(row="(o.tenant, o.task, o.key) = (%(tenant)s, %(task)s, %(key)s)", own=_OWN.format(service="service"))

_TENANTS = """
WITH RECURSIVE named(tenant, task) AS (
    (SELECT r.tenant, r.task FROM idempotency.records r WHERE %(after)s::text IS NULL OR r.tenant > %(after)s
     ORDER BY r.tenant, r.task LIMIT 1)
    UNION ALL
    SELECT next.tenant, next.task FROM named CROSS JOIN LATERAL (
        SELECT r.tenant, r.task FROM idempotency.records r
        WHERE (r.tenant, r.task) > (named.tenant, named.task) ORDER BY r.tenant, r.task LIMIT 1) next
)
SELECT DISTINCT n.tenant FROM (SELECT tenant, task FROM named LIMIT %(window)s) n
WHERE (%(tenants)s::text[] IS NULL OR n.tenant = ANY(%(tenants)s)) AND EXISTS (
    -- a task is one application's, so its first records say whose it is
    SELECT FROM (SELECT r.service FROM idempotency.records r WHERE r.tenant = n.tenant AND r.task = n.task LIMIT 100) o
    WHERE (o.service = %(service)s) IS NOT FALSE)
ORDER BY n.tenant LIMIT %(limit)s
"""


def page(
    connection: Connection,
    service: str,
    tenants: Sequence[str] | None,
    stage: str,
    *,
    task: str | None = None,
    tenant: str | None = None,
    status: str | None = None,
    after: Sequence[Any] | None = None,
    limit: int,
) -> tuple[Sequence[Row[Any]], Row[Any] | None]:
    """Operations that are `running`, `released` or `ended`, and the row after which the next page begins; None: there is none.

    `after`: that row of the page before, as queue, time, tenant, task, key.
    """
    at, condition, order = _WINDOWS[stage]
    queue, when, *key = after or (None,) * 5
    names = dict(zip(("after_tenant", "after_task", "after_key"), key, strict=True))
    fields = parameters(
        service,
        tenants,
        task=task,
        tenant=tenant,
        status=status,
        at=when,
        after_queue=queue,
        limit=limit,
        window=WINDOW,
    )
    statement = _PAGE.format(at=at, condition=condition, order=order)
    rows = connection.exec_driver_sql(_FITTING.format(page=statement), fields | names).all()
    if len(rows) == limit:
        return rows, rows[-1]
    last = _LAST_SEEN.format(columns=_COLUMNS, at=at, condition=condition, order=order)
    return rows, connection.exec_driver_sql(last, fields | names).one_or_none()


def accepted(
    connection: Connection,
    service: str,
    tenants: Sequence[str] | None,
    *,
    task: str | None = None,
    tenant: str | None = None,
    after: tuple[str, int] | None = None,
    limit: int,
) -> tuple[Sequence[Row[Any]], Row[Any] | None]:
    """Outbox rows of operations that have not begun, by queue, oldest first, and the row after which the next page begins.

    `after`: queue and id of that row of the page before.
    """
    queue, id = after or (None, None)
    fields = parameters(
        service, tenants, task=task, tenant=tenant, after_queue=queue, after=id, window=WINDOW, limit=limit
    )
    rows = connection.exec_driver_sql(_ACCEPTED, fields).all()
    if len(rows) == limit:
        return rows, rows[-1]
    return rows, connection.exec_driver_sql(_LAST_ACCEPTED, fields).one_or_none()


def with_key(
    connection: Connection, service: str, tenants: Sequence[str] | None, key: str
) -> tuple[list[tuple[str, str, str]], bool]:
    """The operations that have this key, as tenant, task, key: begun, accepted, or with a dead letter; and whether all were asked.

    Not asked is what comes after `KINDS` pairs of a tenant and a task.
    """
    found: set[tuple[str, str, str]] = set()
    are_all = True
    for table, column in (("records", "service"), ("outbox", "service"), ("dead_letters", "consumer_service")):
        statement = _KINDS.format(table=table, mine=_OWN.format(service=column))
        fields = parameters(service, tenants, key=key, kinds=KINDS)
        for row in connection.exec_driver_sql(statement, fields):
            are_all &= not row.stopped
            if row.key is not None:
                found.add((row.tenant, row.task, row.key))
    return sorted(found), are_all


def is_own(connection: Connection, service: str, tenant: str, task: str, key: str) -> bool:
    """Whether an operation is known, and none but this application's."""
    fields = {"service": service, "tenant": tenant, "task": task, "key": key}
    return bool(connection.exec_driver_sql(_IS_MINE, fields).scalar_one())


def names_of_tenants(
    connection: Connection, service: str, tenants: Sequence[str] | None, *, after: str | None, limit: int
) -> list[str]:
    """The tenants that have operations of this application, by name. `after`: the last one before."""
    fields = parameters(service, tenants, after=after, limit=limit, window=WINDOW)
    return list(connection.exec_driver_sql(_TENANTS, fields).scalars())
