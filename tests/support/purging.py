"""Rows that a purge has to do with: operations past their time, and deliveries settled long ago."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, text

from idempotency.store import outbox
from idempotency.wire.keys import OperationId
from idempotency.wire.message import Message
from tests.support import operations as op
from tests.support.operations import age, completed


def past_its_time(connection: Connection, state: Callable[..., Any] = completed) -> OperationId:
    id: OperationId = state(connection).id
    age(connection, id, expires_at=-1)
    return id


def deliver_again(
    connection: Connection, id: OperationId, *, fingerprint: str = op.FINGERPRINT, **columns: str
) -> None:
    """An outbox row of the operation, in the state that the columns say."""
    message_id = outbox.insert(connection, id, fingerprint, Message.from_text(op.MESSAGE), service=op.SERVICE)
    changes = ", ".join(f"{column} = {value}" for column, value in columns.items())
    if changes:
        connection.execute(text(f"UPDATE idempotency.outbox SET {changes} WHERE message_id = :id"), {"id": message_id})


# Longer ago than it may still be delivered.
PUBLISHED = {"status": "'published'", "published_at": "clock_timestamp() - interval '25 hours'"}


SETTLED = PUBLISHED | {"settled_at": "clock_timestamp() - interval '31 days'"}


def a_retention_later(connection: Connection) -> None:
    connection.execute(text("UPDATE idempotency.outbox SET kept_at = kept_at - interval '31 days'"))
