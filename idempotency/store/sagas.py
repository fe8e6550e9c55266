"""Sagas: the rows of what each has recorded, and what it waits for.

Every write by a saga's attempt has two conditions: its claim on the record, and the status that it has found the saga in.
The saga is locked before the record, by everybody, so that a person's cancel and a forward step have one order. What is
recorded under `RUNNING` never commits once the saga is being undone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from sqlalchemy import Connection

from ..wire.keys import OperationId
from .answers import Claimed
from .callers import Executes
from .record import MINE, idle_ms, mine, named
from .statements import execute

# Without a time of its own. Not infinity, which Python's clock does not have.
LONGEST_WAIT = "10 years"
RUNNING, COMPLETED, FAILED, COMPENSATING = "RUNNING", "COMPLETED", "FAILED", "COMPENSATING"


@dataclass(frozen=True, slots=True)
class SagaRow:
    """A saga as an attempt has found it."""

    id: Any
    status: str
    error: str | None
    stopped: str | None
    stops: int
    signals: int
    is_new: bool


@dataclass(slots=True)
class Recorded:
    """One thing that a saga has recorded. `args`: the fingerprint of its arguments."""

    position: int
    name: str
    kind: str
    state: str
    args: str | None = None
    result: str | None = None
    error: str | None = None
    entry: dict[str, Any] | None = None
    undo: str | None = None
    undo_arguments: str | None = None
    undoes: int | None = None
    call_task: str | None = None
    call_key: str | None = None
    event_type: str | None = None
    match: str | None = None
    event_id: int | None = None
    # seconds from when it is recorded, for the database to add to its own clock
    seconds: float | None = field(default=None, compare=False)
    is_due: bool = False
    due_in: float | None = None


_OPEN = """
INSERT INTO idempotency.sagas AS g (tenant, task, key, generation, entity_id)
VALUES (%(tenant)s, %(task)s, %(key)s, %(generation)s, %(entity)s)
ON CONFLICT (tenant, task, key) DO UPDATE SET
    generation = excluded.generation,
    -- a replay begins anew
    status = CASE WHEN g.generation < excluded.generation THEN 'RUNNING' ELSE g.status END,
    error = CASE WHEN g.generation < excluded.generation THEN NULL ELSE g.error END,
    waits_for = NULL
-- xmax is 0 for an inserted row
RETURNING id, status, error, stopped, stops, signals, xmax = 0
"""

_STEPS = """
SELECT position, name, kind, state, args, result, error, entry, undo, undo_arguments, undoes, call_task, call_key,
       event_type, match, event_id, due_at <= clock_timestamp() AS is_due,
       extract(epoch FROM due_at - clock_timestamp())::float8 AS due_in
FROM idempotency.saga_steps WHERE saga_id = %(saga)s AND generation = %(generation)s ORDER BY position
"""

# Locks the saga, then the record. No row: the attempt is no longer the holder, or the saga is in another state.
_HELD = f"""
saga AS MATERIALIZED (
    SELECT id FROM idempotency.sagas WHERE id = %(saga)s AND status = %(status)s FOR SHARE
), held AS MATERIALIZED (
    SELECT saga.id FROM idempotency.records, saga WHERE {MINE} FOR NO KEY UPDATE OF records
)"""

_COLUMNS = """(saga_id, generation, position, tenant, name, kind, state, args, result, entry, undo, undo_arguments, undoes,
     call_task, call_key, event_type, match, event_id, due_at, ended_at)"""
_VALUES = """SELECT held.id, %(generation)s, %(position)s, %(tenant)s, %(name)s, %(kind)s, %(state)s, %(args)s, %(result)s,
       %(entry)s::jsonb, %(undo)s, %(undo_arguments)s, %(undoes)s, %(call_task)s, %(call_key)s, %(event_type)s, %(match)s,
       %(event_id)s, clock_timestamp() + make_interval(secs => %(seconds)s),
       CASE WHEN %(state)s <> 'begun' THEN clock_timestamp() END
FROM held"""

_RECORD = f"WITH {_HELD}\nINSERT INTO idempotency.saga_steps {_COLUMNS}\n{_VALUES}\nRETURNING clock_timestamp()"

# In a step's own transaction: raises division_by_zero if nothing was recorded, as an operation's end does.
_RECORD_WITH = f"""
WITH settings AS (
    SELECT set_config('idle_in_transaction_session_timeout', %(idle_ms)s, true),
           set_config('synchronous_commit', 'on', true)
), {_HELD}, recorded AS (
    INSERT INTO idempotency.saga_steps {_COLUMNS}
    {_VALUES}, settings RETURNING 1
)
SELECT 1 / count(*) FROM recorded
"""

_BEGIN_EFFECT = f"""
WITH {_HELD}
INSERT INTO idempotency.saga_steps {_COLUMNS}
{_VALUES}
ON CONFLICT (saga_id, generation, position) DO UPDATE
SET state = 'begun', entry = saga_steps.entry || excluded.entry, begun_at = clock_timestamp(), ended_at = NULL
WHERE saga_steps.state = 'not_happened'
RETURNING extract(epoch FROM begun_at)::float8
"""

# An outcome is recorded even if the saga is being undone by now: what has happened has to be known.
_CHANGE_EFFECT = f"""
UPDATE idempotency.saga_steps s
SET entry = s.entry || %(change)s::jsonb, state = coalesce(%(change)s::jsonb ->> 'state', s.state),
    ended_at = CASE WHEN %(change)s::jsonb ? 'state' THEN clock_timestamp() END
FROM (SELECT 1 FROM idempotency.records WHERE {MINE} FOR NO KEY UPDATE) held
WHERE s.saga_id = %(saga)s AND s.generation = %(generation)s AND s.position = %(position)s AND s.state = 'begun'
RETURNING 1
"""
_CHANGE_EFFECT_WITH = f"""
WITH settings AS (
    SELECT set_config('idle_in_transaction_session_timeout', %(idle_ms)s, true),
           set_config('synchronous_commit', 'on', true)
), changed AS ({_CHANGE_EFFECT})
SELECT 1 / count(*) FROM changed, settings
"""

# The saga lets go of everything but its rows. `waits_for` of them have to end before it goes on; none: it goes on at once.
# Not if anything has happened since it was read.
_WAIT = f"""
WITH settings AS (
    SELECT set_config('idle_in_transaction_session_timeout', %(idle_ms)s, true),
           set_config('synchronous_commit', 'on', true)
), saga AS (
    UPDATE idempotency.sagas
    SET waits_for = CASE WHEN signals = %(signals)s THEN %(waits_for)s END, updated_at = clock_timestamp(),
        stopped = %(stopped)s, stops = CASE WHEN %(stopped)s::text IS NULL THEN 0 ELSE stops + 1 END
    FROM settings WHERE id = %(saga)s AND status = %(status)s
    RETURNING CASE
        WHEN waits_for IS NULL THEN clock_timestamp()
        WHEN %(seconds)s::float8 IS NULL THEN clock_timestamp() + interval '{LONGEST_WAIT}'
        ELSE clock_timestamp() + make_interval(secs => %(seconds)s) END AS due
), released AS (
    UPDATE idempotency.records
    SET status = 'released', token = NULL, locked_until = NULL, locked_by = NULL, available_at = saga.due,
        -- neither an attempt nor the time it waits counts
        opened_at = saga.due, attempts = 0, spent_at = NULL, updated_at = clock_timestamp()
    FROM saga WHERE {MINE}
    RETURNING tenant, task, key, fingerprint, message, queue, available_at, generation, service
), next_delivery AS (
    INSERT INTO idempotency.outbox
        (message_id, tenant, task, key, fingerprint, message, queue, origin, available_at, generation, service)
    SELECT gen_random_uuid()::text, tenant, task, key, fingerprint, message, queue, 'retry', available_at, generation,
           service
    FROM released WHERE message <> ''
), superseded AS (
    DELETE FROM idempotency.outbox o USING released r
    WHERE o.tenant = r.tenant AND o.task = r.task AND o.key = r.key AND o.fingerprint = r.fingerprint
      AND (o.service = r.service) IS NOT FALSE AND o.origin IN ('retry', 'recover') AND o.status = 'published'
      AND r.message <> ''
)
SELECT 1 / count(*) FROM released
"""

_LOCK_EVENTS = "SELECT pg_advisory_xact_lock(idempotency.event_lock(%(tenant)s, %(event_type)s, %(match)s))"

# The earliest that this saga has not used yet.
_FIND_EVENT = """
SELECT e.id, e.event FROM idempotency.saga_events e
WHERE e.tenant = %(tenant)s AND e.event_type = %(event_type)s AND e.match = %(match)s
  AND (e.saga_id IS NULL OR e.saga_id = %(saga)s) AND NOT EXISTS (
    SELECT FROM idempotency.saga_steps s
    WHERE s.saga_id = %(saga)s AND s.generation = %(generation)s AND s.event_id = e.id)
ORDER BY e.id LIMIT 1
"""

# A wait has one winner, which is recorded.
_DECIDE = f"""
WITH settings AS (
    SELECT set_config('idle_in_transaction_session_timeout', %(idle_ms)s, true),
           set_config('synchronous_commit', 'on', true)
), {_HELD}, decided AS (
    UPDATE idempotency.saga_steps s
    SET state = %(state)s, result = %(result)s, event_id = %(event_id)s, ended_at = clock_timestamp()
    FROM held, settings
    WHERE s.saga_id = held.id AND s.generation = %(generation)s AND s.position = %(position)s AND s.state = 'begun'
    RETURNING 1
)
SELECT 1 / count(*) FROM decided
"""

# A call whose operation had begun before, by another saga or another caller under the same key. The lock orders this and
# its end: one that has ended is seen here, and a later one sees the call.
_SETTLE_CALLS = """
WITH called AS MATERIALIZED (
    SELECT s.position, r.status, r.result, r.error
    FROM idempotency.saga_steps s JOIN idempotency.records r
        ON (r.tenant, r.task, r.key) = (s.tenant, s.call_task, s.call_key)
    WHERE s.saga_id = %(saga)s AND s.generation = %(generation)s AND s.position = ANY(%(positions)s)
    FOR SHARE OF r
)
UPDATE idempotency.saga_steps s
SET state = CASE called.status WHEN 'completed' THEN 'done' ELSE 'failed' END, result = called.result,
    error = CASE called.status WHEN 'failed' THEN called.error END, ended_at = clock_timestamp()
FROM called
WHERE s.saga_id = %(saga)s AND s.generation = %(generation)s AND s.position = called.position AND s.state = 'begun'
  AND called.status IN ('completed', 'failed')
RETURNING s.position
"""

_COMPENSATE = f"""
WITH saga AS (
    UPDATE idempotency.sagas SET status = 'COMPENSATING', error = %(error)s, updated_at = clock_timestamp()
    WHERE id = %(saga)s AND status = 'RUNNING' AND EXISTS (SELECT FROM idempotency.records WHERE {MINE})
    RETURNING id
)
SELECT count(*) FROM saga
"""

_END = """
UPDATE idempotency.sagas SET status = %(status)s, stopped = NULL, waits_for = NULL, updated_at = clock_timestamp()
WHERE id = %(saga)s AND status = %(was)s RETURNING 1
"""
_END_WITH = f"WITH ended AS ({_END}) SELECT 1 / count(*) FROM ended"

_CANCEL = """
WITH cancelled AS (
    INSERT INTO idempotency.sagas AS g (tenant, task, key, entity_id, status, error)
    VALUES (%(tenant)s, %(task)s, %(key)s, %(key)s, 'COMPENSATING', %(error)s)
    -- one that has not begun finds this, and ends
    ON CONFLICT (tenant, task, key) DO UPDATE
    SET status = 'COMPENSATING', error = excluded.error, waits_for = NULL, updated_at = clock_timestamp()
    WHERE g.status = 'RUNNING'
    RETURNING *
)
SELECT idempotency.resume_saga(cancelled) FROM cancelled
"""

_KEEP_EVENT = """
SELECT idempotency.keep_event(%(tenant)s, %(event_type)s, %(match)s, %(event_id)s, %(event)s, %(saga)s::uuid)
"""

_OBSERVE = """
INSERT INTO idempotency.sagas AS g (tenant, task, key, entity_id, status)
VALUES (idempotency.about(%(tenant)s), %(task)s, %(key)s, %(key)s, %(status)s)
ON CONFLICT (tenant, task, key) DO UPDATE SET status = excluded.status, updated_at = clock_timestamp()
RETURNING id
"""
_SEEN = """
INSERT INTO idempotency.saga_steps (saga_id, generation, position, tenant, name, kind, state, result, ended_at)
SELECT %(saga)s, 1, coalesce(max(position), 0) + 1, %(tenant)s, %(name)s, 'seen', 'done', %(result)s, clock_timestamp()
FROM idempotency.saga_steps WHERE saga_id = %(saga)s
HAVING NOT coalesce(bool_or(name = %(name)s), false)
"""


def open_saga(connection: Connection, claim: Claimed, entity_id: str) -> SagaRow:
    """Find the saga of a claim, or make it. A replay begins it anew; its earlier rows stay, under their generation."""
    fields = named(claim.id) | {"generation": claim.generation, "entity": entity_id}
    return SagaRow(*execute(connection, _OPEN, fields).fetchone())


def steps_of(connection: Connection, saga: SagaRow, claim: Claimed) -> list[Recorded]:
    """All that a saga has recorded, in order, by one statement."""
    rows = execute(connection, _STEPS, {"saga": saga.id, "generation": claim.generation}).fetchall()
    return [Recorded(**row._asdict()) for row in rows]


def record(connection: Connection, claim: Claimed, saga: SagaRow, row: Recorded) -> bool:
    """Record something, by a statement that commits by itself. False: not the holder, or the saga is undone."""
    return execute(connection, _RECORD, _fields(claim, saga, row)).fetchone() is not None


def record_with(connection: Connection, claim: Claimed, saga: SagaRow, row: Recorded, *, lease: float) -> None:
    """Record something in the transaction of what it did. Raises `DivisionByZero` if not the holder, or undone."""
    execute(connection, _RECORD_WITH, _fields(claim, saga, row) | {"idle_ms": idle_ms(lease)})


def begin_effect(connection: Connection, claim: Claimed, saga: SagaRow, row: Recorded) -> float | None:
    """Record that an effect is about to be called. Returns the database's time; None: not the holder, or undone."""
    found = execute(connection, _BEGIN_EFFECT, _fields(claim, saga, row)).fetchone()
    return None if found is None else float(found[0])


def change_effect(connection: Connection, claim: Claimed, saga: SagaRow, position: int, change: dict[str, Any]) -> bool:
    """Record what became of an effect. False: not the holder, or the effect is no longer open."""
    fields = _at(claim, saga, position) | {"change": json.dumps(change)}
    return execute(connection, _CHANGE_EFFECT, fields).fetchone() is not None


def change_effect_with(
    connection: Connection, claim: Claimed, saga: SagaRow, position: int, change: dict[str, Any], *, lease: float
) -> None:
    """`change_effect` in the transaction of what the effect's function wrote. Raises `DivisionByZero`."""
    fields = _at(claim, saga, position) | {"change": json.dumps(change), "idle_ms": idle_ms(lease)}
    execute(connection, _CHANGE_EFFECT_WITH, fields)


def wait(
    connection: Connection,
    claim: Claimed,
    saga: SagaRow,
    *,
    waits_for: int,
    seconds: float | None,
    lease: float,
    stopped: str | None = None,
) -> None:
    """Let go until `waits_for` signals have come or `seconds` have passed, in this transaction; at once if any has come.

    Raises `DivisionByZero` if not the holder, or if the saga is in another state by now.
    """
    fields = mine(claim) | {
        "saga": saga.id,
        "status": saga.status,
        "signals": saga.signals,
        "waits_for": waits_for,
        "seconds": seconds,
        "stopped": stopped,
        "idle_ms": idle_ms(lease),
    }
    execute(connection, _WAIT, fields)


def find_event(
    connection: Connection, claim: Claimed, saga: SagaRow, event_type: str, match: str
) -> tuple[int, str] | None:
    """The earliest event that the saga has not used. Publishers of such events wait until this transaction ends."""
    fields = {
        "tenant": claim.id.tenant,
        "event_type": event_type,
        "match": match,
        "saga": saga.id,
        "generation": claim.generation,
    }
    execute(connection, _LOCK_EVENTS, fields)
    # a statement of its own: its snapshot has to be younger than the lock
    row = execute(connection, _FIND_EVENT, fields).fetchone()
    return None if row is None else (row.id, row.event)


def decide(
    connection: Connection,
    claim: Claimed,
    saga: SagaRow,
    position: int,
    state: str,
    *,
    result: str | None,
    event_id: int | None,
    lease: float,
) -> None:
    """Record what has ended a wait: its event, or its time. Raises `DivisionByZero` if not the holder, or undone."""
    change = {"state": state, "result": result, "event_id": event_id, "idle_ms": idle_ms(lease)}
    execute(connection, _DECIDE, _at(claim, saga, position) | change)


def settle_calls(connection: Connection, claim: Claimed, saga: SagaRow, positions: list[int]) -> int:
    """Record the ends of calls whose operations had ended when they were called. Returns how many."""
    fields = {"saga": saga.id, "generation": claim.generation, "positions": positions}
    return len(execute(connection, _SETTLE_CALLS, fields).fetchall())


def compensate(connection: Connection, claim: Claimed, saga: SagaRow, error: str) -> bool:
    """From now on the saga is undone, because of `error`. False: not the holder, or it is undone already."""
    fields = mine(claim) | {"saga": saga.id, "error": error}
    return bool(execute(connection, _COMPENSATE, fields).fetchone()[0])


def end(connection: Connection, saga: SagaRow, status: str) -> None:
    """End the saga in the transaction that ends its operation, before that. Raises `DivisionByZero` if it has moved on."""
    execute(connection, _END_WITH, {"saga": saga.id, "status": status, "was": saga.status})


def cancel(connection: Connection, id: OperationId, error: str) -> bool:
    """From now on a saga is undone, by a person or by the saga that has called it. False: it has ended, or is undone already."""
    return execute(connection, _CANCEL, named(id) | {"error": error}).fetchone() is not None


def keep_event(
    connection: Executes, tenant: str, event_type: str, match: str, event_id: str, event: str, *, saga: Any = None
) -> None:
    """Keep an event for the sagas that wait for it, now or later, and let those go on that wait. In the caller's commit.

    `saga`: the id of the only one that gets it.
    """
    fields = {"tenant": tenant, "event_type": event_type, "match": match, "event_id": event_id, "event": event}
    connection.exec_driver_sql(_KEEP_EVENT, fields | {"saga": saga})


def observe(connection: Executes, tenant: str, task: str, key: str, *, step: str, result: str, status: str) -> None:
    """Note what an observer has seen of a process that no saga conducts. A step that was seen before changes nothing."""
    found = connection.exec_driver_sql(_OBSERVE, {"tenant": tenant, "task": task, "key": key, "status": status})
    saga = found.scalar_one()
    connection.exec_driver_sql(_SEEN, {"saga": saga, "tenant": tenant, "name": step, "result": result})


def _at(claim: Claimed, saga: SagaRow, position: int) -> dict[str, Any]:
    at = {"saga": saga.id, "status": saga.status, "generation": claim.generation, "position": position}
    return mine(claim) | at


def _fields(claim: Claimed, saga: SagaRow, row: Recorded) -> dict[str, Any]:
    fields: dict[str, Any] = asdict(row)
    fields["entry"] = None if row.entry is None else json.dumps(row.entry)
    return mine(claim) | fields | {"saga": saga.id, "status": saga.status, "generation": claim.generation}
