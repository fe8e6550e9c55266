"""How often one may ask: a bucket of tokens for each caller, in this process."""

from __future__ import annotations

import math
import time
from collections import OrderedDict

# Callers that are remembered; whoever has not asked for longest is forgotten, and begins with a full bucket.
REMEMBERED = 10_000


class Limit:
    """`burst` requests at once, and `per_second` in the long run, for each caller.

    With several processes, each counts by itself.
    """

    def __init__(self, *, burst: int, per_second: float) -> None:
        self._burst = float(burst)
        self._rate = per_second
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, caller: str) -> int:
        """0: go on. Otherwise the seconds until the caller may ask again."""
        now = time.monotonic()
        left, at = self._buckets.pop(caller, (self._burst, now))
        left = min(left + (now - at) * self._rate, self._burst)
        allowed = left >= 1
        self._buckets[caller] = (left - 1 if allowed else left, now)
        if len(self._buckets) > REMEMBERED:
            self._buckets.popitem(last=False)
        return 0 if allowed else math.ceil((1 - left) / self._rate)
