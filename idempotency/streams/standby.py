"""Waiting while Postgres' standby is behind, so that a failover loses no more than a setting allows."""

from __future__ import annotations

import time

from ..attempt.runtime import Runtime
from ..errors import SettingsError
from ..store import streams

# Seconds between two looks.
LOOK = 1.0


class Standbys:
    """Whether the slowest standby is further behind than `stream_standby_lag` seconds."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._limit = runtime.settings.stream_standby_lag
        self._looked_at = float("-inf")
        self._found: str | None = None

    def behind(self) -> str | None:
        """Why to wait; None: go on. Raises `SettingsError` if this login may not see it, and SQLAlchemy's errors."""
        if self._limit is None:
            return None
        if time.monotonic() - self._looked_at >= LOOK:
            self._found = self._look(self._limit)
            self._looked_at = time.monotonic()
        return self._found

    def _look(self, limit: float) -> str | None:
        with self._runtime.autocommit() as connection:
            found = streams.standby_lag(connection)
        if found.is_hidden:
            raise SettingsError(
                "idempotency_stream_standby_lag: this login may not see how far the standbys are; GRANT pg_read_all_stats to it"
            )
        if found.standbys == 0:
            return "no standby is connected"
        return f"a standby is {found.lag:.0f} s behind" if found.lag is not None and found.lag > limit else None
