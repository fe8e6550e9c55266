"""Waiting while Postgres' standby is behind, so that a failover loses no more than a setting allows.

Postgres measures a lag when something is replayed, so a standby that replays nothing seems to be where it was. Hence the second
measure: how long ago this process saw the log reach a point that the standby has not replayed.
"""

from __future__ import annotations

import time
from collections import deque

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
        # Times, and where the log ended then, of what is not replayed yet; the oldest first.
        self._written: deque[tuple[float, int]] = deque()

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
            found = streams.standbys(connection)
        if found.is_hidden:
            raise SettingsError(
                "idempotency_stream_standby_lag: this login may not see how far the standbys are; GRANT pg_read_all_stats to it"
            )
        if found.standbys == 0:
            return "no standby is connected"
        lag = max(found.lag or 0.0, self._not_replayed_for(found.replayed))
        if lag > limit:
            return f"a standby is {lag:.0f} s behind"
        self._written.append((time.monotonic(), found.written))
        return None

    def _not_replayed_for(self, replayed: int) -> float:
        """For how many seconds, at least, something has been in the log that the slowest standby has not replayed."""
        while self._written and self._written[0][1] <= replayed:
            self._written.popleft()
        return time.monotonic() - self._written[0][0] if self._written else 0.0
