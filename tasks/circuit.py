"""A circuit breaker: an unavailable provider is left alone for a while instead of costing every task a time-out.

One per process. pybreaker counts failures and keeps the state, but holds its lock during a call, so threads would wait
for each other's time-outs. So calls run outside of it, and it only gets their outcomes.
"""

import math
import random
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeVar

import pybreaker
from celery.exceptions import SoftTimeLimitExceeded

from idempotency import Defer, NotSent

T = TypeVar("T")

# The longest Retry-After that is honoured, in seconds.
MAX_RETRY_AFTER = 3600.0


class Unavailable(Defer):
    """The provider could not be reached or did not answer in time; it may or may not have acted."""


def seconds_of(retry_after: str, *, otherwise: float) -> float:
    """How long a provider asks us to wait, by its Retry-After in seconds, from 0 to an hour; `otherwise` if it says no number."""
    try:
        seconds = float(retry_after)
    except ValueError:
        return otherwise
    # "nan" is a number to Python
    return otherwise if math.isnan(seconds) else min(max(seconds, 0.0), MAX_RETRY_AFTER)


class Circuit:
    """Opens after `failures` consecutive `Unavailable` calls; after `pause` seconds, one call may try again.

    Any other answer, including a refusal, shows that the provider is available. While the circuit is open, calls are
    deferred without being made. The pause is measured by the wall clock, so setting the clock back prolongs it.
    """

    def __init__(self, provider: str, *, failures: int = 5, pause: float = 30.0) -> None:
        self._provider = provider
        self._pause = pause
        self._storage = pybreaker.CircuitMemoryStorage(pybreaker.STATE_CLOSED)
        self._breaker = pybreaker.CircuitBreaker(
            fail_max=failures,
            reset_timeout=pause,
            exclude=[lambda error: not isinstance(error, Unavailable)],
            state_storage=self._storage,
            throw_new_error_on_trip=False,
        )
        self._trial = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether calls are being held back."""
        return bool(self._breaker.current_state != pybreaker.STATE_CLOSED)

    def call(self, function: Callable[[], T]) -> T:
        """Make the call and return its result. Raises `NotSent` when the circuit is open."""
        if not self.is_open:
            return self._observed(function)
        remaining = self._remaining()
        if remaining > 0 or not self._trial.acquire(blocking=False):
            raise NotSent(self._spread(max(remaining, 0)), f"{self._provider} is unavailable: circuit open")
        try:
            return self._observed(function)
        finally:
            self._trial.release()

    def _observed(self, function: Callable[[], T]) -> T:
        try:
            result = function()
        except SoftTimeLimitExceeded:
            # interrupted by the worker, which says nothing about the provider
            raise
        except Exception as error:
            self._report(error)
            raise
        self._report(None)
        return result

    def _report(self, error: Exception | None) -> None:
        def outcome() -> None:
            if error is not None:
                raise error

        try:
            self._breaker.call(outcome)
        except Exception as raised:
            # a call that began before the circuit opened may end after, which changes nothing
            if raised is not error and not isinstance(raised, pybreaker.CircuitBreakerError):
                raise

    def _remaining(self) -> float:
        opened_at = self._storage.opened_at
        if opened_at is None:
            return 0.0
        waited: float = (datetime.now(UTC) - opened_at).total_seconds()
        return self._pause - waited

    def _spread(self, seconds: float) -> float:
        # deferred calls must not all come back at the same moment
        return min(seconds, self._pause) + random.uniform(0.1, 0.5) * self._pause
