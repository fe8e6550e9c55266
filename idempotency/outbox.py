"""The outbox: messages that leave with the caller's commit.

A row is written in the transaction of the business change and published after it by a relay (`relay.py`). It stays
until its operation has ended: what a wiped broker has lost is still here.
"""

from __future__ import annotations

from datetime import datetime
from uuid import uuid4

from sqlalchemy import Connection, text
from sqlalchemy.orm import Session

from .keys import OperationId
from .message import Message

_INSERT = text("""
INSERT INTO idempotency.outbox
    (event_id, tenant, operation, key, fingerprint, message, queue, ordering_key, origin, available_at, settled_at)
VALUES (:event_id, :tenant, :operation, :key, :fingerprint, :message, :queue, :ordering_key, :origin,
        coalesce(cast(:eta AS timestamptz), clock_timestamp() + make_interval(secs => :countdown)),
        CASE WHEN :settled THEN clock_timestamp() END)
""")

_ORDER = text("SELECT pg_advisory_xact_lock(hashtextextended(:ordering_key, 0))")


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
) -> str:
    """Write the row in the caller's transaction; it leaves with its commit. Returns the event id.

    Rows of one operation and `ordering_key` are published in commit order. `settled` rows name no operation whose end they would wait for: once published, nothing is owed.
    """
    event_id = str(uuid4())
    if ordering_key is not None:
        # Ids are given out in the order of inserts; the lock, held until commit, makes it the order of commits.
        session.execute(_ORDER, {"ordering_key": f"{id.operation} {ordering_key}"})
    session.execute(
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
        },
    )
    return event_id
