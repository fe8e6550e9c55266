"""The record of an operation, and how a holder proves that it still is the holder.

       ┌─────forget──────┐
       ▼                 │
    (none) ──claim──▶ started ──complete──▶ completed ──purge──▶ (none)
                       │  ▲  └────fail────▶ failed ─────purge──▶ (none)
              release, │  │ claim, when due    │
              recover  ▼  │                    │ replay
                      released ◀───────────────┘

Every write by a holder has status, fence and token in its WHERE. People and sweeps change only what they have locked,
or what still has the fence they read. The token is needed because after a crash or a restore a sequence can return the
same fence again. Zero rows always means that the writer is no longer the holder. All times are the database's
`clock_timestamp()`; `now()` is the start of the transaction, so a claim that waited for a lock would write a lease that
has already run out.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from ..wire.keys import OperationId
from .answers import Claimed

# A whole record, without where it is and what `traces` keeps there. Not `*`: that means another result once the records are
# partitioned, and Postgres then refuses a statement that it has prepared before.
COLUMNS = """tenant, task, key, status, generation, fence, token, attempts, duplicates, locked_until, locked_by, available_at, fingerprint,
    message, queue, effects, result, response_code, first_error, error, created_at, opened_at, updated_at, completed_at, expires_at,
    revoked_generation, error_code, kept_until, taken_over, spent_at, service, woken, erased_at"""

ROW = "tenant = %(tenant)s AND task = %(task)s AND key = %(key)s"
# Of this application, or without a name, as code of schema 0011 writes them. What belongs to another application is another
# operation, even under the same tenant, task and key: nothing may be concluded from it.
OWN = "(service = %(service)s) IS NOT FALSE"


def unsettled(row: str = "outbox") -> str:
    """SQL: this row of the outbox, which is found by its operation or its id, is not settled.

    Not `settled_at IS NULL`, which finds what waits. After an ANALYZE while nothing waited, the planner takes the indexes of
    that for the smallest there are, and would read a whole backlog for one row.
    """
    return f"isfinite({row}.settled_at) IS NOT TRUE"


def is_open(letter: str = "dead_letters") -> str:
    """SQL: this dead letter, which is found by its operation or its id, is open; not `status = 'open'`, for the same reason."""
    return f"{letter}.status NOT IN ('replayed', 'discarded')"


# So it is with a saga that runs, which is found by its operation or its id.
RUNS = "status NOT IN ('COMPENSATING', 'COMPLETED', 'FAILED')"


def is_scheduled(row: str) -> str:
    """SQL: this row of the outbox is a call that is enqueued for a later time. It is not how an earlier call comes back."""
    return f"({row}.origin = 'enqueue' AND {row}.status = 'pending' AND {row}.available_at > clock_timestamp())"


# Whether anything is: a record, or a message that is not settled.
KNOWN = f"""(EXISTS (SELECT FROM idempotency.records WHERE {ROW})
    OR EXISTS (SELECT FROM idempotency.outbox WHERE {ROW} AND {unsettled()}))"""
MINE = f"{ROW} AND status = 'started' AND fence = %(fence)s AND token = %(token)s"

# If the holder freezes between its finishing statement and COMMIT, the server disconnects it within half a lease. Whatever a
# body has SET, this commit waits for the disk, and says so if no standby has confirmed it (`note_warning`).
SETTINGS = """settings AS (
    SELECT set_config('idle_in_transaction_session_timeout', %(idle_ms)s, true),
           set_config('synchronous_commit', 'on', true), set_config('client_min_messages', 'warning', true)
)"""

# Raises division_by_zero if it matches no row, so that no COMMIT can follow.
FINISH = (
    f"WITH {SETTINGS}"
    + """, finished AS (
    UPDATE idempotency.records SET {changes}, updated_at = clock_timestamp()
    FROM settings WHERE {condition} RETURNING 1
)
SELECT 1 / count(*) FROM finished
"""
)


# The same as a separate statement, before a statement that locks what others wait for.
IDLE_LIMIT = """
SELECT set_config('idle_in_transaction_session_timeout', %(idle_ms)s, true) AS idle,
       set_config('synchronous_commit', 'on', true) AS flush, set_config('client_min_messages', 'warning', true) AS warn
"""


def named(id: OperationId) -> dict[str, Any]:
    """The parameters of `ROW`."""
    return {"tenant": id.tenant, "task": id.task, "key": id.key}


def all_named(ids: Collection[OperationId]) -> dict[str, list[str]]:
    """Several operations, as parameters for `unnest`."""
    return {"tenants": [id.tenant for id in ids], "tasks": [id.task for id in ids], "keys": [id.key for id in ids]}


def mine(claim: Claimed) -> dict[str, Any]:
    """The parameters of `MINE`."""
    return named(claim.id) | {"fence": claim.fence, "token": claim.token}


def idle_ms(lease: float) -> str:
    """How long a holder may be idle after `FINISH`, in milliseconds: below half a lease.

    A holder that freezes before COMMIT is therefore disconnected before another one can take over.
    """
    return str(max(math.floor(lease * 1000 / 2) - 1, 1))
