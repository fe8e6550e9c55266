"""One run of a body under one claim: its session, its effects, and the single door to every end.

An attempt ends in exactly one of complete, fail and release, or finds that it is not the holder any more. Whatever
it wrote shares the finishing commit, or is rolled back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from sqlalchemy.exc import DataError, DBAPIError, OperationalError
from sqlalchemy.orm import Session

from . import dead_letters, effects, metrics, records, results
from .crash_points import crash_point
from .delivery import Delivery, Operation
from .errors import EffectUnknown, LeaseLost, OutcomeInDoubt, PermanentError, SessionNotYours
from .lease import Holding
from .logs import log
from .records import Claimed
from .runtime import Runtime
from .settings import Settings

# Enough for a sentence; a record is not a log file.
ERROR_LIMIT = 500
# The code a failed operation answers with, as HTTP would say it: understood, and cannot be done.
RESPONSE_FAILED = 422
# psycopg's class for the division by zero with which a finishing statement says "not the holder"
DIVISION_BY_ZERO = "22012"


# An `on_failed` that kills its process must not do so for ever: after this many tries beyond the last attempt the
# operation fails without it.
ON_FAILED_TRIES = 5

OnFailed = Callable[[Session, Operation, PermanentError], object]


@dataclass(frozen=True, slots=True)
class Policy:
    """How a task wants its attempts to end: its own options, filled up from the settings."""

    max_attempts: int
    retention_completed: float
    retention_failed: float
    permanent_errors: tuple[type[BaseException], ...] = ()
    on_failed: OnFailed | None = None

    @classmethod
    def of(cls, task: Any, settings: Settings) -> Policy:
        return cls(
            task.max_attempts or settings.max_attempts,
            task.retention_completed or settings.retention_completed,
            task.retention_failed or settings.retention_failed,
            tuple(task.permanent_errors),
            task.on_failed,
        )


class AttemptSession(Session):
    """The session of an attempt: a plain SQLAlchemy session, except that its commit is the attempt's."""

    def commit(self) -> NoReturn:
        raise SessionNotYours(
            "the session commits with the result; what must be committed before the body goes on belongs in self.step"
        )

    def begin(self, nested: bool = False) -> Any:
        if nested:
            return super().begin(nested=True)
        raise SessionNotYours("the session's transaction belongs to the attempt; use begin_nested() for a savepoint")


class Attempt:
    """What `self.session`, `self.effect` and `self.step` work on. Belongs to the request, never to the task object."""

    def __init__(self, runtime: Runtime, claim: Claimed, delivery: Delivery, policy: Policy) -> None:
        self.runtime = runtime
        self.claim = claim
        self.delivery = delivery
        self.policy = policy
        self.names_used: set[str] = set()
        self._session: AttemptSession | None = None
        self._holding = Holding(claim, delivery.fingerprint)
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
        """Raise `LeaseLost` when this attempt is known not to be the holder any more."""
        if self._holding.lost:
            raise LeaseLost(f"{self.claim.id.operation}: another attempt may hold the operation")

    def effect(self, name: str, fn: Callable[..., Any], *args: Any, reconcile: Any = None, **kwargs: Any) -> Any:
        return effects.effect(self, name, fn, args, kwargs, reconcile)

    def step(self, name: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return effects.step(self, name, fn, args, kwargs)

    # ------------------------------------------------------------ its ends

    def complete(self, result: Any) -> None:
        """Commit the session's work together with the result. Raises `LeaseLost` or `OutcomeInDoubt`."""
        self.check_lease()
        settings = self.runtime.settings
        text = results.to_text(result, limit=settings.result_limit)
        retention = self.policy.retention_completed
        if self._session is None:
            self._finish_alone(
                lambda c: records.complete(c, self.claim, text, retention=retention, lease=settings.lease)
            )
        else:
            session = self._session
            session.flush()
            self.guarded(
                lambda: records.complete(
                    session.connection(), self.claim, text, retention=retention, lease=settings.lease
                )
            )
            crash_point("finish.written")
            self.commit()
        crash_point("finish.committed")
        metrics.completed.labels(self.claim.id.operation).inc()

    def fail(self, error: PermanentError, *, cause: BaseException | None = None) -> None:
        """End without success: `on_failed`'s rows, the record and the dead letter in one commit."""
        self._roll_back()
        self.check_lease()
        settings = self.runtime.settings
        described = records.error_text(error.code, str(error) if cause in (None, error) else describe(cause))
        session = self.session
        reason = error.code
        if self.policy.on_failed is not None and self.claim.attempts <= self.policy.max_attempts + ON_FAILED_TRIES:
            try:
                self.policy.on_failed(session, self._operation(), error)
                session.flush()
            except (OperationalError, LeaseLost):
                raise  # Postgres is away or a lock was not to be had: the handler is not to blame
            except Exception as broken:
                # A broken handler must not keep the operation open for ever; the dead letter says what is missing.
                session.rollback()
                reason = "on_failed_error"
                log.error("on_failed_error", error=describe(broken), **self._names())
        dead_letters.store_failure(
            session.connection(),
            self.claim.id,
            self.delivery,
            self.claim,
            reason=reason,
            last_error=described,
            service=settings.service,
        )
        self.guarded(
            lambda: records.fail(
                session.connection(),
                self.claim,
                described,
                response_code=RESPONSE_FAILED,
                retention=self.policy.retention_failed,
                lease=settings.lease,
            )
        )
        crash_point("finish.written")
        self.commit()
        crash_point("finish.committed")
        metrics.failed.labels(self.claim.id.operation, error.code).inc()
        if error.code == EffectUnknown.default_code:
            metrics.unknown_effects.labels(self.claim.id.operation).inc()
        log.warning("failed", code=error.code, **self._names())

    def release(self, *, delay: float, error: BaseException | None, give_back: bool = False) -> None:
        """Let go; the next delivery is committed with it and is due after `delay` seconds."""
        self._roll_back()
        described = None if error is None else records.error_text(type(error).__name__, describe(error))
        with self.runtime.autocommit() as connection:
            released = records.release(
                connection,
                self.claim,
                # nobody delivers an eager call again: its next attempt follows at once
                delay=0.0 if self.delivery.is_eager else delay,
                error=described,
                give_back=give_back,
                deliver=not self.delivery.is_eager,
            )
        crash_point("released")
        if not released:
            self.fenced()
        counter = metrics.deferrals if give_back else metrics.retries
        counter.labels(self.claim.id.operation).inc()
        log.info("released", delay=round(delay, 3), given_back=give_back, error=described, **self._names())

    def close(self) -> None:
        """Stop renewing, drop the hint in Redis, return the connection. Safe to call at any end."""
        self.runtime.heartbeat.drop(self._holding)
        self.runtime.leases.drop(self.claim.id, self.claim.token, self.delivery.fingerprint)
        metrics.attempt_seconds.labels(self.claim.id.operation).observe(time.monotonic() - self._holding.since)
        self._roll_back()
        if self._session is not None:
            self._session.close()

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
        notices: list[Any] = []
        note = notices.append
        driver.add_notice_handler(note)
        try:
            Session.commit(session)
        except BaseException as error:
            if isinstance(error, DBAPIError) and _refused_by_server(error, driver):
                raise
            self._doubt(error)
        finally:
            driver.remove_notice_handler(note)
        if notices:
            # "canceling wait for synchronous replication": committed here, perhaps not where it counts
            self._doubt(None)

    def guarded(self, finish: Callable[[], None]) -> None:
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
        self._holding.lost = True
        if self._session is not None:
            self._session.invalidate()
        metrics.in_doubt.labels(self.claim.id.operation).inc()
        log.warning("commit_in_doubt", error=type(error).__name__, **self._names())
        if isinstance(error, SystemExit | KeyboardInterrupt):
            # the process ends; the message is unacknowledged and the record says how it went
            raise error
        raise OutcomeInDoubt(f"{self.claim.id.operation}: the answer to COMMIT was lost") from error

    def fenced(self) -> NoReturn:
        """Note that a write of this attempt matched nothing, because it is not the holder any more."""
        self._holding.lost = True
        metrics.fenced.labels(self.claim.id.operation).inc()
        log.warning("fenced", **self._names())
        raise LeaseLost(f"{self.claim.id.operation}: the write of a former holder matched nothing")

    def _operation(self) -> Operation:
        id = self.claim.id
        return Operation(id.tenant, id.operation, id.key, self.delivery.arguments, self.claim.attempts)

    def _names(self) -> dict[str, Any]:
        return {
            "operation": self.claim.id.operation,
            "key": self.claim.id.key,
            "fence": self.claim.fence,
            "attempt": self.claim.attempts,
        }


def describe(error: BaseException) -> str:
    """An error in one line for the record: type and message, without the statement's parameters or a row's values."""
    if isinstance(error, DBAPIError):
        diagnosis = getattr(error.orig, "diag", None)
        primary = getattr(diagnosis, "message_primary", None)
        return f"{type(error.orig).__name__}: {primary or 'no answer from the database'}"
    return f"{type(error).__name__}: {error}"[:ERROR_LIMIT]


def _refused_by_server(error: DBAPIError, driver: Any) -> bool:
    """Whether the server itself said no: then nothing was committed, and there is no doubt."""
    sqlstate = getattr(error.orig, "sqlstate", None)
    # 57P..: the server is going down; what it had done by then is not known
    return sqlstate is not None and not sqlstate.startswith("57P") and not driver.closed
