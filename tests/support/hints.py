"""Hints in Redis, as other processes leave them."""

from __future__ import annotations

from typing import Any

import redis
from sqlalchemy import Row

from idempotency.application import runtime_of
from idempotency.attempt.hints import hint_name
from idempotency.wire.keys import OperationId
from tests.support import bank


def leave_hint(redis_url: str, row: Row[Any], *, counted: bool) -> None:
    """The hint of this operation, as another process holds it."""
    id = OperationId(row.tenant, row.task, row.key)
    value = f"{'d' * 32} {row.fingerprint}" + (" counted" if counted else "")
    with redis.Redis.from_url(redis_url) as client:
        client.set(hint_name(id, runtime_of(bank.app).hints.owner), value, px=60_000)
