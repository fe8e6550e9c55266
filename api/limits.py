"""Rate limits: a token bucket for each caller, in this process."""

from __future__ import annotations

import math
import time

from idempotency.http.recent import Recent

# Callers whose buckets are kept. Beyond that, the caller idle longest is forgotten and starts again with a full bucket.
REMEMBERED = 10_000


class RateLimit:
    """`burst` requests at once, and `per_second` in the long run, for each caller.

    With several processes, each counts by itself.
    """

    def __init__(self, *, burst: int, per_second: float) -> None:
        self._burst = float(burst)
        self._rate = per_second
        # tokens left, and when that was
        self._buckets: Recent[str, tuple[float, float]] = Recent(REMEMBERED)

    def take(self, caller: str) -> int:
        """Take a token. Returns 0, or the seconds until the caller may ask again."""
        now = time.monotonic()
        left, at = self._buckets.get(caller, (self._burst, now))
        left = min(left + (now - at) * self._rate, self._burst)
        allowed = left >= 1
        self._buckets[caller] = (left - 1 if allowed else left, now)
        return 0 if allowed else math.ceil((1 - left) / self._rate)
