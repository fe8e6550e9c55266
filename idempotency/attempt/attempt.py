"""One run of a body under one claim: its session, its effects and steps, and its end.

An attempt ends in exactly one of complete, fail and release, or finds that it no longer holds the operation. Whatever
its session wrote shares the finishing commit, or is rolled back. Every write goes through `writes.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ..errors import EffectUnknown, LeaseLost, PermanentError, TransactionEnded, Unfinished
from ..observe import metrics
from ..observe.logs import log
from ..store import claims, ends, letters
from ..store import effects as stored_effects
from ..store.answers import Claimed, Renewal, error_text
from ..store.statements import describe, said_by, where
from ..wire.delivery import Delivery
from . import conclusions, effects, refusals, steps
from .conclusions import Concluded, Undo
from .heartbeat import Holding
from .policy import Policy
from .runtime import Runtime
from .session import AttemptSession
from .writes import FencedWrites

# An `on_failed` that kills its process must not do so forever: this many attempts after the last one, the operation
# fails without it.
ON_FAILED_ATTEMPTS = 5


class Attempt:
    """One run of a body, with the session, effects and steps that it uses. Belongs to the request, not to the task."""

    # of an effect's first key
    first_number = 1
    # whether only an attempt that has run the body itself may fail the operation by what the body raised
    fails_by_running = False

    def __init__(self, runtime: Runtime, claim: Claimed, delivery: Delivery, policy: Policy) -> None:
        self.runtime = runtime
        self.claim = claim
        # A record stored under an older rule keeps its fingerprint, and dead letters use that one.
        is_same = claim.fingerprint == delivery.fingerprint
        self.delivery = delivery if is_same else replace(delivery, fingerprint=claim.fingerprint)
        self.policy = policy
        self.names_used: set[str] = set()
        # The effects that the body has reached: asked about once more before the operation fails.
        self.calls: dict[str, effects.Call] = {}
        self.moved_on: set[str] = set()
        # Effects of which the provider was asked before their first call, after the restore of a backup.
        self.asked_first: set[str] = set()
        # Set for a last look: the body runs only to finish what has happened outside, and may begin nothing new.
        self.ends_as: PermanentError | None = None
        self.stopped = False
        # What the record says when this attempt completes; at the HTTP edge, the status of the answer.
        self.response_code = ends.RESPONSE_COMPLETED
        self._holding = Holding(claim, delivery.fingerprint, runtime.settings.lease)
        self.writes = FencedWrites(runtime, claim, self._holding)
        runtime.heartbeat.hold(self._holding)

    @property
    def has_hint(self) -> bool:
        """Whether Redis may have a hint of this attempt: of its claim, or of a renewal."""
        return not self.delivery.only_asked and (self.claim.has_hint or self._holding.is_renewed)

    @property
    def released_as(self) -> tuple[Any, str] | None:
        """Of a saga's attempt: the saga's id and the status in which it was read."""
        return None

    # ------------------------------------------------------------ while the body runs

    @property
    def session(self) -> AttemptSession:
        """The SQLAlchemy session, opened on first use; its work is committed with the result. Raises `LeaseLost`."""
        self.check_lease()
        return self.writes.session

    def check_lease(self) -> None:
        """Raise `LeaseLost` if another attempt may hold the operation.

        If the lease has run out by this process's clock (the process or its heartbeat was paused), Postgres is asked first.
        """
        if self._holding.lost and (self._holding.given_up or not self._renewed()):
            self.runtime.heartbeat.lose(self._holding, "over")
            raise LeaseLost(f"{self.claim.id.task}: another attempt may hold the operation")

    def _renewed(self) -> bool:
        asked_at, lease = time.monotonic(), self.runtime.settings.lease
        with self.runtime.autocommit(self.claim.id.tenant) as connection:
            verdict = claims.renew(connection, [self.claim], lease)[self.claim.token]
        if verdict is not Renewal.HELD:
            return False
        self._holding.renewed_at = asked_at
        return True

    def may_have_happened(self, name: str) -> bool:
        """Whether an effect has happened, or was begun and its outcome is not known."""
        entry = self.claim.effects.get(name)
        return entry is not None and conclusions.has_acted({name: entry})

    def refusal_of(self, name: str) -> PermanentError | None:
        """What an effect was refused with, if an earlier attempt of this generation has recorded that."""
        entry = self.claim.effects.get(name)
        return None if entry is None else refusals.refusal_of(entry, self.claim.generation)

    def check_may_begin(self) -> None:
        """Raise the error that the operation ends with if this is a last look, which may begin nothing new."""
        if self.ends_as is not None:
            self.stopped = True
            raise self.ends_as

    def passed_over(self, state: str) -> str:
        """The names of earlier attempts' effects that this run of the body has not reached, separated by commas.

        `state`: "begun" for effects whose outcome is unknown, "done" for those that have happened.
        """
        passed = (
            repr(name)
            for name, entry in self.claim.effects.items()
            if entry["kind"] == "effect" and entry["state"] == state and name not in self.calls
        )
        return ", ".join(sorted(passed))

    def effect(
        self,
        name: str,
        fn: Callable[..., Any],
        /,
        *args: Any,
        reconcile: effects.Reconcile | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call the outside world, as `IdempotentTask.effect` does."""
        return effects.effect(self, effects.Call(name, fn, args, kwargs, reconcile))

    def step(self, name: str, fn: Callable[..., Any], /, *args: Any, undo: Undo | None = None, **kwargs: Any) -> Any:
        """Commit a database phase before the body goes on, as `IdempotentTask.step` does."""
        return steps.step(self, name, fn, args, kwargs, undo)

    def note_spent(self, *, within: int = 0) -> None:
        """Note on the record that this claim found the attempts used up, or (`within=1`) that the next one will."""
        if self.claim.spent_at is None:
            spent_at = self.writes.alone(lambda connection: claims.note_spent(connection, self.claim, within=within))
            self.claim = replace(self.claim, spent_at=spent_at)

    # ------------------------------------------------------------ what is recorded, and where

    def prepare(self) -> None:
        """Read what else is known of the operation, before anything is decided about it."""

    def next_position(self) -> int:
        """Where the next effect or step is recorded. Undos run in reverse order, and jsonb keeps none."""
        return 1 + max((entry["position"] for entry in self.claim.effects.values()), default=0)

    def begin_effect(self, name: str, entry: dict[str, Any]) -> float:
        """Record that an effect is about to be called. Returns the database's time. Raises `LeaseLost`."""
        return self.writes.alone(lambda c: stored_effects.begin_effect(c, self.claim, name, entry))

    def change_effect(self, name: str, change: dict[str, Any]) -> None:
        """Record what became of an effect, together with what the session has written. Raises `LeaseLost`."""
        if self.writes.in_transaction:
            lease = self.runtime.settings.lease
            self.writes.together(lambda c: stored_effects.change_effect_with(c, self.claim, name, change, lease=lease))
        else:
            self.writes.alone(lambda c: stored_effects.change_effect(c, self.claim, name, change))

    # ------------------------------------------------------------ how it ends

    def complete(self, result: Any) -> None:
        """Commit the session's work together with the result.

        Raises `LeaseLost` or `OutcomeInDoubt`; `InvalidResult` for a result that is not JSON or too long; and
        `EffectUnknown` or `Unfinished` if the body did not reach an earlier attempt's effect this time, because its
        result then says nothing about that effect. What the body does after reaching an effect is its own decision.
        """
        self.check_lease()
        if names := self.passed_over("begun"):
            raise EffectUnknown(f"effect {names}: begun by an earlier attempt, and this one did not come to it")
        if names := self.passed_over("done"):
            raise Unfinished(f"effect {names}: happened in an earlier attempt, and this one did not come to it")
        settings, retention = self.runtime.settings, self.policy.retention_completed
        text = self.runtime.stored_result(result, before_put=self.writes.flush)
        self.before_end()
        self.writes.finish(
            lambda c: ends.complete(
                c, self.claim, text, retention=retention, lease=settings.lease, response_code=self.response_code
            )
        )
        metrics.completed.labels(self.claim.id.task).inc()

    def before_end(self) -> None:
        """What has to be written just before the record ends, in that transaction."""

    def fail(self, error: PermanentError, *, cause: BaseException | None = None) -> PermanentError:
        """End without success: undos, `on_failed`'s rows, the record and the dead letter in one commit.

        Returns the error that the operation has ended with: `error`, or `EffectUnknown` or `Unfinished` because of what
        happened outside. Raises `LeaseLost` or `OutcomeInDoubt`.
        """
        self.writes.roll_back()
        self.check_lease()
        if not isinstance(error, EffectUnknown):
            self._ask_once_more()
        spent_at = self.claim.spent_at
        is_too_often = spent_at is not None and self.claim.attempts >= spent_at + ON_FAILED_ATTEMPTS
        described = said_by(error)
        if cause is not None and cause is not error:
            described = describe(cause)
            error.__cause__ = error.__cause__ or cause  # for `on_failed`
        try:
            concluded = self._fail(
                error, described, skip="it has ended its process too often" if is_too_often else None
            )
        except TransactionEnded as broken:
            self.writes.roll_back()
            concluded = self._fail(error, described, skip=str(broken))
        metrics.count_failed(self.claim.id.task, concluded.error.code)
        at = where(cause or error)
        log.warning("failed", code=concluded.error.code, cause=error.code, at=at, **self.writes.names)
        return concluded.error

    def _fail(self, error: PermanentError, described: str, *, skip: str | None) -> Concluded:
        settings, session = self.runtime.settings, self.session
        concluded = conclusions.conclude(
            session.connection(),
            self.claim.id,
            error,
            described=described,
            entries=self.claim.effects,
            arguments=self.delivery.arguments,
            attempts=self.claim.attempts,
            on_failed=self.policy.on_failed,
            skip=skip,
        )
        letters.store_failure(
            session.connection(),
            self.delivery,
            self.claim,
            reason=concluded.reason,
            last_error=concluded.end.error,
            service=settings.service,
        )
        retention = self.policy.retention_failed
        self.before_end()
        self.writes.finish(lambda c: ends.fail(c, self.claim, concluded.end, retention=retention, lease=settings.lease))
        return concluded

    def _ask_once_more(self) -> None:
        """Before failing over an effect of unknown outcome, ask the provider about it, if the body reached its call."""
        begun = [call for name, call in self.calls.items() if self.claim.effects.get(name, {}).get("state") == "begun"]
        for call in begun:
            try:
                effects.ask(self, call)
            except (LeaseLost, DBAPIError, PoolTimeout, SoftTimeLimitExceeded):
                raise  # the provider was not asked
            except Exception as unanswered:
                log.warning("reconcile_failed", effect=call.name, error=type(unanswered).__name__, **self.writes.names)

    def release(
        self,
        *,
        delay: float,
        error: BaseException | None,
        give_back: bool = False,
        forget: bool = False,
        is_undecided: bool = False,
    ) -> None:
        """Let go. The next delivery is committed with it and is due after `delay` seconds; `error` is why.

        `give_back` does not count this attempt. With `forget`, the record goes too, unless something is recorded in it.
        `is_undecided`: due at once if it was woken meanwhile. Raises `LeaseLost`.
        """
        self.writes.roll_back()
        described = None if error is None else error_text(type(error).__name__, describe(error))
        is_eager = self.delivery.is_eager
        self.writes.alone(
            lambda connection: (
                (forget and ends.forget(connection, self.claim))
                or ends.release(
                    connection,
                    self.claim,
                    # An eager call's next attempt follows at once; if its process dies first, a worker takes over.
                    delay=0.0 if is_eager else delay,
                    after_due=max(delay, self.runtime.settings.lease) if is_eager else 0.0,
                    error=described,
                    give_back=give_back,
                    saga=self.released_as,
                    is_undecided=is_undecided,
                )
            ),
            then="released",
        )
        counter = metrics.deferrals if give_back else metrics.retries
        counter.labels(self.claim.id.task).inc()
        at = None if error is None else where(error)
        log.info("released", delay=round(delay, 3), given_back=give_back, error=described, at=at, **self.writes.names)

    def close(self) -> None:
        """Stop renewing, drop the hint in Redis and return the connection, however the attempt has ended."""
        self.runtime.heartbeat.drop(self.claim.token)
        if self.has_hint:
            self.runtime.hints.drop(self.claim.id, self.claim.token, self._holding.fingerprint)
        metrics.attempt_seconds.labels(self.claim.id.task).observe(time.monotonic() - self._holding.since)
        self.writes.close()
