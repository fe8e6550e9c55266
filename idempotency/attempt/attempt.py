"""One run of a body under one claim: its session, its effects, and the single door to every end.

An attempt ends in exactly one of complete, fail and release, or finds that it is not the holder any more. Whatever
it wrote shares the finishing commit, or is rolled back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from billiard.exceptions import SoftTimeLimitExceeded
from sqlalchemy.exc import DataError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ..errors import EffectUnknown, LeaseLost, OutcomeInDoubt, PermanentError, TransactionEnded, Unfinished
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

# psycopg's class for the division by zero with which a finishing statement says "not the holder"
DIVISION_BY_ZERO = "22012"


# An `on_failed` that kills its process must not do so for ever: after this many attempts beyond the last one the
# operation fails without it.
ON_FAILED_TRIES = 5


class Attempt:
    """What `self.session`, `self.effect` and `self.step` work on. Belongs to the request, never to the task object."""

    def __init__(self, runtime: Runtime, claim: Claimed, delivery: Delivery, policy: Policy) -> None:
        self.runtime = runtime
        self.claim = claim
        # a record stored under an older rule keeps its fingerprint, and letters name it so
        is_same = claim.fingerprint == delivery.fingerprint
        self.delivery = delivery if is_same else replace(delivery, fingerprint=claim.fingerprint)
        self.policy = policy
        self.names_used: set[str] = set()
        # The effects that the body has reached, to be asked about once more before an end.
        self.calls: dict[str, effects.Call] = {}
        self.moved_on: set[str] = set()
        # Set for a last look: the body runs to finish what has happened outside, and may begin nothing.
        self.ends_as: PermanentError | None = None
        self.stopped = False
        self._session: AttemptSession | None = None
        self._holding = Holding(claim, delivery.fingerprint, runtime.settings.lease)
        runtime.heartbeat.hold(self._holding)

    # ------------------------------------------------------------ while the body runs

    @property
    def session(self) -> AttemptSession:
        """The session, opened on first use."""
        self.check_lease()
        if self._session is None:
            self._session = AttemptSession(self.runtime.engine, expire_on_commit=False)
        return self._session

    @property
    def session_in_transaction(self) -> bool:
        return self._session is not None and self._session.in_transaction()

    def check_lease(self) -> None:
        """Raise `LeaseLost` when this attempt is known not to be the holder any more.

        A lease that is over by this process's clock is asked about first: the process was paused, or its heartbeat was.
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
        """Raise the error that the operation ends with, if this run of the body may begin nothing new."""
        if self.ends_as is not None:
            self.stopped = True
            raise self.ends_as

    def passed_over(self, state: str) -> str:
        """The effects of earlier attempts that this run of the body has not come to, as a list of names.

        `state`: "begun" for those of unknown outcome, "done" for those that have happened.
        """
        effects = ((name, entry) for name, entry in self.claim.effects.items() if entry["kind"] == "effect")
        return ", ".join(
            sorted(repr(name) for name, entry in effects if entry["state"] == state and name not in self.calls)
        )

    def effect(self, name: str, fn: Callable[..., Any], *args: Any, reconcile: Any = None, **kwargs: Any) -> Any:
        return effects.effect(self, effects.Call(name, fn, args, kwargs, reconcile))

    def step(self, name: str, fn: Callable[..., Any], *args: Any, undo: Undo | None = None, **kwargs: Any) -> Any:
        return steps.step(self, name, fn, args, kwargs, undo)

    def note_spent(self, *, within: int = 0) -> None:
        """Note on the record that this claim found the attempts used up, or that the next one does (`within` 1)."""
        if self.claim.spent_at is None:
            with self.runtime.autocommit() as connection:
                spent_at = claims.note_spent(connection, self.claim, within=within)
            if spent_at is None:
                self.fenced()
            self.claim = replace(self.claim, spent_at=spent_at)

    # ------------------------------------------------------------ its ends

    def complete(self, result: Any) -> None:
        """Commit the session's work together with the result.

        Raises `LeaseLost` or `OutcomeInDoubt`, and `EffectUnknown` or `Unfinished` over an effect of an earlier attempt
        that the body did not come to this time: its result says nothing about it. What it came to and went on from is
        its own decision.
        """
        self.check_lease()
        if names := self.passed_over("begun"):
            raise EffectUnknown(f"effect {names}: begun by an earlier attempt, and this one did not come to it")
        if names := self.passed_over("done"):
            raise Unfinished(f"effect {names}: happened in an earlier attempt, and this one did not come to it")
        settings = self.runtime.settings
        text = results.to_text(result, limit=settings.result_limit)
        retention = self.policy.retention_completed
        if self._session is None:
            self._finish_alone(lambda c: ends.complete(c, self.claim, text, retention=retention, lease=settings.lease))
        else:
            session = self._session
            session.flush()
            self.fenced_write(
                lambda: ends.complete(session.connection(), self.claim, text, retention=retention, lease=settings.lease)
            )
            crash_point("finish.written")
            self.commit()
        crash_point("finish.committed")
        metrics.completed.labels(self.claim.id.task).inc()

    def fail(self, error: PermanentError, *, cause: BaseException | None = None) -> PermanentError:
        """End without success: undos, `on_failed`'s rows, the record and the dead letter in one commit.

        Returns the error that the operation has ended with: `EffectUnknown` or `Unfinished` over what happened outside.
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
        except TransactionEnded as broken:
            self._roll_back()
            concluded = self._fail(error, described, skip=str(broken))
        crash_point("finish.committed")
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
        self.fenced_write(
            lambda: ends.fail(
                session.connection(), self.claim, concluded.end, retention=retention, lease=settings.lease
            )
        )
        crash_point("finish.written")
        self.commit()
        return concluded

    def _ask_once_more(self) -> None:
        """Before an end over an open effect, ask the provider about it, if the body has come as far as its call."""
        for name, call in self.calls.items():
            if self.claim.effects.get(name, {}).get("state") == "begun":
                try:
                    effects.ask(self, call)
                except (LeaseLost, DBAPIError, PoolTimeout, SoftTimeLimitExceeded):
                    raise  # the provider was not asked
                except Exception as unanswered:
                    log.warning("reconcile_failed", effect=name, error=type(unanswered).__name__, **self._names())

    def release(self, *, delay: float, error: BaseException | None, give_back: bool = False) -> None:
        """Let go; the next delivery is committed with it and is due after `delay` seconds."""
        self._roll_back()
        described = None if error is None else error_text(type(error).__name__, describe(error))
        is_eager = self.delivery.is_eager
        with self.runtime.autocommit() as connection:
            released = ends.release(
                connection,
                self.claim,
                # An eager call's next attempt follows at once; should its process die before, a worker takes over.
                delay=0.0 if is_eager else delay,
                after_due=max(delay, self.runtime.settings.lease) if is_eager else 0.0,
                error=described,
                give_back=give_back,
                deliver=bool(self.delivery.message),
            )
        crash_point("released")
        if not released:
            self.fenced()
        counter = metrics.deferrals if give_back else metrics.retries
        counter.labels(self.claim.id.task).inc()
        at = None if error is None else where(error)
        log.info("released", delay=round(delay, 3), given_back=give_back, error=described, at=at, **self._names())

    def close(self) -> None:
        """Stop renewing, drop the hint in Redis, return the connection. Safe to call at any end."""
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
            except Exception:  # interrupted in the middle of a statement: the connection is of no more use
                self._session.invalidate()

    # ------------------------------------------------------------ the commit

    def commit(self) -> None:
        """Commit the session's transaction. Raises `OutcomeInDoubt` when its answer was lost."""
        assert self._session is not None
        session = self._session
        driver: Any = session.connection().connection.driver_connection
        try:
            session.end_with_commit()
        except BaseException as error:
            if isinstance(error, DBAPIError) and _refused_by_server(error, driver):
                raise
            self._doubt(error)

    def fenced_write(self, finish: Callable[[], None]) -> None:
        """Run the finishing statement; it raises by itself when this attempt is not the holder."""
        try:
            finish()
        except DataError as error:
            if getattr(error.orig, "sqlstate", None) != DIVISION_BY_ZERO:
                raise
            assert self._session is not None
            self._session.rollback()
            self.fenced()

    def _finish_alone(self, finish: Callable[[Any], None]) -> None:
        """Finish an attempt that never opened its session: statement and commit are one round trip."""
        try:
            with self.runtime.autocommit() as connection:
                # now, because asking an invalidated connection would open another one in the middle of the doubt
                driver = connection.connection.driver_connection
                try:
                    finish(connection)
                except BaseException as error:
                    if not (isinstance(error, DBAPIError) and _refused_by_server(error, driver)):
                        connection.invalidate()
                        self._doubt(error)
                    raise
        except DataError as error:
            if getattr(error.orig, "sqlstate", None) != DIVISION_BY_ZERO:
                raise
            self.fenced()

    def _doubt(self, error: BaseException | None) -> NoReturn:
        self._holding.taken = True
        if self._session is not None:
            self._session.invalidate()
        metrics.in_doubt.labels(self.claim.id.task).inc()
        log.warning("commit_in_doubt", error=type(error).__name__, **self._names())
        if isinstance(error, SystemExit | KeyboardInterrupt):
            # the process ends; the message is unacknowledged and the record says how it went
            raise error
        raise OutcomeInDoubt(f"{self.claim.id.task}: the answer to COMMIT was lost") from error

    def fenced(self) -> NoReturn:
        """Note that a write of this attempt matched nothing, because it is not the holder any more."""
        self._holding.taken = True
        metrics.fenced.labels(self.claim.id.task).inc()
        log.warning("fenced", **self._names())
        raise LeaseLost(f"{self.claim.id.task}: the write of a former holder matched nothing")

    def _names(self) -> dict[str, Any]:
        return {
            "task": self.claim.id.task,
            "key": self.claim.id.key,
            "fence": self.claim.fence,
            "attempt": self.claim.attempts,
        }


def _refused_by_server(error: DBAPIError, driver: Any) -> bool:
    """Whether the server itself said no: then nothing was committed, and there is no doubt."""
    sqlstate = getattr(error.orig, "sqlstate", None)
    # 57P..: the server is going down; what it had done by then is not known
    return sqlstate is not None and not sqlstate.startswith("57P") and not driver.closed
