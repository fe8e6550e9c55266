"""One run of a body under one claim: its session, its effects and steps, and its end.

An attempt ends in exactly one of complete, fail and release, or finds that it no longer holds the operation. Complete
and fail commit through `_finish`, together with what the attempt has written in its session; release rolls that back.
Every write that commits by itself, release's included, goes through `write_alone`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from billiard.exceptions import SoftTimeLimitExceeded
from sqlalchemy import Connection
from sqlalchemy.exc import DataError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ..errors import EffectUnknown, LeaseLost, OutcomeInDoubt, PartBroken, PermanentError, Unfinished
from ..observe import metrics
from ..observe.crash_points import crash_point
from ..observe.logs import log
from ..store import claims, ends, letters
from ..store.answers import Claimed, Renewal, error_text
from ..store.statements import describe, where
from ..wire import results
from ..wire.delivery import Delivery
from . import conclusions, effects, steps
from .conclusions import Concluded, Undo
from .heartbeat import Holding
from .policy import Policy
from .runtime import Runtime
from .session import AttemptSession

T = TypeVar("T")
# A finishing statement divides by zero (SQLSTATE 22012) when the attempt is not the holder.
DIVISION_BY_ZERO = "22012"
# An `on_failed` that kills its process must not do so forever: this many attempts after the last one, the operation
# fails without it.
ON_FAILED_TRIES = 5


class Attempt:
    """One run of a body, with the session, effects and steps that it uses. Belongs to the request, not to the task."""

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
        # Set for a last look: the body runs only to finish what has happened outside, and may begin nothing new.
        self.ends_as: PermanentError | None = None
        self.stopped = False
        self._session: AttemptSession | None = None
        self._holding = Holding(claim, delivery.fingerprint, runtime.settings.lease)
        runtime.heartbeat.hold(self._holding)

    # ------------------------------------------------------------ while the body runs

    @property
    def session(self) -> AttemptSession:
        """The SQLAlchemy session, opened on first use; its work is committed with the result. Raises `LeaseLost`."""
        self.check_lease()
        if self._session is None:
            self._session = AttemptSession(self.runtime.engine, expire_on_commit=False)
        return self._session

    @property
    def session_in_transaction(self) -> bool:
        return self._session is not None and self._session.in_transaction()

    def check_lease(self) -> None:
        """Raise `LeaseLost` if another attempt may hold the operation.

        If the lease has run out by this process's clock (the process or its heartbeat was paused), Postgres is asked first.
        """
        if self._holding.lost and (self._holding.taken or not self._renewed()):
            self.runtime.heartbeat.lose(self._holding, "over")
            raise LeaseLost(f"{self.claim.id.task}: another attempt may hold the operation")

    def _renewed(self) -> bool:
        asked_at, lease = time.monotonic(), self.runtime.settings.lease
        with self.runtime.autocommit() as connection:
            verdict = claims.renew(connection, [self.claim], lease)[self.claim.token]
        if verdict is not Renewal.HELD:
            return False
        self._holding.renewed_at = asked_at
        return True

    def check_may_begin(self) -> None:
        """Raise the error that the operation ends with if this is a last look, which may begin nothing new."""
        if self.ends_as is not None:
            self.stopped = True
            raise self.ends_as

    def passed_over(self, state: str) -> str:
        """The names of earlier attempts' effects that this run of the body has not reached, separated by commas.

        `state`: "begun" for effects whose outcome is unknown, "done" for those that have happened.
        """
        effects = ((name, entry) for name, entry in self.claim.effects.items() if entry["kind"] == "effect")
        return ", ".join(
            sorted(repr(name) for name, entry in effects if entry["state"] == state and name not in self.calls)
        )

    def effect(
        self,
        name: str,
        fn: Callable[..., Any],
        *args: Any,
        reconcile: effects.Reconcile | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call the outside world once, as `IdempotentTask.effect` does."""
        return effects.effect(self, effects.Call(name, fn, args, kwargs, reconcile))

    def step(self, name: str, fn: Callable[..., Any], *args: Any, undo: Undo | None = None, **kwargs: Any) -> Any:
        """Commit a database phase before the body goes on, as `IdempotentTask.step` does."""
        return steps.step(self, name, fn, args, kwargs, undo)

    def note_spent(self, *, within: int = 0) -> None:
        """Note on the record that this claim found the attempts used up, or (`within=1`) that the next one will."""
        if self.claim.spent_at is None:
            spent_at = self.write_alone(lambda connection: claims.note_spent(connection, self.claim, within=within))
            self.claim = replace(self.claim, spent_at=spent_at)

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
        text = results.to_text(result, limit=settings.result_limit)
        self._finish(lambda c: ends.complete(c, self.claim, text, retention=retention, lease=settings.lease))
        metrics.completed.labels(self.claim.id.task).inc()

    def fail(self, error: PermanentError, *, cause: BaseException | None = None) -> PermanentError:
        """End without success: undos, `on_failed`'s rows, the record and the dead letter in one commit.

        Returns the error that the operation has ended with: `error`, or `EffectUnknown` or `Unfinished` because of what
        happened outside. Raises `LeaseLost` or `OutcomeInDoubt`.
        """
        self._roll_back()
        self.check_lease()
        if not isinstance(error, EffectUnknown):
            self._ask_once_more()
        spent_at = self.claim.spent_at
        is_too_often = spent_at is not None and self.claim.attempts >= spent_at + ON_FAILED_TRIES
        described = str(error) if cause in (None, error) else describe(cause)
        try:
            concluded = self._fail(
                error, described, skip="it has ended its process too often" if is_too_often else None
            )
        except PartBroken as broken:
            self._roll_back()
            concluded = self._fail(error, described, skip=str(broken))
        metrics.count_failed(self.claim.id.task, concluded.error.code)
        at = where(cause or error)
        log.warning("failed", code=concluded.error.code, cause=error.code, at=at, **self._names())
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
            self.claim.id,
            self.delivery,
            self.claim,
            reason=concluded.reason,
            last_error=concluded.end.error,
            service=settings.service,
        )
        retention = self.policy.retention_failed
        self._finish(lambda c: ends.fail(c, self.claim, concluded.end, retention=retention, lease=settings.lease))
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
                log.warning("reconcile_failed", effect=call.name, error=type(unanswered).__name__, **self._names())

    def release(self, *, delay: float, error: BaseException | None, give_back: bool = False) -> None:
        """Let go. The next delivery is committed with it and is due after `delay` seconds; `error` is why.

        `give_back` does not count this attempt. Raises `LeaseLost`.
        """
        self._roll_back()
        described = None if error is None else error_text(type(error).__name__, describe(error))
        is_eager = self.delivery.is_eager
        self.write_alone(
            lambda connection: ends.release(
                connection,
                self.claim,
                # An eager call's next attempt follows at once; if its process dies first, a worker takes over.
                delay=0.0 if is_eager else delay,
                after_due=max(delay, self.runtime.settings.lease) if is_eager else 0.0,
                error=described,
                give_back=give_back,
                deliver=bool(self.delivery.message),
            ),
            then="released",
        )
        counter = metrics.deferrals if give_back else metrics.retries
        counter.labels(self.claim.id.task).inc()
        at = None if error is None else where(error)
        log.info("released", delay=round(delay, 3), given_back=give_back, error=described, at=at, **self._names())

    def close(self) -> None:
        """Stop renewing, drop the hint in Redis and return the connection, however the attempt has ended."""
        self.runtime.heartbeat.drop(self._holding)
        self.runtime.hints.drop(self.claim.id, self.claim.token, self.delivery.fingerprint)
        metrics.attempt_seconds.labels(self.claim.id.task).observe(time.monotonic() - self._holding.since)
        self._roll_back()
        if self._session is not None:
            self._session.end()

    def _roll_back(self) -> None:
        if self._session is not None:
            try:
                self._session.rollback()
            except Exception:  # interrupted in the middle of a statement: the connection cannot be used again
                self._session.invalidate()

    # ------------------------------------------------------------ fenced writes and their commits

    def _finish(self, write: Callable[[Connection], None]) -> None:
        """Write the operation's end and commit it, together with the session's work if there is a session.

        The one way into store.ends for an attempt that completes or fails. Raises `LeaseLost` or `OutcomeInDoubt`.
        """
        if self._session is None:
            self._finish_without_session(write)
        else:
            self._session.flush()
            self.write_in_session(write)
            crash_point("finish.written")
            self.commit()
        crash_point("finish.committed")

    def _finish_without_session(self, write: Callable[[Connection], None]) -> None:
        """Statement and commit are one round trip."""
        with self._fenced_by_division(), self.runtime.autocommit() as connection:
            # Taken now: asking an invalidated connection for it would open another one in the middle of the doubt.
            driver = connection.connection.driver_connection
            try:
                write(connection)
            except BaseException as error:
                if _refused_by_server(error, driver):
                    raise
                connection.invalidate()
                self._doubt(error)

    def write_in_session(self, write: Callable[[Connection], None]) -> None:
        """Write in the session's transaction. The statement itself raises when this attempt is not the holder.

        Raises `LeaseLost`; the session is rolled back then.
        """
        assert self._session is not None
        with self._fenced_by_division():
            write(self._session.connection())

    def commit(self) -> None:
        """Commit the session's transaction. Raises `OutcomeInDoubt` if the answer was lost."""
        assert self._session is not None
        driver = self._session.connection().connection.driver_connection
        try:
            self._session.end_with_commit()
        except BaseException as error:
            if _refused_by_server(error, driver):
                raise
            self._doubt(error)

    def write_alone(self, write: Callable[[Connection], T | None], *, then: str | None = None) -> T:
        """Write in a commit of its own, and return what `write` does; nothing or False means: not the holder.

        `then` is the crash point after the commit. Raises `LeaseLost`.
        """
        with self.runtime.autocommit() as connection:
            answer = write(connection)
        if then is not None:
            crash_point(then)
        if answer is None or answer is False:
            self._fenced()
        return answer

    @contextmanager
    def _fenced_by_division(self) -> Iterator[None]:
        """Turn the division by zero of a finishing statement into `LeaseLost`."""
        try:
            yield
        except DataError as error:
            if getattr(error.orig, "sqlstate", None) != DIVISION_BY_ZERO:
                raise
            if self._session is not None:
                self._session.rollback()
            self._fenced()

    def _fenced(self) -> NoReturn:
        """A write of this attempt matched nothing, because it no longer holds the operation."""
        self._holding.taken = True
        metrics.fenced.labels(self.claim.id.task).inc()
        log.warning("fenced", **self._names())
        raise LeaseLost(f"{self.claim.id.task}: the write of a former holder matched nothing")

    def _doubt(self, error: BaseException) -> NoReturn:
        """The answer to a COMMIT was lost: neither the session nor the claim can be used any more."""
        self._holding.taken = True
        if self._session is not None:
            self._session.invalidate()
        metrics.in_doubt.labels(self.claim.id.task).inc()
        log.warning("commit_in_doubt", error=type(error).__name__, **self._names())
        if isinstance(error, SystemExit | KeyboardInterrupt):
            # The process ends. The message is not acknowledged, and the record says how it went.
            raise error
        raise OutcomeInDoubt(f"{self.claim.id.task}: the answer to COMMIT was lost") from error

    def _names(self) -> dict[str, Any]:
        return {
            "task": self.claim.id.task,
            "key": self.claim.id.key,
            "fence": self.claim.fence,
            "attempt": self.claim.attempts,
        }


def _refused_by_server(error: BaseException, driver: Any) -> bool:
    """Whether the server itself said no: then nothing was committed, and there is no doubt."""
    if not isinstance(error, DBAPIError):
        return False
    sqlstate = getattr(error.orig, "sqlstate", None)
    # 57P..: the server is going down; what it had done by then is not known
    return sqlstate is not None and not sqlstate.startswith("57P") and not driver.closed
