"""How an operation ends, or is let go: complete, fail, release; and what people end or correct."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection

from ..wire.keys import OperationId
from .answers import Claimed
from .record import FINISH, MINE, ROW, idle_ms, mine, named
from .statements import execute

# The code a failed operation answers with, as HTTP would say it: understood, and cannot be done.
RESPONSE_FAILED = 422

_TERMINAL = """completed_at = clock_timestamp(), locked_until = NULL,
        expires_at = clock_timestamp() + make_interval(secs => %(retention)s)"""

_COMPLETE = FINISH.format(
    changes=f"status = 'completed', result = %(result)s, response_code = 200, {_TERMINAL}", condition=MINE
)

# Steps that were undone are forgotten, so that a replay does them again.
_CONCLUDED = """status = 'failed', error = %(error)s, error_code = %(code)s,
        effects = (effects - %(forgotten)s::text[]) || %(changed)s::jsonb"""

_FAIL = FINISH.format(
    changes=f"""{_CONCLUDED}, first_error = coalesce(first_error, %(error)s),
        response_code = %(response_code)s, {_TERMINAL}""",
    condition=MINE,
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
    WHERE {MINE}
    RETURNING tenant, task, key, fingerprint, message, queue, available_at, generation
), next_delivery AS (
    INSERT INTO idempotency.outbox
        (message_id, tenant, task, key, fingerprint, message, queue, origin, available_at, generation)
    SELECT gen_random_uuid()::text, tenant, task, key, fingerprint, message, queue, 'retry',
           available_at + make_interval(secs => %(after_due)s), generation
    FROM released WHERE %(deliver)s
), superseded AS (
    -- what the next delivery stands for now: an operation that defers for hours keeps one row and not thousands
    DELETE FROM idempotency.outbox o USING released r
    WHERE o.tenant = r.tenant AND o.task = r.task AND o.key = r.key AND o.fingerprint = r.fingerprint
      AND o.origin IN ('retry', 'recover') AND o.status = 'published' AND %(deliver)s
)
SELECT count(*) FROM released
"""

_CANCEL = f"""
UPDATE idempotency.records
SET {_CONCLUDED}, available_at = NULL, fence = nextval('idempotency.fence'),
    first_error = coalesce(first_error, %(error)s), response_code = %(response_code)s,
    completed_at = clock_timestamp(), expires_at = clock_timestamp() + make_interval(secs => %(retention)s),
    updated_at = clock_timestamp()
WHERE {ROW} AND status = 'released' AND fence = %(fence)s
RETURNING fence
"""

# A person's word about an effect, and what the end may conclude now. The fence moves: who was shown the record before
# is told to look again.
_CONCLUDE = f"""
UPDATE idempotency.records SET {_CONCLUDED}, fence = nextval('idempotency.fence'), updated_at = clock_timestamp(),
    -- remembered for as long from this word as it was to be from its end
    expires_at = greatest(expires_at, clock_timestamp() + (expires_at - completed_at))
WHERE {ROW} AND status = 'failed' AND fence = %(fence)s
RETURNING fence
"""


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


def complete(connection: Connection, claim: Claimed, result: str, *, retention: float, lease: float) -> None:
    """Finish with a result, in the transaction of the effects; raises `DivisionByZero` when not the holder."""
    parameters = {"result": result, "retention": retention, "idle_ms": idle_ms(lease)}
    execute(connection, _COMPLETE, mine(claim) | parameters)


def fail(connection: Connection, claim: Claimed, end: FailedEnd, *, retention: float, lease: float) -> None:
    """Finish without success; raises `DivisionByZero` when not the holder. The dead letter goes in the same transaction."""
    parameters = end.parameters() | {"retention": retention, "idle_ms": idle_ms(lease)}
    execute(connection, _FAIL, mine(claim) | parameters)


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
    return bool(execute(connection, _RELEASE, mine(claim) | parameters).fetchone()[0])


def cancel(connection: Connection, id: OperationId, end: FailedEnd, *, fence: int, retention: float) -> int | None:
    """End what is released, under the fence that was read. Returns the new fence; None: it has changed meanwhile."""
    parameters = end.parameters() | {"fence": fence, "retention": retention}
    return _fence(execute(connection, _CANCEL, named(id) | parameters).fetchone())


def conclude(connection: Connection, id: OperationId, end: FailedEnd, *, fence: int) -> int | None:
    """Say anew how a failed operation ended. Returns the new fence; None: it has changed meanwhile."""
    return _fence(execute(connection, _CONCLUDE, named(id) | end.parameters() | {"fence": fence}).fetchone())


def _fence(row: Any | None) -> int | None:
    return None if row is None else int(row.fence)
