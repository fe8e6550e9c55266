"""The outbox: messages that leave with the caller's commit.

A row is written in the transaction of the business change and published after it by a relay (`relay.py`). It stays
until its operation has ended: what a wiped broker has lost is still here.

Rows of one operation and ordering key are a lane. A row that failed blocks its lane until a person replays it, in its
old place, or discards it.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from uuid import uuid4

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from ..errors import InvalidArguments
from ..wire.keys import OperationId
from ..wire.message import Message

_INSERT = """
INSERT INTO idempotency.outbox
    (event_id, tenant, operation, key, fingerprint, message, queue, ordering_key, origin, available_at, settled_at,
     generation)
VALUES (%(event_id)s, %(tenant)s, %(operation)s, %(key)s, %(fingerprint)s, %(message)s, %(queue)s, %(ordering_key)s,
        %(origin)s,
        greatest(cast(%(eta)s AS timestamptz), clock_timestamp() + make_interval(secs => %(countdown)s)),
        CASE WHEN %(settled)s THEN clock_timestamp() END, %(generation)s)
"""

_REFRESH = """
SELECT idempotency.refresh_lane(operation, ordering_key)
FROM unnest(%(operations)s::text[], %(keys)s::text[]) lane(operation, ordering_key)
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
    event_id = str(uuid4())
    connection.exec_driver_sql(
        _INSERT,
        {
            "event_id": event_id,
            "tenant": id.tenant,
            "operation": id.operation,
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
    return event_id


def refresh_lanes(connection: Connection, lanes: Iterable[Lane]) -> None:
    """Tell the relay what is first in these lanes, in the transaction that has changed it."""
    ordered = sorted(set(lanes))  # one lock order
    if ordered:
        operations, keys = zip(*ordered, strict=True)
        connection.exec_driver_sql(_REFRESH, {"operations": list(operations), "keys": list(keys)})
