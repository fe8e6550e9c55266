"""Recovering operations that have lost their holder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, Row

from ..wire.keys import OperationId
from . import sagas, sweeps
from .record import ROW, named
from .sweeps import BATCH, RECORD_ID, THIS_RECORD, Sweep

# An operation without attempts left is ended by its next claim, in a worker that can run `on_failed` (tried five times).
# If the process dies in this many further claims, the sweep ends the operation without `on_failed`.
SPARE_CLAIMS = 10

_HOLDERS = (
    "SELECT DISTINCT locked_by FROM idempotency.records WHERE status = 'started' AND locked_until >= clock_timestamp()"
)

_HOLDER = f"SELECT locked_by FROM idempotency.records WHERE {ROW} AND status = 'started'"

# The task's own limit of attempts, or that of the settings.
_MOST = """coalesce(
          (SELECT bound.attempts FROM unnest(%(tasks)s::text[], %(attempts)s::int[]) bound(task, attempts)
           WHERE bound.task = r.task), %(otherwise)s)"""

# Whether this application has the task; another service on the database does not know how many attempts it has.
_KNOWN = """coalesce(
          (SELECT true FROM pg_catalog.unnest(%(known)s::text[]) known(task) WHERE known.task = r.task), false)"""

# `spare` claims have found the attempts used up, counted from the first. If none lived long enough to record that, twice
# as many, because this process's limit may differ from the workers' during a deploy.
_SPENT = f"""{_KNOWN} AND r.attempts > {_MOST}
      AND r.attempts >= coalesce(r.spent_at + %(spare)s - 1, {_MOST} + 2 * %(spare)s)"""

# The first condition selects the index. A record without a name is that of an application that has its task and its queue.
_ORPHANED = f"""r.locked_until IS NOT NULL AND r.status = 'started'
      AND (r.service = %(service)s OR r.service IS NULL AND {_KNOWN} AND (r.queue = '' OR r.queue = ANY(%(queues)s)))
      AND (r.locked_until < clock_timestamp() OR r.locked_by = ANY(%(dead)s))"""

# Spent operations that `EXHAUST` skipped because they were locked must not be released here.
RECOVER = Sweep(
    "recover",
    table="records",
    columns="r.locked_by = ANY(%(dead)s) AS is_of_dead",
    due=f"{_ORPHANED} AND NOT ({_SPENT})",
    order="r.locked_until",
    one=THIS_RECORD,
    id=RECORD_ID,
    then="""
, released AS (
    UPDATE idempotency.records r
    SET status = 'released', token = NULL, locked_until = NULL, locked_by = NULL, service = %(service)s,
        available_at = clock_timestamp(), updated_at = clock_timestamp()
    FROM due o WHERE (r.tenant, r.task, r.key) = (o.tenant, o.task, o.key)
    RETURNING r.tenant, r.task, r.key, r.fingerprint, r.message, r.queue, r.generation, o.is_of_dead
), next_delivery AS (
    INSERT INTO idempotency.outbox
        (message_id, tenant, task, key, fingerprint, message, queue, origin, generation, service)
    SELECT gen_random_uuid()::text, tenant, task, key, fingerprint, message, queue, 'recover', generation, %(service)s
    FROM released WHERE message <> ''
)
SELECT (SELECT count(*) FROM released), (SELECT count(*) FROM released WHERE is_of_dead) AS of_dead""",
)

# By a process of the application, whose role does not see what sweeps have set aside.
_RECOVER_ONE = f"""
WITH due AS MATERIALIZED (
    SELECT r.tenant, r.task, r.key, {RECOVER.columns} FROM idempotency.records r
    WHERE {RECOVER.due} AND {THIS_RECORD} FOR UPDATE OF r SKIP LOCKED
) {RECOVER.then}
"""

# Ended one by one in Python (`end_spent`): they are rare, and Python decides how an operation may end.
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
    """Whose operations, and which are lost or out of attempts: dead holders, known tasks, the attempts of each."""

    service: str
    dead: Sequence[str]
    known: Sequence[str]
    tasks: Sequence[str]  # names of tasks with their own limit
    attempts: Sequence[int]
    queues: Sequence[str]
    otherwise: int
    spare: int = SPARE_CLAIMS

    def parameters(self) -> dict[str, Any]:
        return asdict(self) | {"batch": BATCH}


def holders(connection: Connection) -> list[str]:
    """The holders with a lease that has not run out."""
    return list(connection.exec_driver_sql(_HOLDERS).scalars())


def holder(connection: Connection, id: OperationId) -> str | None:
    """Who has an operation under a claim now, expired or not; None: no one."""
    found: str | None = connection.exec_driver_sql(_HOLDER, named(id)).scalar_one_or_none()
    return found


def release_one(connection: Connection, bounds: Bounds, id: OperationId) -> bool:
    """Release one operation, if it has lost its holder and is not out of attempts for long. False: nothing has changed."""
    return bool(connection.exec_driver_sql(_RECOVER_ONE, bounds.parameters() | named(id)).scalar_one())


def release(connection: Connection, bounds: Bounds, *, limit: int) -> tuple[int, int]:
    """Release operations that have lost their holder and write their next deliveries.

    Returns how many, and of how many of them the holder is dead.
    """
    of_dead = 0

    def count(answer: Row[Any]) -> None:
        nonlocal of_dead
        of_dead += answer.of_dead

    released, _ = sweeps.run(connection, RECOVER, bounds.parameters(), limit=limit, note=count)
    return released, of_dead


def end_spent(connection: Connection, bounds: Bounds, end: Callable[[Mapping[str, Any]], int]) -> int:
    """Call `end` with the names of each operation that is out of attempts; returns how many it ended."""
    found = sweeps.find(connection, EXHAUST, bounds.parameters())
    ended, _ = sweeps.one_by_one(connection, EXHAUST.name, found, lambda row: end(sweeps.names(row)))
    return ended


def lock_spent(
    connection: Connection, bounds: Bounds, names: Mapping[str, Any]
) -> tuple[Row[Any] | None, Row[Any] | None]:
    """Lock the record of such an operation, and before it its saga, in the transaction that ends it.

    Without a record, it was renewed, or is locked. Without a saga, it is none, or one that has ended.
    """
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = {sweeps.LOCK_TIMEOUT_MS}")
    saga = sagas.locked(connection, OperationId(names["tenant"], names["task"], names["key"]))
    record = connection.exec_driver_sql(EXHAUST.find_one, {**bounds.parameters(), **names}).one_or_none()
    return record, saga
