"""What a person looks at: counts, lists and one operation whole. Reads only; arguments and results only on request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row

from .keys import OperationId

_OPERATIONS = """
SELECT operation, status, count(*) AS operations FROM idempotency.records GROUP BY operation, status
ORDER BY operation, status
"""

# Ages in seconds by the database's clock.
_OLDEST = """
SELECT
    (SELECT extract(epoch FROM clock_timestamp() - min(opened_at))::float8 FROM idempotency.records
     WHERE locked_until IS NOT NULL) AS oldest_started,
    (SELECT extract(epoch FROM clock_timestamp() - min(opened_at))::float8 FROM idempotency.records
     WHERE status = 'released') AS oldest_released,
    (SELECT count(*) FROM idempotency.records WHERE status = 'started' AND locked_until < clock_timestamp())
        AS without_holder,
    (SELECT count(*) FROM idempotency.outbox
     WHERE status = 'pending' AND (ordering_key IS NULL OR ordering_key IS NOT NULL AND place IS NOT NULL)) AS outbox_pending,
    (SELECT extract(epoch FROM clock_timestamp() - min(available_at))::float8 FROM idempotency.outbox
     WHERE status = 'pending' AND (ordering_key IS NULL OR ordering_key IS NOT NULL AND place IS NOT NULL)
       AND available_at <= clock_timestamp()) AS outbox_oldest_due,
    (SELECT count(*) FROM idempotency.outbox WHERE status = 'failed') AS outbox_failed
"""

_OPEN_LETTERS = """
SELECT operation, reason, count(*) AS letters FROM idempotency.dead_letters WHERE status = 'open'
GROUP BY operation, reason ORDER BY operation, reason
"""

_LIST = """
SELECT tenant, operation, key, status, generation, fence, attempts, duplicates, locked_until, available_at,
       created_at, updated_at, completed_at, error
FROM idempotency.records
WHERE (%(operation)s::text IS NULL OR operation = %(operation)s)
  AND (%(status)s::text IS NULL OR status = %(status)s)
  AND (%(tenant)s::text IS NULL OR tenant = %(tenant)s)
  AND (%(older_than)s::float8 IS NULL OR opened_at < clock_timestamp() - make_interval(secs => %(older_than)s))
ORDER BY opened_at, tenant, operation, key LIMIT %(limit)s
"""

_ROW = "tenant = %(tenant)s AND operation = %(operation)s AND key = %(key)s"
_RECORD = f"SELECT * FROM idempotency.records WHERE {_ROW}"
_OUTBOX = f"SELECT * FROM idempotency.outbox WHERE {_ROW} ORDER BY id"
_LETTERS = f"SELECT * FROM idempotency.dead_letters WHERE {_ROW} ORDER BY id"
_AUDIT = f"SELECT id, at, actor, action, generation, fence_before, fence_after, reason, details FROM idempotency.audit WHERE {_ROW} ORDER BY id"

# What a caller sent or a task returned: personal data lives here, so it is shown only to who asks for it.
PAYLOAD = ("message", "result", "payload", "headers")
# The token is what a holder proves itself by.
_NEVER = ("token",)


def status(connection: Connection) -> dict[str, Any]:
    """Count operations by task and status, with the oldest open ones, the outbox and the open dead letters."""
    operations: dict[str, dict[str, int]] = {}
    for row in connection.exec_driver_sql(_OPERATIONS):
        operations.setdefault(row.operation, {})[row.status] = row.operations
    oldest = connection.exec_driver_sql(_OLDEST).one()
    letters = connection.exec_driver_sql(_OPEN_LETTERS).all()
    return {
        "operations": operations,
        "oldest_seconds": {"started": oldest.oldest_started, "released": oldest.oldest_released},
        "lease_over": oldest.without_holder,
        "outbox": {
            "pending": oldest.outbox_pending,
            "oldest_due_seconds": oldest.outbox_oldest_due,
            "failed": oldest.outbox_failed,
        },
        "dead_letters": {
            "open": sum(row.letters for row in letters),
            "by_reason": [row._asdict() for row in letters],
        },
    }


def list_operations(
    connection: Connection,
    *,
    operation: str | None = None,
    status: str | None = None,
    tenant: str | None = None,
    older_than: float | None = None,
    limit: int = 100,
) -> Sequence[Row[Any]]:
    """The oldest operations first, of one task, status, tenant or minimum age in seconds."""
    parameters = {
        "operation": operation, "status": status, "tenant": tenant, "older_than": older_than, "limit": limit
    }  # fmt: skip
    return connection.exec_driver_sql(_LIST, parameters).all()


def operation(connection: Connection, id: OperationId, *, with_payload: bool = False) -> dict[str, Any]:
    """One operation whole: its record, effects, outbox rows, dead letters and audit rows.

    Arguments, results and messages only `with_payload`.
    """
    names = {"tenant": id.tenant, "operation": id.operation, "key": id.key}
    record = connection.exec_driver_sql(_RECORD, names).one_or_none()
    fields = None if record is None else _visible(record, with_payload)
    effects = {} if fields is None else fields.pop("effects")
    if not with_payload:
        effects = {
            name: {field: value for field, value in effect.items() if field not in ("result", "args")}
            for name, effect in effects.items()
        }
    return {
        **names,
        "record": fields,
        "effects": effects,
        "outbox": [_visible(row, with_payload) for row in connection.exec_driver_sql(_OUTBOX, names)],
        "dead_letters": [_visible(row, with_payload) for row in connection.exec_driver_sql(_LETTERS, names)],
        "audit": [row._asdict() for row in connection.exec_driver_sql(_AUDIT, names)],
    }


def _visible(row: Row[Any], with_payload: bool) -> dict[str, Any]:
    fields = {name: value for name, value in row._asdict().items() if name not in _NEVER}
    if not with_payload:
        fields = {name: value for name, value in fields.items() if name not in PAYLOAD}
    for name in ("error", "first_error", "last_error"):
        if (text := fields.get(name)) is not None and text.startswith("{"):
            fields[name] = json.loads(text)
    return fields
