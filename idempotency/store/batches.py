"""Many operations of a task in one statement: claimed, completed under their claims, or completed without one, as a stream does."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import Connection

from ..wire.delivery import Delivery
from ..wire.keys import OperationId
from .answers import Claimed, Completed
from .ends import RESPONSE_COMPLETED
from .inserting import CONFLICT, KEYS_AT_ONCE, LOCKED, fitting, is_partitioned, lock_of
from .record import idle_ms
from .statements import IS_CONFIRMED, execute

# In a plain table, and in partitions, where the locks of keys come first. What is locked is asked about alone: a batch that
# waited would hold its locks meanwhile, for as long as an `on_failed` takes perhaps.
_PLAIN = {"free": "", "source": "given", "conflict": f"\n{CONFLICT} DO NOTHING"}
_PARTITIONS = {
    "free": f"""
), free AS MATERIALIZED (
    SELECT * FROM given
    WHERE set_config('idempotency.keys_locked', '{LOCKED}', true) = '{LOCKED}'
      AND pg_try_advisory_xact_lock({lock_of("%(tenant)s", "%(task)s", "key")})""",
    "source": "free",
    "conflict": "",
}

# Only what has no record yet. Everything else has an answer that takes a look of its own, which `claims.claim` takes.
_CLAIM_NEW_WITH = """
WITH given AS MATERIALIZED (
    SELECT * FROM unnest(%(keys)b::text[], %(tokens)b::text[], %(fingerprints)b::text[], %(messages)b::text[],
                         %(queues)b::text[], %(signed)b::float8[])
        AS g(key, token, fingerprint, message, queue, signed_at){free}
)
INSERT INTO idempotency.records
    (tenant, task, key, status, fence, token, locked_until, locked_by, fingerprint, message, queue, service)
SELECT %(tenant)s, %(task)s, key, 'started', pg_catalog.nextval('idempotency.fence'), token,
       clock_timestamp() + make_interval(secs => %(lease)s), %(holder)s, fingerprint, message, queue, %(service)s
FROM {source}
-- an older message may be a copy whose operation is purged: it is asked about alone
WHERE (to_timestamp(signed_at) < clock_timestamp() - make_interval(secs => %(horizon)s)) IS NOT TRUE
-- in one order everywhere: two batches with the same keys would otherwise wait for each other
ORDER BY key{conflict}
RETURNING key, fence, token, attempts, generation, fingerprint,
    -- nothing is acknowledged because of it, as with a single claim that is new
    set_config('synchronous_commit', 'off', true)
"""
_CLAIM_NEW, _CLAIM_NEW_IN_PARTITIONS = (_CLAIM_NEW_WITH.format(**each) for each in (_PLAIN, _PARTITIONS))

# What there is of operations already, and what a single claim would answer for those that have been completed, by the record
# alone. OFFSET 0, because by the conditions together a plan that is made while the table is small reads all that the
# application has completed.
_RECORDS_OF = """
WITH given AS MATERIALIZED (
    SELECT * FROM unnest(%(keys)b::text[], %(fingerprints)b::text[]) AS g(key, fingerprint)
)
SELECT given.key, {} FROM given CROSS JOIN LATERAL (
    SELECT * FROM idempotency.records r
    WHERE r.tenant = %(tenant)s AND r.task = %(task)s AND r.key = given.key OFFSET 0
) known
"""
_IS_COMPLETED = "known.status = 'completed' AND known.service = %(service)s AND known.fingerprint = given.fingerprint"
# In the list, where it is asked for a row only: as a condition of the whole it would be asked without one.
_COMPLETED = _RECORDS_OF.format(f"CASE WHEN {IS_CONFIRMED} THEN known.result END AS result") + f"WHERE {_IS_COMPLETED}"
_UNDER_TOKENS = (
    _RECORDS_OF.format("known.fence, known.token, known.attempts, known.generation, known.fingerprint")
    + "WHERE known.status = 'started' AND known.token = ANY(%(tokens)b::text[])"
)
_KNOWN = _RECORDS_OF.format(f"{_IS_COMPLETED} AS is_completed")

# Of operations that no one has claimed: what they are known by is committed with what they have done, in one version of the row.
_COMPLETE_NEW_WITH = """
WITH given AS MATERIALIZED (
    SELECT * FROM unnest(%(keys)b::text[], %(fingerprints)b::text[], %(results)b::text[]) AS g(key, fingerprint, result){free}
)
INSERT INTO idempotency.records
    (tenant, task, key, status, fence, locked_by, fingerprint, message, queue, service, result, response_code, created_at,
     opened_at, completed_at, expires_at)
SELECT %(tenant)s, %(task)s, key, 'completed', pg_catalog.nextval('idempotency.fence'), %(holder)s, fingerprint, '', %(queue)s,
       %(service)s, result, %(response_code)s,
       now(), now(),  -- when their transaction began, and not after their end
       clock_timestamp(), clock_timestamp() + make_interval(secs => %(retention)s)
FROM {source}
-- in one order everywhere, as when they are claimed
ORDER BY key{conflict}
RETURNING key
"""
_COMPLETE_NEW, _COMPLETE_NEW_IN_PARTITIONS = (_COMPLETE_NEW_WITH.format(**each) for each in (_PLAIN, _PARTITIONS))

# As of a single end: a holder that freezes before COMMIT is disconnected within half a lease, and the commit is flushed. The
# rows are found by their keys, however small the table was when the plan was made.
_SETTINGS = """
SELECT set_config('idle_in_transaction_session_timeout', %(idle_ms)s, true) AS idle,
       set_config('synchronous_commit', 'on', true) AS flush, set_config('client_min_messages', 'warning', true) AS warn,
       set_config('enable_seqscan', 'off', true) AS scan
"""
# Raises division_by_zero unless all are still held: then none is committed. LATERAL and `= ANY`, because by a join alone a
# plan that is made while the table is small reads all records of the task.
_COMPLETE_WITH = """
WITH given AS MATERIALIZED (
    SELECT * FROM unnest(%(keys)b::text[], %(fences)b::bigint[], %(tokens)b::text[], %(results)b::text[]{array})
        AS g(key, fence, token, result{column}) ORDER BY key
), mine AS MATERIALIZED (
    SELECT given.key, given.result{given} FROM given CROSS JOIN LATERAL (
        SELECT FROM idempotency.records r
        WHERE r.tenant = %(tenant)s AND r.task = %(task)s AND r.key = given.key
          AND r.status = 'started' AND r.fence = given.fence AND r.token = given.token
        FOR UPDATE
    ) held
), finished AS (
    UPDATE idempotency.records r
    SET status = 'completed', result = mine.result,{change} response_code = %(response_code)s, completed_at = clock_timestamp(),
        locked_until = NULL, expires_at = clock_timestamp() + make_interval(secs => %(retention)s),
        updated_at = clock_timestamp()
    FROM mine WHERE r.tenant = %(tenant)s AND r.task = %(task)s AND r.key = ANY(%(keys)b::text[]) AND r.key = mine.key
    RETURNING 1
)
SELECT 1 / (count(*) = %(many)s)::int FROM finished
"""
_COMPLETE = _COMPLETE_WITH.format(array="", column="", given="", change="")
# With the spans of the attempts, as `traces.note` has them: here, because nothing that has ended is changed.
_COMPLETE_TRACED = _COMPLETE_WITH.format(
    array=", %(traces)b::text[]", column=", trace", given=", given.trace", change=" trace = mine.trace,"
)


def claim_new(
    connection: Connection,
    deliveries: Sequence[Delivery],
    tokens: Sequence[str],
    *,
    service: str,
    holder: str,
    lease: float,
    horizon: float,
) -> Iterator[list[Claimed]]:
    """Claim those of these operations of one task and tenant that have no record yet.

    `tokens`: one for each delivery, whose keys must differ. `lease` and `horizon`, which signed messages are not older than, in
    seconds. On a connection in AUTOCOMMIT mode, of partitions some at a time: the leases of what is yielded are
    running, and the next ones may take longer than a lease.
    """
    ids = {each.id.key: each.id for each in deliveries}
    many = most_together(connection, len(deliveries))
    for begin in range(0, len(deliveries), many):
        some, asked_at = deliveries[begin : begin + many], time.monotonic()
        rows = execute(
            connection,
            fitting(connection, _CLAIM_NEW, _CLAIM_NEW_IN_PARTITIONS),
            {
                **_named(some, service),
                "tokens": list(tokens[begin : begin + many]),
                "messages": [each.message for each in some],
                "queues": [each.queue for each in some],
                "signed": [each.signed_at for each in some],
                "horizon": horizon,
                "holder": holder,
                "lease": lease,
            },
        )
        yield [_claimed(ids[row.key], row, asked_at) for row in rows.fetchall()]


def claimed(
    connection: Connection, deliveries: Sequence[Delivery], tokens: Sequence[str], *, asked_at: float
) -> list[Claimed]:
    """Those of these operations of one task and tenant that are claimed under one of these tokens.

    For a statement whose answer was lost, which was sent at `asked_at`, by this process's monotonic clock; it may still be
    running.
    """
    ids = {each.id.key: each.id for each in deliveries}
    rows = execute(connection, _UNDER_TOKENS, _named(deliveries, "") | {"tokens": list(tokens)}).fetchall()
    return [_claimed(ids[row.key], row, asked_at) for row in rows]


def _claimed(id: OperationId, row: Any, asked_at: float) -> Claimed:
    """The first claim of an operation."""
    return Claimed(
        id,
        row.fence,
        row.token,
        row.attempts,
        row.generation,
        0.0,
        {},
        fingerprint=row.fingerprint,
        has_hint=False,
        asked_at=asked_at,
    )


def most_together(connection: Connection, many: int) -> int:
    """How many of so many new operations a transaction may insert: in partitions, each takes a lock until its end."""
    return min(many, KEYS_AT_ONCE) if is_partitioned(connection) else many


def completed(connection: Connection, deliveries: Sequence[Delivery], *, service: str) -> dict[str, Completed]:
    """The answers, by key, to those of these deliveries of one task and tenant whose operations have been completed."""
    rows = execute(
        connection,
        _COMPLETED,
        _named(deliveries, service),
    ).fetchall()
    return {row.key: Completed(row.result) for row in rows}


def complete(
    connection: Connection,
    claims: Sequence[Claimed],
    results: Sequence[str],
    traces: Sequence[str | None],
    *,
    retention: float,
    lease: float,
) -> None:
    """Complete operations of one task and tenant in the bodies' transaction. Raises `DivisionByZero` if one is not held.

    `results` as text, one for each claim, and so `traces`, the spans of the attempts; `retention` and `lease` in seconds.
    """
    first = claims[0].id
    execute(connection, _SETTINGS, {"idle_ms": idle_ms(lease)})
    execute(
        connection,
        _COMPLETE_TRACED if any(traces) else _COMPLETE,
        {
            "tenant": first.tenant,
            "task": first.task,
            "keys": [each.id.key for each in claims],
            "fences": [each.fence for each in claims],
            "tokens": [each.token for each in claims],
            "results": list(results),
            "response_code": RESPONSE_COMPLETED,
            "retention": retention,
            "many": len(claims),
        }
        | ({"traces": list(traces)} if any(traces) else {}),
    )


def known(connection: Connection, deliveries: Sequence[Delivery], *, service: str) -> dict[str, bool]:
    """Those of these operations of one task and tenant that have a record, by key: whether it says that they have been completed."""
    rows = execute(
        connection,
        _KNOWN,
        _named(deliveries, service),
    ).fetchall()
    return {row.key: bool(row.is_completed) for row in rows}


def complete_new(
    connection: Connection,
    deliveries: Sequence[Delivery],
    results: Sequence[str],
    *,
    service: str,
    holder: str,
    retention: float,
    lease: float,
) -> set[str]:
    """Complete operations of one task and tenant that no one has claimed, in the bodies' transaction. Returns the keys of those.

    A key that another process has claimed meanwhile, or is inserting, is left out of the result. At most `most_together`, and
    last: until the commit, others wait for their keys, and upkeep for all partitions. `results` as text; `retention` and `lease`
    in seconds.
    """
    execute(connection, _SETTINGS, {"idle_ms": idle_ms(lease)})
    rows = execute(
        connection,
        fitting(connection, _COMPLETE_NEW, _COMPLETE_NEW_IN_PARTITIONS),
        {
            **_named(deliveries, service),
            "results": list(results),
            "queue": deliveries[0].queue,
            "holder": holder,
            "retention": retention,
            "response_code": RESPONSE_COMPLETED,
        },
    ).fetchall()
    return {row.key for row in rows}


def _named(deliveries: Sequence[Delivery], service: str) -> dict[str, Any]:
    """The parameters that name these operations, of one task and tenant."""
    first = deliveries[0].id
    return {
        "tenant": first.tenant,
        "task": first.task,
        "service": service,
        "keys": [each.id.key for each in deliveries],
        "fingerprints": [each.fingerprint for each in deliveries],
    }
