"""The outbox: messages that are sent when the caller commits.

A row is written in the transaction of the business change, and a relay publishes it after the commit (`relay/relay.py`).
It stays until its operation has ended, so that it can be resent if the broker loses it.

Rows with the same tenant, task and ordering key form a lane. A failed row blocks its lane until a person replays it, in
its old place, or discards it.

Several applications may share the table. Each row names its application, the `service`, and each relay publishes its
own. Rows without a name are adopted (`adoption.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any
from uuid import uuid4

from sqlalchemy import Connection, Row

from ..reasons import UNPUBLISHABLE
from ..wire.keys import OperationId
from ..wire.message import Message
from .callers import Executes
from .letters import insert_for_rows_sql
from .statements import confirm

# A row that the broker has refused this many times raises an alert; it is still retried. The index outbox_stuck contains
# the same number.
STUCK = 5

_INSERT = """
INSERT INTO idempotency.outbox
    (message_id, tenant, task, key, fingerprint, message, queue, ordering_key, origin, available_at, settled_at,
     generation, service)
VALUES (%(message_id)s, idempotency.about(%(tenant)s), %(task)s, %(key)s, %(fingerprint)s, %(message)s, %(queue)s, %(ordering_key)s,
        %(origin)s,
        greatest(cast(%(eta)s AS timestamptz), clock_timestamp() + make_interval(secs => %(countdown)s)),
        CASE WHEN %(settled)s THEN clock_timestamp() END, %(generation)s, %(service)s)
"""
_INSERT_FIRST = f"{_INSERT} ON CONFLICT (message_id) DO NOTHING"

_SERVICE = "SELECT service FROM idempotency.outbox WHERE message_id = %(id)s"

_REFRESH = """
SELECT idempotency.refresh_lane(task, ordering_key)
FROM unnest(%(tasks)s::text[], %(keys)s::text[]) lane(task, ordering_key)
"""

# Not "= 'pending'", for which the planner would use the index of pending rows and read all its dead entries, instead of
# finding the row by its id.
_STILL_PENDING = "status NOT IN ('published', 'failed')"

# If a crash of Postgres loses a reservation or a mark, its rows are published twice, which is harmless: do not wait for
# the disk.
_UNFLUSHED = "set_config('synchronous_commit', 'off', true)"
# Not so a reservation where there is a synchronous standby. Its commit waits for all before it, too: after a crash, or where a
# wait was cancelled, Postgres shows rows that no standby has, and what is published of them would outlive them in the next
# promotion.
_CONFIRMED_OR_UNFLUSHED = """set_config('synchronous_commit', CASE WHEN current_setting('synchronous_standby_names') = '' THEN 'off'
    ELSE current_setting('synchronous_commit') END, true)"""

# MATERIALIZED: otherwise the planner may run the locking subquery once per row and lock more than the batch.
# (SELECT clock_timestamp()): a volatile condition would read the whole index, including delayed rows.
# By state, never by `id > last`: a slow transaction commits rows with small ids late.
_RESERVE_ROWS = f"""
WITH due AS MATERIALIZED (
    SELECT id FROM idempotency.outbox
    WHERE status = 'pending' AND available_at <= (SELECT clock_timestamp()) AND ordering_key IS NULL
      AND service = %(service)s AND (relayed_until IS NULL OR relayed_until < clock_timestamp())
      AND queue <> ALL(%(silent)s::text[])
    ORDER BY available_at, id LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED
)
UPDATE idempotency.outbox o
SET relayed_until = clock_timestamp() + make_interval(secs => %(seconds)s)
FROM due WHERE o.id = due.id
RETURNING o.id, o.message_id, o.message, o.origin, o.generation, o.refusals, o.resends, o.attempts, o.queue,
    NULL AS task, NULL AS ordering_key, {_CONFIRMED_OR_UNFLUSHED}
"""

# Whole lanes are reserved, and their first rows returned, about one batch in total. A lane without rows gives NULLs. Where
# queues are silent, the first row of each due lane is looked up, to leave out those that begin with a row for one of them.
_RESERVE_LANES = f"""
WITH due AS MATERIALIZED (
    SELECT task, ordering_key FROM idempotency.lanes l
    WHERE NOT blocked AND available_at <= (SELECT clock_timestamp()) AND service = %(service)s
      AND (relayed_until IS NULL OR relayed_until < clock_timestamp())
      AND (%(silent)s::text[] = '{{}}' OR (
          SELECT r.queue <> ALL(%(silent)s::text[]) FROM idempotency.outbox r
          WHERE r.task = l.task AND r.ordering_key = l.ordering_key AND r.status <> 'published' AND r.place IS NOT NULL
          ORDER BY r.place, r.id LIMIT 1) IS NOT FALSE)
    ORDER BY available_at LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED
), lane AS (
    UPDATE idempotency.lanes l
    SET relayed_until = clock_timestamp() + make_interval(secs => %(seconds)s)
    FROM due WHERE (l.task, l.ordering_key) = (due.task, due.ordering_key)
    RETURNING l.task, l.ordering_key, {_CONFIRMED_OR_UNFLUSHED}
)
SELECT lane.task, lane.ordering_key, o.id, o.message_id, o.message, o.origin, o.generation, o.refusals, o.resends,
       o.attempts, o.queue, o.status = 'pending' AND o.available_at <= clock_timestamp() AND o.service = %(service)s AS goes
FROM lane LEFT JOIN LATERAL (
    SELECT * FROM idempotency.outbox r
    WHERE r.task = lane.task AND r.ordering_key = lane.ordering_key
      AND r.status <> 'published' AND r.place IS NOT NULL
    ORDER BY r.place, r.id LIMIT greatest(%(batch)s / (SELECT count(*) FROM due), 1)
) o ON true
ORDER BY lane.task, lane.ordering_key, o.place, o.id
"""

# The broker's answer is about the row as it was sent. One that was put back, resent or replayed since then has to be
# published once more: marked by a late answer, its next delivery would be nowhere.
_AS_SENT = f"""
FROM unnest(%(ids)s::text[], %(generations)s::int[], %(refusals)s::int[], %(resends)s::int[], %(attempts)s::int[])
    AS sent(id, generation, refusals, resends, attempts)
WHERE o.message_id = sent.id
  AND (o.generation, o.refusals, o.resends, o.attempts)
    = (sent.generation, sent.refusals, sent.resends, sent.attempts)
  AND o.{_STILL_PENDING}
"""

# Why a worker refused a row, as JSON, is kept until it is refused again; why it could not be published, in words, is not.
# A join rather than "= ANY", so that rows are marked in the order in which they were sent.
_MARK_PUBLISHED = f"""
UPDATE idempotency.outbox o
SET status = 'published', published_at = clock_timestamp(), relayed_until = NULL,
    last_error = CASE WHEN starts_with(last_error, '{{') THEN last_error END
{_AS_SENT}
RETURNING {_UNFLUSHED}
"""

# For rows written without knowing the application's routes: resend needs the name of the queue.
_NAME_QUEUE = "UPDATE idempotency.outbox SET queue = %(queue)s WHERE message_id = ANY(%(ids)s) AND queue <> %(queue)s"

_RETURN_ROWS = f"UPDATE idempotency.outbox o SET relayed_until = NULL {_AS_SENT}"

_NOTE_ERROR = f"""
UPDATE idempotency.outbox o
SET relayed_until = NULL, last_error = %(error)s, attempts = o.attempts + 1,
    available_at = clock_timestamp() + make_interval(secs => %(delay)s)
{_AS_SENT}
"""

_UNPUBLISHABLE = insert_for_rows_sql("failed", reason=f"'{UNPUBLISHABLE}'", error="last_error", attempts="attempts")
_GIVE_UP = f"""
WITH failed AS (
    UPDATE idempotency.outbox o
    SET status = 'failed', relayed_until = NULL, last_error = %(error)s, attempts = o.attempts + 1,
        settled_at = clock_timestamp()
    {_AS_SENT}
    RETURNING o.*
)
{_UNPUBLISHABLE}
"""

_SLEEP = f"""
UPDATE idempotency.relay_sleep SET until = clock_timestamp() + make_interval(secs => %(poll)s) RETURNING {_UNFLUSHED}
"""

# A task's name and an ordering key.
Lane = tuple[str, str]
# The task name of rows for external consumers of events begins with this. Such a row has no operation. What was written
# before the name had the application in it ends here, and is of any.
EXTERNAL = "idempotency.external_event"
# Its lanes have the names that all had before there were tenants.
DEFAULT_TENANT = "default"


def insert(
    connection: Executes,
    id: OperationId,
    fingerprint: str,
    message: Message,
    *,
    service: str,
    queue: str = "",
    countdown: float = 0.0,
    eta: datetime | None = None,
    origin: str = "enqueue",
    ordering_key: str | None = None,
    settled: bool = False,
    generation: int = 1,
    message_id: str | None = None,
) -> str:
    """Write a row in the connection's transaction; it is published after the commit, by a relay of `service`.

    Returns its message_id. With a `message_id` of the caller's, only the first row is written.

    Due at `eta`, but not before `countdown` seconds. Rows with the same tenant, task and `ordering_key` are published in
    commit order: the database assigns each its place during the commit. `settled=True`: no operation to wait for; done once
    published.
    """
    given, message_id = message_id, message_id or str(uuid4())
    written = connection.exec_driver_sql(
        _INSERT if given is None else _INSERT_FIRST,
        {
            "message_id": message_id,
            "tenant": id.tenant,
            "task": id.task,
            "key": id.key,
            "fingerprint": fingerprint,
            "message": message.to_text(),
            "queue": queue,
            "ordering_key": None if ordering_key is None else lane_key(id.tenant, ordering_key),
            "origin": origin,
            "eta": eta,
            "countdown": countdown,
            "settled": settled,
            "generation": generation,
            "service": service,
        },
    )
    if given is not None and not written.rowcount:
        confirm(connection)  # the first row, on whose strength this message is given up
    return message_id


def lane_key(tenant: str, ordering_key: str) -> str:
    """An ordering key as it is stored, with the tenant whose it is. A tenant's name has no line break."""
    named = str(ordering_key)
    return named if tenant == DEFAULT_TENANT and "\n" not in named else f"{tenant}\n{named}"


def external_task(service: str) -> str:
    """The task name of an application's rows for external consumers: its lanes are not those of others."""
    return f"{EXTERNAL}@{service}"


def service_of(connection: Connection, message_id: str | None) -> str | None:
    """The application that a row belongs to now. None: there is no such row, or it has no name."""
    service: str | None = connection.exec_driver_sql(_SERVICE, {"id": message_id}).scalar_one_or_none()
    return service


def refresh_lanes(connection: Connection, lanes: Iterable[Lane]) -> None:
    """Update the heads of these lanes for the relay, in the transaction that changed their rows."""
    ordered = sorted(set(lanes))  # a fixed order of locks
    if ordered:
        tasks, keys = zip(*ordered, strict=True)
        connection.exec_driver_sql(_REFRESH, {"tasks": list(tasks), "keys": list(keys)})


# ---------------------------------------------------------------- for the relay


def reserve_rows(
    connection: Connection, service: str, *, batch: int, seconds: float, silent: Sequence[str] = ()
) -> list[Row[Any]]:
    """Reserve due rows of `service` without an ordering key for `seconds`; returns them, oldest first.

    Not those for a `silent` queue. They are passed over one by one, which takes longer the more of them wait.
    """
    fields = {"service": service, "batch": batch, "seconds": seconds, "silent": list(silent)}
    rows = connection.exec_driver_sql(_RESERVE_ROWS, fields)
    return sorted(rows, key=lambda row: row.id)


def reserve_lanes(
    connection: Connection, service: str, *, batch: int, seconds: float, silent: Sequence[str] = ()
) -> Sequence[Row[Any]]:
    """Reserve due lanes that begin with a row of `service` for `seconds`. Returns their first rows, lane by lane.

    Not those that begin with one for a `silent` queue. `goes`: the row is of `service`, pending and due.
    """
    fields = {"service": service, "batch": batch, "seconds": seconds, "silent": list(silent)}
    return connection.exec_driver_sql(_RESERVE_LANES, fields).all()


def mark_published(connection: Connection, rows: Sequence[Row[Any]]) -> None:
    """Mark confirmed rows as published, in the order in which they were sent."""
    connection.exec_driver_sql(_MARK_PUBLISHED, as_sent(rows))


def name_queue(connection: Connection, message_ids: Sequence[str], queue: str) -> None:
    """Set the queue of rows that were written without one, or have another one by now."""
    connection.exec_driver_sql(_NAME_QUEUE, {"queue": queue, "ids": message_ids})


def give_back(connection: Connection, rows: Sequence[Row[Any]]) -> None:
    """End the reservation of rows that the broker neither confirmed nor refused."""
    connection.exec_driver_sql(_RETURN_ROWS, as_sent(rows))


def note_error(connection: Connection, row: Row[Any], error: str, *, delay: float) -> None:
    """Record a failed try; the row is due again after `delay` seconds."""
    connection.exec_driver_sql(_NOTE_ERROR, as_sent([row]) | {"error": error, "delay": delay})


def give_up(connection: Connection, row: Row[Any], error: str, *, service: str) -> None:
    """Fail a row that can never be published, and store its dead letter."""
    connection.exec_driver_sql(_GIVE_UP, as_sent([row]) | {"error": error, "service": service})


def as_sent(rows: Sequence[Row[Any]]) -> dict[str, Any]:
    """The parameters by which an answer of the broker is matched to the rows that were sent."""
    return {
        "ids": [row.message_id for row in rows],
        "generations": [row.generation for row in rows],
        "refusals": [row.refusals for row in rows],
        "resends": [row.resends for row in rows],
        "attempts": [row.attempts for row in rows],
    }


def sleep(connection: Connection, *, poll: float) -> None:
    """Record that a relay sleeps for at most `poll` seconds, so that writers wake it."""
    connection.exec_driver_sql(_SLEEP, {"poll": poll})
