"""Reading sagas, for people: a list of them, and one with all that has happened in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row

from ..wire.keys import OperationId
from . import operations
from .record import ROW, named

# A saga belongs to one application. What an observer has noted is shown to all.
_FIND = """
SELECT g.tenant, g.task, g.key, g.observed FROM idempotency.sagas g
WHERE g.key = %(key)s AND (g.service = %(service)s OR g.observed) AND (%(tenant)s::text IS NULL OR g.tenant = %(tenant)s)
  AND (%(type)s::text IS NULL OR right('.' || g.task, length(%(type)s::text) + 1) = '.' || %(type)s::text)
ORDER BY g.task <> coalesce(%(type)s::text, ''), g.tenant, g.task LIMIT 20
"""

# Why it is undone; or, if there was nothing to undo, what its record has failed with.
_ERROR = """coalesce(g.error, (SELECT r.error FROM idempotency.records r
    WHERE (r.tenant, r.task, r.key) = (g.tenant, g.task, g.key) AND g.status = 'FAILED' AND r.status = 'failed')) AS error"""

_SAGA = f"""
SELECT id, tenant, task AS type, key, service, observed, generation, entity_id, status, {_ERROR}, stopped, stops, waits_for, created_at, updated_at
FROM idempotency.sagas g WHERE {ROW}
"""

# Upwards to the sagas that have called an operation, which its end may have undone; from each of those, all that is below.
_TASKS = """
WITH RECURSIVE above(tenant, task, key) AS (
    SELECT %(tenant)s::text, %(task)s::text, %(key)s::text
    UNION
    SELECT g.tenant, g.task, g.key FROM above a
    JOIN idempotency.saga_steps s ON (s.tenant, s.call_task, s.call_key) = (a.tenant, a.task, a.key)
    JOIN idempotency.sagas g ON g.id = s.saga_id AND NOT g.observed
), family(saga_id, task) AS (
    SELECT g.id, g.task FROM above JOIN idempotency.sagas g USING (tenant, task, key) WHERE NOT g.observed
    UNION
    SELECT g.id, g.task FROM family f JOIN idempotency.saga_steps s USING (saga_id)
    JOIN idempotency.sagas g ON (g.tenant, g.task, g.key) = (s.tenant, s.call_task, s.call_key) AND NOT g.observed
)
SELECT task FROM family UNION
SELECT named.task FROM family JOIN idempotency.saga_steps s USING (saga_id),
    LATERAL (VALUES (s.call_task), (s.undo)) named(task) WHERE named.task IS NOT NULL
"""

# What the filters choose first, then what each of those waits for.
_LIST = f"""
SELECT g.tenant, g.task AS type, g.key, g.entity_id, g.status, g.stopped, letter.last_error AS why, {_ERROR}, waits.waits,
       g.created_at, g.updated_at, g.id
FROM (
    SELECT g.* FROM idempotency.sagas g
    WHERE (g.service = %(service)s OR g.observed)
      AND (%(status)s::text IS NULL OR g.status = %(status)s) AND (%(type)s::text IS NULL OR g.task = %(type)s)
      AND (%(tenant)s::text IS NULL OR g.tenant = %(tenant)s) {{stopped}}
      AND (%(tenants)s::text[] IS NULL OR g.tenant = ANY(%(tenants)s))
      AND (%(before)s::timestamptz IS NULL OR g.created_at <= %(before)s
           AND (g.created_at < %(before)s OR g.id < %(before_id)s::uuid))
      AND (%(older_than)s::float8 IS NULL OR g.created_at < clock_timestamp() - make_interval(secs => %(older_than)s))
      AND (%(waits_for)s::text IS NULL OR EXISTS (
          SELECT FROM idempotency.saga_steps s
          WHERE s.saga_id = g.id AND s.generation = g.generation AND s.state = 'begun'
            AND %(waits_for)s IN (s.event_type, s.call_task, s.name)))
    ORDER BY g.created_at DESC, g.id DESC LIMIT %(limit)s
) g
LEFT JOIN LATERAL (
    SELECT pg_catalog.jsonb_agg(pg_catalog.jsonb_build_object(
        'kind', s.kind, 'name', s.name, 'match', s.match, 'due_at', s.due_at, 'task', s.call_task, 'key', s.call_key
    ) ORDER BY s.position) AS waits
    FROM idempotency.saga_steps s
    WHERE s.saga_id = g.id AND s.generation = g.generation AND s.state = 'begun'
) waits ON g.status IN ('RUNNING', 'COMPENSATING')
LEFT JOIN LATERAL (
    SELECT d.last_error FROM idempotency.dead_letters d
    WHERE (d.tenant, d.task, d.key) = (g.tenant, g.task, g.key) AND d.status = 'open' AND d.reason = g.stopped
    ORDER BY d.id DESC LIMIT 1
) letter ON g.stopped IS NOT NULL
ORDER BY g.created_at DESC, g.id DESC
"""
_STOPPED = "AND g.stopped IS NOT NULL"

_STEPS = """
SELECT s.generation, s.position, s.kind, s.name, s.state, s.result, s.error, s.entry, s.undo, s.undoes,
       s.call_task, s.call_key, r.status AS call_status, r.attempts AS call_attempts, r.spent_at AS call_spent_at, r.generation AS call_generation,
       s.event_type, s.match, e.event_id, s.due_at, s.begun_at, s.ended_at
FROM idempotency.saga_steps s
LEFT JOIN idempotency.records r ON (r.tenant, r.task, r.key) = (s.tenant, s.call_task, s.call_key)
LEFT JOIN idempotency.saga_events e ON e.id = s.event_id
WHERE s.saga_id = %(saga)s ORDER BY s.generation, s.position
"""

# What it has waited for, and what a person has signalled ahead of a wait; used or not, by this generation.
_EVENTS = """
SELECT e.event_type, e.match, e.event_id, e.event, e.repeats, e.received_at, used.name AS used_by,
       used.name IS NULL AND coalesce((
           SELECT bool_and(coalesce(s.ended_at, 'infinity') <= e.received_at) FROM idempotency.saga_steps s
           WHERE s.saga_id = %(saga)s AND s.generation = %(generation)s AND (s.event_type, s.match) = (e.event_type, e.match)
       ), false) AS is_late,
       e.received_at < (SELECT g.accepted_at FROM idempotency.sagas g WHERE g.id = %(saga)s) AS is_early
FROM idempotency.saga_events e
LEFT JOIN LATERAL (
    SELECT s.name FROM idempotency.saga_steps s
    WHERE s.saga_id = %(saga)s AND s.generation = %(generation)s AND s.event_id = e.id LIMIT 1
) used ON true
WHERE e.tenant = %(tenant)s AND e.service = %(service)s AND (e.saga_id IS NULL OR e.saga_id = %(saga)s)
  AND (e.event_type, e.match) IN (
    SELECT s.event_type, s.match FROM idempotency.saga_steps s WHERE s.saga_id = %(saga)s AND s.event_type IS NOT NULL
    UNION SELECT a.details ->> 'event_type', a.details ->> 'compared_with' FROM idempotency.audit a
    WHERE a.tenant = %(tenant)s AND a.task = %(task)s AND a.key = %(key)s AND a.action = 'saga_signal')
ORDER BY e.id
"""

# Of the operations that it has called, and of those that undo it.
_CALLED = """
SELECT DISTINCT s.tenant, s.call_task AS task, s.call_key AS key
FROM idempotency.saga_steps s WHERE s.saga_id = %(saga)s AND s.call_key IS NOT NULL
"""
_LETTERS = f"""
SELECT d.id, d.task, d.key, d.generation, d.reason, d.status, d.failed_at, d.last_error
FROM ({_CALLED}) c JOIN idempotency.dead_letters d ON (d.tenant, d.task, d.key) = (c.tenant, c.task, c.key)
ORDER BY d.id
"""
_AUDIT = f"""
SELECT a.id, a.at, a.actor, a.action, a.task, a.key, a.reason, a.details
FROM ({_CALLED}) c JOIN idempotency.audit a ON (a.tenant, a.task, a.key) = (c.tenant, c.task, c.key)
ORDER BY a.id
"""

# What has stopped of the sagas that a saga waits for, and of those that they wait for.
_STOPPED_BELOW = """
WITH RECURSIVE below AS (
    SELECT %(saga)s::uuid AS id, %(generation)s::int AS generation, NULL AS task, NULL AS key, NULL AS stopped
    UNION ALL
    SELECT g.id, g.generation, g.task, g.key, g.stopped
    FROM below JOIN idempotency.saga_steps s ON s.saga_id = below.id AND s.generation = below.generation
    JOIN idempotency.sagas g ON (g.tenant, g.task, g.key) = (s.tenant, s.call_task, s.call_key)
    WHERE s.state = 'begun' AND s.call_key IS NOT NULL
)
SELECT task, key, stopped FROM below WHERE stopped IS NOT NULL ORDER BY task, key
"""

_WAITS = """
SELECT s.event_type, s.match, s.due_at FROM idempotency.saga_steps s JOIN idempotency.sagas g ON g.id = s.saga_id
WHERE g.id = %(saga)s AND s.generation = g.generation AND s.kind = 'wait' AND s.state = 'begun' ORDER BY s.position
"""

# The kinds of events that any saga waits for; of `match` only the name of the member, so that there are few.
_AWAITED = """
SELECT DISTINCT event_type, split_part(match, '=', 1) || '=' AS match
FROM idempotency.saga_steps WHERE kind = 'wait' AND state = 'begun' ORDER BY 1, 2
"""
_WAITING_FOR = """
SELECT g.task FROM idempotency.saga_steps s
JOIN idempotency.sagas g ON g.id = s.saga_id AND g.generation = s.generation AND g.status = 'RUNNING'
WHERE s.kind = 'wait' AND s.state = 'begun' AND s.event_type = %(event_type)s AND starts_with(s.match, %(match)s)
  AND g.service = %(service)s
LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which sagas a list is of; None means any. `waits_for`: an event's type, a task that was called, or a name.

    `tenants`: those of these only. `before` and `before_id`: when the last one of the page before has begun, and its id.
    """

    service: str
    status: str | None = None
    type: str | None = None
    tenant: str | None = None
    older_than: float | None = None
    waits_for: str | None = None
    stopped: bool = False
    tenants: list[str] | None = None
    before: datetime | None = None
    before_id: UUID | None = None


def find(
    connection: Connection, key: str, service: str, *, type: str | None, tenant: str | None
) -> list[tuple[OperationId, bool]]:
    """The sagas that have this key, at most 20, each with whether an observer has noted it. `type` is the whole name, or the part of it after a dot."""
    rows = connection.exec_driver_sql(_FIND, {"key": key, "service": service, "type": type, "tenant": tenant})
    return [(OperationId(row.tenant, row.task, row.key), row.observed) for row in rows]


def saga(connection: Connection, id: OperationId) -> Row[Any] | None:
    """The saga of an operation; None if it has none, because it has not begun or is another kind of operation."""
    return connection.exec_driver_sql(_SAGA, named(id)).one_or_none()


def waits(connection: Connection, saga_id: Any) -> Sequence[Row[Any]]:
    """The events that a saga waits for now."""
    return connection.exec_driver_sql(_WAITS, {"saga": saga_id}).all()


def awaited(connection: Connection) -> Sequence[Row[Any]]:
    """The types of events that sagas wait for now, each with how the match of such waits begins."""
    return connection.exec_driver_sql(_AWAITED).all()


def waiting_for(connection: Connection, awaited: Row[Any], service: str) -> str | None:
    """The type of a saga of this application that waits for such events."""
    found = connection.exec_driver_sql(_WAITING_FOR, awaited._asdict() | {"service": service})
    return found.scalar_one_or_none()


def list_sagas(connection: Connection, only: Filter, *, limit: int) -> Sequence[Row[Any]]:
    """The newest sagas, each with what it waits for and why it is stopped."""
    statement = _LIST.format(stopped=_STOPPED if only.stopped else "")
    return connection.exec_driver_sql(statement, asdict(only) | {"limit": limit}).all()


def show(connection: Connection, id: OperationId, *, with_payload: bool = False) -> dict[str, Any]:
    """A saga with all that it has recorded, the events for it, and what has become of what it called.

    Results, events' data and messages are included only `with_payload`.
    """
    shown = operations.operation(connection, id, with_payload=with_payload)
    shown.pop("effects")  # a saga's are among its steps
    row = saga(connection, id)
    if row is None:
        return shown | {"saga": None, "steps": [], "events": []}
    of_saga = named(id) | {"saga": row.id, "service": row.service, "generation": row.generation}
    letters = [_with_error(each) for each in connection.exec_driver_sql(_LETTERS, of_saga)]
    audit = [each._asdict() for each in connection.exec_driver_sql(_AUDIT, of_saga)]
    stopped = [each._asdict() for each in connection.exec_driver_sql(_STOPPED_BELOW, of_saga)]
    return shown | {
        "saga": _with_error(row),
        "steps": [_step(each, with_payload) for each in connection.exec_driver_sql(_STEPS, of_saga)],
        "events": [_event(each, with_payload) for each in connection.exec_driver_sql(_EVENTS, of_saga)],
        "called": {"dead_letters": letters, "audit": audit, "stopped": stopped},
    }


def _with_error(row: Row[Any]) -> dict[str, Any]:
    fields = row._asdict()
    for name in ("error", "last_error"):
        if (text := fields.get(name)) is not None and text.startswith("{"):
            fields[name] = json.loads(text)
    return fields


def _step(row: Row[Any], with_payload: bool) -> dict[str, Any]:
    fields = _with_error(row)
    entry = fields.pop("entry") or {}
    if (refused := entry.get("refused")) is not None:
        fields["error"] = fields["error"] or {"code": refused["code"], "message": refused["message"]}
    fields["idempotency_key"] = entry.get("key")
    fields["result"] = fields["result"] if fields["result"] is not None else entry.get("result")
    if not with_payload:
        fields.pop("result")
    return fields


def _event(row: Row[Any], with_payload: bool) -> dict[str, Any]:
    """An event; `person`: who has signalled it, if it was not published."""
    fields = row._asdict()
    attributes = json.loads(fields.pop("event"))
    fields["person"] = attributes.get("person")
    return fields | ({"data": attributes.get("data")} if with_payload else {})


def tasks_of(connection: Connection, id: OperationId) -> Sequence[str]:
    """The tasks that a saga has called or is undone by, also of sagas below it, and of those that have called the operation.

    None of an operation that no saga has called.
    """
    return connection.exec_driver_sql(_TASKS, named(id)).scalars().all()
