"""Sagas: how one begins, waits, is undone and ends. What it has recorded is in `saga_steps`.

The saga's row is always locked before its record. Triggers of migration 0014 do the rest: `signal_waiting` wakes those
that wait for an event, `end_of_operation` the caller of an operation, and it lets only a saga's own code end it;
`close_waits` closes the waits of one that is undone, `forget_saga` deletes its rows with its record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row

from ..wire.keys import OperationId
from .answers import Claimed
from .callers import Executes
from .record import MINE, ROW, RUNS, SETTINGS, idle_ms, is_open, mine, named
from .statements import execute

# For a wait without a time-out. Not infinity, which Python's clock does not have.
LONGEST_WAIT = "10 years"
NOT_REACHED = "its processes died in every attempt before its code had come to all that is recorded"
# Seconds until a saga whose code does not fit is tried again: a deploy may be half done. Doubled each time, up to the last.
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0
STATUSES = RUNNING, COMPLETED, FAILED, COMPENSATING = "RUNNING", "COMPLETED", "FAILED", "COMPENSATING"


@dataclass(frozen=True, slots=True)
class SagaRow:
    """A saga as an attempt has found it."""

    id: Any
    service: str
    status: str
    error: str | None
    stopped: str | None
    stops: int
    signals: int
    reached: int
    is_new: bool


_OPEN = """
INSERT INTO idempotency.sagas AS g (tenant, task, key, service, generation, entity_id, accepted_at)
VALUES (%(tenant)s, %(task)s, %(key)s, %(service)s, %(generation)s, coalesce(%(entity)s, left(%(key)s, 255)),
        idempotency.accepted_at(%(tenant)s, %(task)s, %(key)s))
-- Not fenced, so it changes nothing that the next attempt depends on: this one may have been overtaken since its claim.
ON CONFLICT (tenant, task, key) DO UPDATE SET
    generation = greatest(g.generation, excluded.generation),
    -- one that was cancelled before it began has its key here
    entity_id = coalesce(%(entity)s, g.entity_id),
    -- what an observer has noted is no saga yet
    observed = false,
    service = excluded.service,
    accepted_at = CASE WHEN g.observed THEN excluded.accepted_at ELSE g.accepted_at END,
    -- a replay begins anew
    status = CASE WHEN g.observed OR g.generation < excluded.generation THEN 'RUNNING' ELSE g.status END,
    error = CASE WHEN g.generation < excluded.generation THEN NULL ELSE g.error END,
    reached = CASE WHEN g.generation < excluded.generation THEN 0 ELSE g.reached END
-- xmax is 0 for an inserted row, which does not wait for the disk, like a first claim: what is recorded of the saga does
RETURNING id, service, status, error, stopped, stops, signals, reached, xmax = 0,
    CASE WHEN xmax = 0 THEN set_config('synchronous_commit', 'off', true) END
"""

# The saga lets go of everything but its rows. `waits_for` of them have to end before it goes on; none: it goes on at once.
# Not if anything has happened since it was read.
_WAIT = f"""
WITH {SETTINGS}, saga AS (
    UPDATE idempotency.sagas
    SET waits_for = CASE WHEN signals = %(signals)s THEN %(waits_for)s END, reached = 0, updated_at = clock_timestamp(),
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

_COMPENSATE = f"""
WITH {SETTINGS}, saga AS (
    UPDATE idempotency.sagas SET status = 'COMPENSATING', error = %(error)s, updated_at = clock_timestamp()
    FROM settings WHERE id = %(saga)s AND {RUNS} RETURNING id
)
SELECT 1 / count(*) FROM saga
"""

# As deep in what is recorded as the code has come in these attempts.
_NOTE_REACHED = """
UPDATE idempotency.sagas SET reached = %(position)s
WHERE id = %(saga)s AND generation = %(generation)s AND reached < %(position)s
"""

_OPEN_STATUS = f"""
SELECT status, stopped, reached >= coalesce((SELECT max(s.position) FROM idempotency.saga_steps s
                                    WHERE s.saga_id = g.id AND s.generation = g.generation), 0) AS has_reached
FROM idempotency.sagas g WHERE {ROW} AND NOT observed AND status IN ('RUNNING', 'COMPENSATING') FOR UPDATE
"""

# Of a saga whose processes died in every attempt: its code has killed them, so it is undone; or it stops.
_LET_GO = f"""
WITH saga AS (
    UPDATE idempotency.sagas
    SET status = CASE WHEN %(stopped)s::text IS NULL THEN 'COMPENSATING' ELSE status END,
        error = CASE WHEN %(stopped)s::text IS NULL THEN coalesce(error, %(error)s) ELSE error END,
        waits_for = CASE WHEN %(stopped)s::text IS NOT NULL THEN 1 END,
        stopped = coalesce(%(stopped)s, stopped), reached = 0, updated_at = clock_timestamp()
    WHERE {ROW}
    RETURNING clock_timestamp() + coalesce(make_interval(secs => %(seconds)s), interval '{LONGEST_WAIT}') AS due
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

_END = f"""
WITH {SETTINGS}, ended AS (
    UPDATE idempotency.sagas SET status = %(status)s, stopped = NULL, waits_for = NULL, updated_at = clock_timestamp()
    FROM settings WHERE id = %(saga)s AND status = %(was)s RETURNING 1
)
SELECT 1 / count(*) FROM ended
"""

# The saga has gone on from these failures, so they may not be replayed. What may have left something outside stays open. A
# letter that is being replayed is closed, and still says who has used its operation: its next one asks it. By its record: the
# letter gives another reason if `on_failed` has failed, too. One that is being replayed has not failed any more.
_STAYS = """EXISTS (SELECT FROM idempotency.records r WHERE (r.tenant, r.task, r.key) = (d.tenant, d.task, d.key)
    AND (r.status <> 'failed' OR r.error_code IN ('effect_unknown', 'unfinished')))"""
_CLOSE_LETTERS = f"""
UPDATE idempotency.dead_letters d
SET status = CASE WHEN d.status <> 'open' THEN d.status WHEN {_STAYS} THEN 'open' ELSE 'discarded' END,
    closed_at = CASE WHEN d.status = 'open' AND NOT {_STAYS} THEN clock_timestamp() ELSE d.closed_at END,
    used_by = g.task || ' ' || g.key
FROM idempotency.sagas g JOIN idempotency.saga_steps s ON s.saga_id = g.id AND s.generation = g.generation
WHERE g.id = %(saga)s AND s.kind = 'call' AND s.state = 'failed' AND (d.status = 'open' OR d.used_by IS NULL)
  AND (d.tenant, d.task, d.key) = (s.tenant, s.call_task, s.call_key)
"""

_CANCEL = f"""
WITH cancelled AS (
    INSERT INTO idempotency.sagas AS g (tenant, task, key, service, generation, entity_id, status, error, accepted_at)
    VALUES (%(tenant)s, %(task)s, %(key)s,
            coalesce((SELECT service FROM idempotency.records WHERE {ROW}),
                     (SELECT max(service) FROM idempotency.outbox WHERE {ROW}), ''),
            coalesce((SELECT generation FROM idempotency.records WHERE {ROW}), 1), %(key)s, 'COMPENSATING', %(error)s,
            idempotency.accepted_at(%(tenant)s, %(task)s, %(key)s))
    -- one that has not begun, or not begun anew, finds this, and ends
    ON CONFLICT (tenant, task, key) DO UPDATE
    SET status = 'COMPENSATING', error = excluded.error, generation = excluded.generation, waits_for = NULL, stopped = NULL,
        updated_at = clock_timestamp(), observed = false, service = excluded.service,
        accepted_at = CASE WHEN g.observed THEN excluded.accepted_at ELSE g.accepted_at END
    WHERE g.observed OR g.status = 'RUNNING' OR g.generation < excluded.generation
    RETURNING *
)
SELECT idempotency.resume_saga(cancelled) FROM cancelled
"""

# Before its letter.
_LOCKS = (
    f"SELECT FROM idempotency.sagas WHERE {ROW} FOR NO KEY UPDATE",
    f"SELECT FROM idempotency.records WHERE {ROW} FOR NO KEY UPDATE",
)
# What had stopped it no longer needs a person.
_CLOSE_STOPPED = f"""
UPDATE idempotency.dead_letters d SET status = 'replayed', closed_at = clock_timestamp()
FROM (SELECT * FROM idempotency.sagas WHERE {ROW} AND {RUNS}) g
WHERE (d.tenant, d.task, d.key, d.reason) = (g.tenant, g.task, g.key, g.stopped) AND {is_open("d")}
"""

_OBSERVE = """
INSERT INTO idempotency.sagas AS g (tenant, task, key, service, observed, entity_id, status, accepted_at)
VALUES (idempotency.about(%(tenant)s), %(task)s, %(key)s, %(service)s, true, %(key)s, %(status)s, 'infinity')
ON CONFLICT (tenant, task, key) DO UPDATE SET status = excluded.status, updated_at = clock_timestamp() WHERE g.observed
RETURNING id
"""
_SEEN = """
INSERT INTO idempotency.saga_steps (saga_id, generation, position, tenant, name, kind, state, result, ended_at)
SELECT %(saga)s, 1, coalesce(max(position), 0) + 1, %(tenant)s, %(name)s, 'seen', 'done', %(result)s, clock_timestamp()
FROM idempotency.saga_steps WHERE saga_id = %(saga)s
HAVING NOT coalesce(bool_or(name = %(name)s), false)
"""


def open_saga(connection: Connection, claim: Claimed, entity_id: str | None, *, service: str) -> SagaRow:
    """Find the saga of a claim, or make it. A replay begins it anew; its earlier rows stay, under their generation.

    `entity_id`: None if it is not known any more.
    """
    fields = named(claim.id) | {"service": service, "generation": claim.generation, "entity": entity_id}
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


def compensate(connection: Connection, saga: SagaRow, error: str, *, lease: float) -> None:
    """From now on the saga is undone, because of `error`; `wait` follows in the transaction. Raises `DivisionByZero`."""
    execute(connection, _COMPENSATE, {"saga": saga.id, "error": error, "idle_ms": idle_ms(lease)})


def note_reached(connection: Connection, claim: Claimed, saga: SagaRow, position: int) -> None:
    """Note that an attempt's code has come to all that is recorded, as far as `position`."""
    execute(connection, _NOTE_REACHED, {"saga": saga.id, "generation": claim.generation, "position": position})


def locked(connection: Connection, id: OperationId) -> Row[Any] | None:
    """The status of a saga that has not ended, why it is stopped, and whether its last attempts had come to all that is recorded.

    It is locked until the transaction ends. None: the operation is no saga, or it has ended.
    """
    return connection.exec_driver_sql(_OPEN_STATUS, named(id)).one_or_none()


def let_go(
    connection: Connection, id: OperationId, error: str, *, stopped: str | None, seconds: float | None = None
) -> None:
    """Take a saga from processes that die of it: it is undone, or stops because of `stopped`. Its record is locked.

    It goes on after `seconds`; None: not by itself.
    """
    execute(connection, _LET_GO, named(id) | {"error": error, "stopped": stopped, "seconds": seconds})


def end(connection: Connection, saga: SagaRow, status: str, *, lease: float) -> None:
    """End the saga in the transaction that ends its operation, before that, and close the letters of its failed calls.

    Raises `DivisionByZero` if it has moved on.
    """
    fields = {"saga": saga.id, "status": status, "was": saga.status, "idle_ms": idle_ms(lease)}
    execute(connection, _END, fields)
    close_letters(connection, saga.id)


def close_letters(connection: Connection, saga: Any) -> None:
    """Close the letters of the calls from whose failure an ended saga has gone on; what is in doubt stays on the list."""
    execute(connection, _CLOSE_LETTERS, {"saga": saga})


def cancel(connection: Connection, id: OperationId, error: str) -> bool:
    """From now on a saga is undone, by a person or by the saga that has called it. False: it has ended, or is undone already."""
    for statement in (*_LOCKS, _CLOSE_STOPPED):
        execute(connection, statement, named(id))
    return execute(connection, _CANCEL, named(id) | {"error": error}).fetchone() is not None


def observe(connection: Executes, id: OperationId, *, service: str, step: str, result: str, status: str) -> bool:
    """Note what an observer has seen of a process that no saga conducts. A step that was seen before changes nothing.

    False: a saga has this name and key.
    """
    found = connection.exec_driver_sql(_OBSERVE, named(id) | {"service": service, "status": status})
    if (saga := found.scalar_one_or_none()) is None:
        return False
    connection.exec_driver_sql(_SEEN, {"saga": saga, "tenant": id.tenant, "name": step, "result": result})
    return True
