"""What operators look at: queues, processes, counts and lists, as far as Postgres knows.

Of one application, its `service`, with what has no name; and who else uses the tables (`sharers.py`).

Read-only, and every query reads a bounded number of rows, however long the backlog: a count stops at its share of
`BOUND` and says so, and ended operations are estimated from a sample if there are many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row
from sqlalchemy.pool import NullPool

from ..settings import Settings
from . import archive, edits, processes, sharers, stream_status, webhooks
from .connections import make_engine
from .record import is_open

# The most rows that one count reads, over all queues: about a quarter of a second. A count that stopped there is shown
# as "50,000+".
BOUND = 50_000
# Pages of 8 KiB in the sample of ended operations, about 60,000 records. Smaller tables are read whole.
SAMPLE = 4_000
# Seconds: to connect to Postgres or the broker, per statement, and per answer of the broker.
TIMEOUT = 2.0

# Always index scans and nested loops: a hash join would read a whole table however small the window. JIT compilation
# would take longer than the query.
_BY_INDEX = {"enable_seqscan": "off", "enable_hashjoin": "off", "enable_mergejoin": "off", "jit": "off"}

# As in the index outbox_waiting. Of any origin, since rows that were put back or replayed may have no record yet either.
_WAITING = "o.settled_at IS NULL"

# An accepted operation has neither a record yet nor an open dead letter, which would mean that its message was refused.
# LATERAL with LIMIT, so that each row costs two index lookups.
_BEGUN = f"""
    LEFT JOIN LATERAL (SELECT true AS yes FROM idempotency.records r
                       WHERE (r.tenant, r.task, r.key) = (o.tenant, o.task, o.key) LIMIT 1) begun ON true
    LEFT JOIN LATERAL (SELECT true AS yes FROM idempotency.dead_letters d
                       WHERE (d.tenant, d.task, d.key) = (o.tenant, o.task, o.key) AND {is_open("d")} LIMIT 1) refused ON true
"""
_ACCEPTED_ONLY = (
    "(o.service = %(service)s) IS NOT FALSE AND begun.yes IS NULL AND refused.yes IS NULL AND o.status <> 'failed'"
)

# A failed publish or a resend changes available_at, so such a row counts from its creation; one that no worker could run
# counts from when it was first refused.
_DUE_AT = """CASE WHEN o.refusals > 0 THEN o.first_refused_at
    WHEN o.attempts = 0 AND o.resends = 0 THEN o.available_at ELSE o.created_at END"""

# Each queue gets a window of the same size, so that one backlog cannot hide the other queues. Their names are found by
# skipping through the index.
QUEUES = """
WITH RECURSIVE queues(queue) AS (
    (SELECT o.queue FROM idempotency.{table} o WHERE {condition} ORDER BY o.queue LIMIT 1)
    UNION ALL
    SELECT (SELECT o.queue FROM idempotency.{table} o WHERE {condition} AND o.queue > q.queue ORDER BY o.queue LIMIT 1)
    FROM queues q WHERE q.queue IS NOT NULL
)
"""

_PART = "%(bound)s / (SELECT count(queue) FROM queues)"

_WAITING_QUEUES = QUEUES.format(table="outbox", condition=_WAITING)
_WINDOW = f"""
    SELECT o.* FROM idempotency.outbox o WHERE {_WAITING} AND o.queue = q.queue ORDER BY o.id LIMIT {_PART}
"""

# Counts rows, not keys: an operation that was enqueued twice before it started counts twice.
_ACCEPTED = f"""
{_WAITING_QUEUES}
SELECT q.queue, counted.* FROM queues q CROSS JOIN LATERAL (
    SELECT o.task, sum(count(*)) OVER () >= {_PART} AS stopped,
           count(*) FILTER (WHERE {_ACCEPTED_ONLY} AND {_DUE_AT} <= clock_timestamp()) AS accepted,
           count(*) FILTER (WHERE {_ACCEPTED_ONLY} AND {_DUE_AT} > clock_timestamp()) AS scheduled,
           extract(epoch FROM clock_timestamp() - min({_DUE_AT}) FILTER (WHERE {_ACCEPTED_ONLY}))::float8 AS oldest
    FROM ({_WINDOW}) o {_BEGUN}
    GROUP BY o.task
) counted WHERE q.queue IS NOT NULL AND (accepted + scheduled > 0 OR stopped)
"""

# Without a message, an operation is not due: a request over HTTP goes on when its client asks again. Nor is what waits for a person.
_RELEASED = f"""
{QUEUES.format(table="records", condition="o.available_at IS NOT NULL")}
SELECT q.queue, counted.* FROM queues q CROSS JOIN LATERAL (
    SELECT o.task, count(*) AS operations, sum(count(*)) OVER () >= {_PART} AS stopped,
           extract(epoch FROM min(o.available_at) - clock_timestamp())::float8 AS next_due,
           -- a saga's time begins when its wait is over
           greatest(extract(epoch FROM clock_timestamp() - min(o.opened_at)), 0)::float8 AS oldest,
           count(*) FILTER (WHERE position('"code": "ResultNotKept"' IN o.error) > 0) AS not_kept
    FROM (SELECT r.task, r.available_at, r.opened_at, r.service, r.error, {{waits}} AS waits FROM idempotency.records r
          WHERE r.available_at IS NOT NULL AND r.queue = q.queue AND r.message <> ''
          ORDER BY r.available_at LIMIT {_PART}) o
    WHERE (o.service = %(service)s) IS NOT FALSE AND NOT o.waits
    GROUP BY o.task
) counted WHERE q.queue IS NOT NULL
"""

# One window for all queues, since there are only as many running operations as slots.
_RUNNING = """
SELECT queue, task, count(*) AS operations, sum(count(*)) OVER () >= %(bound)s AS stopped,
       count(*) FILTER (WHERE locked_until < clock_timestamp()) AS lease_over,
       extract(epoch FROM clock_timestamp() - min(opened_at))::float8 AS oldest
FROM (SELECT queue, task, locked_until, opened_at, service FROM idempotency.records
      WHERE locked_until IS NOT NULL ORDER BY locked_until LIMIT %(bound)s) held
WHERE (service = %(service)s) IS NOT FALSE
GROUP BY queue, task
"""

# Of the server and this login, not of this connection: a standby, or one that was set to take none (a full disk, say).
_TAKES_WRITES = "SELECT NOT pg_is_in_recovery() AND current_setting('default_transaction_read_only') = 'off'"

# of a plain table, or of its partitions
_PAGES = """
SELECT ((pg_relation_size('idempotency.records') + coalesce(sum(pg_relation_size(inhrelid)), 0))
        / current_setting('block_size')::int)::bigint
FROM pg_catalog.pg_inherits WHERE inhparent = 'idempotency.records'::regclass
"""
_ENDED = """
SELECT task, status, count(*) AS operations FROM idempotency.records TABLESAMPLE SYSTEM (%(percent)s)
WHERE status IN ('completed', 'failed') AND (service = %(service)s) IS NOT FALSE GROUP BY task, status
"""

# Only due rows: a requested delay is not a backlog. A failed publish changes available_at, so such a row counts from its
# creation; it is due again within a minute, hence near the beginning of the index. Rows with an ordering key have a
# separate index, by lane.
_UNPUBLISHED = """
SELECT count(*) AS pending,
       count(*) FILTER (WHERE due) AS unpublished,
       extract(epoch FROM clock_timestamp()
           - min(CASE WHEN attempts = 0 THEN available_at ELSE created_at END) FILTER (WHERE due))::float8 AS oldest,
       (SELECT count(*) FROM (SELECT service FROM idempotency.outbox WHERE status = 'failed'
                              ORDER BY id LIMIT %(bound)s) f WHERE (service = %(service)s) IS NOT FALSE) AS failed
FROM (SELECT attempts, available_at, created_at, available_at <= clock_timestamp() OR attempts > 0 AS due FROM (
          (SELECT status, attempts, available_at, created_at, service FROM idempotency.outbox
           WHERE service = %(service)s AND status = 'pending' AND ordering_key IS NULL
           ORDER BY available_at, id LIMIT %(bound)s)
          UNION ALL
          -- including failed rows at the heads of lanes, to match the index
          (SELECT status, attempts, available_at, created_at, service FROM idempotency.outbox
           WHERE status <> 'published' AND ordering_key IS NOT NULL AND place IS NOT NULL
           ORDER BY task, ordering_key, place, id LIMIT %(bound)s)
          LIMIT %(bound)s) window_of_both
      WHERE status = 'pending' AND service = %(service)s) pending
"""

_OPEN_LETTERS = """
SELECT task, service, reason, count(*) AS letters, count(*) FILTER (WHERE unknown) AS unknown
FROM (SELECT task, coalesce(consumer_service, '-') AS service, reason,
             -- a failing on_failed hides the record's code
             reason = 'effect_unknown' OR reason = 'on_failed_error' AND EXISTS (
                 SELECT FROM idempotency.records r
                 WHERE (r.tenant, r.task, r.key) = (d.tenant, d.task, d.key)
                   AND r.generation = d.generation AND r.error_code = 'effect_unknown') AS unknown
      FROM idempotency.dead_letters d
      WHERE status = 'open' {listed} AND (consumer_service = %(service)s) IS NOT FALSE ORDER BY task, reason LIMIT %(bound)s) open
GROUP BY task, service, reason ORDER BY task, service, reason
"""

_LIST = """
SELECT tenant, task, key, status, generation, fence, attempts, spent_at, duplicates, locked_until, available_at,
       created_at, updated_at, completed_at, error, 0 AS refusals, NULL AS first_refused_at, service
FROM idempotency.records
WHERE {condition} AND (service = %(service)s) IS NOT FALSE
  AND (%(task)s::text IS NULL OR task = %(task)s)
  AND (%(status)s::text IS NULL OR status = %(status)s)
  AND (%(tenant)s::text IS NULL OR tenant = %(tenant)s)
  AND (%(older_than)s::float8 IS NULL OR created_at < clock_timestamp() - make_interval(secs => %(older_than)s))
ORDER BY created_at DESC, tenant, task, key LIMIT %(limit)s
"""
# Equivalent to the status, but indexed.
_INDEXED = {"started": "locked_until IS NOT NULL", "released": "available_at IS NOT NULL"}

# The columns of _LIST for operations that are only in the outbox, among the newest rows of each queue.
_LIST_ACCEPTED = f"""
{_WAITING_QUEUES}
SELECT tenant, task, key, 'accepted' AS status, 0 AS generation, NULL AS fence, 0 AS attempts, NULL AS spent_at, 0 AS duplicates,
       NULL AS locked_until, min(available_at) AS available_at, min(created_at) AS created_at,
       max(updated_at) AS updated_at, NULL AS completed_at, max(error) AS error, max(refusals) AS refusals,
       min(first_refused_at) AS first_refused_at, max(service) AS service
FROM queues q CROSS JOIN LATERAL (
    SELECT o.tenant, o.task, o.key, o.available_at, o.created_at, o.refusals, o.first_refused_at, o.service,
           coalesce(o.published_at, o.created_at) AS updated_at,
           CASE WHEN starts_with(o.last_error, '{{') THEN o.last_error END AS error
    FROM ({_WINDOW.replace("o.id", "o.id DESC")}) o {_BEGUN}
    WHERE {_ACCEPTED_ONLY}
      AND (%(task)s::text IS NULL OR o.task = %(task)s)
      AND (%(tenant)s::text IS NULL OR o.tenant = %(tenant)s)
      AND (%(older_than)s::float8 IS NULL OR o.created_at < clock_timestamp() - make_interval(secs => %(older_than)s))
    ORDER BY o.id DESC LIMIT %(limit)s
) accepted WHERE q.queue IS NOT NULL
GROUP BY tenant, task, key ORDER BY min(created_at) DESC, tenant, task, key LIMIT %(limit)s
"""


@dataclass(slots=True)
class QueueState:
    """One queue, according to Postgres and the broker. Ages and times are in seconds; None is unknown."""

    accepted: int = 0  # due but without a record: in the outbox or the broker
    oldest_accepted_seconds: float | None = None
    scheduled: int = 0  # accepted but not due yet
    running: int = 0
    lease_over: int = 0  # of the running ones
    released: int = 0  # between two attempts
    next_due_seconds: float | None = None  # of the released ones; negative: overdue
    at_least: list[str] = field(default_factory=list)  # counts that stopped at their share of BOUND
    ready: int | None = None  # messages not handed to a consumer
    consumers: int | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.accepted or self.ready or (self.next_due_seconds or 0.0) < 0.0)

    def count(self, name: str, number: int, stopped: bool) -> None:
        setattr(self, name, getattr(self, name) + number)
        if stopped and name not in self.at_least:
            self.at_least.append(name)


@dataclass(slots=True)
class Snapshot:
    """A snapshot of what has not ended, which processes work on it, and what waits for a person."""

    queues: dict[str, QueueState] = field(default_factory=dict)
    operations: dict[str, dict[str, int]] = field(default_factory=dict)  # by task and status
    oldest_started: float | None = None
    oldest_released: float | None = None
    outbox: Any = None
    letters: Sequence[Row[Any]] = ()
    archived: archive.Archived = archive.NONE
    processes: Sequence[Row[Any]] = ()
    # of other applications on the same tables
    others: Sequence[Row[Any]] = ()
    sharers: Sequence[Row[Any]] = ()
    disabled_webhooks: Sequence[Row[Any]] = ()
    streams: Sequence[Row[Any]] = ()  # where each stream is, by partition
    takes_writes: bool = True
    not_kept: int = 0  # operations that wait for the place of large results
    broker_answered: bool = False

    @property
    def unknown_effects(self) -> int:
        """Operations that ended as effect_unknown and have an open dead letter."""
        return sum(row.unknown for row in self.letters)

    def has_relay(self, silence: float) -> bool:
        """Whether a relay was seen within the last `silence` seconds."""
        return any(process.kind == "relay" and process.silent_seconds <= silence for process in self.processes)

    def queue(self, name: str) -> QueueState:
        return self.queues.setdefault(name, QueueState())

    def count(self, task: str, status: str, number: int) -> None:
        if number:
            counts = self.operations.setdefault(task, {})
            counts[status] = counts.get(status, 0) + number


@contextmanager
def monitoring_connection(settings: Settings) -> Iterator[Connection]:
    """A connection for these queries, with index scans only and `TIMEOUT` seconds to connect and per statement."""
    engine = make_engine(
        settings,
        session={"statement_timeout": int(TIMEOUT * 1000), **_BY_INDEX},
        connect={"connect_timeout": int(TIMEOUT)},
        poolclass=NullPool,
        isolation_level="AUTOCOMMIT",
    )
    with engine.connect() as connection:
        yield connection


def take_snapshot(connection: Connection, settings: Settings) -> Snapshot:
    """Take a snapshot of the application with these settings, as far as Postgres knows."""
    found, bound = Snapshot(), {"bound": BOUND, "service": settings.service}
    for row in connection.exec_driver_sql(_ACCEPTED, bound):
        state = found.queue(row.queue)
        state.count("accepted", row.accepted, row.stopped)
        state.count("scheduled", row.scheduled, row.stopped)
        if row.accepted:
            state.oldest_accepted_seconds = max(row.oldest, state.oldest_accepted_seconds or 0.0)
        found.count(row.task, "accepted", row.accepted + row.scheduled)
    for row in connection.exec_driver_sql(_RUNNING, bound):
        state = found.queue(row.queue)
        state.count("running", row.operations, row.stopped)
        state.count("lease_over", row.lease_over, row.stopped)
        found.oldest_started = max(row.oldest, found.oldest_started or 0.0)
        found.count(row.task, "started", row.operations)
    for row in connection.exec_driver_sql(_RELEASED.format(waits=edits.waits_for_person(connection)), bound):
        state = found.queue(row.queue)
        state.count("released", row.operations, row.stopped)
        state.next_due_seconds = min(row.next_due, math.inf if (due := state.next_due_seconds) is None else due)
        found.oldest_released = max(row.oldest, found.oldest_released or 0.0)
        found.count(row.task, "released", row.operations)
        found.not_kept += row.not_kept
    found.takes_writes = connection.exec_driver_sql(_TAKES_WRITES).scalar_one()
    found.outbox = connection.exec_driver_sql(_UNPUBLISHED, bound).one()
    outside = archive.condition(connection, "outside")
    found.letters = connection.exec_driver_sql(_OPEN_LETTERS.format(listed=outside), bound).all()
    found.archived = archive.count(connection, settings.service)
    seen = processes.processes(connection)
    found.processes = [process for process in seen if process.service == settings.service]
    found.others = [process for process in seen if process.service != settings.service]
    found.sharers = sharers.sharers(connection, settings, bound=BOUND)
    found.streams = stream_status.status(connection, settings.service)
    found.disabled_webhooks = webhooks.disabled_by_itself(connection, settings.service)
    return found


def ended(connection: Connection, service: str) -> tuple[Sequence[Row[Any]], float]:
    """Count ended operations of `service` in a sample, by task and status.

    Also returns the sample's share of the table, in percent.
    """
    percent = min(100.0, 100.0 * SAMPLE / max(connection.exec_driver_sql(_PAGES).scalar_one(), 1))
    return connection.exec_driver_sql(_ENDED, {"service": service, "percent": percent}).all(), percent


def list_operations(
    connection: Connection,
    service: str,
    *,
    task: str | None = None,
    status: str | None = None,
    tenant: str | None = None,
    older_than: float | None = None,
    limit: int = 100,
) -> Sequence[Row[Any]]:
    """List operations of `service`, newest first, of one task, status, tenant or minimum age in seconds.

    Status `accepted`: those without a record yet. Without a status, they are included.
    """
    parameters = {
        "service": service, "task": task, "status": status, "tenant": tenant, "older_than": older_than, "limit": limit,
        "bound": BOUND,
    }  # fmt: skip
    found: list[Row[Any]] = []
    if status in (None, "accepted"):
        found += connection.exec_driver_sql(_LIST_ACCEPTED, parameters)
    if status != "accepted":
        statement = _LIST.format(condition=_INDEXED.get(status or "", "true"))
        found += connection.exec_driver_sql(statement, parameters)
    return sorted(found, key=lambda row: row.created_at, reverse=True)[:limit]
