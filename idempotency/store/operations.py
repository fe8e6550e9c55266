"""One operation, whole: its record, effects, outbox rows, dead letters and audit rows."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Connection, Row

from ..wire.keys import OperationId

_ROW = "tenant = %(tenant)s AND operation = %(operation)s AND key = %(key)s"
_RECORD = f"SELECT * FROM idempotency.records WHERE {_ROW}"
_OUTBOX = f"SELECT * FROM idempotency.outbox WHERE {_ROW} ORDER BY id"
_LETTERS = f"SELECT * FROM idempotency.dead_letters WHERE {_ROW} ORDER BY id"
_AUDIT = f"SELECT id, at, actor, action, generation, fence_before, fence_after, reason, details FROM idempotency.audit WHERE {_ROW} ORDER BY id"

# What a caller sent or a task returned: personal data lives here, so it is shown only to who asks for it.
PAYLOAD = ("message", "result", "payload", "headers")
# The token is what a holder proves itself by.
_NEVER = ("token",)


def operation(connection: Connection, id: OperationId, *, with_payload: bool = False) -> dict[str, Any]:
    """One operation whole: its record, effects, outbox rows, dead letters and audit rows.

    Arguments, results and messages only `with_payload`.
    """
    names = {"tenant": id.tenant, "operation": id.operation, "key": id.key}
    record = connection.exec_driver_sql(_RECORD, names).one_or_none()
    fields = None if record is None else _visible(record, with_payload)
    effects = {} if fields is None else fields.pop("effects")
    effects = dict(sorted(effects.items(), key=lambda entry: entry[1]["position"]))  # jsonb keeps no order
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
