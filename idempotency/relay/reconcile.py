"""Reconcile: what the broker has lost is sent again from the outbox.

A row stays unsettled until its operation has ended, so that deleting every queue loses nothing. Age says little: a long
backlog is not a lost one, and sending it again would only make it longer. So a row is looked at once it must have left
its queue: the queue is empty, or a marker that was sent behind the row has reached a worker. If it has left no trace
then, and no consumer holds it, it is lost. So a pass costs what has left its queue, and never what waits in it.

Where queues are not first in, first out (Redis), messages are counted instead: no queue is sent more than it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from celery import Celery
from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from ..application import runtime_of
from ..attempt.runtime import Runtime
from ..broker.publisher import BrokerAway, Publisher, Seen
from ..observe import metrics
from ..observe.logs import log
from ..store import sweeps
from ..store.outbox import refresh_lanes
from ..store.sweeps import RECORD_ID, THIS_RECORD, Sweep
from ..wire.message import Message

# Rows per statement: short transactions.
BATCH = 1000
# Statements of each kind in one pass, which holds up the relay: what is left is taken by the next.
BATCHES = 10
# The longest pause between two sends of one operation. Longer than RabbitMQ leaves a delivery unacknowledged (30 min),
# so after it a row is lost even if some consumer does not say what it holds.
RESEND_CAP = 3600.0
# Seconds in which a message that has left its queue reaches a worker, which then says that it holds it.
GRACE = 5.0
# How long before the last settled end the next pass begins: some commit later than they say. What is missed is found
# when its message has left the queue.
OVERLAP = 10.0
# Quorum queues hand out two classes, up to priority 4 and above, each first in, first out; a marker for each.
PRIORITIES = (0, 9)

# In what follows `r` is a row of the outbox and `p` the record of its operation.

# Fingerprints of two rules cannot be compared here, where the arguments are not known; the worker that is given the
# message does it.
_OTHER_RULE = "split_part(p.fingerprint, ':', 1) <> split_part(r.fingerprint, ':', 1)"
_ITS_RECORD = "(p.tenant, p.operation, p.key) = (r.tenant, r.operation, r.key)"
_ENDED = f"p.status IN ('completed', 'failed') AND (p.fingerprint = r.fingerprint OR {_OTHER_RULE})"
_REFUSED = f"p.fingerprint <> r.fingerprint AND NOT {_OTHER_RULE}"

# Settled by a terminal record with the same fingerprint; another request's end says nothing about this one.
SETTLE = Sweep(
    "settle",
    table="records",
    columns="r.status, r.fingerprint, r.completed_at",
    due="r.completed_at IS NOT NULL AND r.completed_at > %(since)s",
    order="r.completed_at",
    one=THIS_RECORD,
    id=RECORD_ID,
    then=f"""
, rows AS MATERIALIZED (
    SELECT r.id FROM due p JOIN idempotency.outbox r ON {_ITS_RECORD}
    WHERE r.status = 'published' AND r.settled_at IS NULL AND {_ENDED}
    FOR UPDATE OF r SKIP LOCKED
), settled AS (
    UPDATE idempotency.outbox o SET settled_at = clock_timestamp() FROM rows WHERE o.id = rows.id RETURNING 1
), moved AS (
    UPDATE idempotency.settled SET until = greatest(until, (SELECT max(completed_at) FROM due))
    WHERE EXISTS (SELECT FROM due)
)
SELECT (SELECT count(*) FROM settled) AS settled, count(*) AS ended, max(completed_at) AS until FROM due""",
)
# Locks no record: that would write to each.
_SETTLE = f"WITH due AS MATERIALIZED ({SETTLE.unlocked}) {SETTLE.then}"

_SINCE = "SELECT until - make_interval(secs => %(overlap)s) FROM idempotency.settled"

# The oldest row of each queue, by hops through the index.
_QUEUES = """
WITH RECURSIVE oldest AS (
    (SELECT queue, published_at FROM idempotency.outbox
     WHERE settled_at IS NULL AND NOT taken AND queue > '' ORDER BY queue, published_at LIMIT 1)
    UNION ALL
    SELECT following.queue, following.published_at FROM oldest CROSS JOIN LATERAL (
        SELECT queue, published_at FROM idempotency.outbox
        WHERE settled_at IS NULL AND NOT taken AND queue > oldest.queue ORDER BY queue, published_at LIMIT 1
    ) following
)
SELECT queue FROM oldest WHERE published_at < clock_timestamp() - make_interval(secs => %(after)s)
"""

# A time is asked for first and given as a parameter: by a condition with clock_timestamp() no index is searched.
_TIMES = """
SELECT clock_timestamp() - make_interval(secs => %(after)s) AS overdue,
       clock_timestamp() - make_interval(secs => %(grace)s) AS before_grace,
       (SELECT min(sent_at) FROM (
           SELECT max(sent_at) AS sent_at FROM idempotency.markers
           WHERE queue = %(queue)s AND taken_at < clock_timestamp() - make_interval(secs => %(grace)s)
           GROUP BY priority
       ) marked HAVING count(*) = %(classes)s) AS marked
"""

# `taken` (of a row; `taken_at` of a marker is another thing): answered by a started record, a newer row of the
# operation or its own dead letter, and so not looked for again, until a discard gives the rows of the operation back.
# `started` is recover's business; a released operation that is due has its next delivery in the newest row of its
# newest generation.
LOOK = Sweep(
    "reconcile",
    table="outbox",
    columns="r.id, r.fingerprint, r.generation, r.message, r.published_at, r.resends, r.ctid AS version",
    due="""r.queue = %(queue)s AND r.settled_at IS NULL AND NOT r.taken AND r.status = 'published'
      AND r.published_at < %(until)s AND r.published_at >= %(past)s
      AND (r.published_at, r.id) > (%(past)s, %(past_id)s)""",
    order="r.published_at, r.id",
    one="r.id = %(id)s",
    id="r.id::text",
    then=f"""
, judged AS MATERIALIZED (
    SELECT r.id, r.published_at, r.message, CASE
        WHEN {_REFUSED} THEN 'refused'
        WHEN {_ENDED} THEN 'ended'
        WHEN p.status = 'started'
          OR EXISTS (SELECT FROM idempotency.outbox newer
                     WHERE (newer.tenant, newer.operation, newer.key, newer.fingerprint)
                         = (r.tenant, r.operation, r.key, r.fingerprint)
                       AND (newer.generation, newer.id) > (r.generation, r.id)
                       AND newer.settled_at IS NULL AND newer.status <> 'failed')
          OR (SELECT true FROM idempotency.dead_letters d WHERE d.outbox_id = r.id AND d.status = 'open') THEN 'taken'
        WHEN p.available_at > clock_timestamp()
          OR r.published_at >= clock_timestamp()
             - make_interval(secs => least(%(after)s * power(2, least(r.resends, 20)), %(cap)s)) THEN 'early'
        ELSE 'lost'
    END AS verdict
    -- A row that was given back since this statement's snapshot is judged by the next one: this one still sees why it
    -- was taken.
    FROM due r JOIN idempotency.outbox seen ON (seen.id, seen.ctid) = (r.id, r.version)
    LEFT JOIN idempotency.records p ON {_ITS_RECORD}
), settled AS (
    UPDATE idempotency.outbox o SET settled_at = clock_timestamp()
    FROM judged j WHERE o.id = j.id AND j.verdict = 'ended'
), taken AS (
    UPDATE idempotency.outbox o SET taken = true FROM judged j WHERE o.id = j.id AND j.verdict = 'taken'
)
SELECT id, published_at, verdict, CASE WHEN verdict = 'lost' THEN message END AS message,
       published_at < clock_timestamp() - make_interval(secs => %(cap)s) AS old
FROM judged ORDER BY published_at, id""",
)
_LOOK = f"WITH due AS MATERIALIZED ({LOOK.find}) {LOOK.then}"

# The key belongs to another request: this one will never run under it, and a person has to know.
_OF_ANOTHER = f"(SELECT p.generation FROM idempotency.records p WHERE {_ITS_RECORD} AND {_REFUSED} LIMIT 1)"
REFUSE = Sweep(
    "refuse",
    table="outbox",
    columns=f"r.id, {_OF_ANOTHER} AS of_record",
    due=f"r.id = ANY(%(ids)s) AND r.status = 'published' AND r.settled_at IS NULL AND {_OF_ANOTHER} IS NOT NULL",
    order="r.id",
    one="r.id = %(id)s",
    id="r.id::text",
    then="""
, refused AS (
    UPDATE idempotency.outbox o SET settled_at = clock_timestamp() FROM due WHERE o.id = due.id
    RETURNING o.*, due.of_record
), letters AS (
    INSERT INTO idempotency.dead_letters
        (source, outbox_id, event_id, tenant, operation, key, generation, fingerprint, queue, task, reason, first_error,
         last_error, attempts, payload, consumer_service)
    SELECT 'relay', id, event_id, tenant, operation, key, of_record, fingerprint, queue, operation,
           'fingerprint_mismatch', %(error)s, %(error)s, 0, message, %(service)s
    FROM refused ON CONFLICT DO NOTHING
)
SELECT (SELECT count(*) FROM refused)""",
)

# Whatever has begun since it was looked at is not sent, nor what another pass has sent again meanwhile.
_RESEND = """
UPDATE idempotency.outbox o SET status = 'pending', origin = 'reconcile', resends = resends + 1,
    available_at = clock_timestamp(), relayed_until = NULL
FROM unnest(%(ids)s::bigint[], %(published)s::timestamptz[]) lost(id, published_at)
WHERE (o.id, o.published_at) = (lost.id, lost.published_at) AND status = 'published' AND settled_at IS NULL
  AND NOT EXISTS (SELECT FROM idempotency.records r
                  WHERE (r.tenant, r.operation, r.key) = (o.tenant, o.operation, o.key)
                    AND (r.status <> 'released' OR r.available_at > clock_timestamp()))
RETURNING operation, ordering_key
"""
_NAMED = """
SELECT o.id, o.id::text AS row_id, tenant, operation, key, o.published_at
FROM idempotency.outbox o JOIN unnest(%(ids)s::bigint[], %(published)s::timestamptz[]) lost(id, published_at)
    ON (o.id, o.published_at) = (lost.id, lost.published_at) ORDER BY o.id
"""

# One at a time as long as they come through; rarer, the longer none has. So a backlog of hours holds few of them.
_MARK = """
INSERT INTO idempotency.markers (id, queue, priority) SELECT %(id)s, %(queue)s, %(priority)s
WHERE EXISTS (SELECT FROM idempotency.outbox
              WHERE queue = %(queue)s AND settled_at IS NULL AND NOT taken AND status = 'published'
                AND published_at >= %(marked)s AND published_at < %(overdue)s)
  AND NOT EXISTS (SELECT FROM idempotency.markers
                  WHERE queue = %(queue)s AND priority = %(priority)s
                    AND sent_at > clock_timestamp() - greatest(make_interval(secs => %(pause)s), (
                        SELECT clock_timestamp() - min(sent_at) FROM idempotency.markers
                        WHERE queue = %(queue)s AND taken_at IS NULL) / 10))
"""

_FORGET_MARKERS = """
DELETE FROM idempotency.markers
WHERE queue = %(queue)s AND (sent_at < %(marked)s OR sent_at < clock_timestamp() - interval '2 days')
"""

_TAKEN = "UPDATE idempotency.markers SET taken_at = clock_timestamp() WHERE id = %(id)s AND taken_at IS NULL"

# What waits in a queue: published, and its record missing, or released and due.
_WAITING = """
WITH newest AS MATERIALIZED (
    SELECT DISTINCT ON (o.tenant, o.operation, o.key, o.fingerprint)
           o.id, o.tenant, o.operation, o.key, o.fingerprint, o.queue, o.published_at, o.resends, o.status
    FROM idempotency.outbox o
    WHERE o.settled_at IS NULL AND NOT o.taken AND o.status <> 'failed'
    ORDER BY o.tenant, o.operation, o.key, o.fingerprint, o.generation DESC, o.id DESC
)
SELECT n.id, n.operation, n.queue, n.published_at,
       n.published_at < clock_timestamp()
           - make_interval(secs => least(%(after)s * power(2, least(n.resends, 20)), %(cap)s)) AS overdue
FROM newest n LEFT JOIN idempotency.records r ON (r.tenant, r.operation, r.key) = (n.tenant, n.operation, n.key)
WHERE n.status = 'published'
  AND (r.status IS NULL OR r.status = 'released' AND r.available_at <= clock_timestamp())
  AND NOT EXISTS (SELECT FROM idempotency.dead_letters d
                  WHERE d.outbox_id = n.id AND d.status = 'open')
ORDER BY n.published_at
"""

_EPOCH = datetime.fromtimestamp(0, UTC)
# Where nothing shows which messages have left their queue, every row that waits is read anyway.
_WAITS = "r.status = 'published' AND r.settled_at IS NULL AND NOT r.taken"
REFUSE_ANY = replace(
    REFUSE,
    due=f"""{_WAITS} AND r.published_at < (SELECT clock_timestamp() - make_interval(secs => %(after)s))
      AND {_OF_ANOTHER} IS NOT NULL""",
    order="r.queue, r.published_at",
)
SETTLE_ANY = Sweep(
    "settle_rows",
    table="outbox",
    columns="r.id",
    due=f"{_WAITS} AND (SELECT true FROM idempotency.records p WHERE {_ITS_RECORD} AND {_ENDED} LIMIT 1)",
    order="r.queue, r.published_at",
    one="r.id = %(id)s",
    id="r.id::text",
    then="""
, settled AS (
    UPDATE idempotency.outbox o SET settled_at = clock_timestamp() FROM due WHERE o.id = due.id RETURNING 1
)
SELECT (SELECT count(*) FROM settled)""",
)

_MISMATCH = '{"code": "fingerprint_mismatch", "message": "this idempotency key was used with other arguments"}'


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What one pass did: rows whose operation has ended, and operations sent again."""

    settled: int
    resent: int


def reconcile(
    app: Celery, depth: Callable[[str], int] | None = None, *, publisher: Publisher | None = None
) -> Reconciled:
    """Settle what has ended, and send again what the broker has lost. Any number at once.

    Nothing is sent again while the broker is away. `publisher` is used where one is open already. `depth` tells how
    many messages are ready in a queue of a broker that is not first in, first out.
    """
    runtime = runtime_of(app)
    with runtime.autocommit() as connection:
        settled = _settle(connection)
        if depth is not None:
            return _counted(app, runtime, connection, depth, settled)
        own = publisher or Publisher(app, confirm_timeout=10.0)
        try:
            if own.is_fifo():
                found, resent = _send_what_is_lost(runtime, connection, own)
                return Reconciled(settled + found, resent)
            return _counted(app, runtime, connection, own.depth, settled)
        except BrokerAway as error:
            log.warning("broker_unavailable", error=str(error))
            return Reconciled(settled, 0)
        finally:
            if publisher is None:
                own.close()


def marker_taken(runtime: Runtime, marker: str) -> None:
    """Note that a worker was handed this marker: what its queue held before it has left."""
    with runtime.autocommit() as connection:
        connection.exec_driver_sql(_TAKEN, {"id": marker})


def _settle(connection: Connection) -> int:
    since: datetime = connection.exec_driver_sql(_SINCE, {"overlap": OVERLAP}).scalar_one()
    total = 0
    for _ in range(BATCHES):
        fields = {"since": since, "batch": BATCH}
        try:
            done = connection.exec_driver_sql(_SETTLE, fields).one()
        except DBAPIError as error:
            if not sweeps.is_of_a_row(error):
                raise
            found = _one_by_one(connection, SETTLE, fields)
            return total + sum(int(row.settled) for row in found)  # the rest is for the next pass
        total += done.settled
        if done.ended < BATCH:
            break
        since = done.until
    return total


def _one_by_one(connection: Connection, sweep: Sweep, fields: dict[str, Any]) -> list[Row[Any]]:
    """What the sweep's statement answers for each row of a batch that Postgres refused as a whole."""
    found: list[Row[Any]] = []

    def handle(row: Row[Any]) -> int:
        found.extend(connection.exec_driver_sql(sweep.single, fields | sweeps.names(row)))
        return 1

    sweeps.one_by_one(connection, sweep, connection.exec_driver_sql(sweep.find, fields).all(), handle)
    return found


# ---------------------------------------------------------------- first in, first out


def _send_what_is_lost(runtime: Runtime, connection: Connection, publisher: Publisher) -> tuple[int, int]:
    """How many rows turned out to be settled, and how many operations were sent again."""
    settings = runtime.settings
    settled = resent = 0
    for queue in connection.exec_driver_sql(_QUEUES, {"after": settings.resend_after}).scalars().all():
        parameters = {
            "queue": queue,
            "after": settings.resend_after,
            "grace": GRACE,
            "classes": len(PRIORITIES),
        }
        # before the look, so that an empty queue held none of what was published until then
        times = connection.exec_driver_sql(_TIMES, parameters).one()
        seen = publisher.look(queue)
        if seen is None:
            continue
        left = times.marked if seen.ready else times.before_grace
        if left is not None:
            lost, ended = _look(connection, queue, min(left, times.overdue), settings.resend_after, settings.service)
            settled += ended
            resent += _resend(runtime, _not_held(publisher, queue, seen, lost))
        if seen.ready and seen.consumers:
            _mark(connection, publisher, queue, times, pause=settings.sweep / 2)
    return settled, resent


def _look(
    connection: Connection, queue: str, until: datetime, after: float, service: str
) -> tuple[list[Row[Any]], int]:
    """Judge what left a queue until then: what is lost, and how much has ended."""
    lost: list[Row[Any]] = []
    ended = 0
    place: dict[str, Any] = {"past": _EPOCH, "past_id": 0}
    for _ in range(BATCHES):
        parameters = {"queue": queue, "until": until, "after": after, "cap": RESEND_CAP, "batch": BATCH} | place
        with sweeps.sweeping(connection):
            try:
                rows = connection.exec_driver_sql(_LOOK, parameters).all()
            except DBAPIError as error:
                if not sweeps.is_of_a_row(error):
                    raise
                rows = _one_by_one(connection, LOOK, parameters)
        lost += [row for row in rows if row.verdict == "lost"]
        ended += sum(row.verdict == "ended" for row in rows)
        if refused := [row.id for row in rows if row.verdict == "refused"]:
            _refuse(connection, REFUSE, service, ids=refused)
        if len(rows) < BATCH:
            break
        place = {"past": rows[-1].published_at, "past_id": rows[-1].id}
    return lost, ended


def _not_held(publisher: Publisher, queue: str, seen: Seen, lost: list[Row[Any]]) -> list[Row[Any]]:
    """What no consumer holds: a delivery that waits for a free slot is not lost."""
    if not lost or not seen.consumers:
        return lost
    tasks = {row.id: _task_id(row.message) for row in lost}
    held = publisher.held(queue, seen.consumers, list(tasks.values()))
    if held is None:
        log.warning("consumers_silent", queue=queue, consumers=seen.consumers, operations=len(lost))
        return [row for row in lost if row.old]
    return [row for row in lost if tasks[row.id] not in held]


def _task_id(message: str) -> str:
    try:
        return str(Message.from_text(message).headers.get("id"))
    except ValueError:
        return ""  # no worker holds what is no message


def _mark(connection: Connection, publisher: Publisher, queue: str, times: Row[Any], *, pause: float) -> None:
    marked = times.marked or _EPOCH
    for priority in PRIORITIES:
        id = str(uuid4())
        fields = {"id": id, "queue": queue, "priority": priority, "pause": pause}
        if connection.exec_driver_sql(_MARK, fields | {"marked": marked, "overdue": times.overdue}).rowcount:
            publisher.mark(queue, id, priority=priority)
    if times.marked is not None:
        connection.exec_driver_sql(_FORGET_MARKERS, {"queue": queue, "marked": times.marked})


# ---------------------------------------------------------------- counted


def _counted(
    app: Celery, runtime: Runtime, connection: Connection, depth: Callable[[str], int], settled: int
) -> Reconciled:
    done, _ = sweeps.run(connection, SETTLE_ANY, {}, limit=BATCHES * BATCH)
    return Reconciled(settled + done, _send_what_lacks(app, runtime, connection, depth))


def _send_what_lacks(app: Celery, runtime: Runtime, connection: Connection, depth: Callable[[str], int]) -> int:
    waiting: dict[str, list[Row[Any]]] = {}
    fields = {"after": runtime.settings.resend_after, "cap": RESEND_CAP}
    _refuse(connection, REFUSE_ANY, runtime.settings.service, after=runtime.settings.resend_after)
    for row in connection.exec_driver_sql(_WAITING, fields):
        waiting.setdefault(row.queue or _routed(app, row.operation), []).append(row)
    total = 0
    for queue, rows in waiting.items():
        overdue = [row for row in rows if row.overdue]
        if not overdue:
            continue
        try:
            lacking = len(rows) - depth(queue)
        except BrokerAway:
            break
        total += _resend(runtime, overdue[: max(lacking, 0)])
    return total


# ---------------------------------------------------------------- both


def _resend(runtime: Runtime, lost: Sequence[Row[Any]]) -> int:
    total = 0
    for start in range(0, len(lost), BATCH):
        batch = lost[start : start + BATCH]
        try:
            total += _send_again(runtime, batch)
        except DBAPIError as error:
            if not sweeps.is_of_a_row(error):
                raise
            with runtime.autocommit() as connection:
                rows = connection.exec_driver_sql(_NAMED, _judged(batch)).all()
                done, _ = sweeps.one_by_one(connection, LOOK, rows, lambda row: _send_again(runtime, [row]))
            total += done
    if total:
        metrics.resent.inc(total)
        log.warning("resent", operations=total)
    return total


def _send_again(runtime: Runtime, lost: Sequence[Row[Any]]) -> int:
    with runtime.engine.begin() as connection:  # with their lanes: a row without one is never published
        rows = connection.exec_driver_sql(_RESEND, _judged(lost)).all()
        refresh_lanes(connection, [(row.operation, row.ordering_key) for row in rows if row.ordering_key])
    return len(rows)


def _judged(lost: Sequence[Row[Any]]) -> dict[str, Any]:
    return {"ids": [row.id for row in lost], "published": [row.published_at for row in lost]}


def _refuse(connection: Connection, sweep: Sweep, service: str, **which: Any) -> None:
    sweeps.run(connection, sweep, which | {"service": service, "error": _MISMATCH}, limit=BATCHES * BATCH)


def _routed(app: Celery, operation: str) -> str:
    queue = app.amqp.router.route({}, operation).get("queue")
    return str(getattr(queue, "name", queue or app.conf.task_default_queue))
