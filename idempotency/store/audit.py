"""The audit table: who changed what, and why. Append-only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Row

from ..text import storable
from ..wire.keys import OperationId

_AUDIT = """
INSERT INTO idempotency.audit
    (actor, action, tenant, task, key, generation, fence_before, fence_after, reason, details, request_id)
VALUES (%(actor)s, %(action)s, %(tenant)s, %(task)s, %(key)s, %(generation)s, %(before)s, %(after)s, %(reason)s,
        %(details)s::jsonb, %(request_id)s)
"""

# Copies of a request wait for each other, so that the second sees what the first did.
_LOCK_REQUEST = "SELECT pg_advisory_xact_lock(hashtextextended(%(request_id)s, 1))"

_REQUESTED = """
SELECT actor, action, tenant, task, key, reason, details FROM idempotency.audit WHERE request_id = %(request_id)s
"""


def add(
    connection: Connection,
    id: OperationId | None,
    *,
    actor: str,
    action: str,
    generation: int | None,
    before: int | None,
    after: int | None,
    reason: str,
    details: Mapping[str, Any],
    request_id: str | None,
) -> None:
    """Record who did what, in the transaction of the change. `before` and `after` are fences of the operation's record."""
    stored = {name: storable(value) if isinstance(value, str) else value for name, value in details.items()}
    connection.exec_driver_sql(
        _AUDIT,
        {
            "tenant": id and id.tenant,
            "task": id and id.task,
            "key": id and id.key,
            "actor": actor,
            "action": action,
            "generation": generation,
            "before": before,
            "after": after,
            "reason": reason,
            "details": json.dumps(stored),
            "request_id": request_id,
        },
    )


def of_request(connection: Connection, request_id: str) -> Row[Any] | None:
    """The row of a request that was carried out before. Other copies of it wait until this transaction ends."""
    names = {"request_id": request_id}
    connection.exec_driver_sql(_LOCK_REQUEST, names)
    return connection.exec_driver_sql(_REQUESTED, names).one_or_none()
