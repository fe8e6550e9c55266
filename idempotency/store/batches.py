"""Many new operations of a task by one statement: claimed, or completed at once without a claim."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection

from ..wire.delivery import Delivery
from .answers import Claimed, Completed
from .ends import RESPONSE_COMPLETED
from .inserting import CONFLICT, KEYS_AT_ONCE, LOCKED, fitting, is_partitioned, lock_of
from .record import idle_ms
from .statements import execute

# Only what has no record yet. Everything else has an answer that takes a look of its own, which `claims.claim` takes.
_CLAIM_NEW = """
WITH given AS MATERIALIZED (
    SELECT * FROM unnest(%(keys)b::text[], %(tokens)b::text[], %(fingerprints)b::text[], %(messages)b::text[],
                         %(queues)b::text[], %(signed)b::float8[])
        AS g(key, token, fingerprint, message, queue, signed_at)
)
INSERT INTO idempotency.records
    (tenant, task, key, status, fence, token, locked_until, locked_by, fingerprint, message, queue, service)
SELECT %(tenant)s, %(task)s, key, 'started', pg_catalog.nextval('idempotency.fence'), token,
       clock_timestamp() + make_interval(secs => %(lease)s), %(holder)s, fingerprint, message, queue, %(service)s
FROM given
-- an older message may be a copy whose operation is purged: it is asked about alone
WHERE (to_timestamp(signed_at) < clock_timestamp() - make_interval(secs => %(horizon)s)) IS NOT TRUE
-- in one order everywhere: two batches with the same keys would otherwise wait for each other
ORDER BY key
ON CONFLICT (tenant, task, key) DO NOTHING
RETURNING key, fence, token, attempts, generation, fingerprint,
    -- nothing is acknowledged because of it, as with a single claim that is new
    set_config('synchronous_commit', 'off', true)
"""
# There the locks of keys come first. What is locked is asked about alone: a batch that waited would hold its locks meanwhile, for
# as long as an `on_failed` takes perhaps.
_FREE = f"""
), free AS MATERIALIZED (
    SELECT * FROM given
    WHERE set_config('idempotency.keys_locked', '{LOCKED}', true) = '{LOCKED}'
      AND pg_try_advisory_xact_lock({lock_of("%(tenant)s", "%(task)s", "key")})
)
INSERT"""
_CLAIM_NEW_IN_PARTITIONS = (
    _CLAIM_NEW.replace(f"{CONFLICT} DO NOTHING\n", "")
    .replace("\n)\nINSERT", _FREE)
    .replace("FROM given\n-- an older", "FROM free\n-- an older")
)

# What there is of operations already, and what a single claim would answer for those that have been completed, by the record alone.
# OFFSET 0, because by the conditions together a plan that is made while the table is small reads all that the application has
# completed.
_KNOWN = """
WITH given AS MATERIALIZED (
    SELECT * FROM unnest(%(keys)b::text[], %(fingerprints)b::text[], %(signed)b::float8[]) AS g(key, fingerprint, signed_at)
)
SELECT given.key, known.result,
    known.status = 'completed' AND known.service = %(service)s AND known.fingerprint = given.fingerprint AS is_done
FROM given LEFT JOIN LATERAL (
    SELECT true AS is_there, r.status, r.service, r.fingerprint, r.result FROM idempotency.records r
    WHERE r.tenant = %(tenant)s AND r.task = %(task)s AND r.key = given.key OFFSET 0
) known ON true
WHERE known.is_there OR to_timestamp(signed_at) < clock_timestamp() - make_interval(secs => %(horizon)s)
"""

# Of operations that no one has claimed: what they are known by is committed with what they have done, in one version of the row.
_COMPLETE_NEW = """
WITH given AS MATERIALIZED (
    SELECT * FROM unnest(%(keys)b::text[], %(fingerprints)b::text[], %(messages)b::text[], %(queues)b::text[],
                         %(results)b::text[], %(traces)b::text[])
        AS g(key, fingerprint, message, queue, result, trace)
)
INSERT INTO idempotency.records
    (tenant, task, key, status, fence, locked_by, fingerprint, message, queue, service, result, trace, response_code,
     completed_at, expires_at)
SELECT %(tenant)s, %(task)s, key, 'completed', pg_catalog.nextval('idempotency.fence'), %(holder)s, fingerprint, message, queue,
       %(service)s, result, trace, %(response_code)s, clock_timestamp(),
       clock_timestamp() + make_interval(secs => %(retention)s)
FROM given
-- in one order everywhere, as when they are claimed
ORDER BY key
ON CONFLICT (tenant, task, key) DO NOTHING
RETURNING key
"""
_COMPLETE_NEW_IN_PARTITIONS = (
    _COMPLETE_NEW.replace(f"{CONFLICT} DO NOTHING\n", "")
    .replace("\n)\nINSERT", _FREE)
    .replace("FROM given\n-- in one", "FROM free\n-- in one")
)

# As of a single end: a holder that freezes before COMMIT is disconnected within half a lease, and the commit is flushed.
_SETTINGS = """
SELECT set_config('idle_in_transaction_session_timeout', %(idle_ms)s, true) AS idle,
       set_config('synchronous_commit', 'on', true) AS flush
"""


def claim_new(
    connection: Connection,
    deliveries: Sequence[Delivery],
    tokens: Sequence[str],
    *,
    service: str,
    holder: str,
    lease: float,
    horizon: float,
) -> dict[str, Claimed]:
    """Claim those of these operations of one task and tenant that have no record yet. Returns the claims by key.

    `tokens`: one for each delivery, whose keys must differ. `lease` and `horizon`, which signed messages are not older than, in
    seconds. On a connection in AUTOCOMMIT mode, of partitions some at a time.
    """
    ids, claims = {each.id.key: each.id for each in deliveries}, dict[str, Claimed]()
    many = most_together(connection, len(deliveries))
    for begin in range(0, len(deliveries), many):
        some, asked_at = deliveries[begin : begin + many], time.monotonic()
        rows = execute(
            connection,
            fitting(connection, _CLAIM_NEW, _CLAIM_NEW_IN_PARTITIONS),
            {
                **_named(some, service),
                "tokens": list(tokens[begin : begin + many]),
                **_stored(some),
                **_age(some, horizon),
                "holder": holder,
                "lease": lease,
            },
        )
        claims |= {
            row.key: Claimed(
                ids[row.key],
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
            for row in rows.fetchall()
        }
    return claims


def most_together(connection: Connection, many: int) -> int:
    """How many of so many new operations a transaction may insert: in partitions, each takes a lock until its end."""
    return min(many, KEYS_AT_ONCE) if is_partitioned(connection) else many


def known(
    connection: Connection, deliveries: Sequence[Delivery], *, service: str, horizon: float
) -> dict[str, Completed | None]:
    """Those of these operations of one task and tenant that cannot be begun as new ones, by key.

    With the answer, if they have been completed; None: their record has to be asked, or they are asked for by a message that
    was signed longer than `horizon` seconds ago.
    """
    rows = execute(connection, _KNOWN, _named(deliveries, service) | _age(deliveries, horizon)).fetchall()
    return {row.key: Completed(row.result) if row.is_done else None for row in rows}


def complete_new(
    connection: Connection,
    deliveries: Sequence[Delivery],
    results: Sequence[str],
    traces: Sequence[str | None],
    *,
    service: str,
    holder: str,
    retention: float,
    lease: float,
) -> set[str]:
    """Complete operations of one task and tenant that no one has claimed, in the bodies' transaction. Returns the keys of those.

    Whoever has claimed another one's key since, or is about to commit, has it: it is not among them. At most `most_together`, and
    last: until the commit, others wait for their keys, and upkeep for all partitions. `results` as text, one for each delivery,
    and so `traces`, the spans of the attempts; `retention` and `lease` in seconds.
    """
    execute(connection, _SETTINGS, {"idle_ms": idle_ms(lease)})
    rows = execute(
        connection,
        fitting(connection, _COMPLETE_NEW, _COMPLETE_NEW_IN_PARTITIONS),
        {
            **_named(deliveries, service),
            **_stored(deliveries),
            "results": list(results),
            "traces": list(traces),
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


def _stored(deliveries: Sequence[Delivery]) -> dict[str, Any]:
    """What their records keep of their messages."""
    return {"messages": [each.message for each in deliveries], "queues": [each.queue for each in deliveries]}


def _age(deliveries: Sequence[Delivery], horizon: float) -> dict[str, Any]:
    return {"signed": [each.signed_at for each in deliveries], "horizon": horizon}
