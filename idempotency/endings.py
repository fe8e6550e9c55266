"""How an attempt ends: what an exception of the body means for its operation, as a value.

Ordinary outcomes are values to match on; the exception that leaves the task is chosen here, because whatever Celery
sees decides whether the message is acknowledged.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from celery.exceptions import Ignore, Reject, Retry
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from . import conclusions
from .attempt import Attempt
from .errors import AttemptsExhausted, CallRefused, Defer, PermanentError, UnsupportedControl
from .statements import NotConnected, describe

# lock_not_available: a statement waited for a lock for longer than lock_timeout
LOCK_NOT_AVAILABLE = "55P03"
# Ten years: beyond this a delay is a mistake, and Postgres' clock ends eventually.
MAX_DELAY = 10 * 365 * 86400.0


class RetriesExhausted(AttemptsExhausted):
    """`retry()` was called beyond its `max_retries`: told from a body's own AttemptsExhausted, which is a last word."""


@dataclass(frozen=True, slots=True)
class Returned:
    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    error: BaseException


@dataclass(frozen=True, slots=True)
class Fail:
    """The operation ends without success."""

    failure: PermanentError
    outcome: BaseException

    def apply(self, attempt: Attempt) -> BaseException:
        """Returns what Celery is told."""
        ended = attempt.fail(self.failure, cause=self.outcome)
        if ended is self.failure:
            return self.outcome
        ended.__cause__ = ended.__cause__ or self.outcome  # Celery's log shows both
        return ended


@dataclass(frozen=True, slots=True)
class Release:
    """Another attempt later."""

    delay: float
    cause: BaseException | None
    outcome: BaseException
    give_back: bool = False
    is_spent: bool = False  # the next claim has a last look, whatever `max_attempts` says

    def apply(self, attempt: Attempt) -> BaseException:
        """Returns what Celery is told."""
        if self.is_spent:
            attempt.note_spent(within=1)
        attempt.release(delay=self.delay, error=self.cause, give_back=self.give_back)
        return self.outcome


Ending = Fail | Release


def _is_lock_timeout(error: BaseException) -> bool:
    if not isinstance(error, DBAPIError) or getattr(error.orig, "sqlstate", None) != LOCK_NOT_AVAILABLE:
        return False
    return "NOWAIT" not in (error.statement or "").upper()  # there it was the body that would not wait


def end_for(error: BaseException, attempt: Attempt) -> Ending:
    """What an exception of the body means for the operation."""
    policy, settings, attempts = attempt.policy, attempt.runtime.settings, attempt.claim.attempts
    match error:
        case SystemExit() | KeyboardInterrupt():
            # The worker shuts down: due at once, elsewhere, and no attempt used. A hard time limit begins with the
            # same SIGTERM, so it is not for free for ever.
            return Release(0.0, None, error, give_back=attempt.claim.age <= settings.longest_run)
        case RetriesExhausted() if attempt.claim.spent_at is None and conclusions.has_acted(attempt.claim.effects):
            # a last look, as when the attempts are used up
            return Release(0.0, error, Retry(exc=error, when=0.0), is_spent=True)
        case PermanentError():
            return Fail(error, error)
        case CallRefused():
            # a call the body makes is refused the same way every time
            return Fail(PermanentError(describe(error), "call_refused"), error)
        case Ignore() | Reject():
            refused = UnsupportedControl(f"{type(error).__name__} from a body would acknowledge past the record")
            return Fail(refused, refused)
        case Defer(seconds=seconds) if attempt.claim.age + seconds <= settings.defer_budget:
            return Release(seconds, error, Retry(exc=error, when=seconds), give_back=True)
        case _ if isinstance(error, policy.permanent_errors):
            return Fail(PermanentError(describe(error), type(error).__name__), error)
    cause = (error.exc or error) if isinstance(error, Retry) else error
    if _is_lock_timeout(cause) and attempt.claim.age + settings.lease <= settings.defer_budget:
        # A lock that somebody holds is not this operation's fault: of a frozen holder it outlives several leases.
        delay = random.uniform(0.0, settings.lease)
        return Release(delay, cause, Retry(exc=cause, when=delay), give_back=True)
    if isinstance(cause, NotConnected | PoolTimeout) and attempt.claim.age + settings.lease <= settings.defer_budget:
        # Claims keep their connections when Postgres, or the pool, has none left for bodies. A restart is soon over, and a
        # shortage may last: about as long as the operation has waited already, up to a lease.
        delay = random.uniform(0.0, min(settings.lease, max(settings.retry_base, attempt.claim.age)))
        return Release(delay, cause, Retry(exc=cause, when=delay), give_back=True)
    if attempts == policy.max_attempts and conclusions.has_acted(attempt.claim.effects):
        # The next claim finds the attempts used up and has a last look: what has happened outside may still be finished.
        return Release(0.0, cause, Retry(exc=cause, when=0.0))
    if attempts >= policy.max_attempts:
        last = f"attempt {attempts} of {policy.max_attempts}: {describe(cause)}"
        return Fail(AttemptsExhausted(last), cause)
    if isinstance(error, Retry) and isinstance(error.when, int | float):
        return Release(min(float(error.when), MAX_DELAY), cause, error)
    # full jitter: a burst that failed together does not come back together
    delay = random.uniform(0.0, min(settings.retry_cap, settings.retry_base * 2.0 ** min(attempts - 1, 60)))
    return Release(delay, cause, Retry(exc=cause, when=delay))
