"""Give an operation that has not begun its record, so that what a person has decided is met by every delivery."""

from __future__ import annotations

import secrets

from sqlalchemy import Connection

from ..store import claims, ends
from ..store.answers import Claimed
from ..wire.keys import OperationId
from .runtime import Runtime


def open_record(
    connection: Connection,
    runtime: Runtime,
    id: OperationId,
    *,
    service: str | None,
    fingerprint: str,
    message: str = "",
    queue: str | None = None,
) -> bool:
    """Create the record, as released and without a delivery. Returns False if there is one: something has begun.

    Without a `message`, only a delivery from elsewhere can run it. `service`: the application that owns it; None: the runtime's.
    `queue`: where its deliveries go; None: not known, and the task's name stands in its place.
    """
    answer = claims.claim(
        connection,
        id,
        service=service or runtime.settings.service,
        token=secrets.token_hex(16),
        fingerprint=fingerprint,
        message=message,
        holder=runtime.holder,
        lease=runtime.settings.lease,
        queue=id.task if queue is None else queue,
    )
    # a record that was replayed, or whose attempt was given back, counts from 0 again
    if not isinstance(answer, Claimed) or (answer.attempts, answer.generation) != (1, 1):
        return False
    ends.release(connection, answer, delay=0.0, error=None, give_back=True, deliver=False)
    return True
