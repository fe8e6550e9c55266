"""The record of an operation, and how a holder proves that it still is its holder.

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

import math
from typing import Any

from ..wire.keys import OperationId
from .answers import Claimed

ROW = "tenant = %(tenant)s AND task = %(task)s AND key = %(key)s"
MINE = f"{ROW} AND status = 'started' AND fence = %(fence)s AND token = %(token)s"

# Raises division_by_zero by itself when it matches no row, so that no COMMIT can follow. A holder
# frozen between this statement and COMMIT is evicted by the server within half a lease: nothing waits behind it.
# And whatever a body has SET, this commit waits for the disk.
FINISH = """
WITH settings AS (
    SELECT set_config('idle_in_transaction_session_timeout', %(idle_ms)s, true),
           set_config('synchronous_commit', 'on', true)
), finished AS (
    UPDATE idempotency.records SET {changes}, updated_at = clock_timestamp()
    FROM settings WHERE {condition} RETURNING 1
)
SELECT 1 / count(*) FROM finished
"""


def named(id: OperationId) -> dict[str, Any]:
    """The parameters of `ROW`."""
    return {"tenant": id.tenant, "task": id.task, "key": id.key}


def mine(claim: Claimed) -> dict[str, Any]:
    """The parameters of `MINE`."""
    return named(claim.id) | {"fence": claim.fence, "token": claim.token}


def idle_ms(lease: float) -> str:
    """How long a holder may be silent within `FINISH`, in milliseconds: below half a lease.

    So a holder frozen before COMMIT is gone before another may take over.
    """
    return str(max(math.floor(lease * 1000 / 2) - 1, 1))
