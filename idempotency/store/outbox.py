"""The outbox: messages that leave with the caller's commit.

A row is written in the transaction of the business change and published after it by a relay (`relay/relay.py`). It stays
until its operation has ended: what a wiped broker has lost is still here.

Rows of one operation and ordering key are a lane. A row that failed blocks its lane until a person replays it, in its
old place, or discards it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any
from uuid import uuid4

from sqlalchemy import Connection, Row
from sqlalchemy.orm import Session

from ..errors import InvalidArguments
from ..wire.keys import OperationId
from ..wire.message import Message
from .letters import storing_rows

# From this failed try on a row that the broker refuses is told about; it goes on being tried. The index outbox_stuck
# says the same number.
STUCK = 5

_INSERT = """
INSERT INTO idempotency.outbox
    (message_id, tenant, task, key, fingerprint, message, queue, ordering_key, origin, available_at, settled_at,
     generation)
VALUES (%(message_id)s, %(tenant)s, %(task)s, %(key)s, %(fingerprint)s, %(message)s, %(queue)s, %(ordering_key)s,
        %(origin)s,
        greatest(cast(%(eta)s AS timestamptz), clock_timestamp() + make_interval(secs => %(countdown)s)),
        CASE WHEN %(settled)s THEN clock_timestamp() END, %(generation)s)
"""

_REFRESH = """
SELECT idempotency.refresh_lane(task, ordering_key)
FROM unnest(%(operations)s::text[], %(keys)s::text[]) lane(task, ordering_key)
"""

# Said by what it is not: for "= 'pending'" the planner takes the index of pending rows and reads through all the dead
# entries in it, instead of finding the row by its id.
_STILL_PENDING = "status NOT IN ('published', 'failed')"

# A crash of Postgres that undoes a reservation or a mark has its rows published twice, so neither waits for the disk.
_UNFLUSHED = "set_config('synchronous_commit', 'off', true)"

# MATERIALIZED: without it the planner may run the locking subquery once per row and lock more than the batch.
# (SELECT clock_timestamp()): a volatile condition finds its rows by reading the whole index, delayed rows included.
# By state, never by `id > last`: a row committed late by a slow transaction has a small id.
_RESERVE_ROWS = f"""
WITH due AS MATERIALIZED (
    SELECT id FROM idempotency.outbox
    WHERE status = 'pending' AND available_at <= (SELECT clock_timestamp()) AND ordering_key IS NULL
      AND (relayed_until IS NULL OR relayed_until < clock_timestamp())
    ORDER BY available_at, id LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED
)
UPDATE idempotency.outbox o
SET relayed_until = clock_timestamp() + make_interval(secs => %(seconds)s)
FROM due WHERE o.id = due.id
RETURNING o.id, o.message_id, o.message, o.origin, o.generation, o.refusals, o.resends, o.attempts, o.queue,
    NULL AS task, NULL AS ordering_key, {_UNFLUSHED}
"""

# A lane is reserved whole, and as much of each as makes one batch of all. A lane whose rows are gone has a row of NULLs.
_RESERVE_LANES = f"""
WITH due AS MATERIALIZED (
    SELECT task, ordering_key FROM idempotency.lanes
    WHERE NOT blocked AND available_at <= (SELECT clock_timestamp())
      AND (relayed_until IS NULL OR relayed_until < clock_timestamp())
    ORDER BY available_at LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED
), lane AS (
    UPDATE idempotency.lanes l
    SET relayed_until = clock_timestamp() + make_interval(secs => %(seconds)s)
    FROM due WHERE (l.task, l.ordering_key) = (due.task, due.ordering_key)
    RETURNING l.task, l.ordering_key, {_UNFLUSHED}
)
SELECT lane.task, lane.ordering_key, o.id, o.message_id, o.message, o.origin, o.generation, o.refusals, o.resends,
       o.attempts, o.queue, o.status = 'pending' AND o.available_at <= clock_timestamp() AS goes
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
FROM unnest(%(ids)s::text[], %(generations)s::int[], %(refusals)s::int[], %(resends)s::int[])
    AS sent(id, generation, refusals, resends)
WHERE o.message_id = sent.id AND (o.generation, o.refusals, o.resends) = (sent.generation, sent.refusals, sent.resends)
  AND o.{_STILL_PENDING}
"""

# Joined, and not "= ANY": so they are marked in the order in which they were sent.
_MARK_PUBLISHED = f"""
UPDATE idempotency.outbox o
SET status = 'published', published_at = clock_timestamp(), relayed_until = NULL, last_error = NULL
{_AS_SENT}
RETURNING {_UNFLUSHED}
"""

# Of deliveries whose writer did not know the application's routes: what their queue has lost is looked for by its name.
_NAME_QUEUE = "UPDATE idempotency.outbox SET queue = %(queue)s WHERE message_id = ANY(%(ids)s) AND queue = ''"

_RETURN_ROWS = f"UPDATE idempotency.outbox o SET relayed_until = NULL {_AS_SENT}"

_NOTE_ERROR = f"""
UPDATE idempotency.outbox o
SET relayed_until = NULL, last_error = %(error)s, attempts = attempts + 1,
    available_at = clock_timestamp() + make_interval(secs => %(delay)s)
{_AS_SENT}
"""

_UNPUBLISHABLE = storing_rows("failed", reason="'unpublishable'", error="last_error", attempts="attempts")
_GIVE_UP = f"""
WITH failed AS (
    UPDATE idempotency.outbox o
    SET status = 'failed', relayed_until = NULL, last_error = %(error)s, attempts = attempts + 1,
        settled_at = clock_timestamp()
    {_AS_SENT}
    RETURNING o.*
)
{_UNPUBLISHABLE}
"""

_SLEEP = f"""
UPDATE idempotency.relay_sleep SET until = clock_timestamp() + make_interval(secs => %(poll)s) RETURNING {_UNFLUSHED}
"""

# An operation (a task's name) and an ordering key.
Lane = tuple[str, str]


def insert(
    session: Session | Connection,
    id: OperationId,
    fingerprint: str,
    message: Message,
    *,
    queue: str = "",
    countdown: float = 0.0,
    eta: datetime | None = None,
    origin: str = "enqueue",
    ordering_key: str | None = None,
    settled: bool = False,
    generation: int = 1,
) -> str:
    """Write the row in the caller's transaction; it leaves with its commit. Returns the event id.

    Due at `eta`, and not before `countdown` seconds. Rows of one operation and `ordering_key` are published in the
    order of their commits: the database gives each its place while it commits. With `settled` there is no operation
    whose end to wait for; the row is done once published. Raises `InvalidArguments` for a session that is none.
    """
    if not hasattr(session, "connection"):
        got = type(session).__name__  # a sessionmaker, most often
        raise InvalidArguments(f"session: must be a SQLAlchemy Session or Connection, got {got}")
    connection = session if isinstance(session, Connection) else session.connection()
    message_id = str(uuid4())
    connection.exec_driver_sql(
        _INSERT,
        {
            "message_id": message_id,
            "tenant": id.tenant,
            "task": id.task,
            "key": id.key,
            "fingerprint": fingerprint,
            "message": message.to_text(),
            "queue": queue,
            "ordering_key": ordering_key,
            "origin": origin,
            "eta": eta,
            "countdown": countdown,
            "settled": settled,
            "generation": generation,
        },
    )
    return message_id


def refresh_lanes(connection: Connection, lanes: Iterable[Lane]) -> None:
    """Tell the relay what is first in these lanes, in the transaction that has changed it."""
    ordered = sorted(set(lanes))  # one lock order
    if ordered:
        operations, keys = zip(*ordered, strict=True)
        connection.exec_driver_sql(_REFRESH, {"operations": list(operations), "keys": list(keys)})


# ---------------------------------------------------------------- what a relay does


def reserve_rows(connection: Connection, *, batch: int, seconds: float) -> list[Row[Any]]:
    """Reserve the rows without an order that are due, for `seconds`; the oldest first."""
    rows = connection.exec_driver_sql(_RESERVE_ROWS, {"batch": batch, "seconds": seconds})
    return sorted(rows, key=lambda row: row.id)


def reserve_lanes(connection: Connection, *, batch: int, seconds: float) -> Sequence[Row[Any]]:
    """Reserve the lanes that are due, for `seconds`. Returns their first rows, lane by lane; `goes`: it is due."""
    return connection.exec_driver_sql(_RESERVE_LANES, {"batch": batch, "seconds": seconds}).all()


def mark_published(connection: Connection, rows: Sequence[Row[Any]]) -> None:
    """Mark what the broker has confirmed as published, in the order in which it was sent."""
    connection.exec_driver_sql(_MARK_PUBLISHED, as_sent(rows))


def name_queue(connection: Connection, message_ids: Sequence[str], queue: str) -> None:
    """Note the queue that rows without one have gone to."""
    connection.exec_driver_sql(_NAME_QUEUE, {"queue": queue, "ids": message_ids})


def give_back(connection: Connection, rows: Sequence[Row[Any]]) -> None:
    """Let any relay take rows again that were reserved and got no answer."""
    connection.exec_driver_sql(_RETURN_ROWS, as_sent(rows))


def note_error(connection: Connection, row: Row[Any], error: str, *, delay: float) -> None:
    """Count a refusal by the broker; the row is due again after `delay` seconds."""
    connection.exec_driver_sql(_NOTE_ERROR, as_sent([row]) | {"error": error, "delay": delay})


def give_up(connection: Connection, row: Row[Any], error: str, *, service: str) -> None:
    """Fail a row that can never be published, with its dead letter in the same statement."""
    connection.exec_driver_sql(_GIVE_UP, as_sent([row]) | {"error": error, "service": service})


def as_sent(rows: Sequence[Row[Any]]) -> dict[str, Any]:
    """The parameters by which an answer of the broker is matched to the rows that were sent."""
    return {
        "ids": [row.message_id for row in rows],
        "generations": [row.generation for row in rows],
        "refusals": [row.refusals for row in rows],
        "resends": [row.resends for row in rows],
    }


def sleep(connection: Connection, *, poll: float) -> None:
    """Say that a relay sleeps for `poll` seconds at most, so that a writer knows to wake it."""
    connection.exec_driver_sql(_SLEEP, {"poll": poll})
