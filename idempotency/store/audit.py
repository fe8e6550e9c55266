"""The audit table: who changed what, and why. Append-only, and chained by hash.

The database chains each row when its transaction commits (migration 0015): `audit_chain` has the hash of each row and of all
before it, `audit_head` the last one. Who owns the tables can rewrite both; only a head that was kept elsewhere shows that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row

from ..text import storable
from ..wire.keys import OperationId

_AUDIT = """
INSERT INTO idempotency.audit
    (actor, action, tenant, task, key, generation, fence_before, fence_after, reason, details, request_id)
VALUES (%(actor)s, %(action)s, %(tenant)s, %(task)s, %(key)s, %(generation)s, %(before)s, %(after)s, %(reason)s,
        %(details)s::jsonb, %(request_id)s)
"""

# Copies of a request wait for each other, so that the second sees what the first did.
_LOCK_REQUEST = "SELECT pg_advisory_xact_lock(pg_catalog.hashtextextended(%(request_id)s, 1))"

_REQUESTED = """
SELECT actor, action, tenant, task, key, reason, details FROM idempotency.audit WHERE request_id = %(request_id)s
"""

# By the expression itself and not by a function of the schema, which a role that changes rows could replace.
_CHAIN = """
SELECT c.position, c.audit_id, a.id IS NOT NULL AS is_there, c.hash,
       sha256(pg_catalog.lag(c.hash, 1, '') OVER by_position || pg_catalog.convert_to(pg_catalog.jsonb_build_array(
           a.id, a.at AT TIME ZONE 'UTC', a.actor, a.action, a.tenant, a.task, a.key, a.generation, a.fence_before,
           a.fence_after, a.reason, a.details, a.request_id)::text, 'UTF8')) AS computed
FROM idempotency.audit_chain c LEFT JOIN idempotency.audit a ON a.id = c.audit_id
WINDOW by_position AS (ORDER BY c.position)
"""

# One statement, so that it sees the rows of no transaction in part.
_VERIFY = f"""
WITH chain AS MATERIALIZED ({_CHAIN}), numbered AS (
    SELECT *, row_number() OVER (ORDER BY position) AS expected FROM chain
), wrong AS (
    SELECT position, audit_id, CASE
        WHEN position <> expected THEN 'missing before'
        WHEN NOT is_there THEN 'deleted'
        ELSE 'changed' END AS why
    FROM numbered WHERE position <> expected OR hash IS DISTINCT FROM computed
    ORDER BY position LIMIT 1
), unchained AS (
    SELECT id FROM idempotency.audit a
    WHERE NOT EXISTS (SELECT FROM idempotency.audit_chain c WHERE c.audit_id = a.id) ORDER BY id LIMIT 1
), last AS (
    SELECT position, hash FROM chain ORDER BY position DESC LIMIT 1
)
SELECT h.position, encode(h.hash, 'hex') AS hash, w.position AS wrong_position, w.audit_id AS wrong_id, w.why,
       (SELECT id FROM unchained) AS unchained,
       (h.position, h.hash) = (coalesce(l.position, 0), coalesce(l.hash, '')) AS is_at_head,
       (SELECT encode(hash, 'hex') FROM chain WHERE position = %(position)s) AS hash_at
FROM (SELECT 1) one LEFT JOIN idempotency.audit_head h ON true LEFT JOIN last l ON true LEFT JOIN wrong w ON true
"""


@dataclass(frozen=True, slots=True)
class Verified:
    """What the audit's chain says: how many rows it has, its head, and the first thing that does not fit, if any."""

    rows: int
    head: str
    audit_id: int | None = None
    why: str | None = None


def verify(connection: Connection, expected: tuple[int, str] | None = None) -> Verified:
    """Compute the chain anew. `expected`: the rows and the hash of a head that was kept elsewhere, which has to be in it."""
    row = connection.exec_driver_sql(_VERIFY, {"position": None if expected is None else expected[0]}).one()
    rows, head = row.position or 0, f"{row.position or 0}:{row.hash or ''}"
    if row.why == "missing before":
        return Verified(rows, head, row.wrong_id, "rows before it are gone, with their place in the chain")
    if row.why is not None:
        return Verified(rows, head, row.wrong_id, f"was {row.why}, or its place in the chain")
    if row.unchained is not None:
        return Verified(rows, head, row.unchained, "is not in the chain")
    if not row.is_at_head:
        return Verified(rows, head, None, "the last rows are gone: the chain ends before its head")
    if expected is not None and (expected[1] if expected[0] else None) != row.hash_at:
        return Verified(rows, head, None, f"the head that was kept is not in the chain: {expected[0]}:{expected[1]}")
    return Verified(rows, head)


def add(
    connection: Connection,
    id: OperationId | None,
    *,
    actor: str,
    action: str,
    generation: int | None,
    before: int | None,
    after: int | None,
    reason: str,
    details: Mapping[str, Any],
    request_id: str | None,
) -> None:
    """Record who did what, in the transaction of the change. `before` and `after` are fences of the operation's record."""
    stored = {name: storable(value) if isinstance(value, str) else value for name, value in details.items()}
    connection.exec_driver_sql(
        _AUDIT,
        {
            "tenant": id and id.tenant,
            "task": id and id.task,
            "key": id and id.key,
            "actor": actor,
            "action": action,
            "generation": generation,
            "before": before,
            "after": after,
            "reason": reason,
            "details": json.dumps(stored),
            "request_id": request_id,
        },
    )


def of_request(connection: Connection, request_id: str) -> Row[Any] | None:
    """The row of a request that was carried out before. Other copies of it wait until this transaction ends."""
    names = {"request_id": request_id}
    connection.exec_driver_sql(_LOCK_REQUEST, names)
    return connection.exec_driver_sql(_REQUESTED, names).one_or_none()
