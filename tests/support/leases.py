"""Leases in Redis, as other processes leave them."""

from __future__ import annotations

from typing import Any

import redis
from sqlalchemy import Row

from idempotency.application import runtime_of
from idempotency.attempt.hints import lease_name
from idempotency.wire.keys import OperationId
from tests.support import bank


def leave_lease(redis_url: str, row: Row[Any], *, guarded: bool) -> None:
    """A lease of this operation, as another process holds it."""
    id = OperationId(row.tenant, row.operation, row.key)
    value = f"{'d' * 32} {row.fingerprint}" + (" guarded" if guarded else "")
    with redis.Redis.from_url(redis_url) as client:
        client.set(lease_name(id, runtime_of(bank.app).settings.database_name), value, px=60_000)
