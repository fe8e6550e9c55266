"""A circuit breaker: a provider that is away is left alone for a while instead of costing every task a
time-out.

One per process. pybreaker counts and keeps the state, but it holds its lock for the length of a call,
which would make threads wait for each other's time-outs; so it is told of outcomes only, and calls run
outside it.
"""

import random
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeVar

import pybreaker
from celery.exceptions import SoftTimeLimitExceeded

from idempotency import Defer, NotSent

T = TypeVar("T")


class Unavailable(Defer):
    """The provider could not be reached or gave no usable answer in time; whether it acted is open."""


class Circuit:
    """Opens after `failures` calls in a row were `Unavailable`; after `pause` seconds one call may try again.

    Anything else the provider says, refusals included, shows that it is there. While open, calls are deferred
    without being made. The pause is measured by the wall clock: a clock set back prolongs it.
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
        """Make the call and return its result. Defer when the circuit is open."""
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
            # Interrupted by the worker, not answered: it says nothing about the provider.
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
            # A call that began before the circuit opened may report after: that changes nothing.
            if raised is not error and not isinstance(raised, pybreaker.CircuitBreakerError):
                raise

    def _remaining(self) -> float:
        opened_at = self._storage.opened_at
        if opened_at is None:
            return 0.0
        waited: float = (datetime.now(UTC) - opened_at).total_seconds()
        return self._pause - waited

    def _spread(self, seconds: float) -> float:
        # Everything deferred meanwhile must not come back in the same moment.
        return min(seconds, self._pause) + random.uniform(0.1, 0.5) * self._pause
