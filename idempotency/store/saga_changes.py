"""What people change of sagas that have stopped, and what keeps them from changing what a saga has used.

An operation that a saga has called is locked before the saga, as its end does it, and the saga before its own record.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Row

from ..errors import ChangeRefused
from ..wire.keys import OperationId
from ..wire.results import REPLACED_BEGINS
from . import dead_letters, sagas
from .record import ROW, RUNS, is_open, named

if TYPE_CHECKING:
    from celery import Celery

_LOCKED = f"SELECT id, generation, status, stopped, error FROM idempotency.sagas WHERE {ROW} FOR NO KEY UPDATE"

_IS_TRIED_AGAIN = f"SELECT status = 'started' FROM idempotency.records WHERE {ROW} FOR UPDATE"

_FAILED_UNDOS = f"""
SELECT s.name, s.tenant, s.call_task AS task, s.call_key AS key, r.status, (
    SELECT max(d.id) FROM idempotency.dead_letters d
    WHERE (d.tenant, d.task, d.key) = (s.tenant, s.call_task, s.call_key) AND {is_open("d")}
      AND d.reason NOT IN ('fingerprint_mismatch', 'service_mismatch')) AS letter
FROM idempotency.sagas g
JOIN idempotency.saga_steps s ON s.saga_id = g.id AND s.generation = g.generation
LEFT JOIN idempotency.records r ON (r.tenant, r.task, r.key) = (s.tenant, s.call_task, s.call_key)
WHERE g.tenant = %(tenant)s AND g.task = %(task)s AND g.key = %(key)s AND s.kind = 'undo' AND s.state = 'failed'
ORDER BY s.position DESC
"""

_BEGIN_ANEW = "UPDATE idempotency.sagas SET stops = 0 WHERE id = %(saga)s"
_GO_ON = "SELECT idempotency.signal_saga(%(saga)s)"

# A saga whose dead letter this is, if it is still stopped for that reason.
_STOPPED_BY = f"""
SELECT g.tenant, g.task, g.key
FROM idempotency.dead_letters d
JOIN idempotency.sagas g ON (g.tenant, g.task, g.key) = (d.tenant, d.task, d.key) AND g.stopped = d.reason
WHERE d.id = %(letter)s AND {is_open("d")} AND g.status IN ('RUNNING', 'COMPENSATING')
"""

# The saga that waits for an operation.
_WAITING_FOR = """
SELECT g.tenant, g.task, g.key FROM idempotency.saga_steps s
JOIN idempotency.sagas g ON g.id = s.saga_id AND g.status IN ('RUNNING', 'COMPENSATING')
WHERE (s.tenant, s.call_task, s.call_key) = (%(tenant)s, %(task)s, %(key)s) AND s.state = 'begun' LIMIT 1
"""

# The saga that has called the operation of a letter, and has gone on from its failure; or that a person has undone by hand.
_USED_BY = """
SELECT s.kind, g.task || ' ' || g.key AS saga
FROM idempotency.dead_letters d
JOIN idempotency.saga_steps s ON (s.tenant, s.call_task, s.call_key) = (d.tenant, d.task, d.key)
JOIN idempotency.sagas g ON g.id = s.saga_id
WHERE d.id = %(letter)s AND (s.kind = 'call' AND s.state = 'failed' OR s.kind = 'undo' AND s.state = 'done')
UNION ALL
SELECT 'undo', g.task || ' ' || g.key
FROM idempotency.dead_letters d
JOIN idempotency.saga_steps s ON (s.tenant, s.call_task, s.call_key) = (d.tenant, d.task, d.key)
JOIN idempotency.sagas g ON g.id = s.saga_id
JOIN idempotency.saga_steps u ON u.saga_id = g.id AND u.generation = s.generation AND u.undoes = s.position AND u.state = 'done'
WHERE d.id = %(letter)s AND s.kind = 'call'
UNION ALL
-- or of an earlier letter of the same operation: its replay has failed, too
SELECT CASE WHEN other.is_undone THEN 'undo' ELSE 'call' END, other.used_by FROM idempotency.dead_letters d JOIN idempotency.dead_letters other USING (tenant, task, key)
WHERE d.id = %(letter)s AND other.used_by IS NOT NULL
ORDER BY 1 DESC LIMIT 1
"""

# Whether a person has found that the effects in doubt have happened, so that a replay does none of them again.
_HAS_HAPPENED = """
SELECT coalesce(bool_or((entry.value ->> 'resolved')::boolean) AND bool_and(entry.value ->> 'state' = 'done'), false)
FROM idempotency.dead_letters d
JOIN idempotency.records r USING (tenant, task, key)
CROSS JOIN jsonb_each(r.effects) entry
WHERE d.id = %(letter)s
  -- or it is replayed already, and its message could not be published
  AND (r.error_code IN ('effect_unknown', 'unfinished') OR r.status = 'released' AND r.spent_at = 1)
"""

# The replay of what a saga has gone on from: its first attempt is the last look, which begins nothing.
_ONLY_FINISH = f"UPDATE idempotency.records SET spent_at = 1 WHERE {ROW} AND status = 'released'"

# In this order, and before the letter: the end of the saga locks the saga, and then the letters of what it has called.
_LOCK_OWN_SAGA = """
SELECT FROM idempotency.sagas g JOIN idempotency.dead_letters d USING (tenant, task, key) WHERE d.id = %(letter)s FOR NO KEY UPDATE OF g
"""
_LOCK_CALLER = """
SELECT g.id FROM idempotency.dead_letters d
JOIN idempotency.saga_steps s ON (s.tenant, s.call_task, s.call_key) = (d.tenant, d.task, d.key)
JOIN idempotency.sagas g ON g.id = s.saga_id AND g.generation = s.generation
WHERE d.id = %(letter)s AND s.kind = 'call' AND s.state = 'failed'
FOR NO KEY UPDATE OF g
"""

# The call that a replay has opened again, if its saga still waits and has not seen how it had failed.
_AWAIT_AGAIN = f"""
WITH waits AS (
    UPDATE idempotency.sagas g SET waits_for = waits_for + 1, updated_at = clock_timestamp()
    FROM idempotency.saga_steps s
    WHERE g.id = %(saga)s AND g.{RUNS} AND g.stopped IS NULL AND g.waits_for IS NOT NULL
      AND s.saga_id = g.id AND s.generation = g.generation AND s.kind = 'call' AND s.state = 'failed'
      AND (s.tenant, s.call_task, s.call_key) = (%(tenant)s, %(task)s, %(key)s)
      AND NOT EXISTS (SELECT FROM idempotency.saga_steps later
                      WHERE later.saga_id = g.id AND later.generation = g.generation AND later.begun_at > s.ended_at)
    RETURNING g.id, g.generation, s.position
)
UPDATE idempotency.saga_steps s SET state = 'begun', error = NULL, ended_at = NULL
FROM waits WHERE (s.saga_id, s.generation, s.position) = (waits.id, waits.generation, waits.position)
RETURNING 1
"""

_NOT_UNDONE = """NOT EXISTS (
    SELECT FROM idempotency.saga_steps u
    WHERE u.saga_id = g.id AND u.generation = s.generation AND u.undoes = s.position AND u.state = 'done')"""

# What a saga that was undone has left done, because it has no undo; and what the calls have that failed, and those that they
# have called. Of a call whose record is purged that is not known any more.
_LEFT_DONE = f"""
WITH RECURSIVE failed AS (
    SELECT d.tenant, d.task, d.key, '' AS of_call FROM idempotency.dead_letters d WHERE d.id = %(letter)s
    UNION ALL
    SELECT s.tenant, s.call_task, s.call_key, ' of ' || s.name || failed.of_call
    FROM failed JOIN idempotency.sagas g USING (tenant, task, key) JOIN idempotency.saga_steps s ON s.saga_id = g.id
    WHERE g.status = 'FAILED' AND s.kind = 'call' AND s.state = 'failed' AND {_NOT_UNDONE}
)
SELECT s.kind || ' ' || s.name || failed.of_call
FROM failed JOIN idempotency.sagas g USING (tenant, task, key) JOIN idempotency.saga_steps s ON s.saga_id = g.id
WHERE g.status = 'FAILED' AND s.kind IN ('step', 'effect', 'call') AND s.state = 'done' AND {_NOT_UNDONE}
UNION ALL
SELECT CASE WHEN r.key IS NULL THEN 'what is no longer known' ELSE (entry.value ->> 'kind') || ' ' || entry.key END || failed.of_call
FROM failed LEFT JOIN idempotency.records r USING (tenant, task, key) LEFT JOIN jsonb_each(r.effects) entry ON true
WHERE failed.of_call <> '' AND (r.key IS NULL OR entry.value ->> 'state' = 'done')
ORDER BY 1
"""

# A call that may have left something outside; as `error_text` writes it, because jsonb refuses some of what a message may hold.
_IS_IN_DOUBT = """s.kind = 'call' AND s.state = 'failed'
    AND (starts_with(s.error, '{"code": "effect_unknown"') OR starts_with(s.error, '{"code": "unfinished"'))"""

# What replaced a call may still run.
_IS_REPLACED = f"s.kind = 'call' AND s.state = 'done' AND starts_with(s.result, '{REPLACED_BEGINS}')"

# What an undo is of, by its name or by that of the undo, and how far the undo has come.
_TO_UNDO = f"""
SELECT g.id AS saga, g.generation, s.position, s.name, u.position AS undo_position, u.state AS undo_state,
       u.call_task, u.call_key, s.kind, s.call_task AS of_task, s.call_key AS of_key,
       s.state AS of_state
FROM idempotency.sagas g
JOIN idempotency.saga_steps s ON s.saga_id = g.id AND s.generation = g.generation
LEFT JOIN idempotency.saga_steps u ON u.saga_id = g.id AND u.generation = g.generation AND u.undoes = s.position
WHERE g.tenant = %(tenant)s AND g.task = %(task)s AND g.key = %(key)s AND (
    s.undo IS NOT NULL AND s.state = 'done'
    OR {_IS_IN_DOUBT} OR {_IS_REPLACED})
ORDER BY s.position
"""

_UNDONE = """
INSERT INTO idempotency.saga_steps (saga_id, generation, position, tenant, name, kind, state, undoes, ended_at)
SELECT %(saga)s, %(generation)s, coalesce(%(undo_position)s::int, max(position) + 1), %(tenant)s, 'undo ' || %(name)s, 'undo',
       'done', %(position)s, clock_timestamp()
FROM idempotency.saga_steps WHERE saga_id = %(saga)s AND generation = %(generation)s
ON CONFLICT (saga_id, generation, position) DO UPDATE SET state = 'done', ended_at = excluded.ended_at
WHERE saga_steps.kind = 'undo' AND saga_steps.state = 'failed'
RETURNING position
"""

_END_WITH = "UPDATE idempotency.sagas SET error = %(error)s WHERE id = %(saga)s AND status = 'COMPENSATING'"

# Of the generation that would run, nothing is open and nothing has to be undone.
_END_WITH_NOTHING_TO_UNDO = f"""
UPDATE idempotency.sagas g SET status = 'FAILED', stopped = NULL, waits_for = NULL, updated_at = clock_timestamp()
WHERE {ROW} AND NOT observed AND status IN ('RUNNING', 'COMPENSATING') AND NOT EXISTS (
    SELECT FROM idempotency.saga_steps s
    WHERE s.saga_id = g.id AND s.generation = coalesce((SELECT generation FROM idempotency.records WHERE {ROW}), g.generation)
      AND (s.state = 'begun' AND s.kind NOT IN ('wait', 'timer')
        OR (s.undo IS NOT NULL AND s.state = 'done' OR {_IS_IN_DOUBT}) AND {_NOT_UNDONE}))
RETURNING g.id
"""
_HAS_ENDED = f"""
SELECT NOT EXISTS (
    SELECT FROM idempotency.sagas WHERE {ROW} AND NOT observed AND status IN ('RUNNING', 'COMPENSATING'))
"""

_OPEN_EFFECTS = """
SELECT s.name FROM idempotency.sagas g JOIN idempotency.saga_steps s ON s.saga_id = g.id AND s.generation = g.generation
WHERE g.id = %(saga)s AND s.kind = 'effect' AND s.state = 'begun' ORDER BY s.position
"""

_RESOLVE = """
UPDATE idempotency.saga_steps SET state = %(state)s, entry = entry || %(word)s::jsonb, ended_at = clock_timestamp()
WHERE saga_id = %(saga)s AND generation = %(generation)s AND kind = 'effect' AND name = %(name)s AND state = 'begun'
RETURNING position
"""


@dataclass(frozen=True, slots=True)
class Retried:
    """What a retry has set going: the dead letters that it replayed, and the undos that the saga waits for."""

    letters: dict[int, OperationId]
    waits_for: list[str]


def locked_stopped(connection: Connection, id: OperationId, *, at_rest: bool = False) -> Row[Any]:
    """The saga of an operation, locked: neither its code nor another person changes it until the transaction ends.

    Raises `ChangeRefused` unless it has stopped; with `at_rest`, also while it is tried again.
    """
    row = connection.exec_driver_sql(_LOCKED, named(id)).one_or_none()
    if row is None or row.stopped is None:
        what = "has not begun" if row is None else f"is {row.status}"
        raise ChangeRefused(f"{id.task} {id.key}: {what} and has not stopped")
    if at_rest and connection.exec_driver_sql(_IS_TRIED_AGAIN, named(id)).scalar_one_or_none():
        raise ChangeRefused(f"{id.task} {id.key}: is being tried again at this moment; look again")
    return row


def retry(connection: Connection, id: OperationId, *, service: str, app: Celery) -> Retried:
    """Let a stopped saga go on: what has failed to be undone is replayed first, and ends the wait. Raises `ChangeRefused`."""
    done = Retried({}, [])
    for undo in connection.exec_driver_sql(_FAILED_UNDOS, named(id)).all():
        if undo.status in (None, "failed") and undo.letter is None:
            raise ChangeRefused(
                f"{id.task} {id.key}: {undo.name!r} has failed and its dead letter is closed; "
                f"undo it by hand, then say so with --undone"
            )
        if undo.status == "completed":
            raise ChangeRefused(
                f"{id.task} {id.key}: {undo.name!r} was replaced by another task; see that to its end, then say so with --undone"
            )
        if undo.status == "failed" and (left := left_done(connection, undo.letter)):
            raise ChangeRefused(
                f"{id.task} {id.key}: {undo.name!r} is a saga that was undone except for {', '.join(left)}; undo it by hand, "
                "then say so with --undone"
            )
        if undo.status == "failed":
            done.letters[undo.letter] = dead_letters.replay(connection, undo.letter, service=service, app=app)
        done.waits_for.append(undo.name)
    row = locked_stopped(connection, id)
    if not done.waits_for:
        go_on(connection, row.id)
    return done


def go_on(connection: Connection, saga: Any) -> None:
    """Make a saga due now, as what it waits for would; one that runs at this moment runs once more."""
    connection.exec_driver_sql(_BEGIN_ANEW, {"saga": saga})
    connection.exec_driver_sql(_GO_ON, {"saga": saga})


def stopped_by(connection: Connection, letter: int) -> OperationId | None:
    """The saga that this dead letter says has stopped, if it still has."""
    row = connection.exec_driver_sql(_STOPPED_BY, {"letter": letter}).one_or_none()
    return None if row is None else OperationId(*row)


def waiting_for(connection: Connection, id: OperationId) -> OperationId | None:
    """The saga that waits for an operation to end."""
    row = connection.exec_driver_sql(_WAITING_FOR, named(id)).one_or_none()
    return None if row is None else OperationId(*row)


def used_by(connection: Connection, letter: int) -> Row[Any] | None:
    """The saga that has gone on from how the operation of this letter has ended."""
    return connection.exec_driver_sql(_USED_BY, {"letter": letter}).one_or_none()


def has_happened(connection: Connection, letter: int) -> bool:
    """Whether all that an operation in doubt has begun has happened, as a person has found."""
    happened: bool = connection.exec_driver_sql(_HAS_HAPPENED, {"letter": letter}).scalar_one()
    return happened


def left_done(connection: Connection, letter: int) -> list[str]:
    """What the failed saga of a dead letter has done and not undone: run again, it would do that again."""
    return list(connection.exec_driver_sql(_LEFT_DONE, {"letter": letter}).scalars())


def to_undo(connection: Connection, id: OperationId) -> Sequence[Row[Any]]:
    """What a saga has to undo, each with its undo as far as that has come."""
    return connection.exec_driver_sql(_TO_UNDO, named(id)).all()


def undone(connection: Connection, id: OperationId, step: Row[Any]) -> bool:
    """Record that something was undone by hand. False: its undo is no longer failed."""
    return connection.exec_driver_sql(_UNDONE, named(id) | step._asdict()).one_or_none() is not None


def end_with(connection: Connection, saga: Any, error: str) -> None:
    """Change why a saga is undone, and so what it ends with."""
    connection.exec_driver_sql(_END_WITH, {"saga": saga, "error": error})


def lock_caller(connection: Connection, letter: int) -> Any:
    """Lock the operation of a letter, and then the saga that has called it and failed to get its result: its id, if there is one."""
    connection.exec_driver_sql(_LOCK_OWN_SAGA, {"letter": letter})
    dead_letters.lock_record(connection, letter)
    return connection.exec_driver_sql(_LOCK_CALLER, {"letter": letter}).scalar_one_or_none()


def await_again(connection: Connection, id: OperationId, saga: Any) -> bool:
    """Let the saga, which is locked and has called a replayed operation, wait for its new end. False: it has gone on from the failure."""
    # a statement after the lock: what the saga has recorded by then decides
    return saga is not None and bool(connection.exec_driver_sql(_AWAIT_AGAIN, named(id) | {"saga": saga}).rowcount)


def only_finish(connection: Connection, id: OperationId) -> None:
    """Let a replay finish what has happened, and begin nothing."""
    connection.exec_driver_sql(_ONLY_FINISH, named(id))


def end_with_nothing_to_undo(connection: Connection, id: OperationId) -> bool:
    """End a saga that has not begun, or whose message cannot be published. False: it has something to undo."""
    ended = connection.exec_driver_sql(_END_WITH_NOTHING_TO_UNDO, named(id)).scalar_one_or_none()
    if ended is not None:
        sagas.close_letters(connection, ended)
    has_ended: bool = connection.exec_driver_sql(_HAS_ENDED, named(id)).scalar_one()
    return has_ended


def open_effects(connection: Connection, saga: Any) -> list[str]:
    """The names of a saga's effects of unknown outcome."""
    return list(connection.exec_driver_sql(_OPEN_EFFECTS, {"saga": saga}).scalars())


def resolve(connection: Connection, saga: Row[Any], name: str, word: dict[str, Any]) -> bool:
    """Record what became of an effect of unknown outcome. False: it has none of this name."""
    fields = {"saga": saga.id, "generation": saga.generation, "name": name, "state": word["state"]}
    done = connection.exec_driver_sql(_RESOLVE, fields | {"word": json.dumps(word)})
    return done.one_or_none() is not None
