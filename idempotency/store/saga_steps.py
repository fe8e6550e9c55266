"""What a saga has recorded, a row each; and the events that are kept for its waits.

Every forward write has two conditions: the attempt's claim on the record, and the status in which it has found the saga. The
saga is always locked before the record, so that a person's cancel and a forward step have one order. Nothing forward
commits once the saga is being undone. The outcome of an effect has only the first condition: what has happened is recorded
while the saga is undone, too.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection

from .answers import Claimed
from .callers import Executes
from .record import IDLE_LIMIT, MINE, SETTINGS, idle_ms, mine
from .sagas import SagaRow
from .statements import execute


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
    # when the last thing ended that its attempt has read
    seen: float | None = field(default=None, compare=False)
    is_due: bool = False
    begun_at: float | None = None
    ended_at: float | None = None
    due_in: float | None = None


_RECORDED = tuple(each.name for each in dataclasses.fields(Recorded))

_STEPS = """
SELECT position, name, kind, state, args, result, error, entry, undo, undo_arguments, undoes, call_task, call_key,
       event_type, match, event_id, due_at <= clock_timestamp() AS is_due,
       extract(epoch FROM due_at - clock_timestamp())::float8 AS due_in,
       extract(epoch FROM begun_at)::float8 AS begun_at, extract(epoch FROM ended_at)::float8 AS ended_at
FROM idempotency.saga_steps WHERE saga_id = %(saga)s AND generation = %(generation)s ORDER BY position
"""

# Locks the saga, then the record. No row: the attempt is no longer the holder, or the saga is in another state.
_HELD = f"""
saga AS MATERIALIZED (
    SELECT id FROM idempotency.sagas WHERE id = %(saga)s AND status = %(status)s FOR SHARE
), held AS MATERIALIZED (
    SELECT saga.id FROM idempotency.records, saga WHERE {MINE} FOR NO KEY UPDATE OF records
)"""

# `begun_at` is later than every end that the attempt has read, whatever the clock of another server says: what is recorded
# after a failure tells that the saga has gone on from it.
_COLUMNS = """(saga_id, generation, position, tenant, name, kind, state, args, result, entry, undo, undo_arguments, undoes,
     call_task, call_key, event_type, match, event_id, due_at, ended_at, begun_at)"""
_VALUES = """SELECT held.id, %(generation)s, %(position)s, %(tenant)s, %(name)s, %(kind)s, %(state)s, %(args)s, %(result)s,
       %(entry)s::jsonb, %(undo)s, %(undo_arguments)s, %(undoes)s, %(call_task)s, %(call_key)s, %(event_type)s, %(match)s,
       %(event_id)s, clock_timestamp() + make_interval(secs => %(seconds)s),
       CASE WHEN %(state)s <> 'begun' THEN clock_timestamp() END,
       greatest(clock_timestamp(), to_timestamp(%(seen)s::float8) + interval '1 millisecond')
FROM held"""

_RECORD = f"WITH {_HELD}\nINSERT INTO idempotency.saga_steps {_COLUMNS}\n{_VALUES}\nRETURNING clock_timestamp()"

# In a step's own transaction: raises division_by_zero if nothing was recorded, as an operation's end does.
_RECORD_WITH = f"""
WITH {SETTINGS}, {_HELD}, recorded AS (
    INSERT INTO idempotency.saga_steps {_COLUMNS}
    {_VALUES}, settings RETURNING 1
)
SELECT 1 / count(*) FROM recorded
"""

# When it was called, by the clock alone: how old a call in doubt is decides whether it may be repeated.
_CALLED_AT = (
    "%(entry)s::jsonb || pg_catalog.jsonb_build_object('begun_at', extract(epoch FROM clock_timestamp())::float8)"
)
_BEGIN_EFFECT = f"""
WITH {_HELD}
INSERT INTO idempotency.saga_steps {_COLUMNS}
{_VALUES.replace("%(entry)s::jsonb", _CALLED_AT)}
ON CONFLICT (saga_id, generation, position) DO UPDATE
SET state = 'begun', entry = saga_steps.entry || excluded.entry, begun_at = excluded.begun_at, ended_at = NULL
WHERE saga_steps.state = 'not_happened'
RETURNING (entry ->> 'begun_at')::float8
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
WITH {SETTINGS}, changed AS ({_CHANGE_EFFECT})
SELECT 1 / count(*) FROM changed, settings
"""

# Publishers queue behind who waits for this lock, so that it gives up soon; the saga's attempt comes again.
_PATIENCE = f"{IDLE_LIMIT.rstrip()}, set_config('lock_timeout', '500ms', true) AS patience"
_LOCK_EVENTS = (
    "SELECT pg_advisory_xact_lock(idempotency.event_lock(%(tenant)s, %(service)s, %(event_type)s, %(match)s))"
)

# The earliest that this saga has not used yet. What came before it was accepted is of an earlier process. Those that it has
# used are older than all others: an event gets its number under the lock that a saga looking for one takes alone.
_FIND_EVENT = """
SELECT e.id, e.event FROM idempotency.saga_events e
WHERE e.tenant = %(tenant)s AND e.service = %(service)s AND e.event_type = %(event_type)s AND e.match = %(match)s
  AND e.received_at >= (SELECT g.accepted_at FROM idempotency.sagas g WHERE g.id = %(saga)s)
  AND (e.saga_id IS NULL OR e.saga_id = %(saga)s)
  AND e.id > coalesce((SELECT max(s.event_id) FROM idempotency.saga_steps s
                       WHERE s.saga_id = %(saga)s AND s.generation = %(generation)s
                         AND s.event_type = %(event_type)s AND s.match = %(match)s), 0)
ORDER BY e.id LIMIT 1
"""

# A wait has one winner, which is recorded.
_DECIDE = f"""
WITH {SETTINGS}, {_HELD}, decided AS (
    UPDATE idempotency.saga_steps s
    SET state = %(state)s, result = %(result)s, event_id = %(event_id)s, ended_at = clock_timestamp()
    FROM held, settings
    WHERE s.saga_id = held.id AND s.generation = %(generation)s AND s.position = %(position)s AND s.state = 'begun'
    RETURNING 1
)
SELECT 1 / count(*) FROM decided
"""

_SIGNAL = "SELECT idempotency.signal_from(0) WHERE EXISTS (SELECT FROM idempotency.saga_events WHERE NOT signalled)"

_KEEP_EVENT = """
SELECT idempotency.keep_event(%(tenant)s, %(service)s, %(event_type)s, %(match)s, %(event_id)s, %(event)s, %(saga)s::uuid)
"""


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


def find_event(
    connection: Connection, claim: Claimed, saga: SagaRow, event_type: str, match: str, *, lease: float
) -> tuple[int, str] | None:
    """The earliest event that the saga has not used. Publishers of such events wait until this transaction ends."""
    fields = {
        "tenant": claim.id.tenant,
        "service": saga.service,
        "event_type": event_type,
        "match": match,
        "saga": saga.id,
        "generation": claim.generation,
    }
    execute(connection, _PATIENCE, {"idle_ms": idle_ms(lease)})
    execute(connection, _LOCK_EVENTS, fields)
    # a separate statement: its snapshot has to be younger than the lock
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


def signal(connection: Connection) -> None:
    """Let sagas go on that wait for events which could not signal when they were published."""
    execute(connection, _SIGNAL, {})


def keep_event(
    connection: Executes,
    tenant: str,
    service: str,
    event_type: str,
    match: str,
    event_id: str,
    event: str,
    *,
    saga: Any = None,
) -> None:
    """Keep an event for the sagas of an application that wait for it, now or later, and let those go on that wait.

    In the caller's commit.
    `saga`: the id of the only one that gets it.
    """
    fields = {"tenant": tenant, "service": service, "event_type": event_type, "match": match}
    connection.exec_driver_sql(_KEEP_EVENT, fields | {"event_id": event_id, "event": event, "saga": saga})


def _at(claim: Claimed, saga: SagaRow, position: int) -> dict[str, Any]:
    at = {"saga": saga.id, "status": saga.status, "generation": claim.generation, "position": position}
    return mine(claim) | at


def _fields(claim: Claimed, saga: SagaRow, row: Recorded) -> dict[str, Any]:
    fields = {name: getattr(row, name) for name in _RECORDED}  # `asdict` would copy every value
    fields["entry"] = None if row.entry is None else json.dumps(row.entry)
    return mine(claim) | fields | {"saga": saga.id, "status": saga.status, "generation": claim.generation}


_WAS_REPLACED = """
UPDATE idempotency.saga_steps SET state = 'failed', result = NULL, error = %(error)s
WHERE saga_id = %(saga)s AND generation = %(generation)s AND position = %(position)s AND kind = 'undo' AND state = 'done'
"""


def was_replaced(connection: Connection, claim: Claimed, saga: SagaRow, position: int, error: str) -> bool:
    """Note that an undo has left its work to another task, whose end this saga is not notified of. False: it is noted."""
    fields = {"saga": saga.id, "generation": claim.generation, "position": position, "error": error}
    return bool(connection.exec_driver_sql(_WAS_REPLACED, fields).rowcount)
