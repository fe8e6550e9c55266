"""The record of an operation: every transition, one guarded statement each.

    (none) ──claim──▶ started ──complete──▶ completed ──purge──▶ (none)
                       │  ▲  └────fail────▶ failed ─────purge──▶ (none)
              release, │  │ claim, when due    │
              recover  ▼  │                    │ replay
                      released ◀───────────────┘

With each change a holder proves that it still is the holder: status, fence and token are in the WHERE. People and
sweeps change what they have locked, or what still has the fence that they were shown. The token is there because a
sequence can hand a fence out twice after a crash or a restore. Zero rows means "not yours any more", never "probably
fine". All times are the database's `clock_timestamp()`; `now()` is the start of the transaction, and a claim that
waited for a lock would write a lease that is already over.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection

from ..errors import UnknownVersion
from ..wire import keys, results
from ..wire.keys import OperationId
from ..wire.message import Message
from .statements import execute

Parameters = Mapping[str, Any]

# ---------------------------------------------------------------- what a claim answers


@dataclass(frozen=True, slots=True)
class Claimed:
    """Ours: run the body. `attempts` counts this one; `effects` are those of earlier attempts."""

    id: OperationId
    fence: int
    token: str
    attempts: int
    generation: int
    age: float  # seconds since the first claim of this generation
    effects: dict[str, dict[str, Any]]
    first_claim: bool
    taken_over: bool = False  # from another holder, whose lease was over
    revoked: bool = False  # Celery was told to revoke this generation: it ends, with a last look at most
    fingerprint: str = ""  # as it is stored: perhaps by an older rule than the delivery's
    spent_at: int | None = None  # the attempt that first found the attempts used up
    # By this process's clock, when the claim was sent: the lease is no older, however late its answer was read.
    asked_at: float = field(default_factory=time.monotonic)

    def resumes(self, earlier: Claimed) -> bool:
        """Whether this is the same attempt as an earlier claim of the same token.

        The count tells, and not the token that the claim has found: the answer to another claim in between may have been
        lost. Whoever has claimed in between was counted; what is given back is one's own.
        """
        return (self.generation, self.attempts) == (earlier.generation, earlier.attempts)


@dataclass(frozen=True, slots=True)
class Completed:
    """Done before: here is the stored result, as the text it was stored in."""

    result: str

    def value(self) -> Any:
        return results.from_text(self.result)


@dataclass(frozen=True, slots=True)
class Failed:
    """Ended before, without success."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The key belongs to a request with other arguments."""

    generation: int


@dataclass(frozen=True, slots=True)
class Busy:
    """Somebody holds it, or its next delivery is not due yet."""


@dataclass(frozen=True, slots=True)
class Changed:
    """The row moved between the upsert and its explanation: ask again."""


Answer = Claimed | Completed | Failed | Mismatch | Busy | Changed


class Renewal(StrEnum):
    HELD = "held"
    LOST = "lost"
    UNKNOWN = "unknown"  # the row is locked by somebody, or could not be read


# ---------------------------------------------------------------- statements

_ROW = "tenant = %(tenant)s AND operation = %(operation)s AND key = %(key)s"
_MINE = f"{_ROW} AND status = 'started' AND fence = %(fence)s AND token = %(token)s"

_CLAIM = f"""
WITH claimed AS (
    INSERT INTO idempotency.records AS r
        (tenant, operation, key, status, fence, token, locked_until, locked_by, fingerprint, message, queue)
    VALUES (%(tenant)s, %(operation)s, %(key)s, 'started', nextval('idempotency.fence'), %(token)s,
            clock_timestamp() + make_interval(secs => %(lease)s), %(holder)s, %(fingerprint)s, %(message)s,
            %(queue)s)
    ON CONFLICT (tenant, operation, key) DO UPDATE SET
        status = 'started',
        fence = nextval('idempotency.fence'),
        token = excluded.token,
        -- the same token again is the same attempt, resolving a doubt
        attempts = r.attempts + (r.token IS DISTINCT FROM excluded.token)::int,
        locked_until = clock_timestamp() + make_interval(secs => %(lease)s),
        locked_by = excluded.locked_by,
        taken_over = r.status = 'started' AND r.token IS DISTINCT FROM excluded.token,
        available_at = NULL,
        updated_at = clock_timestamp()
    WHERE r.fingerprint = ANY(%(fingerprints)s)
      AND (r.status = 'started' AND (r.token = excluded.token OR r.locked_until < clock_timestamp())
        OR r.status = 'released' AND r.available_at <= clock_timestamp())
    RETURNING fence, attempts, generation, nullif(effects, '{{}}') AS effects, opened_at, revoked_generation, fingerprint,
        taken_over, spent_at,
        -- xmax is 0 in a row that was inserted
        CASE WHEN NOT %(synchronous)s AND xmax = 0 THEN set_config('synchronous_commit', 'off', true) END
)
SELECT 'claimed' AS answer, fence, attempts, generation, effects,
       extract(epoch FROM clock_timestamp() - opened_at)::float8 AS age, NULL AS result, NULL AS error,
       revoked_generation IS NOT DISTINCT FROM generation AS revoked, fingerprint, taken_over, spent_at
FROM claimed
UNION ALL
SELECT CASE
           WHEN fingerprint <> ALL(%(fingerprints)s) THEN 'mismatch'
           WHEN status IN ('completed', 'failed') THEN status
           WHEN status = 'started' AND locked_until >= clock_timestamp() THEN 'busy'
           WHEN status = 'released' AND available_at > clock_timestamp() THEN 'busy'
           ELSE 'changed'
       END, NULL, NULL, generation, NULL, NULL, result, error, NULL, fingerprint, NULL, NULL
FROM idempotency.records
WHERE {_ROW} AND NOT EXISTS (SELECT FROM claimed)
"""

# The only proof that allows a duplicate in flight to be acknowledged: one row, under this guard. Zero rows flush
# nothing and prove nothing.
_COUNT_DUPLICATE = f"""
UPDATE idempotency.records
SET duplicates = duplicates + 1, updated_at = clock_timestamp()
WHERE {_ROW} AND fingerprint = ANY(%(fingerprints)s)
  AND (status = 'started' AND locked_until > clock_timestamp()
    OR status = 'released' AND available_at > clock_timestamp())
RETURNING token
"""

# A skipped row is locked by somebody (its own finish, perhaps): unknown, not lost. Without SKIP LOCKED one slow
# transaction would keep every lease of the process from being renewed.
_RENEW = """
WITH held AS (
    SELECT * FROM unnest(%(tenants)s::text[], %(operations)s::text[], %(keys)s::text[],
                         %(fences)s::bigint[], %(tokens)s::text[])
        AS h(tenant, operation, key, fence, token)
), mine AS MATERIALIZED (
    SELECT r.tenant, r.operation, r.key
    FROM idempotency.records r JOIN held h USING (tenant, operation, key)
    WHERE r.status = 'started' AND r.fence = h.fence AND r.token = h.token
    ORDER BY r.tenant, r.operation, r.key
    FOR UPDATE OF r SKIP LOCKED
), renewed AS (
    UPDATE idempotency.records r SET locked_until = clock_timestamp() + make_interval(secs => %(lease)s)
    FROM mine WHERE (r.tenant, r.operation, r.key) = (mine.tenant, mine.operation, mine.key)
    RETURNING r.token
)
SELECT h.token,
       EXISTS (SELECT FROM renewed WHERE renewed.token = h.token) AS renewed,
       EXISTS (SELECT FROM idempotency.records r
               WHERE (r.tenant, r.operation, r.key) = (h.tenant, h.operation, h.key)
                 AND r.status = 'started' AND r.fence = h.fence AND r.token = h.token) AS still_mine
FROM held h
"""

_BEGIN_EFFECT = f"""
UPDATE idempotency.records
SET effects = effects || jsonb_build_object(%(name)s::text, %(effect)s::jsonb
        || jsonb_build_object('begun_at', extract(epoch FROM clock_timestamp())::float8)),
    updated_at = clock_timestamp()
WHERE {_MINE} AND (NOT effects ? %(name)s OR effects -> %(name)s ->> 'state' IN ('not_happened', 'compensated'))
RETURNING effects -> %(name)s ->> 'begun_at'
"""

_CHANGE_EFFECT = f"""
UPDATE idempotency.records
SET effects = jsonb_set(effects, ARRAY[%(name)s], (effects -> %(name)s) || %(change)s::jsonb),
    updated_at = clock_timestamp()
WHERE {_MINE} AND effects -> %(name)s ->> 'state' = 'begun'
RETURNING 1
"""

# The rows of a repeated request are as many as its repetitions.
_ACCEPTED = f"""
(SELECT message FROM idempotency.records WHERE {_ROW} AND fingerprint = %(fingerprint)s)
UNION ALL
(SELECT message FROM idempotency.outbox WHERE {_ROW} AND fingerprint = %(fingerprint)s ORDER BY id LIMIT 10)
"""

# What is used up is counted from here, and not from `max_attempts`, which the next deploy may lower.
_NOTE_SPENT = f"""
UPDATE idempotency.records
SET spent_at = coalesce(spent_at, attempts + %(in)s), updated_at = clock_timestamp()
WHERE {_MINE} RETURNING spent_at
"""

_DATABASE_TIME = "SELECT extract(epoch FROM clock_timestamp())::float8"

# Raises division_by_zero by itself when it matches no row, so that no COMMIT can follow. A holder
# frozen between this statement and COMMIT is evicted by the server within half a lease: nobody waits behind it.
# And whatever a body has SET, this commit waits for the disk.
_FINISH = """
WITH settings AS (
    SELECT set_config('idle_in_transaction_session_timeout', %(idle_ms)s, true),
           set_config('synchronous_commit', 'on', true)
), finished AS (
    UPDATE idempotency.records SET {changes}, updated_at = clock_timestamp()
    FROM settings WHERE {guard} RETURNING 1
)
SELECT 1 / count(*) FROM finished
"""

_RECORD_STEP = _FINISH.format(
    changes="""effects = effects || jsonb_build_object(%(name)s::text, %(effect)s::jsonb
        || jsonb_build_object('begun_at', extract(epoch FROM clock_timestamp())::float8))""",
    guard=f"{_MINE} AND NOT effects ? %(name)s",
)

_TERMINAL = """completed_at = clock_timestamp(), locked_until = NULL,
        expires_at = clock_timestamp() + make_interval(secs => %(retention)s)"""

_COMPLETE = _FINISH.format(
    changes=f"status = 'completed', result = %(result)s, response_code = 200, {_TERMINAL}", guard=_MINE
)

# Steps that were undone are forgotten, so that a replay does them again.
_CONCLUDED = """status = 'failed', error = %(error)s, error_code = %(code)s,
        effects = (effects - %(forgotten)s::text[]) || %(changed)s::jsonb"""

_FAIL = _FINISH.format(
    changes=f"""{_CONCLUDED}, first_error = coalesce(first_error, %(error)s),
        response_code = %(response_code)s, {_TERMINAL}""",
    guard=_MINE,
)

# The next delivery leaves with the release itself: no message has to survive for the operation to go on.
_RELEASE = f"""
WITH released AS (
    UPDATE idempotency.records
    SET status = 'released', token = NULL, locked_until = NULL, locked_by = NULL,
        available_at = clock_timestamp() + make_interval(secs => %(delay)s),
        attempts = attempts - %(given_back)s,
        error = coalesce(%(error)s, error), first_error = coalesce(first_error, %(error)s),
        updated_at = clock_timestamp()
    WHERE {_MINE}
    RETURNING tenant, operation, key, fingerprint, message, queue, available_at, generation
), next_delivery AS (
    INSERT INTO idempotency.outbox
        (event_id, tenant, operation, key, fingerprint, message, queue, origin, available_at, generation)
    SELECT gen_random_uuid()::text, tenant, operation, key, fingerprint, message, queue, 'retry',
           available_at + make_interval(secs => %(after_due)s), generation
    FROM released WHERE %(deliver)s
), superseded AS (
    -- what the next delivery stands for now: an operation that defers for hours keeps one row and not thousands
    DELETE FROM idempotency.outbox o USING released r
    WHERE o.tenant = r.tenant AND o.operation = r.operation AND o.key = r.key AND o.fingerprint = r.fingerprint
      AND o.origin IN ('retry', 'recover') AND o.status = 'published' AND %(deliver)s
)
SELECT count(*) FROM released
"""

_LOOKUP = f"""
SELECT status, generation, fence, attempts, duplicates, fingerprint, result, error, response_code, effects,
       available_at, locked_until, created_at, completed_at, expires_at
FROM idempotency.records WHERE {_ROW}
"""


# ---------------------------------------------------------------- transitions


def claim(
    connection: Connection,
    id: OperationId,
    *,
    token: str,
    fingerprint: str,
    message: str,
    holder: str,
    lease: float,
    queue: str = "",
    synchronous: bool = True,
    also: Sequence[str] = (),
) -> Answer:
    """Claim the operation by writing first; read only to explain a lost claim.

    One statement: a new record, one that is due again, one whose lease is over, or our own claim after a doubt.
    `also`: the fingerprints of the same arguments by other rules than that of `fingerprint`. Raises `UnknownVersion`
    for a record whose fingerprint is of a rule that is not known here.

    Without `synchronous` the commit of a *new* record does not wait for the disk; only for a caller that acknowledges
    nothing on its strength. Every later write about it is flushed, and the claim, earlier in the log, with it. Should
    a crash of Postgres undo the claim before that, those writes match nothing and the holder claims again.
    """
    asked_at = time.monotonic()
    row = execute(
        connection,
        _CLAIM,
        _row(id)
        | {
            "token": token,
            "fingerprint": fingerprint,
            "fingerprints": [fingerprint, *also],
            "message": message,
            "queue": queue,
            "holder": holder,
            "lease": lease,
            "synchronous": synchronous,
        },
    ).fetchone()
    if row is None:
        return Changed()
    if row.answer == "claimed":
        return Claimed(
            id,
            row.fence,
            token,
            row.attempts,
            row.generation,
            max(row.age, 0.0),
            row.effects or {},
            row.attempts == 1,
            taken_over=row.taken_over,
            revoked=row.revoked,
            fingerprint=row.fingerprint,
            spent_at=row.spent_at,
            asked_at=asked_at,
        )
    return _explained(row)


def _explained(row: Any) -> Completed | Failed | Mismatch | Busy | Changed:
    """Why a record could not be had, from the statement that tried."""
    match row.answer:
        case "completed":
            return Completed(row.result)
        case "failed":
            return Failed(**error_fields(row.error))
        case "mismatch":
            version = keys.fingerprint_version(row.fingerprint)
            if version is not None and version not in keys.FINGERPRINT_RULES:
                raise UnknownVersion(f"fingerprint: made by rule {version}, which this version does not know")
            return Mismatch(row.generation)
        case "busy":
            return Busy()
        case _:
            return Changed()


def count_duplicate(
    connection: Connection, id: OperationId, fingerprint: str, also: Sequence[str] = ()
) -> tuple[bool, str | None]:
    """Count a duplicate of an operation in flight. Returns whether a row was counted, and its holder's token."""
    row = execute(connection, _COUNT_DUPLICATE, _row(id) | {"fingerprints": [fingerprint, *also]}).fetchone()
    return (False, None) if row is None else (True, row.token)


def renew(connection: Connection, claims: Sequence[Claimed], lease: float) -> dict[str, Renewal]:
    """Renew all leases of a process in one statement. Returns the verdict by token."""
    rows = execute(
        connection,
        _RENEW,
        {
            "tenants": [claim.id.tenant for claim in claims],
            "operations": [claim.id.operation for claim in claims],
            "keys": [claim.id.key for claim in claims],
            "fences": [claim.fence for claim in claims],
            "tokens": [claim.token for claim in claims],
            "lease": lease,
        },
    )
    return {row.token: _renewal(row) for row in rows}


def _renewal(row: Any) -> Renewal:
    if row.renewed:
        return Renewal.HELD
    return Renewal.UNKNOWN if row.still_mine else Renewal.LOST


def begin_effect(connection: Connection, claim: Claimed, name: str, effect: Parameters) -> float | None:
    """Record that an effect is about to be called. Returns the database's time in seconds; None: not the holder."""
    row = execute(connection, _BEGIN_EFFECT, _guard(claim) | {"name": name, "effect": json.dumps(effect)}).fetchone()
    return None if row is None else float(row[0])


def change_effect(connection: Connection, claim: Claimed, name: str, change: Parameters) -> bool:
    """Record what became of an effect that was begun. False: not the holder, or no longer open."""
    row = execute(connection, _CHANGE_EFFECT, _guard(claim) | {"name": name, "change": json.dumps(change)}).fetchone()
    return row is not None


def is_accepted(connection: Connection, id: OperationId, fingerprint: str, body: str) -> bool:
    """Whether a message with this very body was accepted under a fingerprint: its arguments are those, as text."""
    rows = execute(connection, _ACCEPTED, _row(id) | {"fingerprint": fingerprint}).fetchall()
    return any(_body(row.message) == body for row in rows)


def _body(message: str) -> str | None:
    try:
        return Message.from_text(message).body
    except ValueError:
        return None


def note_spent(connection: Connection, claim: Claimed, *, within: int) -> int | None:
    """Note that this attempt (`within` 0) or the next one (1) has none left. Returns the first such; None: not the holder."""
    row = execute(connection, _NOTE_SPENT, _guard(claim) | {"in": within}).fetchone()
    return None if row is None else int(row.spent_at)


def database_time(connection: Connection) -> float:
    """Seconds since the epoch by the database's clock: the only one that is compared with."""
    return float(execute(connection, _DATABASE_TIME).fetchone()[0])


def has_come(connection: Connection, time: datetime) -> bool:
    """Whether a time has come by the database's clock."""
    return bool(execute(connection, "SELECT %(time)s <= clock_timestamp()", {"time": time}).fetchone()[0])


def record_step(connection: Connection, claim: Claimed, name: str, effect: Parameters, *, lease: float) -> None:
    """Record a step's result in its own transaction; raises `DivisionByZero` when not the holder."""
    parameters = {"name": name, "effect": json.dumps(effect), "idle_ms": _idle_ms(lease)}
    execute(connection, _RECORD_STEP, _guard(claim) | parameters)


def complete(connection: Connection, claim: Claimed, result: str, *, retention: float, lease: float) -> None:
    """Finish with a result, in the transaction of the effects; raises `DivisionByZero` when not the holder."""
    parameters = {"result": result, "retention": retention, "idle_ms": _idle_ms(lease)}
    execute(connection, _COMPLETE, _guard(claim) | parameters)


def fail(connection: Connection, claim: Claimed, end: FailedEnd, *, retention: float, lease: float) -> None:
    """Finish without success; raises `DivisionByZero` when not the holder. The dead letter goes in the same transaction."""
    parameters = end.parameters() | {"retention": retention, "idle_ms": _idle_ms(lease)}
    execute(connection, _FAIL, _guard(claim) | parameters)


def release(
    connection: Connection,
    claim: Claimed,
    *,
    delay: float,
    error: str | None,
    give_back: bool = False,
    deliver: bool = True,
    after_due: float = 0.0,
) -> bool:
    """Let go, claimable after `delay` seconds, with the next delivery in the same statement. False: not the holder.

    `give_back` returns the attempt: it was a deferral or a shutdown, not the operation's fault. `after_due`: how many
    seconds later the delivery leaves. Without `deliver` there is none: for a caller that ends the operation now.
    """
    parameters = {
        "delay": delay,
        "error": error,
        "given_back": int(give_back),
        "deliver": deliver,
        "after_due": after_due,
    }
    return bool(execute(connection, _RELEASE, _guard(claim) | parameters).fetchone()[0])


def lookup(connection: Connection, id: OperationId) -> Any | None:
    """Read a record, for people and for handles; decisions are never made on it."""
    return execute(connection, _LOOKUP, _row(id)).fetchone()


# ---------------------------------------------------------------- the error as it is stored


# The code a failed operation answers with, as HTTP would say it: understood, and cannot be done.
RESPONSE_FAILED = 422


def error_text(code: str, message: str, cause: Mapping[str, str] | None = None) -> str:
    """Write an error as it is stored: JSON with code and message, and what ended the operation beside an open effect."""
    return json.dumps({"code": code, "message": message} | ({"cause": dict(cause)} if cause else {}))


@dataclass(frozen=True, slots=True)
class FailedEnd:
    """How an operation fails: its error and code, the steps that were undone, and the effects that an undo answered for."""

    code: str
    error: str
    forgotten: tuple[str, ...] = ()
    changed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def parameters(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "error": self.error,
            "forgotten": list(self.forgotten),
            "changed": json.dumps(self.changed),
            "response_code": RESPONSE_FAILED,
        }


def error_fields(text: str) -> dict[str, str]:
    fields = json.loads(text)
    return {"code": fields["code"], "message": fields["message"]}


def _row(id: OperationId) -> dict[str, Any]:
    return {"tenant": id.tenant, "operation": id.operation, "key": id.key}


def _guard(claim: Claimed) -> dict[str, Any]:
    return _row(claim.id) | {"fence": claim.fence, "token": claim.token}


def _idle_ms(lease: float) -> str:
    # Below half a lease, so that a holder frozen before COMMIT is gone before anybody may take over.
    return str(max(math.floor(lease * 1000 / 2) - 1, 1))


def keys_of(rows: Iterable[Any]) -> list[OperationId]:
    return [OperationId(row.tenant, row.operation, row.key) for row in rows]


# ---------------------------------------------------------------- what people and Celery's revoke change

_READ = f"SELECT * FROM idempotency.records WHERE {_ROW} FOR UPDATE"

# A worker remembers revoked task ids for hours, and a replay has the same one: its memory counts only once.
_REVOKE = f"""
UPDATE idempotency.records SET revoked_generation = generation, updated_at = clock_timestamp()
WHERE {_ROW} AND fingerprint = ANY(%(fingerprints)s) AND status IN ('started', 'released')
  AND (revoked_generation IS NULL OR NOT %(remembered)s)
RETURNING 1
"""

_CANCEL = f"""
UPDATE idempotency.records
SET {_CONCLUDED}, available_at = NULL, fence = nextval('idempotency.fence'),
    first_error = coalesce(first_error, %(error)s), response_code = %(response_code)s,
    completed_at = clock_timestamp(), expires_at = clock_timestamp() + make_interval(secs => %(retention)s),
    updated_at = clock_timestamp()
WHERE {_ROW} AND status = 'released' AND fence = %(fence)s
RETURNING fence
"""

# A person's word about an effect, and what the end may conclude now. The fence moves: who was shown the record before
# is told to look again.
_CONCLUDE = f"""
UPDATE idempotency.records SET {_CONCLUDED}, fence = nextval('idempotency.fence'), updated_at = clock_timestamp(),
    -- remembered for as long from this word as it was to be from its end
    expires_at = greatest(expires_at, clock_timestamp() + (expires_at - completed_at))
WHERE {_ROW} AND status = 'failed' AND fence = %(fence)s
RETURNING fence
"""


def read_locked(connection: Connection, id: OperationId) -> Any | None:
    """Read a whole record and keep everybody else from changing it until the transaction ends."""
    return execute(connection, _READ, _row(id)).fetchone()


def revoke(
    connection: Connection, id: OperationId, fingerprint: str, *, remembered: bool, also: Sequence[str] = ()
) -> bool:
    """Mark this generation as revoked: the next claim ends it, with a last look at most. False: it has ended, or is unknown.

    `remembered`: a worker's memory of a task id, which does not revoke a generation after the one it did revoke.
    """
    parameters = {"fingerprints": [fingerprint, *also], "remembered": remembered}
    return execute(connection, _REVOKE, _row(id) | parameters).fetchone() is not None


def cancel(connection: Connection, id: OperationId, end: FailedEnd, *, fence: int, retention: float) -> int | None:
    """End what is released, under the fence that was read. Returns the new fence; None: it has changed meanwhile."""
    parameters = end.parameters() | {"fence": fence, "retention": retention}
    return _fence(execute(connection, _CANCEL, _row(id) | parameters).fetchone())


def conclude(connection: Connection, id: OperationId, end: FailedEnd, *, fence: int) -> int | None:
    """Say anew how a failed operation ended. Returns the new fence; None: it has changed meanwhile."""
    return _fence(execute(connection, _CONCLUDE, _row(id) | end.parameters() | {"fence": fence}).fetchone())


def _fence(row: Any | None) -> int | None:
    return None if row is None else int(row.fence)


# ---------------------------------------------------------------- what the dead-letter queue ends

# Whether something else than the message in hand will deliver the operation. The newest row of the newest generation
# is what reconcile would send again; the message in hand is a copy if that is another row, or is about to leave again.
# (A row that a relay holds at this moment, itself or by its lane, is the message in hand: it was refused before its
# confirm was noted.)
_ELSEWHERE = f"""(EXISTS (
    SELECT FROM (
        SELECT event_id, status, coalesce(relayed_until, (
            SELECT l.relayed_until FROM idempotency.lanes l
            WHERE (l.operation, l.ordering_key) = (o.operation, o.ordering_key))) AS relayed_until
        FROM idempotency.outbox o WHERE {_ROW} AND fingerprint = ANY(%(fingerprints)s) AND settled_at IS NULL AND status <> 'failed'
        ORDER BY generation DESC, id DESC LIMIT 1) AS next_delivery
    WHERE event_id IS DISTINCT FROM %(event_id)s
       OR status = 'pending' AND (relayed_until IS NULL OR relayed_until < clock_timestamp()))
    OR EXISTS (
        SELECT FROM idempotency.outbox
        WHERE {_ROW} AND fingerprint = ANY(%(fingerprints)s) AND settled_at IS NULL AND status = 'pending'
          AND event_id IS DISTINCT FROM %(event_id)s))"""

# What is started goes on by its holder or by recover, whatever its lease. What is released ends only if it is as this
# statement's snapshot has it: a release since then has brought a delivery that the snapshot does not show.
_ENDS = f"""r.status = 'released' AND (%(generation)s::int IS NULL OR r.generation = %(generation)s::int)
      AND r.fence = (SELECT fence FROM idempotency.records WHERE {_ROW} AND status = 'released')"""

# The fence moves, so that whatever a former holder still sends matches nothing.
_GIVE_UP = f"""
WITH settings AS (
    SELECT set_config('idle_in_transaction_session_timeout', %(idle_ms)s, true),
           set_config('synchronous_commit', 'on', true)
), deliveries AS MATERIALIZED (
    SELECT {_ELSEWHERE} AS elsewhere
), given_up AS (
    INSERT INTO idempotency.records AS r
        (tenant, operation, key, status, fence, attempts, fingerprint, message, queue, error, first_error,
         error_code, response_code, completed_at, expires_at)
    SELECT %(tenant)s, %(operation)s, %(key)s, 'failed', nextval('idempotency.fence'), 0, %(fingerprint)s,
           %(message)s, %(queue)s, %(error)s, %(error)s, %(code)s, %(response_code)s, clock_timestamp(),
           clock_timestamp() + make_interval(secs => %(retention)s)
    FROM settings, deliveries WHERE NOT elsewhere
    ON CONFLICT (tenant, operation, key) DO UPDATE SET
        status = 'failed', fence = excluded.fence, token = NULL, locked_until = NULL, locked_by = NULL,
        available_at = NULL, error = excluded.error, first_error = coalesce(r.first_error, excluded.error),
        -- what the end may conclude is said in the same transaction, by `conclude`
        error_code = CASE
            WHEN jsonb_path_exists(r.effects, '$.* ? (@.state == "begun")') THEN 'effect_unknown'
            WHEN jsonb_path_exists(r.effects, '$.* ? (@.kind == "effect" && @.state == "done")') THEN 'unfinished'
            ELSE excluded.error_code END,
        response_code = excluded.response_code, completed_at = clock_timestamp(), expires_at = excluded.expires_at,
        updated_at = clock_timestamp()
    WHERE r.fingerprint = ANY(%(fingerprints)s)
      AND {_ENDS}
    RETURNING generation, attempts, first_error, fence, effects, fingerprint
)
SELECT 'given_up' AS answer, generation, attempts, first_error, fence, effects, NULL AS result, NULL AS error,
       fingerprint
FROM given_up
UNION ALL
SELECT CASE
           WHEN fingerprint <> ALL(%(fingerprints)s) THEN 'mismatch'
           WHEN status IN ('completed', 'failed') THEN status
           WHEN status = 'started' OR elsewhere THEN 'busy'
           WHEN generation <> %(generation)s::int THEN 'busy'
           ELSE 'changed'
       END, generation, attempts, first_error, NULL, NULL, result, error, fingerprint
FROM deliveries LEFT JOIN idempotency.records ON {_ROW}
WHERE NOT EXISTS (SELECT FROM given_up)
"""

# Something was counted and flushed before a copy is acknowledged: the record it rests on may be younger than the last
# flush. A copy of an earlier generation that is not to be sent again must not hide the row that is.
_COUNT_COPY = f"""
WITH counted AS (
    UPDATE idempotency.records SET duplicates = duplicates + 1, updated_at = clock_timestamp()
    WHERE {_ROW} AND fingerprint = ANY(%(fingerprints)s) AND status IN ('started', 'released')
)
UPDATE idempotency.outbox copy SET settled_at = clock_timestamp()
WHERE event_id = %(event_id)s AND settled_at IS NULL AND status = 'published'
  AND EXISTS (SELECT FROM idempotency.outbox
              WHERE {_ROW} AND fingerprint = ANY(%(fingerprints)s) AND settled_at IS NULL AND status <> 'failed'
                AND generation > copy.generation)
"""

# No worker took it, and nothing is wrong with it that can be seen: a deploy, perhaps. It comes back later by its own
# row, or by one that is written for it; nothing is in the broker alone meanwhile. An ordered row would hold up those
# behind it.
_PUT_BACK = f"""
WITH own AS (
    SELECT id FROM idempotency.outbox
    WHERE event_id = %(event_id)s AND settled_at IS NULL AND status <> 'failed' AND ordering_key IS NULL
), free AS (
    SELECT WHERE NOT {_ELSEWHERE}
      AND NOT EXISTS (SELECT FROM idempotency.records WHERE {_ROW}
                      AND fingerprint = ANY(%(fingerprints)s)
                      AND (status <> 'released' OR generation <> %(generation)s::int))
), in_time AS (
    SELECT FROM free WHERE NOT EXISTS (
        SELECT FROM idempotency.records
        WHERE {_ROW} AND fingerprint <> ALL(%(fingerprints)s) AND split_part(fingerprint, ':', 1) = ANY(%(rules)s))
), again AS (
    UPDATE idempotency.outbox o
    -- it has come through, so the next loss is the first one again
    SET status = 'pending', origin = 'retry', relayed_until = NULL, taken = false, refusals = refusals + 1, resends = 0,
        first_refused_at = coalesce(first_refused_at, clock_timestamp()),
        available_at = clock_timestamp()
            + make_interval(secs => least(%(pause)s * power(2, least(refusals, 20)), %(cap)s))
    FROM own, in_time
    WHERE o.id = own.id AND o.settled_at IS NULL AND o.status <> 'failed'
      AND (first_refused_at IS NULL OR first_refused_at > clock_timestamp() - make_interval(secs => %(grace)s))
    RETURNING 1
), first AS (
    INSERT INTO idempotency.outbox
        (event_id, tenant, operation, key, fingerprint, message, queue, origin, available_at, generation, refusals,
         first_refused_at)
    SELECT gen_random_uuid()::text, %(tenant)s, %(operation)s, %(key)s, %(fingerprint)s, %(message)s, %(queue)s,
           'retry', clock_timestamp() + make_interval(secs => %(pause)s), coalesce(%(generation)s::int, 1), 1,
           clock_timestamp()
    FROM in_time WHERE NOT EXISTS (SELECT FROM own)
    RETURNING 1
)
SELECT CASE WHEN EXISTS (SELECT FROM again) OR EXISTS (SELECT FROM first) THEN 'put_back'
            WHEN EXISTS (SELECT FROM free) THEN 'over'
            ELSE 'copy' END AS answer
"""


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Ended as failed, because no worker will run its message. The dead letter and `conclude` go in the same transaction."""

    generation: int
    attempts: int
    first_error: str
    fence: int
    effects: dict[str, dict[str, Any]]
    fingerprint: str


class PutBack(StrEnum):
    """What became of a message that no worker took, and with which nothing is wrong that can be seen."""

    PUT_BACK = "put_back"  # it comes back
    OVER = "over"  # it has come back for long enough
    COPY = "copy"  # its operation has ended, or something else will deliver it


@dataclass(frozen=True, slots=True)
class Dead:
    """A message that no worker took: which operation it was to deliver, and by which outbox row and generation."""

    id: OperationId
    fingerprint: str
    also: Sequence[str]
    event_id: str | None
    generation: int | None
    message: str
    queue: str

    def parameters(self) -> dict[str, Any]:
        return _row(self.id) | {
            "fingerprint": self.fingerprint,
            "fingerprints": [self.fingerprint, *self.also],
            "event_id": self.event_id,
            "generation": self.generation,
            "message": self.message,
            "queue": self.queue,
        }


def put_back(connection: Connection, dead: Dead, *, pause: float, cap: float, grace: float) -> PutBack:
    """Send a message again after a pause that doubles from `pause` to `cap`, until it has come back for `grace`.

    All in seconds; by its own outbox row, or by one that is written for it.
    """
    # a record's fingerprint by another rule than these may be that of the same request
    rules = [keys.fingerprint_version(each) for each in (dead.fingerprint, *dead.also)]
    parameters = {"pause": pause, "cap": cap, "grace": grace, "rules": rules}
    return PutBack(execute(connection, _PUT_BACK, dead.parameters() | parameters).fetchone().answer)


def count_copy(connection: Connection, dead: Dead) -> None:
    """Count a message that need not be delivered, because something else will deliver its operation."""
    execute(connection, _COUNT_COPY, dead.parameters())


def give_up(
    connection: Connection,
    dead: Dead,
    *,
    end: FailedEnd,
    retention: float,
    lease: float,
) -> GivenUp | Completed | Failed | Mismatch | Busy | Changed:
    """End as failed what has no record yet or is released, and what nothing else will deliver; else say what it is.

    `Busy`: it is started, or will be delivered by something else. Raises `UnknownVersion`, as `claim` does.
    """
    row = execute(
        connection,
        _GIVE_UP,
        dead.parameters()
        | {
            "retention": retention,
            "idle_ms": _idle_ms(lease),
        }
        | end.parameters(),
    ).fetchone()
    if row is None:
        return Changed()
    if row.answer == "given_up":
        return GivenUp(row.generation, row.attempts, row.first_error, row.fence, row.effects, row.fingerprint)
    return _explained(row)
