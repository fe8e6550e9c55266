"""How much the requests of a tenant may keep: keys and bytes, by the settings `tenant_keys_limit` and `tenant_bytes_limit`.

Each process counts at most every `AGE` seconds for a tenant, so what arrives in between may exceed a limit by that much.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..attempt.runtime import Runtime
from ..store import operations, tenants
from ..wire.keys import OperationId

# Seconds for which a count is believed.
AGE = 5.0
# Tenants remembered at once; beyond that, those whose counts are old are forgotten.
REMEMBERED = 10_000
# Seconds after which a refused request may be worth sending again: room is made by the purge, which runs every minute.
RETRY_AFTER = 60


@dataclass(frozen=True, slots=True)
class QuotaExceeded:
    """The tenant's requests keep more than they may. `what` is "keys" or "bytes"; nothing was begun."""

    what: str
    limit: int


class Quotas:
    """What tenants keep, as this process has counted it last."""

    def __init__(self) -> None:
        self._counted: dict[str, tuple[float, QuotaExceeded | None]] = {}

    def refusal(self, runtime: Runtime, id: OperationId) -> QuotaExceeded | None:
        """Why a new key of this tenant is refused; None: there is room. A key that has a record is never refused."""
        settings = runtime.settings
        if settings.tenant_keys_limit is None and settings.tenant_bytes_limit is None:
            return None
        now = time.monotonic()
        counted_at, exceeded = self._counted.get(id.tenant, (-AGE, None))
        if now - counted_at >= AGE:
            # until the answer is there, others go by the last one
            self._counted[id.tenant] = now, exceeded
            exceeded = self._count(runtime, id.tenant)
            self._remember(id.tenant, exceeded, now)
        if exceeded is None:
            return None
        with runtime.autocommit(id.tenant) as connection:
            return None if operations.status_and_fence(connection, id) is not None else exceeded

    def _count(self, runtime: Runtime, tenant: str) -> QuotaExceeded | None:
        keys, size = runtime.settings.tenant_keys_limit, runtime.settings.tenant_bytes_limit
        with runtime.autocommit(tenant) as connection:
            kept = tenants.usage(connection, tenant, keys_limit=keys, bytes_limit=size)
        if keys is not None and kept.keys >= keys:
            return QuotaExceeded("keys", keys)
        if size is not None and kept.bytes >= size:
            return QuotaExceeded("bytes", size)
        return None

    def _remember(self, tenant: str, exceeded: QuotaExceeded | None, now: float) -> None:
        if len(self._counted) >= REMEMBERED:
            self._counted = {name: entry for name, entry in self._counted.items() if now - entry[0] < AGE}
        self._counted[tenant] = now, exceeded
