"""Outbox rows that no relay can publish."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection

from idempotency import OperationId
from idempotency.store import outbox
from idempotency.wire.headers import KEY_HEADER
from idempotency.wire.message import Message
from tests.support import bank as b


def write(connection: Connection, key: str, *, route: dict[str, Any] | None = None, **more_headers: Any) -> None:
    """An outbox row, perhaps with its own route or headers."""
    given = {KEY_HEADER: key} | more_headers
    message = Message.composed(b.app, b.deposit.name, (key,), {}, task_id=key, headers=given)
    message = Message(message.headers, message.body, route or message.route, message.properties)
    outbox.insert(connection, OperationId("default", b.deposit.name, key), "v1:f", message, service="bank")
