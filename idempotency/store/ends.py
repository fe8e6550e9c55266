"""Ending an operation or letting it go: complete, fail, release, forget, and what people end or correct."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection

from ..wire.keys import OperationId
from .answers import Claimed
from .record import FINISH, MINE, ROW, idle_ms, mine, named
from .statements import execute

# The response codes of an operation, after HTTP. An edge's record has the status of its answer instead of 200.
RESPONSE_COMPLETED = 200
RESPONSE_FAILED = 422  # Unprocessable Content

_TERMINAL = """completed_at = clock_timestamp(), locked_until = NULL,
        expires_at = clock_timestamp() + make_interval(secs => %(retention)s)"""

_COMPLETE = FINISH.format(
    changes=f"status = 'completed', result = %(result)s, response_code = %(response_code)s, {_TERMINAL}", condition=MINE
)

# Undone steps are removed, so that a replay runs them again.
_CONCLUDED = """status = 'failed', error = %(error)s, error_code = %(code)s,
        effects = (effects - %(forgotten)s::text[]) || %(changed)s::jsonb"""

_FAIL = FINISH.format(
    changes=f"""{_CONCLUDED}, first_error = coalesce(first_error, %(error)s),
        response_code = %(response_code)s, {_TERMINAL}""",
    condition=MINE,
)


# The next delivery is written by the release itself, so the operation does not depend on a message in the broker. An
# operation that no message has asked for has none: its caller asks again.
def _releasing(
    ctes: str = "", of: str = "", delay: str = "%(delay)s", more: str = "", mine: str = MINE, said: str = "count(*)"
) -> str:
    return f"""
WITH {ctes}released AS (
    UPDATE idempotency.records
    SET status = 'released', token = NULL, locked_until = NULL, locked_by = NULL,
        available_at = clock_timestamp() + make_interval(secs => {delay}),
        attempts = greatest(attempts - %(given_back)s, 0),  -- a cancel of a saga has set it to 0
        error = coalesce(%(error)s, error),
        -- to wait, for a provider or a lock, is no error of its own
        first_error = CASE WHEN %(given_back)s = 0 THEN coalesce(first_error, %(error)s) ELSE first_error END,
        updated_at = clock_timestamp(){more}
    {of}WHERE {mine}
    RETURNING tenant, task, key, fingerprint, message, queue, available_at, generation, service
), next_delivery AS (
    INSERT INTO idempotency.outbox
        (message_id, tenant, task, key, fingerprint, message, queue, origin, available_at, generation, service)
    SELECT gen_random_uuid()::text, tenant, task, key, fingerprint, message, queue, 'retry',
           available_at + make_interval(secs => %(after_due)s), generation, service
    FROM released WHERE message <> '' AND %(deliver)s
), superseded AS (
    -- replaced by the next delivery, so that an operation that defers for hours keeps one row, not thousands
    DELETE FROM idempotency.outbox o USING released r
    WHERE o.tenant = r.tenant AND o.task = r.task AND o.key = r.key AND o.fingerprint = r.fingerprint
      AND (o.service = r.service) IS NOT FALSE AND o.origin IN ('retry', 'recover') AND o.status = 'published'
      AND r.message <> '' AND %(deliver)s
)
SELECT {said} FROM released
"""


# An attempt of a saga that a person has cancelled since it was read: what it waits for counts no more. `FOR SHARE` waits for
# a cancel that is not committed.
_OF_SAGA = {
    "ctes": "saga AS MATERIALIZED (SELECT status AS saga_status FROM idempotency.sagas WHERE id = %(saga)s FOR SHARE), ",
    "of": "FROM saga ",
}
_UNLESS_CANCELLED = "CASE WHEN saga_status = %(saga_status)s THEN {} ELSE 0 END"
# A wake that comes while an attempt runs is noted, because that may have asked the provider before.
_UNLESS_WOKEN = "CASE WHEN woken THEN 0 ELSE %(delay)s END"
_ANEW = ", opened_at = clock_timestamp(), woken = false"

# Claims of one task and tenant under which nothing has run, found by their tokens: a statement whose answer was lost may have
# made some.
_CLAIMED_UNDER = {
    "ctes": "given AS MATERIALIZED (SELECT * FROM unnest(%(keys)b::text[], %(tokens)b::text[]) AS g(given_key, given_token)), ",
    "of": "FROM given ",
    "mine": """tenant = %(tenant)s AND task = %(task)s AND key = ANY(%(keys)b::text[]) AND key = given_key
        AND status = 'started' AND token = given_token""",
    "said": "key",
}

_RELEASE = _releasing()
_GIVE_BACK = _releasing(**_CLAIMED_UNDER)
_RELEASE_UNDECIDED = _releasing(delay=_UNLESS_WOKEN, more=_ANEW)
_RELEASE_SAGA = _releasing(**_OF_SAGA, delay=_UNLESS_CANCELLED.format("%(delay)s"))
_RELEASE_SAGA_UNDECIDED = _releasing(**_OF_SAGA, delay=_UNLESS_CANCELLED.format(_UNLESS_WOKEN), more=_ANEW)

# The claim itself is taken back. What is recorded binds the key: an effect or a step, a message, an end before a replay.
_FORGET = f"""
DELETE FROM idempotency.records WHERE {MINE} AND effects = '{{}}' AND message = '' AND generation = 1 RETURNING 1
"""

_CANCEL = f"""
UPDATE idempotency.records
SET {_CONCLUDED}, available_at = NULL, fence = pg_catalog.nextval('idempotency.fence'),
    first_error = coalesce(first_error, %(error)s), response_code = %(response_code)s,
    completed_at = clock_timestamp(), expires_at = clock_timestamp() + make_interval(secs => %(retention)s),
    updated_at = clock_timestamp()
WHERE {ROW} AND status = 'released' AND fence = %(fence)s
RETURNING fence
"""

# For a person's answer about an effect. The fence changes, so that a command based on the earlier state is refused.
_CONCLUDE = f"""
UPDATE idempotency.records SET {_CONCLUDED}, fence = pg_catalog.nextval('idempotency.fence'), updated_at = clock_timestamp(),
    -- the same retention again, counted from now
    expires_at = greatest(expires_at, clock_timestamp() + (expires_at - completed_at))
WHERE {ROW} AND status = 'failed' AND fence = %(fence)s
RETURNING fence
"""


@dataclass(frozen=True, slots=True)
class FailedEnd:
    """How an operation fails. `forgotten`: the undone steps; `changed`: effects whose state an undo has changed."""

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


def complete(
    connection: Connection,
    claim: Claimed,
    result: str,
    *,
    retention: float,
    lease: float,
    response_code: int = RESPONSE_COMPLETED,
) -> None:
    """Complete the operation in the body's transaction. Raises `DivisionByZero` if not the holder."""
    parameters = {"result": result, "response_code": response_code, "retention": retention, "idle_ms": idle_ms(lease)}
    execute(connection, _COMPLETE, mine(claim) | parameters)


def fail(connection: Connection, claim: Claimed, end: FailedEnd, *, retention: float, lease: float) -> None:
    """Fail the operation; its dead letter goes into the same transaction. Raises `DivisionByZero` if not the holder."""
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
    saga: tuple[Any, str] | None = None,
    is_undecided: bool = False,
) -> bool:
    """Release the operation, due after `delay` seconds, and write its next delivery. False: not the holder.

    `give_back` does not count the attempt, for a deferral or a shutdown. `after_due`: seconds from then until the delivery
    is sent. Without `deliver` there is none, for a caller that ends the operation now. `saga`: the id and status of the saga
    whose attempt this is; if it has another status by now, it is due at once. `is_undecided`: so it is if it was woken.
    """
    parameters = {
        "delay": delay,
        "error": error,
        "given_back": int(give_back),
        "deliver": deliver,
        "after_due": after_due,
    }
    if saga is not None:
        parameters |= {"saga": saga[0], "saga_status": saga[1]}
        statement = _RELEASE_SAGA_UNDECIDED if is_undecided else _RELEASE_SAGA
    else:
        statement = _RELEASE_UNDECIDED if is_undecided else _RELEASE
    return bool(execute(connection, statement, mine(claim) | parameters).fetchone()[0])


def give_back(connection: Connection, ids: Sequence[OperationId], tokens: Sequence[str]) -> set[str]:
    """Release operations of one task and tenant that are claimed under these tokens, each by one, and do not count their attempts.

    Returns the keys of those that were.
    """
    parameters = {
        "tenant": ids[0].tenant,
        "task": ids[0].task,
        "keys": [id.key for id in ids],
        "tokens": list(tokens),
        "delay": 0.0,
        "error": None,
        "given_back": 1,
        "deliver": True,
        "after_due": 0.0,
    }
    return {row.key for row in execute(connection, _GIVE_BACK, parameters).fetchall()}


def forget(connection: Connection, claim: Claimed) -> bool:
    """Delete the record and free its key. False: not the holder, or something is recorded that has to be kept."""
    return execute(connection, _FORGET, mine(claim)).fetchone() is not None


def cancel(connection: Connection, id: OperationId, end: FailedEnd, *, fence: int, retention: float) -> int | None:
    """Fail a released operation that still has the fence that was read. Returns the new fence; None: it has changed."""
    parameters = end.parameters() | {"fence": fence, "retention": retention}
    return _fence(execute(connection, _CANCEL, named(id) | parameters).fetchone())


def conclude(connection: Connection, id: OperationId, end: FailedEnd, *, fence: int) -> int | None:
    """Correct how a failed operation ended. Returns the new fence; None: it has changed since it was read."""
    return _fence(execute(connection, _CONCLUDE, named(id) | end.parameters() | {"fence": fence}).fetchone())


def _fence(row: Any | None) -> int | None:
    return None if row is None else int(row.fence)
