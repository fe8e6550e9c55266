"""How much the requests of a tenant may keep: keys and bytes, by the settings `tenant_keys_limit` and `tenant_bytes_limit`.

Each process counts at most every `AGE` seconds for a tenant, so what arrives in between may exceed a limit by that much.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..attempt.runtime import Runtime
from ..store import operations, tenants
from ..wire.keys import OperationId
from .recent import Recent

# Seconds for which a count is believed.
AGE = 5.0
# Tenants whose counts are remembered. A forgotten one is counted again.
REMEMBERED = 10_000
# Seconds after which a refused request may be worth sending again: room is made by the purge, which runs every minute.
RETRY_AFTER = 60


@dataclass(frozen=True, slots=True)
class QuotaExceeded:
    """The tenant's requests keep more than they may. `what` is "keys" or "bytes"; nothing was begun."""

    what: str
    limit: int


class Quotas:
    """What tenants keep, by this process's last count."""

    def __init__(self) -> None:
        self._counted: Recent[str, tuple[float, QuotaExceeded | None]] = Recent(REMEMBERED)

    def refusal(self, runtime: Runtime, id: OperationId) -> QuotaExceeded | None:
        """Why a new key of this tenant is refused; None if there is room. A key that has a record is never refused."""
        settings = runtime.settings
        if settings.tenant_keys_limit is None and settings.tenant_bytes_limit is None:
            return None
        now = time.monotonic()
        counted_at, exceeded = self._counted.get(id.tenant, (-AGE, None))
        if now - counted_at >= AGE:
            # while it is being counted, others go by the last count
            self._counted[id.tenant] = now, exceeded
            exceeded = self._count(runtime, id.tenant)
            self._counted[id.tenant] = now, exceeded
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
