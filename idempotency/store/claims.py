"""Claiming an operation, counting its duplicates, and renewing its lease."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection

from ..wire.keys import OperationId
from ..wire.message import Message
from .answers import Answer, Busy, Changed, Claimed, Completed, Failed, Foreign, Mismatch, Renewal, Stale, why_not
from .inserting import IS_NEW, InsertOrUpdate, insert_or_update
from .record import KNOWN, MINE, OWN, ROW, RUNS, mine, named, unsettled
from .statements import IS_CONFIRMED, execute

# The answer of a record that cannot be claimed.
_WHY_NOT = """CASE
           WHEN service <> %(service)s THEN 'foreign'
           WHEN fingerprint <> ALL(%(fingerprints)s) THEN 'mismatch'
           WHEN status IN ('completed', 'failed') THEN status
           WHEN status = 'started' AND locked_until >= clock_timestamp() THEN 'busy'
           WHEN status = 'released' AND available_at > clock_timestamp() THEN 'busy'
           ELSE 'changed'
       END"""
# Of a plain table, a claim that is refused has locked its row, which alone would do.
_IS_CONFIRMED_IF_ENDED = f"(status NOT IN ('completed', 'failed') OR {IS_CONFIRMED})"
_DUE_IN = "CASE WHEN status = 'released' THEN extract(epoch FROM available_at - clock_timestamp())::float8 END"

# A signed message that is older than `redelivery_horizon` may have been carried out by an operation that is purged. It runs only
# if that is known to be wrong.
_IS_STALE = f"""(
    to_timestamp(%(signed_at)s) < clock_timestamp() - make_interval(secs => %(horizon)s) AND NOT {KNOWN})"""
_STALE = f"SELECT {_IS_STALE}"


_NEW = InsertOrUpdate(
    {
        **{
            name: f"%({name})s"
            for name in ("tenant", "task", "key", "token", "fingerprint", "message", "queue", "service")
        },
        "status": "'started'",
        "fence": "pg_catalog.nextval('idempotency.fence')",
        "locked_until": "clock_timestamp() + make_interval(secs => %(lease)s)",
        "locked_by": "%(holder)s",
    },
    changes="""
        status = 'started',
        fence = pg_catalog.nextval('idempotency.fence'),
        token = excluded.token,
        -- the same token again is the same attempt, whose commit was in doubt
        attempts = r.attempts + (r.token IS DISTINCT FROM excluded.token)::int,
        locked_until = clock_timestamp() + make_interval(secs => %(lease)s),
        locked_by = excluded.locked_by,
        taken_over = r.status = 'started' AND r.token IS DISTINCT FROM excluded.token,
        available_at = NULL,
        -- one that began without a message gets the first that comes
        message = CASE WHEN r.message = '' THEN excluded.message ELSE r.message END,
        queue = CASE WHEN r.message = '' THEN excluded.queue ELSE r.queue END,
        service = excluded.service,
        updated_at = clock_timestamp()""",
    condition="""r.fingerprint = ANY(%(fingerprints)s) AND (r.service = excluded.service) IS NOT FALSE
      AND (r.status = 'started' AND (r.token = excluded.token OR r.locked_until < clock_timestamp())
        OR r.status = 'released' AND r.available_at <= clock_timestamp())""",
    returning=f"""fence, attempts, generation, nullif(effects, '{{}}') AS effects, opened_at, revoked_generation, fingerprint,
        taken_over, spent_at, CASE WHEN NOT %(synchronous)s AND {IS_NEW} THEN set_config('synchronous_commit', 'off', true) END""",
)
_CLAIMED = """
SELECT 'claimed' AS answer, fence, attempts, generation, effects,
       extract(epoch FROM clock_timestamp() - opened_at)::float8 AS age, NULL AS result, NULL AS error,
       revoked_generation IS NOT DISTINCT FROM generation AS revoked, fingerprint, taken_over, spent_at, NULL AS service
FROM claimed
"""
_OR_WHY_NOT = f"""
UNION ALL
SELECT {_WHY_NOT}, NULL, NULL, generation, NULL, {_DUE_IN}, result, error, NULL, fingerprint, NULL, NULL, service
FROM idempotency.records
WHERE {ROW} AND NOT EXISTS (SELECT FROM claimed) AND {_IS_CONFIRMED_IF_ENDED}
"""
_OR_STALE = f"""
UNION ALL
SELECT 'stale', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
WHERE {_IS_STALE} AND NOT EXISTS (SELECT FROM claimed)"""
_CLAIM, _INSERT, _CHANGE = _NEW.statements("claimed", _CLAIMED, _OR_WHY_NOT)
_CLAIM_SIGNED, _INSERT_SIGNED, _CHANGE_SIGNED = replace(_NEW, given=f"NOT {_IS_STALE}").statements(
    "claimed", _CLAIMED, _OR_WHY_NOT + _OR_STALE
)

# Unlike a claim, it never waits for a lock.
_PEEK = f"""
SELECT {_WHY_NOT} AS answer, generation, {_DUE_IN} AS age, result, error, fingerprint, service
FROM idempotency.records WHERE {ROW} AND {_IS_CONFIRMED_IF_ENDED}
"""

# Only one updated row allows a duplicate in flight to be acknowledged. With zero rows nothing was flushed, so nothing is
# proven.
_COUNT_DUPLICATE = f"""
UPDATE idempotency.records
SET duplicates = duplicates + 1, updated_at = clock_timestamp(),
    -- this message will be acknowledged: an operation that began without one keeps it for its next delivery
    message = CASE WHEN message = '' THEN %(message)s ELSE message END,
    queue = CASE WHEN message = '' THEN %(queue)s ELSE queue END
WHERE {ROW} AND fingerprint = ANY(%(fingerprints)s) AND {OWN}
  AND (status = 'started' AND locked_until > clock_timestamp()
    OR status = 'released' AND available_at > clock_timestamp())
RETURNING token, message <> '' AS is_kept
"""

# A skipped row is locked, perhaps by its own finish: its lease is unknown, not lost. Without SKIP LOCKED, one slow
# transaction would block the renewal of all the process's leases.
_RENEW = """
WITH held AS (
    SELECT * FROM unnest(%(tenants)s::text[], %(tasks)s::text[], %(keys)s::text[],
                         %(fences)s::bigint[], %(tokens)s::text[])
        AS h(tenant, task, key, fence, token)
), mine AS MATERIALIZED (
    SELECT r.tenant, r.task, r.key
    FROM idempotency.records r JOIN held h USING (tenant, task, key)
    WHERE r.status = 'started' AND r.fence = h.fence AND r.token = h.token
    ORDER BY r.tenant, r.task, r.key
    FOR UPDATE OF r SKIP LOCKED
), renewed AS (
    UPDATE idempotency.records r SET locked_until = clock_timestamp() + make_interval(secs => %(lease)s)
    FROM mine WHERE (r.tenant, r.task, r.key) = (mine.tenant, mine.task, mine.key)
    RETURNING r.token
)
SELECT h.token,
       EXISTS (SELECT FROM renewed WHERE renewed.token = h.token) AS renewed,
       EXISTS (SELECT FROM idempotency.records r
               WHERE (r.tenant, r.task, r.key) = (h.tenant, h.task, h.key)
                 AND r.status = 'started' AND r.fence = h.fence AND r.token = h.token) AS still_mine
FROM held h
"""

# A request that is repeated many times has as many outbox rows, hence the limit.
_ACCEPTED = f"""
(SELECT message FROM idempotency.records WHERE {ROW} AND fingerprint = %(fingerprint)s)
UNION ALL
(SELECT message FROM idempotency.outbox WHERE {ROW} AND fingerprint = %(fingerprint)s ORDER BY id LIMIT 10)
"""

# Later claims are counted from here rather than from `max_attempts`, which a deploy may lower.
_NOTE_SPENT = f"""
UPDATE idempotency.records
SET spent_at = coalesce(spent_at, attempts + %(in)s), updated_at = clock_timestamp()
WHERE {MINE} RETURNING spent_at
"""

# A worker remembers revoked task ids for hours, and a replay has the same task id: its memory must count only once.
_REVOKE = f"""
UPDATE idempotency.records SET revoked_generation = generation, updated_at = clock_timestamp()
WHERE {ROW} AND fingerprint = ANY(%(fingerprints)s) AND {OWN} AND status IN ('started', 'released')
  AND (revoked_generation IS NULL OR NOT %(remembered)s)
RETURNING 1
"""

# A saga that waits goes on now.
_RESUME = f"SELECT idempotency.resume_saga(g) FROM idempotency.sagas g WHERE {ROW} AND {RUNS} AND NOT observed"

_STANDING = f"""
(SELECT true AS has_begun, message FROM idempotency.records
 WHERE {ROW} AND fingerprint = ANY(%(fingerprints)s) AND {OWN} AND status IN ('started', 'released'))
UNION ALL
(SELECT false, message FROM idempotency.outbox
 WHERE {ROW} AND fingerprint = ANY(%(fingerprints)s) AND {OWN} AND {unsettled()} ORDER BY id LIMIT 10)
"""


def claim(
    connection: Connection,
    id: OperationId,
    *,
    service: str,
    token: str,
    fingerprint: str,
    message: str,
    holder: str,
    lease: float,
    queue: str = "",
    synchronous: bool = True,
    also: Sequence[str] = (),
    signed_at: float | None = None,
    horizon: float = 0.0,
) -> Answer:
    """Claim an operation, or return why not. Raises `UnknownVersion` for a record with a fingerprint by an unknown rule.

    One statement claims a new record, one that is due again, one whose lease has run out, or, with the same token, the
    attempt's own one. A record without a name becomes that of `service`. `also`: the fingerprints of the same arguments by
    other rules. `signed_at`: when the message was published, in seconds since 1970; one that is older than `horizon` seconds
    claims nothing unless its operation is known.

    Without `synchronous`, the commit of a *new* record does not wait for the disk; only for callers that do not
    acknowledge anything because of it. Every later write to the record is flushed, and with it the claim, which is
    earlier in the log. If a crash of Postgres loses the claim before that, those writes are fenced and the holder
    claims again.
    """
    asked_at = time.monotonic()
    row = insert_or_update(
        connection,
        _CLAIM if signed_at is None else _CLAIM_SIGNED,
        (_INSERT, _CHANGE) if signed_at is None else (_INSERT_SIGNED, _CHANGE_SIGNED),
        named(id)
        | {
            "service": service,
            "token": token,
            "fingerprint": fingerprint,
            "fingerprints": [fingerprint, *also],
            "message": message,
            "queue": queue,
            "holder": holder,
            "lease": lease,
            "synchronous": synchronous,
        }
        | ({} if signed_at is None else {"signed_at": signed_at, "horizon": horizon}),
    )
    if row is None:
        return Changed()
    if row.answer == "stale":
        return Stale()
    if row.answer == "claimed":
        return Claimed(
            id,
            row.fence,
            token,
            row.attempts,
            row.generation,
            max(row.age, 0.0),
            row.effects or {},
            taken_over=row.taken_over,
            revoked=row.revoked,
            fingerprint=row.fingerprint,
            spent_at=row.spent_at,
            asked_at=asked_at,
        )
    return why_not(row)


def is_stale(connection: Connection, id: OperationId, *, signed_at: float, horizon: float) -> bool:
    """Whether a message of this age may be a copy of one whose operation is purged."""
    fields = named(id) | {"signed_at": signed_at, "horizon": horizon}
    return bool(execute(connection, _STALE, fields).fetchone()[0])


def peek(
    connection: Connection, id: OperationId, *, service: str, fingerprint: str, also: Sequence[str] = ()
) -> Completed | Failed | Mismatch | Foreign | Busy | None:
    """Why an operation cannot be claimed at the moment; None: it could be. Raises `UnknownVersion`, as `claim` does."""
    fields = {"service": service, "fingerprints": [fingerprint, *also]}
    row = execute(connection, _PEEK, named(id) | fields).fetchone()
    answer = Changed() if row is None else why_not(row)
    return None if isinstance(answer, Changed) else answer


def count_duplicate(
    connection: Connection,
    id: OperationId,
    fingerprint: str,
    also: Sequence[str] = (),
    *,
    service: str,
    message: str = "",
    queue: str = "",
) -> tuple[bool, str | None]:
    """Count a duplicate of an operation in flight. Returns whether it was counted, and the holder's token if its record has a message.

    `message` is kept if the record has none yet. Without one, the next duplicate has to be asked for it.
    """
    fields = {"service": service, "fingerprints": [fingerprint, *also], "message": message, "queue": queue}
    row = execute(connection, _COUNT_DUPLICATE, named(id) | fields).fetchone()
    return (False, None) if row is None else (True, row.token if row.is_kept else None)


def renew(connection: Connection, claims: Sequence[Claimed], lease: float) -> dict[str, Renewal]:
    """Renew all leases of a process in one statement. Returns the result by token."""
    rows = execute(
        connection,
        _RENEW,
        {
            "tenants": [claim.id.tenant for claim in claims],
            "tasks": [claim.id.task for claim in claims],
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


def revoke(
    connection: Connection,
    id: OperationId,
    fingerprint: str,
    *,
    service: str,
    remembered: bool,
    also: Sequence[str] = (),
) -> bool:
    """Mark this generation as revoked, so that the next claim ends it. False: it has ended or there is none.

    `remembered`: the worker only remembers the task id, which must not revoke another generation after the first.
    """
    parameters = {"service": service, "fingerprints": [fingerprint, *also], "remembered": remembered}
    is_marked = execute(connection, _REVOKE, named(id) | parameters).fetchone() is not None
    if is_marked:
        execute(connection, _RESUME, named(id))
    return is_marked


def note_spent(connection: Connection, claim: Claimed, *, within: int) -> int | None:
    """Record that attempts are used up as of this one (`within` 0) or the next (1). Returns the first; None: not the holder."""
    row = execute(connection, _NOTE_SPENT, mine(claim) | {"in": within}).fetchone()
    return None if row is None else int(row.spent_at)


def is_accepted(connection: Connection, id: OperationId, fingerprint: str, body: str) -> bool:
    """Whether a message with exactly this body was accepted under this fingerprint, so that its arguments are the same."""
    rows = execute(connection, _ACCEPTED, named(id) | {"fingerprint": fingerprint}).fetchall()
    return any(_body(row.message) == body for row in rows)


def is_anothers(
    connection: Connection, id: OperationId, fingerprint: str, task_id: str, *, service: str, also: Sequence[str] = ()
) -> bool:
    """Whether the operation has begun under another task id than this one, or before that was accepted under another, too."""
    parameters = {"service": service, "fingerprints": [fingerprint, *also]}
    ids: dict[bool, set[str]] = {True: set(), False: set()}
    for row in execute(connection, _STANDING, named(id) | parameters).fetchall():
        with suppress(ValueError):  # one that began without a message
            ids[row.has_begun].add(Message.from_text(row.message).headers.get("id", task_id))
    return bool((ids[True] or ids[False]) - {task_id})


def _body(message: str) -> str | None:
    try:
        return Message.from_text(message).body
    except ValueError:
        return None
