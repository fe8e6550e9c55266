"""Deleting what is past its retention, in batches, each row only if nothing needs it. The audit table is never purged.

An application deletes what is its own, by its own retentions, and what has no name: that was written by code of schema
0011, perhaps for a task that no application has any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Row

from ..wire.keys import HTTP_TASK
from . import sweeps
from .record import is_open
from .stream_places import IS_SHOWN
from .sweeps import RECORD_ID, THIS_RECORD, Pace, Sweep, deletes

# A record that must stay is looked at again after an hour, so that it does not cost every pass something. Seconds.
KEEP = 3600.0
# Rows that one statement of a purge deletes, and how long it rests after each, in times of what that took: claims beside it have
# three quarters of the time alone, and wait for little at once. What it deletes at this pace (`make bench ONLY=purge`) is still
# many times what workers complete.
BATCH = 100
REST = 3.0
RESTING = Pace(REST)
# How many were deleted, and whether more may be due.
Done = tuple[int, bool]
# What ends an operation of these names; returns how many it has ended.
End = Callable[[Mapping[str, Any]], int]

_OWN = "r.service = %(service)s"

# Outbox rows are deleted with their record: a row without one would be resent and run again. A record stays while it has
# an unpublished row, an unsettled row of another request or application, or an open dead letter. It also stays for the
# redelivery horizon after its last row was published, settled or not, since it prevents a late delivery from running again.
OPERATIONS = Sweep(
    "purge",
    table="records",
    columns=f"""greatest(
        (SELECT clock_timestamp() + make_interval(secs => %(keep)s) FROM idempotency.outbox o
         WHERE o.tenant = r.tenant AND o.task = r.task AND o.key = r.key
           AND (o.status = 'pending' OR o.settled_at IS NULL AND (
                o.status <> 'published' OR o.fingerprint <> r.fingerprint OR o.service <> r.service))
         LIMIT 1),
        (SELECT clock_timestamp() + make_interval(secs => %(keep)s) FROM idempotency.dead_letters d
         WHERE d.tenant = r.tenant AND d.task = r.task AND d.key = r.key AND {is_open("d")} LIMIT 1),
        -- what a saga has called outlives it
        (SELECT clock_timestamp() + make_interval(secs => %(keep)s)
         FROM idempotency.saga_steps s JOIN idempotency.sagas g ON g.id = s.saga_id
         WHERE s.tenant = r.tenant AND s.call_task = r.task AND s.call_key = r.key
           AND g.status IN ('RUNNING', 'COMPENSATING') LIMIT 1),
        (SELECT max(o.published_at) + make_interval(secs => %(horizon)s) FROM idempotency.outbox o
         WHERE o.tenant = r.tenant AND o.task = r.task AND o.key = r.key)) AS stays_until""",
    due="""r.service = %(service)s AND r.status IN ('completed', 'failed')
      AND greatest(r.expires_at, r.kept_until) < (SELECT clock_timestamp())""",
    order="greatest(r.expires_at, r.kept_until)",
    one=THIS_RECORD,
    id=RECORD_ID,
    then="""
, judged AS MATERIALIZED (
    SELECT tenant, task, key, stays_until, coalesce(stays_until > clock_timestamp(), false) AS stays FROM due
), kept AS (
    UPDATE idempotency.records r SET kept_until = j.stays_until
    FROM judged j WHERE j.stays AND (r.tenant, r.task, r.key) = (j.tenant, j.task, j.key)
), rows AS (
    DELETE FROM idempotency.outbox o USING judged j
    WHERE NOT j.stays AND (o.tenant, o.task, o.key) = (j.tenant, j.task, j.key)
), purged AS (
    DELETE FROM idempotency.records r USING judged j
    WHERE NOT j.stays AND (r.tenant, r.task, r.key) = (j.tenant, j.task, j.key)
    RETURNING 1
)
SELECT (SELECT count(*) FROM purged)""",
)

# HTTP requests that did not end and that no client has repeated: only a client continues them. The index records_unasked
# has the same conditions.
_UNASKED = f"""r.service = %(service)s AND r.message = '' AND r.task = '{HTTP_TASK}' AND r.status IN ('started', 'released')
      AND r.updated_at < (SELECT clock_timestamp() - make_interval(secs => %(retention)s))
      AND (r.locked_until IS NULL OR r.locked_until < clock_timestamp())"""
# An effect or a step that is there already, and is recorded nowhere else: without its record it would be made again.
_HAS_BEGUN = """pg_catalog.jsonb_path_exists(r.effects, '$.* ? (@.state == "begun" || @.state == "done")')"""

REQUESTS = Sweep(
    "purge_requests",
    table="records",
    columns="r.fence",
    due=f"{_UNASKED} AND NOT {_HAS_BEGUN}",
    order="r.updated_at",
    one=THIS_RECORD,
    id=RECORD_ID,
    then=deletes("records", "(gone.tenant, gone.task, gone.key) = (due.tenant, due.task, due.key)"),
)

# Those that have begun something are ended one by one in Python, so that a person sees them. `recover` has released those
# whose process died.
ABANDONED = Sweep(
    "abandoned",
    table="records",
    columns="r.fingerprint, r.message, r.queue, r.fence, r.token, r.attempts, r.generation, r.effects",
    due=f"{_UNASKED} AND r.status = 'released' AND {_HAS_BEGUN}",
    order="r.updated_at",
    one=THIS_RECORD,
    id=RECORD_ID,
    then="",
)

# Operations of streams that wait for their next attempt long after it was due, while all that the stream reads is handled:
# their messages were passed over, by a `seek`, or by code that gives them another key. One that a person has opened again runs
# from its letter.
PASSED = Sweep(
    "passed_over",
    table="records",
    columns="r.fingerprint, r.message, r.queue, r.fence, r.token, r.attempts, r.generation, r.effects",
    due=f"""r.service = %(service)s AND r.queue = ANY(%(tasks)s) AND r.task = r.queue AND r.status = 'released'
      AND r.available_at < (SELECT clock_timestamp() - make_interval(secs => %(retention)s))
      AND (SELECT d.status = 'replayed' AND d.generation < r.generation FROM idempotency.dead_letters d
           WHERE (d.tenant, d.task, d.key) = (r.tenant, r.task, r.key) AND d.source = 'operation' ORDER BY d.id DESC LIMIT 1)
          IS NOT TRUE
      AND (SELECT true FROM idempotency.stream_positions p
           WHERE p.service = r.service AND p.consumer = substr(r.task, 8) AND {IS_SHOWN}
             AND ((p.locked_until > clock_timestamp()) IS NOT TRUE OR p.stopped IS NOT NULL) LIMIT 1) IS NULL""",
    order="r.available_at",
    one=THIS_RECORD,
    id=RECORD_ID,
    then="",
)
# Of streams that have ever been read: the index of what is released begins with the queue.
_STREAMS = "SELECT DISTINCT 'stream.' || consumer FROM idempotency.stream_positions WHERE service = %(service)s"

# Settled rows whose operation has ended or has no record: repeated requests, events for external consumers, discarded
# rows, rows that could never be published. A row that was published within the horizon keeps its record. A row that has
# to stay is looked at again after another retention.
ROWS = Sweep(
    "purge_rows",
    table="outbox",
    columns=f"""r.id, coalesce(
        (SELECT true FROM idempotency.records p
         WHERE p.tenant = r.tenant AND p.task = r.task AND p.key = r.key
           AND (p.status NOT IN ('completed', 'failed')
                OR r.published_at > clock_timestamp() - make_interval(secs => %(horizon)s)) LIMIT 1),
        (SELECT true FROM idempotency.dead_letters d WHERE d.outbox_id = r.id AND d.status = 'open' LIMIT 1),
        (SELECT true FROM idempotency.dead_letters d
         WHERE d.tenant = r.tenant AND d.task = r.task AND d.key = r.key AND {is_open("d")} LIMIT 1),
        false) AS stays""",
    due="""r.service = %(service)s AND r.settled_at IS NOT NULL AND r.status = %(status)s AND r.status <> 'pending'
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

# Only closed letters; open ones stay forever. So does, while its operation may be replayed, one that says that a saga has used
# the operation, or that a person has undone it; and, until its operation has ended, one of a stream: opened again, it is run from
# what its letter has kept, which nothing else has. The request to discard a letter is deleted with it.
LETTERS = Sweep(
    "purge_letters",
    table="dead_letters",
    columns="r.id",
    due="""r.status <> 'open' AND r.closed_at < (SELECT clock_timestamp() - make_interval(secs => %(retention)s))
      AND (r.consumer_service = %(service)s) IS NOT FALSE
      AND (r.used_by IS NULL OR (SELECT true FROM idempotency.records p
           WHERE p.tenant = r.tenant AND p.task = r.task AND p.key = r.key AND p.status <> 'completed' LIMIT 1) IS NULL)
      AND (NOT starts_with(r.task, 'stream.') OR (SELECT true FROM idempotency.records p
           WHERE p.tenant = r.tenant AND p.task = r.task AND p.key = r.key AND p.status NOT IN ('completed', 'failed') LIMIT 1)
           IS NULL) IS NOT FALSE""",
    order="r.closed_at",
    one="r.id = %(id)s",
    id="r.id::text",
    then=deletes("dead_letters"),
)

# In partitions: what its partition has not taken away by then.
_LATE_OPERATIONS = replace(
    OPERATIONS,
    due=OPERATIONS.due.replace(
        "(SELECT clock_timestamp())", "(SELECT clock_timestamp() - make_interval(secs => %(late)s))"
    ),
)


def letters(connection: Connection, service: str, *, retention: float, limit: int, pace: Pace = RESTING) -> Done:
    """Delete letters of `service` closed more than `retention` seconds ago. Returns how many, and whether more may be due."""
    return sweeps.run(connection, LETTERS, {"service": service, "retention": retention}, limit=limit, pace=pace)


def operations(
    connection: Connection, service: str, *, horizon: float, limit: int, late: float = 0.0, pace: Pace = RESTING
) -> Done:
    """Delete operations past their retention with their rows, at least `horizon` seconds after the last publish.

    `late`: only those that have been past it for so many seconds. Returns how many, and whether more may be due.
    """
    bounds = {"service": service, "keep": KEEP, "horizon": horizon} | ({"late": late} if late else {})
    sweep = _LATE_OPERATIONS if late else OPERATIONS
    return _both(connection, sweep, bounds, limit, pace)


def requests(connection: Connection, service: str, *, retention: float, limit: int, pace: Pace = RESTING) -> Done:
    """Delete requests of the HTTP edge that no client has repeated for `retention` seconds.

    Returns how many, and whether more may be due.
    """
    return sweeps.run(connection, REQUESTS, {"service": service, "retention": retention}, limit=limit, pace=pace)


def end_abandoned(connection: Connection, service: str, *, retention: float, end: End, pace: Pace = RESTING) -> int:
    """Call `end` with the names of each request that has begun something and that no client has repeated for so long.

    Returns how many it ended.
    """
    return _end(connection, ABANDONED, {"service": service, "retention": retention}, end, pace)


def end_passed_over(connection: Connection, service: str, *, retention: float, end: End, pace: Pace = RESTING) -> int:
    """Call `end` with the names of each operation of a stream whose message was passed over, and that was due so long ago.

    Returns how many it ended.
    """
    tasks = list(connection.exec_driver_sql(_STREAMS, {"service": service}).scalars())
    return _end(connection, PASSED, {"service": service, "retention": retention, "tasks": tasks}, end, pace)


def _end(connection: Connection, sweep: Sweep, bounds: Mapping[str, Any], end: End, pace: Pace) -> int:
    found = sweeps.find(connection, sweep, bounds)
    return sweeps.one_by_one(connection, sweep.name, found, lambda row: end(sweeps.names(row)), pace.progressed)[0]


def lock_abandoned(
    connection: Connection, service: str, names: Mapping[str, Any], *, retention: float, sweep: Sweep = ABANDONED
) -> Row[Any] | None:
    """Lock the record of such an operation, in the transaction that ends it. None: it was asked for again, or is locked."""
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = {sweeps.LOCK_TIMEOUT_MS}")
    fields = {"service": service, "retention": retention, "tasks": [names["task"]], **names}
    return connection.exec_driver_sql(sweep.find_one, fields).one_or_none()


def rows(
    connection: Connection,
    service: str,
    status: str,
    *,
    retention: float,
    horizon: float,
    limit: int,
    pace: Pace = RESTING,
) -> Done:
    """Delete rows with this status, settled more than `retention` seconds ago, whose operation has ended or has no record.

    Returns how many, and whether more may be due.
    """
    bounds = {"service": service, "status": status, "retention": retention, "horizon": horizon}
    return _both(connection, ROWS, bounds, limit, pace)


def _both(connection: Connection, sweep: Sweep, bounds: Mapping[str, Any], limit: int, pace: Pace) -> Done:
    """A sweep of what is the application's, and one of what has no name: one condition for both would not find its index."""
    unnamed = replace(sweep, due=sweep.due.replace(_OWN, "r.service IS NULL"))
    of_own, of_unnamed = (
        sweeps.run(connection, each, bounds, limit=limit, batch=BATCH, pace=pace) for each in (sweep, unnamed)
    )
    return of_own[0] + of_unnamed[0], of_own[1] or of_unnamed[1]
