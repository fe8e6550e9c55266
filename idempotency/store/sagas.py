"""Sagas: how one begins, waits, is undone and ends. What it has recorded is in `saga_steps`.

The saga's row is locked before its record, by everybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from ..wire.keys import OperationId
from .answers import Claimed
from .callers import Executes
from .record import MINE, ROW, SETTINGS, idle_ms, mine, named
from .statements import execute

# Without a time of its own. Not infinity, which Python's clock does not have.
LONGEST_WAIT = "10 years"
# Why a saga stops: its code does not fit what it has recorded, or it cannot be undone.
MISMATCH, NOT_UNDONE = "saga_mismatch", "compensation_failed"
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


_OPEN = """
INSERT INTO idempotency.sagas AS g (tenant, task, key, generation, entity_id)
VALUES (%(tenant)s, %(task)s, %(key)s, %(generation)s, %(entity)s)
-- Not fenced, so it changes nothing that the next attempt depends on: this one may have been overtaken since its claim.
ON CONFLICT (tenant, task, key) DO UPDATE SET
    generation = greatest(g.generation, excluded.generation),
    -- one that was cancelled before it began has its key here
    entity_id = excluded.entity_id,
    -- a replay begins anew
    status = CASE WHEN g.generation < excluded.generation THEN 'RUNNING' ELSE g.status END,
    error = CASE WHEN g.generation < excluded.generation THEN NULL ELSE g.error END
-- xmax is 0 for an inserted row, which does not wait for the disk, like a first claim: what is recorded of the saga does
RETURNING id, status, error, stopped, stops, signals, xmax = 0,
    CASE WHEN xmax = 0 THEN set_config('synchronous_commit', 'off', true) END
"""

# The saga lets go of everything but its rows. `waits_for` of them have to end before it goes on; none: it goes on at once.
# Not if anything has happened since it was read.
_WAIT = f"""
WITH {SETTINGS}, saga AS (
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

_COMPENSATE = """
WITH saga AS (
    UPDATE idempotency.sagas SET status = 'COMPENSATING', error = %(error)s, updated_at = clock_timestamp()
    WHERE id = %(saga)s AND status = 'RUNNING' RETURNING id
)
SELECT 1 / count(*) FROM saga
"""

_STATUS = f"SELECT status FROM idempotency.sagas WHERE {ROW} AND status IN ('RUNNING', 'COMPENSATING') FOR UPDATE"

# Of a saga whose processes died in every attempt: its code has killed them, so it is undone; or the undoing has, so that
# it stops.
_LET_GO = f"""
WITH saga AS (
    UPDATE idempotency.sagas
    SET status = 'COMPENSATING', error = coalesce(error, %(error)s), updated_at = clock_timestamp(),
        waits_for = CASE WHEN status = 'COMPENSATING' THEN 1 END,
        stopped = CASE WHEN status = 'COMPENSATING' THEN %(stopped)s END
    WHERE {ROW}
    RETURNING clock_timestamp() + CASE WHEN stopped IS NULL THEN interval '0' ELSE interval '{LONGEST_WAIT}' END AS due
), released AS (
    UPDATE idempotency.records SET status = 'released', token = NULL, locked_until = NULL, locked_by = NULL,
        available_at = saga.due, opened_at = saga.due, attempts = 0, spent_at = NULL, updated_at = clock_timestamp()
    FROM saga WHERE {ROW}
    RETURNING tenant, task, key, fingerprint, message, queue, available_at, generation, service
)
INSERT INTO idempotency.outbox
    (message_id, tenant, task, key, fingerprint, message, queue, origin, available_at, generation, service)
SELECT gen_random_uuid()::text, tenant, task, key, fingerprint, message, queue, 'recover', available_at, generation, service
FROM released WHERE message <> ''
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
    return SagaRow(*execute(connection, _OPEN, fields).fetchone()[:-1])


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


def compensate(connection: Connection, saga: SagaRow, error: str) -> None:
    """From now on the saga is undone, because of `error`; `wait` follows in the transaction. Raises `DivisionByZero`."""
    execute(connection, _COMPENSATE, {"saga": saga.id, "error": error})


def status_locked(connection: Connection, id: OperationId) -> str | None:
    """RUNNING or COMPENSATING, if the operation is a saga that has not ended; it is locked until the transaction ends."""
    row = execute(connection, _STATUS, named(id)).fetchone()
    return None if row is None else str(row.status)


def let_go(connection: Connection, id: OperationId, error: str, *, stopped: str) -> None:
    """Take a saga from processes that die of it: it is undone, or stops if it was being undone. Its record is locked."""
    execute(connection, _LET_GO, named(id) | {"error": error, "stopped": stopped})


def end(connection: Connection, saga: SagaRow, status: str) -> None:
    """End the saga in the transaction that ends its operation, before that. Raises `DivisionByZero` if it has moved on."""
    execute(connection, _END_WITH, {"saga": saga.id, "status": status, "was": saga.status})


def cancel(connection: Connection, id: OperationId, error: str) -> bool:
    """From now on a saga is undone, by a person or by the saga that has called it. False: it has ended, or is undone already."""
    return execute(connection, _CANCEL, named(id) | {"error": error}).fetchone() is not None


def observe(connection: Executes, tenant: str, task: str, key: str, *, step: str, result: str, status: str) -> None:
    """Note what an observer has seen of a process that no saga conducts. A step that was seen before changes nothing."""
    found = connection.exec_driver_sql(_OBSERVE, {"tenant": tenant, "task": task, "key": key, "status": status})
    saga = found.scalar_one()
    connection.exec_driver_sql(_SEEN, {"saga": saga, "tenant": tenant, "name": step, "result": result})
