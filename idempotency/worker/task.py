"""IdempotentTask: its options, and what Celery sees of each delivery.

    @app.task(base=IdempotentTask, bind=True, key="{payment_id}")
    def capture_payment(self, payment_id): ...

Claim, run, commit is `attempt/run.py`. What Celery sees decides whether the message is acknowledged, so this is all that
ever leaves the wrapper here:

    a value, or an exception of the body     the record is completed, or failed: acknowledged
    Retry                                    released, and the next delivery is committed: acknowledged
    Ignore                                   a duplicate in flight that was counted: acknowledged
    Reject(requeue=False)                    a defect of the message, or an error that nothing foresaw: it goes to the
                                             dead-letter queue
    Ignore, Reject(requeue=True)             no answer from Postgres: it is back in the outbox or the queue (`parking.py`)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NoReturn, TypeVar

from celery import Celery, Task
from celery.exceptions import Ignore, Reject, Retry
from celery.utils.imports import symbol_by_name
from celery.utils.time import maybe_make_aware

from ..application import runtime_of
from ..attempt import effects, steps
from ..attempt.attempt import Attempt
from ..attempt.conclusions import OnFailed, Undo
from ..attempt.endings import MAX_DELAY, Ended, Finished, Release
from ..attempt.policy import Policy
from ..attempt.run import Outcome, run
from ..attempt.session import AttemptSession
from ..errors import (
    Again,
    Defer,
    FingerprintMismatch,
    IdempotencyError,
    InvalidArguments,
    LeaseLost,
    OperationBusy,
    OperationFailed,
    OutcomeInDoubt,
    PermanentError,
    RetriesExhausted,
    SettingsError,
    Unanswered,
    UnsupportedControl,
)
from ..observe import metrics
from ..observe.logs import log
from ..providers import ProviderContract
from ..store import letters
from ..store.answers import Busy, Completed, Failed, Mismatch, error_text
from ..store.statements import describe
from ..wire.delivery import Delivery
from . import parking
from .calls import KeyedTask
from .deliveries import as_accepted, delivery_of
from .waiting import Waiting

T = TypeVar("T")
# A name and not an import, as in Celery: installation.py imports this module.
INSTALL = "idempotency.installation:install"
OnBusy = Literal["ack", "wait", "raise"]


@dataclass(frozen=True, slots=True)
class Returned:
    """Celery sees a value."""

    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """Celery sees an exception."""

    error: BaseException


class IdempotentTask(KeyedTask):
    """A Celery task whose database effects, result and messages are committed together, once per key.

    Use it as `base=`. The options go into the decorator, like Celery's own:

    key             a template (`"{customer_id}:{request_id}"`), a function of the arguments by name,
                    `content_hash(...)`, or None: then every call gives `idempotency_key=`
    on_failed       `on_failed(session, operation, error)`, run in the failing transaction
    permanent_errors exception types that end the operation at once
    provider        what the provider of its effects promises about idempotency keys (`idempotency.providers`)
    effect_types    what its effects return, by name (any type pydantic checks): an operator's result is validated by it
    on_busy         what a duplicate does in a worker while the operation runs: "ack" (default; "raise" means the same)
                    or "wait"; an eager call raises `OperationBusy` whatever this says
    max_attempts, retention_completed, retention_failed   override the settings; retentions in seconds
    """

    abstract = True
    acks_late = True
    reject_on_worker_lost = True
    # Celery's own would acknowledge a revoked message and leave its record open.
    Request = "idempotency.worker.revocation:Request"
    # True would end in an acknowledgement without a dead letter.
    retry_on_worker_lost = False
    # A hard limit that passes before the claim must not acknowledge.
    acks_on_timeout = False
    # An exception leaves the wrapper only after the record says failed.
    acks_on_failure = True
    if not hasattr(Task, "acks_on_timeout"):  # Celery 5.5 and 5.6 have one option for both
        acks_on_failure_or_timeout = False
    # Celery logs results and sends them to Flower; a result may hold what neither should show.
    resultrepr_maxsize = 1

    on_failed: ClassVar[OnFailed | None] = None
    permanent_errors: ClassVar[Sequence[type[BaseException]]] = ()
    provider: ClassVar[ProviderContract | None] = None
    effect_types: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    on_busy: ClassVar[OnBusy] = "ack"
    max_attempts: ClassVar[int | None] = None
    retention_completed: ClassVar[float | None] = None
    retention_failed: ClassVar[float | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if inspect.isfunction(on_failed := cls.__dict__.get("on_failed")):
            cls.on_failed = staticmethod(on_failed)
        if cls.on_busy not in ("ack", "wait", "raise"):
            raise SettingsError(f"on_busy: must be 'ack', 'wait' or 'raise', got {cls.on_busy!r}")

    @classmethod
    def bind(cls, app: Celery) -> Celery:
        # not in Celery's hook `on_bound`: applications override that one without calling ours
        symbol_by_name(INSTALL)()
        bound: Celery = super().bind(app)
        return bound

    # ------------------------------------------------------------ one delivery

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.request.called_directly:
            # A plain call is protected like any other: it runs in this process, under its key.
            return self.apply(args, kwargs, throw=True).get()
        try:
            outcome = self._deliver(delivery_of(self, self.request))
        except Exception as error:
            if self.request.is_eager:
                raise
            log.exception("rejected", task=self.name, task_id=self.request.id)
            raise Reject(describe(error), requeue=False) from error
        if isinstance(outcome, Raised):
            raise outcome.error
        return outcome.value

    def _deliver(self, delivery: Delivery) -> Returned | Raised:
        try:
            if delivery.eta is not None and self._answer(delivery, lambda: self._parked_as_early(delivery)):
                return Raised(Ignore())
            delivery = self._answer(delivery, partial(as_accepted, runtime_of(self.app), delivery))
            return self._seen(delivery, self._run(delivery))
        except Unanswered as unanswered:
            if delivery.is_eager:
                return Raised(unanswered.__cause__ or unanswered)
            return Raised(parking.put_back(self.app, delivery))

    def _run(self, delivery: Delivery) -> Outcome:
        runtime = runtime_of(self.app)
        policy = Policy.of(self, runtime.settings)
        while True:
            try:
                outcome = run(runtime, delivery, policy, self._body, partial(self._answer, delivery))
            finally:
                self.request.attempt = None
            if not (isinstance(outcome, Release) and delivery.is_eager):
                return outcome
            if outcome.give_back and outcome.cause is not None:
                return Ended(outcome.cause)  # "later" means that the caller calls again
            # else the next attempt follows here and now: there is no broker to deliver again

    def _body(self, attempt: Attempt) -> Any:
        request = self.request
        request.retries, request.attempt = max(attempt.claim.attempts - 1, 0), attempt
        try:
            return self.run(*request.args, **request.kwargs)
        except Retry as retry:
            delay = float(retry.when) if isinstance(retry.when, int | float) else None
            raise Again(delay, retry.exc or retry) from retry
        except (Ignore, Reject) as error:
            control = type(error).__name__
            raise UnsupportedControl(f"{control} from a body would acknowledge past the record") from None

    def _seen(self, delivery: Delivery, outcome: Outcome) -> Returned | Raised:
        """What Celery sees of an outcome."""
        match outcome:
            case Finished(result=result):
                return Returned(result)
            case Completed():
                return Returned(outcome.value())
            case Ended(error):
                return Raised(error)
            case Release(cause=cause, delay=delay):
                return Raised(cause if isinstance(cause, Retry) else Retry(exc=cause, when=delay))
            case Failed(code, message):
                return Raised(OperationFailed(message, code))
            case Mismatch(generation):
                return Raised(self._refuse(delivery, generation))
            case Busy():
                return Raised(self._yield_to_holder(delivery))

    def _refuse(self, delivery: Delivery, generation: int) -> FingerprintMismatch:
        """A request with other arguments under a used key: keep it as a dead letter, and change nothing else."""
        error = FingerprintMismatch(f"{self.name}: this idempotency key was used with other arguments")

        def store() -> None:
            runtime = runtime_of(self.app)
            with runtime.autocommit() as connection:
                letters.store_refusal(
                    connection,
                    delivery.id,
                    delivery,
                    generation=generation,
                    reason="fingerprint_mismatch",
                    error=error_text("fingerprint_mismatch", str(error)),
                    service=runtime.settings.service,
                )

        if not delivery.is_eager:
            self._answer(delivery, store)
        metrics.mismatches.labels(self.name).inc()
        log.warning("fingerprint_mismatch", task=self.name, key=delivery.id.key)
        return error

    def _yield_to_holder(self, delivery: Delivery) -> Exception:
        """Acknowledge a duplicate once it has been counted. With on_busy="wait" it comes back for the result."""
        if delivery.is_eager:
            return OperationBusy(f"{self.name}: another attempt holds this operation")

        def park() -> None:
            runtime = runtime_of(self.app)
            with runtime.autocommit() as connection:
                parking.park_until_held_no_more(connection, delivery, patience=runtime.settings.wait)

        if self.on_busy == "wait":
            self._answer(delivery, park)
        ignored: Exception = Ignore()
        return ignored

    def _parked_as_early(self, delivery: Delivery) -> bool:
        with runtime_of(self.app).autocommit() as connection:
            return parking.park_if_early(connection, delivery)

    def _answer(self, delivery: Delivery, ask: Callable[[], T], /) -> T:
        """Ask the database for as long as this delivery can wait. Raises `Unanswered`."""
        limit = (self.request.timelimit or (None,))[0] or self.time_limit or self.app.conf.task_time_limit
        return Waiting(self.name, time_limit=limit, is_eager=delivery.is_eager).answer(ask)

    # ------------------------------------------------------------ what a body uses

    @property
    def session(self) -> AttemptSession:
        """The SQLAlchemy session of this attempt: opened on first use, committed with the result. Raises `LeaseLost`."""
        return self._attempt.session

    def effect(
        self, name: str, fn: Callable[..., Any], *args: Any, reconcile: effects.Reconcile | None = None, **kwargs: Any
    ) -> Any:
        """Call the outside world: `fn(*args, idempotency_key=..., **kwargs)`. Returns its result, once that is recorded.

        No transaction may be open. If an earlier call has no recorded outcome, `reconcile(*args, doubt=..., **kwargs)` is
        asked first. Raises what `fn` raises, `EffectUnknown`, `EffectMismatch`, `EffectNameReused`, `OpenTransaction`,
        `InvalidArguments`, `InvalidResult`, `Defer` and `LeaseLost`.
        """
        return effects.effect(self._attempt, effects.Call(name, fn, args, kwargs, reconcile))

    def step(self, name: str, fn: Callable[..., Any], *args: Any, undo: Undo | None = None, **kwargs: Any) -> Any:
        """Commit a database phase before the body goes on: `fn(session, *args, **kwargs)` and its result, once.

        If the operation ends without success, `undo(session, result)` takes the step back in the failing transaction,
        the last step first, and a replay does the step again. It must be a function that can be imported by its name. No
        undo runs while an effect is unknown, nor if a later effect has happened, unless it accepts `effects` (their
        results by name) and takes care of them. Raises what `fn` raises, `EffectMismatch`, `EffectNameReused`,
        `OpenTransaction`, `InvalidArguments`, `InvalidResult`, `OutcomeInDoubt` and `LeaseLost`.
        """
        return steps.step(self._attempt, name, fn, args, kwargs, undo)

    def check_lease(self) -> None:
        """Raise `LeaseLost` when another attempt may hold the operation; for long loops."""
        self._attempt.check_lease()

    @property
    def _attempt(self) -> Attempt:
        attempt: Attempt | None = getattr(self.request, "attempt", None)
        if attempt is None:
            raise IdempotencyError(f"{self.name}: session, effect and step exist only while the task runs")
        return attempt

    def retry(
        self,
        args: Any = None,
        kwargs: Any = None,
        exc: BaseException | None = None,
        throw: bool = True,
        eta: Any = None,
        countdown: float | None = None,
        max_retries: int | None = None,
        **options: Any,
    ) -> Retry:
        """Let go and try again later, under the same key and task id; the delay is kept in Postgres.

        `countdown` in seconds, `eta` as an aware datetime. Raises `Retry`, or returns it with `throw=False`; an `exc`
        that is a final error; `RetriesExhausted` beyond `max_retries`; `InvalidArguments` for a delay of more than ten
        years; `UnsupportedControl` for other arguments, which would be another operation.
        """
        if args is not None or kwargs is not None:
            raise UnsupportedControl("retry: other arguments are another operation; enqueue it under its own key")
        if isinstance(exc, PermanentError | Defer | LeaseLost | OutcomeInDoubt):
            raise exc  # autoretry_for must not turn a final error into another attempt
        if max_retries is not None and self.request.retries >= max_retries:
            raise RetriesExhausted(f"no result after {max_retries} retries") from exc
        if eta is not None:
            countdown = max((maybe_make_aware(eta) - self.app.now()).total_seconds(), 0.0)
        if countdown is not None and countdown > MAX_DELAY:
            raise InvalidArguments(f"retry: countdown: at most {MAX_DELAY:.0f} seconds, got {countdown:g}")
        retry = Retry(exc=exc, when=self.default_retry_delay if countdown is None else countdown)
        if throw:
            raise retry
        return retry

    def replace(self, sig: Any) -> NoReturn:
        raise UnsupportedControl("replace: the record would never end; enqueue the other task instead")


def idempotent_tasks(app: Celery) -> list[IdempotentTask]:
    """The application's tasks that are idempotent, by name."""
    return [task for _, task in sorted(app.tasks.items()) if isinstance(task, IdempotentTask)]
