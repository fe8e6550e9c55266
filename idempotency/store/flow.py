"""How much work is where between being accepted and its end, for each queue, and what is the oldest there.

Like `overview.py`, every query reads a bounded number of rows, and a count that stopped there says so. Not promised: that the
counts of one answer are of one moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row

from . import edits
from .overview import QUEUES
from .processes import STARTED
from .visible import VISIBLE, parameters

# The most rows that one count reads over all queues: a page is to answer in a fraction of a second.
BOUND = 10_000
# Seconds of what has ended.
SINCE = 3600.0

_PART = "%(bound)s / (SELECT count(queue) FROM queues)"
# Since when a row has been due: as long as it was never tried, not before it was to be sent.
_DUE_AT = "CASE WHEN o.attempts = 0 AND o.resends = 0 THEN o.available_at ELSE o.created_at END"

# A row stays unsettled until its operation has ended: published and not begun is what no attempt holds.
_SENT = f"""
{QUEUES.format(table="outbox", condition="o.settled_at IS NULL")}
SELECT q.queue, counted.* FROM queues q CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE w.stage = 'accepted') AS accepted, count(*) FILTER (WHERE w.stage = 'delayed') AS delayed,
           count(*) FILTER (WHERE w.stage = 'published') AS published, count(*) FILTER (WHERE w.stage = 'stuck') AS stuck,
           extract(epoch FROM clock_timestamp() - min(w.since) FILTER (WHERE w.stage = 'accepted'))::float8 AS oldest_accepted,
           extract(epoch FROM clock_timestamp() - min(w.since) FILTER (WHERE w.stage = 'published'))::float8 AS oldest_published,
           count(*) >= {_PART} AS stopped
    FROM (
        SELECT CASE WHEN NOT ({VISIBLE}) THEN NULL  -- it counts for the limit alone
                    WHEN o.status = 'failed' THEN 'stuck'
                    WHEN o.status = 'published' AND coalesce(begun.status = 'released', true) THEN 'published'
                    WHEN o.status = 'published' THEN 'begun'
                    WHEN {_DUE_AT} <= clock_timestamp() THEN 'accepted' ELSE 'delayed' END AS stage,
               CASE WHEN o.status = 'published' THEN o.published_at ELSE {_DUE_AT} END AS since
        FROM (
            SELECT o.tenant, o.task, o.key, o.status, o.service, o.attempts, o.resends, o.available_at, o.created_at, o.published_at
            FROM idempotency.outbox o WHERE o.settled_at IS NULL AND o.queue = q.queue ORDER BY o.id LIMIT {_PART}) o
        LEFT JOIN LATERAL (
            SELECT r.status FROM idempotency.records r
            WHERE (r.tenant, r.task, r.key) = (o.tenant, o.task, o.key) AND o.status = 'published' AND {VISIBLE} LIMIT 1) begun ON true
    ) w
) counted WHERE q.queue IS NOT NULL
"""

_RUNNING = f"""
SELECT queue, count(*) FILTER (WHERE {VISIBLE}) AS running,
       count(*) FILTER (WHERE {VISIBLE} AND locked_until < clock_timestamp()) AS lease_over,
       extract(epoch FROM clock_timestamp() - min(opened_at) FILTER (WHERE {VISIBLE}))::float8 AS oldest_running,
       sum(count(*)) OVER () >= %(bound)s AS stopped
FROM (SELECT o.queue, o.locked_until, o.opened_at, o.service, o.tenant FROM idempotency.records o
      WHERE o.locked_until IS NOT NULL ORDER BY o.locked_until LIMIT %(bound)s) o
GROUP BY queue
"""

# Without a message, an operation waits for its caller, in no queue: what its record names as one is its task. What waits for a
# person is a letter, and not work.
_WAITS = f"{VISIBLE} AND o.message <> '' AND NOT o.waits"
_RELEASED = f"""
{QUEUES.format(table="records", condition="o.available_at IS NOT NULL")}
SELECT q.queue, counted.* FROM queues q CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE {_WAITS}) AS released,
           extract(epoch FROM clock_timestamp() - min(o.opened_at) FILTER (WHERE {_WAITS}))::float8 AS oldest_released,
           count(*) >= {_PART} AS stopped
    FROM (SELECT r.opened_at, r.service, r.tenant, r.message, {{waits}} AS waits FROM idempotency.records r
          WHERE r.available_at IS NOT NULL AND r.queue = q.queue ORDER BY r.available_at LIMIT {_PART}) o
) counted WHERE q.queue IS NOT NULL
"""

_ENDED = f"""
SELECT queue, count(*) FILTER (WHERE {VISIBLE} AND status = 'completed') AS completed,
       count(*) FILTER (WHERE {VISIBLE} AND status = 'failed') AS failed,
       extract(epoch FROM clock_timestamp() - max(completed_at) FILTER (WHERE {VISIBLE}))::float8 AS last_ended,
       sum(count(*)) OVER () >= %(bound)s AS stopped
FROM (SELECT o.queue, o.status, o.completed_at, o.service, o.tenant FROM idempotency.records o
      WHERE o.completed_at > clock_timestamp() - make_interval(secs => %(since)s)
      ORDER BY o.completed_at DESC LIMIT %(bound)s) o
GROUP BY queue
"""

# The counts by what they are of; of these, one limit is for all queues together.
KINDS = {"sent": _SENT, "running": _RUNNING, "released": _RELEASED, "ended": _ENDED}
OVER_ALL = ("running", "ended")

# Also which code each is of, which a schema before 0018 does not know.
_PROCESSES = f"""
SELECT kind, name, host, pid, version, coalesce(code_version, '–') AS code_version, queues, started_at, seen_at,
       extract(epoch FROM clock_timestamp() - seen_at)::float8 AS silent_seconds, {STARTED}
FROM idempotency.processes p WHERE service = %(service)s ORDER BY kind, name, host, pid LIMIT 1000
"""


@dataclass(slots=True)
class Stages:
    """One queue, according to Postgres. Ages are in seconds, of the oldest; None: there is none."""

    accepted: int = 0  # due, not published
    delayed: int = 0  # not due yet
    published: int = 0  # and not begun, or waiting for its next attempt
    stuck: int = 0  # cannot be published
    running: int = 0
    lease_over: int = 0  # of the running ones
    released: int = 0  # between two attempts, sagas that wait among them
    completed: int = 0  # in the last `SINCE` seconds
    failed: int = 0
    oldest_accepted: float | None = None
    oldest_published: float | None = None
    oldest_running: float | None = None
    oldest_released: float | None = None
    last_ended: float | None = None
    stopped: set[str] = field(default_factory=set)  # of `KINDS`, those whose counts stopped at their share of `BOUND`

    @property
    def ended(self) -> int:
        """How many have ended in the last `SINCE` seconds."""
        return self.completed + self.failed

    @property
    def has_work(self) -> bool:
        """Whether anything of those that were asked for is there."""
        parts = (self.accepted, self.delayed, self.published, self.stuck, self.running, self.released, self.ended)
        return any(parts)


@dataclass(slots=True)
class Flow:
    """All queues by name, also those where only others have work. `stopped`: as of each queue, of counts over all queues."""

    queues: dict[str, Stages] = field(default_factory=dict)
    stopped: set[str] = field(default_factory=set)

    def take(self, kind: str, rows: Any) -> None:
        """Take over the columns of rows by the names of `Stages`' fields."""
        for row in rows:
            stages = self.queues.setdefault(row.queue, Stages())
            for name, value in row._mapping.items():
                if name == "stopped":
                    if value:
                        (self.stopped if kind in OVER_ALL else stages.stopped).add(kind)
                elif name != "queue":
                    setattr(stages, name, value)


def processes(connection: Connection, service: str) -> Sequence[Row[Any]]:
    """The processes of `service` that have not shut down cleanly, with the version of their code."""
    return connection.exec_driver_sql(_PROCESSES, {"service": service}).all()


def flow(connection: Connection, service: str, tenants: Sequence[str] | None = None) -> Flow:
    """Count what is where, of all tenants or of these."""
    found = Flow()
    fields = parameters(service, tenants, bound=BOUND, since=SINCE)
    for kind, statement in KINDS.items():
        if kind == "released":
            statement = statement.format(waits=edits.waits_for_person(connection))
        found.take(kind, connection.exec_driver_sql(statement, fields))
    for stages in found.queues.values():
        stages.stopped |= found.stopped
    return found
