"""Operations that have lost their holder: which they are, and how they are delivered again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, Row

from . import sweeps
from .sweeps import BATCH, RECORD_ID, THIS_RECORD, Sweep

# What has used up its attempts is ended by its next claim, in a worker that knows `on_failed` and tries it five times.
# An operation whose process dies in this many claims beyond its last attempt is ended by the sweep, without `on_failed`.
SPARE_CLAIMS = 10

_HOLDERS = (
    "SELECT DISTINCT locked_by FROM idempotency.records WHERE status = 'started' AND locked_until >= clock_timestamp()"
)

# The attempts of the task's own, or those of the settings.
_MOST = """coalesce(
          (SELECT bound.attempts FROM unnest(%(operations)s::text[], %(attempts)s::int[]) bound(task, attempts)
           WHERE bound.task = r.task), %(otherwise)s)"""

# Whether this application knows the task: another service on this database does not know how many attempts it has.
_KNOWN = """coalesce(
          (SELECT true FROM unnest(%(known)s::text[]) known(task) WHERE known.task = r.task), false)"""

# So many claims have found the attempts used up, counted from the first one. Where none lived to say so, twice as many:
# by the limit of this process, which in the middle of a deploy may not be the workers'.
_SPENT = f"""{_KNOWN} AND r.attempts > {_MOST}
      AND r.attempts >= coalesce(r.spent_at + %(spare)s - 1, {_MOST} + 2 * %(spare)s)"""

# The index of what is held is found by the first condition alone.
_ORPHANED = """r.locked_until IS NOT NULL AND r.status = 'started'
      AND (r.locked_until < clock_timestamp() OR r.locked_by = ANY(%(dead)s))"""

# Spent operations that `EXHAUST` skipped because they were locked must not be released here.
RECOVER = Sweep(
    "recover",
    table="records",
    columns="r.attempts",
    due=f"{_ORPHANED} AND NOT ({_SPENT})",
    order="r.locked_until",
    one=THIS_RECORD,
    id=RECORD_ID,
    then="""
, released AS (
    UPDATE idempotency.records r
    SET status = 'released', token = NULL, locked_until = NULL, locked_by = NULL,
        available_at = clock_timestamp(), updated_at = clock_timestamp()
    FROM due o WHERE (r.tenant, r.task, r.key) = (o.tenant, o.task, o.key)
    RETURNING r.tenant, r.task, r.key, r.fingerprint, r.message, r.queue, r.generation
), next_delivery AS (
    INSERT INTO idempotency.outbox (message_id, tenant, task, key, fingerprint, message, queue, origin, generation)
    SELECT gen_random_uuid()::text, tenant, task, key, fingerprint, message, queue, 'recover', generation
    FROM released
)
SELECT (SELECT count(*) FROM released)""",
)

# Each is ended in Python, in its own transaction (`end_spent`): rare, and what an end may conclude is said there.
EXHAUST = Sweep(
    "exhaust",
    table="records",
    columns="r.message, r.fingerprint, r.queue, r.fence, r.token, r.attempts, r.generation, r.effects",
    due=f"{_ORPHANED} AND {_SPENT}",
    order="r.locked_until",
    one=THIS_RECORD,
    id=RECORD_ID,
    then="",
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What counts as lost, and as spent: holders that are dead, tasks that are known, how many attempts each has."""

    dead: Sequence[str]
    known: Sequence[str]
    operations: Sequence[str]  # those with attempts of their own
    attempts: Sequence[int]
    otherwise: int
    spare: int = SPARE_CLAIMS

    def parameters(self) -> dict[str, Any]:
        return asdict(self) | {"batch": BATCH}


def holders(connection: Connection) -> list[str]:
    """The holders whose lease is not over."""
    return list(connection.exec_driver_sql(_HOLDERS).scalars())


def release(connection: Connection, bounds: Bounds, *, limit: int) -> int:
    """Release what has lost its holder, with the next delivery in the same statement; returns how many."""
    released, _ = sweeps.run(connection, RECOVER, bounds.parameters(), limit=limit)
    return released


def end_spent(connection: Connection, bounds: Bounds, end: Callable[[Mapping[str, Any]], int]) -> int:
    """Hand each operation that has used up its attempts to `end`, by the names for `lock_spent`; returns how many it ended."""
    found = sweeps.find(connection, EXHAUST, bounds.parameters())
    ended, _ = sweeps.one_by_one(connection, EXHAUST, found, lambda row: end(sweeps.names(row)))
    return ended


def lock_spent(connection: Connection, bounds: Bounds, names: Mapping[str, Any]) -> Row[Any] | None:
    """Lock such an operation's record in the transaction that ends it. None: its holder came back, or another sweep has it."""
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = {sweeps.LOCK_TIMEOUT_MS}")
    return connection.exec_driver_sql(EXHAUST.find_one, {**bounds.parameters(), **names}).one_or_none()
