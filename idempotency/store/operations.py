"""Reading operations: by key, before a change, or whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, Row

from ..errors import MissingExtra, ResultUnreadable
from ..wire import references, results
from ..wire.keys import OperationId
from . import edits
from .outbox import EXTERNAL
from .record import COLUMNS, OWN, ROW, is_open, named, unsettled
from .statements import execute

# All tables in which an accepted operation may appear. What a person has done about it says nothing about whose it is.
_FIND = """
SELECT tenant, task, key, pg_catalog.array_remove(pg_catalog.array_agg(DISTINCT service), NULL) AS services FROM (
    SELECT tenant, task, key, service FROM idempotency.records
    UNION ALL SELECT tenant, task, key, service FROM idempotency.outbox
    UNION ALL SELECT tenant, task, key, consumer_service FROM idempotency.dead_letters
    UNION ALL SELECT tenant, task, key, NULL FROM idempotency.audit
) known
WHERE key = %(key)s AND (%(task)s::text IS NULL OR right('.' || task, length(%(task)s::text) + 1) = '.' || %(task)s::text)
  AND (%(tenant)s::text IS NULL OR tenant = %(tenant)s)
GROUP BY tenant, task, key
ORDER BY coalesce(bool_or(service = %(service)s), false) DESC, task <> coalesce(%(task)s::text, ''), tenant, task LIMIT 20
"""

_READ = """
SELECT status, fence, service FROM idempotency.records
WHERE tenant = %(tenant)s AND task = %(task)s AND key = %(key)s
"""

_ACCEPTED = f"""
SELECT o.fingerprint, o.message, o.queue, o.status FROM idempotency.outbox o
WHERE o.tenant = %(tenant)s AND o.task = %(task)s AND o.key = %(key)s AND NOT starts_with(o.task, %(external)s)
  AND (o.service = %(service)s) IS NOT FALSE AND ({unsettled("o")} OR o.status = 'failed' AND EXISTS (
      SELECT FROM idempotency.dead_letters d WHERE d.outbox_id = o.id AND {is_open("d")}))
ORDER BY o.status = 'failed', o.id LIMIT 1
"""

# By the row that would deliver it next.
_IS_UNPUBLISHABLE = f"""
SELECT status = 'failed' FROM idempotency.outbox WHERE {ROW} ORDER BY generation DESC, id DESC LIMIT 1
"""

_LOOKUP = f"""
SELECT status, generation, fence, attempts, duplicates, fingerprint, result, error, response_code, effects,
       available_at, locked_until, created_at, completed_at, expires_at
FROM idempotency.records WHERE {ROW} AND {OWN}
"""

_READ_LOCKED = f"SELECT {COLUMNS} FROM idempotency.records WHERE {ROW} FOR UPDATE"

_RECORD = f"SELECT {COLUMNS} FROM idempotency.records WHERE {ROW}"
_OUTBOX = f"SELECT * FROM idempotency.outbox WHERE {ROW} ORDER BY id"
_LETTERS = f"SELECT * FROM idempotency.dead_letters WHERE {ROW} ORDER BY id"
_AUDIT = f"""
SELECT id, at, actor, action, generation, fence_before, fence_after, reason, details
FROM idempotency.audit WHERE {ROW} ORDER BY id
"""

# May contain personal data, so shown only on request.
PAYLOAD = ("message", "result", "payload", "headers")
# A holder proves itself with the token.
_NEVER = ("token",)


def find(
    connection: Connection, key: str, *, task: str | None, tenant: str | None, service: str
) -> list[tuple[OperationId, Sequence[str]]]:
    """Find operations by key, at most 20, those of `service` first, each with the applications that name it theirs.

    `task` is the task's name, or the part of it after a dot.
    """
    rows = connection.exec_driver_sql(_FIND, {"key": key, "task": task, "tenant": tenant, "service": service})
    return [(OperationId(row.tenant, row.task, row.key), row.services) for row in rows]


def status_and_fence(connection: Connection, id: OperationId) -> Row[Any] | None:
    """The state that a person's change is based on."""
    return connection.exec_driver_sql(_READ, named(id)).one_or_none()


def accepted(connection: Connection, id: OperationId, service: str) -> Row[Any] | None:
    """The oldest outbox row of `service` that is still to deliver the operation, or would be after a replay."""
    return connection.exec_driver_sql(_ACCEPTED, named(id) | {"service": service, "external": EXTERNAL}).one_or_none()


def is_unpublishable(connection: Connection, id: OperationId) -> bool:
    """Whether the broker has refused the operation's next delivery for good."""
    return bool(connection.exec_driver_sql(_IS_UNPUBLISHABLE, named(id)).scalar_one_or_none())


def lookup(connection: Connection, id: OperationId, service: str) -> Any | None:
    """Read a record of `service` for display or for a handle; never base a decision on it."""
    return execute(connection, _LOOKUP, named(id) | {"service": service}).fetchone()


def read_locked(connection: Connection, id: OperationId) -> Any | None:
    """Read a whole record and lock it until the transaction ends."""
    return execute(connection, _READ_LOCKED, named(id)).fetchone()


def operation(connection: Connection, id: OperationId, *, with_payload: bool = False) -> dict[str, Any]:
    """A whole operation: record, effects, outbox rows, dead letters and audit rows.

    Arguments, results and messages are included only `with_payload`.
    """
    names = named(id)
    record = connection.exec_driver_sql(_RECORD, names).one_or_none()
    fields = None if record is None else _visible(record, with_payload)
    if fields is not None and edits.is_waiting_for_person(connection, id):
        fields["available_at"] = None  # no next attempt is due
    effects = {} if fields is None else fields.pop("effects")
    effects = dict(sorted(effects.items(), key=lambda entry: entry[1]["position"]))  # jsonb does not keep the order
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
    with suppress(ResultUnreadable):
        if references.is_reference(fields.get("result") or ""):
            fields["result_object"] = references.reference(fields["result"]).name
    if not with_payload:
        fields = {name: value for name, value in fields.items() if name not in PAYLOAD}
    for name in ("error", "first_error", "last_error"):
        if (text := fields.get(name)) is not None and text.startswith("{"):
            fields[name] = json.loads(text)
    if (text := fields.get("result")) is not None:
        with suppress(MissingExtra, ResultUnreadable):  # then as it is stored
            fields["result"] = results.plain(text)
    return fields
