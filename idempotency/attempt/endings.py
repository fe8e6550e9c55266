"""What an exception of the body means for its operation: how the attempt ends, as a value to match on."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Protocol

import psycopg
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ..errors import (
    Again,
    AttemptsExhausted,
    CallRefused,
    Defer,
    NotConnected,
    NothingDone,
    NotSent,
    PermanentError,
    RetriesExhausted,
    Undecided,
    WrongCell,
)
from ..reasons import CALL_REFUSED
from ..settings import Settings
from ..store.answers import Claimed
from ..store.statements import DEADLOCK, MOVED, describe, driver_error
from ..wire.delivery import Delivery
from . import conclusions
from .attempt import Attempt
from .policy import Policy

# lock_not_available: a statement waited for a lock for longer than lock_timeout
LOCK_NOT_AVAILABLE = "55P03"
# Where Postgres raises it for a timeout; for NOWAIT it is where the lock was asked for. The text depends on the language.
TIMEOUT_FUNCTION = "ProcessInterrupts"
# Ten years: beyond this a delay is a mistake, and Postgres' clock ends eventually.
MAX_DELAY = 10 * 365 * 86400.0


class Waiting(BaseException):
    """The attempt is over, but not its operation: a saga waits, its record is released, its next delivery committed.

    Raised through the saga's code, whose `except Exception` is not for this.
    """


class Throttled(NotSent):
    """Too many effects of this kind are under way: as `NotSent`, but waiting uses up no `defer_budget`."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The result is committed."""

    decided_under: Claimed
    result: Any

    def apply(self, attempt: Attempt) -> Finished:
        return self


@dataclass(frozen=True, slots=True)
class Ended:
    """The operation has ended without success, by this error."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Fail:
    """The operation ends without success."""

    decided_under: Claimed
    failure: PermanentError
    cause: BaseException

    def apply(self, attempt: Attempt) -> Ended:
        ended = attempt.fail(self.failure, cause=self.cause)
        if ended is self.failure:
            return Ended(self.cause)
        ended.__cause__ = ended.__cause__ or self.cause  # a log shows both
        return Ended(ended)


@dataclass(frozen=True, slots=True)
class Release:
    """The operation is let go; another attempt comes after `delay` seconds."""

    decided_under: Claimed
    delay: float
    cause: BaseException | None
    give_back: bool = False
    forget: bool = False  # the record goes, if nothing is recorded in it
    is_undecided: bool = False  # by the provider, or throttled: a wake ends the delay, and `defer_budget` begins anew
    is_spent: bool = False  # the next claim has a last look, whatever `max_attempts` says
    ends_process: BaseException | None = None  # raised once the operation is released

    def apply(self, attempt: Attempt) -> Release:
        if self.is_spent:
            attempt.note_spent(within=1)
        attempt.release(
            delay=self.delay,
            error=self.cause,
            give_back=self.give_back,
            forget=self.forget,
            is_undecided=self.is_undecided,
        )
        if self.ends_process is not None:
            raise self.ends_process
        return self


Ending = Finished | Fail | Release


def is_for_anothers_lock(error: BaseException) -> bool:
    """Whether Postgres has ended a statement because of a lock of another transaction."""
    driver = driver_error(error)
    if not isinstance(driver, psycopg.Error):
        return False
    if driver.sqlstate != LOCK_NOT_AVAILABLE:
        return driver.sqlstate in (DEADLOCK, MOVED)
    return driver.diag.source_function == TIMEOUT_FUNCTION  # with NOWAIT the body chose not to wait


class Judged(Protocol):
    """What decides how an attempt ends, whether its record is in Postgres or elsewhere."""

    @property
    def claim(self) -> Claimed: ...
    @property
    def policy(self) -> Policy: ...
    @property
    def delivery(self) -> Delivery: ...
    @property
    def runtime(self) -> HasSettings: ...


class HasSettings(Protocol):
    """What a process holds open under its settings."""

    @property
    def settings(self) -> Settings: ...


def end_for(error: BaseException, attempt: Judged) -> Fail | Release:
    """What an exception of the body means for the operation."""
    claim, policy, settings = attempt.claim, attempt.policy, attempt.runtime.settings
    match error:
        case SystemExit() | KeyboardInterrupt():
            # The worker shuts down: due at once, in another worker, and no attempt used. A hard time limit begins with
            # the same SIGTERM, so this stops being free after `longest_run`.
            return Release(claim, 0.0, None, give_back=claim.age <= settings.longest_run, ends_process=error)
        case RetriesExhausted() if claim.spent_at is None and conclusions.has_acted(claim.effects):
            return Release(claim, 0.0, error, is_spent=True)  # a last look, as when the attempts are used up
        case PermanentError():
            return Fail(claim, error, error)
        case CallRefused() if not isinstance(
            error, WrongCell
        ):  # of which another process may think otherwise, in a deploy
            # a call that the body makes is refused the same way every time
            return Fail(claim, conclusions.NotDeclined(describe(error), CALL_REFUSED), error)
        case Undecided(seconds=seconds) | Throttled(seconds=seconds):
            return Release(claim, min(seconds, MAX_DELAY), error, give_back=True, is_undecided=True)
        case Defer(seconds=seconds) if claim.age + seconds <= settings.defer_budget:
            return Release(claim, seconds, error, give_back=True)
    cause = error.cause if isinstance(error, Again) else error
    if attempt.delivery.only_asked and not isinstance(error, (Again, *policy.permanent_errors)):
        return Release(claim, 0.0, cause)  # the caller that asks again decides when
    if is_for_anothers_lock(cause) and claim.age + settings.lease <= settings.defer_budget:
        # Someone else's lock is not this operation's fault: a frozen holder keeps it for several leases.
        return Release(claim, random.uniform(0.0, settings.lease), cause, give_back=True)
    if isinstance(cause, NotConnected | PoolTimeout) and claim.age + settings.lease <= settings.defer_budget:
        # Claims keep their connections when Postgres, or the pool, has none left for bodies. A restart is over soon, a
        # shortage may last: wait about as long as the operation has waited already, up to a lease.
        longest = min(settings.lease, max(settings.retry_base, claim.age))
        return Release(claim, random.uniform(0.0, longest), cause, give_back=True)
    if isinstance(error, policy.permanent_errors) and not isinstance(error, Again):
        return Fail(claim, PermanentError(describe(error), type(error).__name__), error)
    if claim.attempts == policy.max_attempts and conclusions.has_acted(claim.effects):
        # The next claim finds the attempts used up and has a last look: what has happened outside may still be finished.
        return Release(claim, 0.0, cause)
    if claim.attempts >= policy.max_attempts:
        last = f"attempt {claim.attempts} of {policy.max_attempts}: {describe(cause)}"
        return Fail(claim, AttemptsExhausted(last), cause)
    if isinstance(error, Again) and error.delay is not None:
        return Release(claim, min(error.delay, MAX_DELAY), cause, forget=isinstance(error, NothingDone))
    # full jitter: a burst that failed together does not come back together
    highest = min(settings.retry_cap, settings.retry_base * 2.0 ** min(claim.attempts - 1, 60))
    return Release(claim, random.uniform(0.0, highest), cause)
