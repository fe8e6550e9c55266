"""The outbox: messages that leave with the caller's commit.

A row is written in the transaction of the business change and published after it by a relay (`relay.py`). It stays
until its operation has ended: what a wiped broker has lost is still here.
"""

from __future__ import annotations

from datetime import datetime
from uuid import uuid4

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from .keys import OperationId
from .message import Message

_INSERT = """
INSERT INTO idempotency.outbox
    (event_id, tenant, operation, key, fingerprint, message, queue, ordering_key, origin, available_at, settled_at,
     generation)
VALUES (%(event_id)s, %(tenant)s, %(operation)s, %(key)s, %(fingerprint)s, %(message)s, %(queue)s, %(ordering_key)s,
        %(origin)s,
        coalesce(cast(%(eta)s AS timestamptz), clock_timestamp() + make_interval(secs => %(countdown)s)),
        CASE WHEN %(settled)s THEN clock_timestamp() END, %(generation)s)
"""

_ORDER = "SELECT pg_advisory_xact_lock(hashtextextended(%(ordering_key)s, 0))"


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

    Rows of one operation and `ordering_key` are published in commit order. `settled` rows name no operation whose end they would wait for: once published, nothing is owed.
    """
    connection = session if isinstance(session, Connection) else session.connection()
    event_id = str(uuid4())
    if ordering_key is not None:
        # Ids are given out in the order of inserts; the lock, held until commit, makes it the order of commits.
        connection.exec_driver_sql(_ORDER, {"ordering_key": f"{id.operation} {ordering_key}"})
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
