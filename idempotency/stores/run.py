"""Claim, run, record: one delivery of an operation whose record is in a store. Read `attempt/run.py` first.

The body's effects are not part of the record's write. A process that dies between them leaves a claim whose lease runs out,
and the next delivery runs the body again: with another fence, and with the same key for calls outside.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

from ..attempt.claim import Patience
from ..attempt.effects import provider_key
from ..attempt.endings import Ended, Ending, Fail, Finished, Release, end_for
from ..attempt.heartbeat import Holding
from ..attempt.policy import Policy
from ..errors import AttemptsExhausted, LeaseLost, Unanswered
from ..observe import metrics
from ..observe.crash_points import crash_point
from ..observe.logs import log
from ..store.answers import Claimed, Completed, Failed, Mismatch, Renewal, error_text
from ..store.statements import ERROR_LIMIT, describe, said_by, where
from ..text import number_of
from ..wire.delivery import Delivery
from .runtime import StoreRuntime
from .store import AT_ONCE, ClaimUnanswered, PlaceAway, StoreAway, StoreBusy, Watch

# How many tokens of claims without an answer a message carries: the last ones, of which one is in the record, if any.
UNANSWERED_KEPT = 10

Body = Callable[["StoreAttempt"], Any]
Outcome = Finished | Ended | Release | Completed | Failed | Mismatch | StoreBusy


class StoreAttempt:
    """One run of a body under one claim. Belongs to the request, not to the task."""

    def __init__(self, runtime: StoreRuntime, claim: Claimed, delivery: Delivery, policy: Policy) -> None:
        self.runtime, self.claim, self.delivery, self.policy = runtime, claim, delivery, policy
        self._holding = Holding(claim, delivery.fingerprint, runtime.settings.lease)
        self._text = ""
        runtime.heartbeat.hold(self._holding)

    @property
    def outside_key(self) -> str:
        """The key for calls outside: the same in every attempt, delivery and worker."""
        return provider_key(self.claim.id, "outside", 1)

    def check_lease(self) -> None:
        """Raise `LeaseLost` if another attempt may hold the operation, or if that cannot be known."""
        if self._holding.lost and (self._holding.given_up or not self._renewed()):
            self.runtime.heartbeat.lose(self._holding, "over")
            raise LeaseLost(f"{self.claim.id.task}: another attempt may hold the operation")

    def run(self, body: Body) -> Ending:
        """Run the body. Any exception becomes the ending that it means for the operation. Raises `LeaseLost`."""
        task, most = self.claim.id.task, self.policy.max_attempts
        if self.claim.attempts > most:
            died = AttemptsExhausted(
                f"no result after {number_of(most, 'attempt')}: the process of the last one has died"
            )
            return Fail(self.claim, died, died)
        try:
            crash_point("body.entered")
            with metrics.phase(task, "body"):
                result = body(self)
            self._text = self.runtime.stored_result(result)
        except LeaseLost:
            raise
        except BaseException as error:
            return end_for(error, self)
        return Finished(self.claim, result)

    def placed(self, ending: Ending, patiently: Patience) -> Ending:
        """The same, once a long result is where it is kept. If that takes none for long, the attempt counts: its effect has happened."""
        if not isinstance(ending, Finished):
            return ending
        try:
            self._text = patiently(lambda: self.runtime.placed(self._text))
        except (Unanswered, PlaceAway) as error:  # an eager call waits for nothing
            return end_for(error.__cause__ if isinstance(error, Unanswered) and error.__cause__ else error, self)
        return ending

    def end(self, ending: Ending) -> Finished | Ended | Release:
        """Record how the attempt ends. Raises `LeaseLost` if it holds the operation no more, and `StoreAway`."""
        store, claim, keep = self.runtime.store, self.claim, self.runtime.keep
        crash_point("store.recording")
        match ending:
            case Finished():
                done = store.complete(claim, self._text, retention=self.policy.retention_completed)
            case Fail(failure=failure):
                # an item has an end, and a refused write would wait
                text = error_text(failure.code, said_by(failure)[:ERROR_LIMIT])
                done = store.fail(claim, text, retention=self.policy.retention_failed)
            case Release(delay=delay, give_back=give_back):
                done = store.release(claim, delay=delay, keep=keep, give_back=give_back)
        if not done:
            metrics.fenced.labels(claim.id.task).inc()
            log.warning("fenced", task=claim.id.task, key=claim.id.key, fence=claim.fence, attempt=claim.attempts)
            raise LeaseLost(f"{claim.id.task}: another attempt holds the operation; this one has recorded nothing")
        crash_point("store.recorded")
        return self._ended(ending)

    def close(self) -> None:
        """Stop renewing, however the attempt has ended."""
        self.runtime.heartbeat.drop(self._holding.claim.token)
        metrics.attempt_seconds.labels(self.claim.id.task).observe(time.monotonic() - self._holding.since)

    def _ended(self, ending: Ending) -> Finished | Ended | Release:
        task = self.claim.id.task
        names = {"task": task, "key": self.claim.id.key, "fence": self.claim.fence, "attempt": self.claim.attempts}
        match ending:
            case Finished():
                metrics.completed.labels(task).inc()
                return ending
            case Fail(failure=failure, cause=cause):
                metrics.count_failed(task, failure.code)
                log.warning("failed", code=failure.code, error=describe(cause), at=where(cause), **names)
                return Ended(cause)
            case Release(delay=delay, cause=cause, give_back=give_back):
                (metrics.deferrals if give_back else metrics.retries).labels(task).inc()
                error = None if cause is None else describe(cause)
                log.info("released", delay=round(delay, 3), given_back=give_back, error=error, **names)
                return ending

    def _renewed(self) -> bool:
        asked_at = time.monotonic()
        try:
            verdict = self.runtime.renew([self.claim])[self.claim.token]
        except StoreAway:
            return False
        if verdict is not Renewal.HELD:
            return False
        self._holding.renewed_at = asked_at
        return True


def run(
    runtime: StoreRuntime,
    delivery: Delivery,
    policy: Policy,
    body: Body,
    patiently: Patience,
    watch: Watch = AT_ONCE,
) -> Outcome:
    """Claim the operation, run its body and record the result; or answer from its record without running anything.

    `patiently` asks the store for as long as the caller can wait. `StoreBusy`: another attempt has the operation, or this one has
    lost it; nothing of it is recorded, and its message has to come again. Raises what `patiently` raises, and the exception
    that ends the process.
    """
    token = secrets.token_hex(16)
    try:
        answer = patiently(lambda: runtime.claim(delivery, token, watch))
    except Unanswered as unanswered:
        claims = [*watch.unanswered.split(), token][-UNANSWERED_KEPT:]
        raise ClaimUnanswered(" ".join(claims)) from unanswered.__cause__
    if not isinstance(answer, Claimed):
        return answer
    attempt = StoreAttempt(runtime, answer, delivery, policy)
    try:
        crash_point("claimed")
        ending = attempt.placed(attempt.run(body), patiently)
        if isinstance(ending, Release) and (ends := ending.ends_process) is not None:
            _release_at_once(attempt, ending)
            raise ends
        return patiently(lambda: _end(attempt, ending))
    except LeaseLost:
        return StoreBusy()
    finally:
        attempt.close()


def _end(attempt: StoreAttempt, ending: Ending) -> Outcome:
    try:
        return attempt.end(ending)
    except LeaseLost:
        return StoreBusy()  # an answer: who asks patiently need not ask again


def _release_at_once(attempt: StoreAttempt, ending: Release) -> None:
    """The process ends: what the store does not take now, the end of the lease does."""
    try:
        attempt.end(ending)
    except (LeaseLost, StoreAway) as error:
        log.warning("not_released", task=attempt.claim.id.task, key=attempt.claim.id.key, error=type(error).__name__)
