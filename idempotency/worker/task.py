"""IdempotentTask: its options, and what Celery sees of each delivery.

    @app.task(base=IdempotentTask, bind=True, key="{payment_id}")
    def capture_payment(self, payment_id): ...

Claim, run, commit is `attempt/run.py`. What Celery sees decides whether the message is acknowledged, so this is all that
ever leaves the wrapper here:

    a value, or an exception of the body     the record is completed, or failed: acknowledged
    Retry                                    released, and the next delivery is committed: acknowledged
    Ignore                                   a duplicate in flight that was counted: acknowledged
    Ignore("revoked")                        the record is failed, or this is a duplicate of one that is not revoked;
                                             Celery's state is REVOKED (`revocation.py`): acknowledged
    Reject(requeue=False)                    a defect of the message, or an error that nothing foresaw: it goes to the
                                             dead-letter queue
    Ignore, Reject(requeue=True)             no answer of Postgres, `cell_of` or the broker, or a soft time limit that hit our own
                                             code: it is back in the outbox or the queue (`parking.py`)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar, cast

from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery, Task
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry
from celery.result import ResultBase
from celery.utils.imports import symbol_by_name

from ..application import runtime_of
from ..attempt.attempt import Attempt
from ..attempt.conclusions import OnFailed
from ..attempt.endings import Ended, Finished, Release
from ..attempt.policy import Policy
from ..attempt.run import Outcome, run
from ..errors import (
    FingerprintMismatch,
    OperationBusy,
    OperationFailed,
    PermanentError,
    ServiceMismatch,
    Unanswered,
    UnsupportedControl,
)
from ..handle import R_co
from ..observe import metrics
from ..observe.logs import log
from ..providers import ProviderContract
from ..reasons import REVOKED
from ..store.answers import Busy, Completed, Failed, Foreign, Mismatch, Stale
from ..store.statements import describe, leave_out_values
from ..wire.delivery import Delivery
from ..wire.headers import DUE_HEADER
from . import following, hooks, parking
from .censored import hide_secrets
from .control import ControlledTask, is_replacement
from .deliveries import (
    Raised,
    Returned,
    as_accepted,
    attempt_of,
    delivery_of,
    is_anothers,
    is_under_another,
    store_refusal,
)
from .errbacks import run_as_errback
from .options import check_batch, check_values
from .prepared import budget_of, claimed_for, note_begun, note_end, note_interrupted, prepared_for
from .retrying import again, told_to_celery
from .using import P
from .waiting import Waiting

T = TypeVar("T")
# A name and not an import, as in Celery: installation.py imports this module.
INSTALL = "idempotency.installation:install"
# Here, and not where a task is bound: `celery report` binds none.
hide_secrets()
# Another request has used the key.
Refusal = FingerprintMismatch | ServiceMismatch
KeptT = TypeVar("KeptT", Refusal, PermanentError)
OnBusy = Literal["ack", "wait"]
BatchCommit = Literal["together", "each"]


class IdempotentTask(ControlledTask[P, R_co]):
    """A Celery task whose database effects, result and messages are committed together, once per key.

    Use it as `base=`. The options go into the decorator, like Celery's own:

    key             a template (`"{customer_id}:{request_id}"`), a function of the arguments by name,
                    `content_hash(...)`, or None: then every call gives `idempotency_key=`
    on_failed       `on_failed(session, operation, error)`, run in the failing transaction
    permanent_errors exception types that end the operation at once
    provider        what the provider of its effects promises about idempotency keys (`idempotency.providers`)
    effect_types    what its effects return, by name (any type pydantic checks): an operator's result is validated by it
    on_busy         what a duplicate does in a worker while the operation runs: "ack" (default) or "wait";
                    an eager call raises `OperationBusy` whatever this says
    max_attempts    how often the body may run; Celery's `max_retries` says the same without the first attempt
    batch           how many messages a worker claims at once (default 1): see docs/batches.md
    batch_commit    "together" (default): a batch runs in one transaction and commit; "each": each message in its own
    batch_wait      the longest that a message waits for others, in seconds (default 0.05)
    amount          what is at stake in a call, for alerts: a template (`"{amount} {currency}"`) or the name of an argument
    moves_money     True: people change its operations only with a token that proves who they are
    retention_completed, retention_failed   override the settings, in seconds
    """

    abstract = True
    # Celery's own would acknowledge a revoked message and leave its record open.
    Request = "idempotency.worker.revocation:Request"
    throws = (OperationFailed,)  # to a duplicate: its failure has been logged as such

    on_failed: ClassVar[OnFailed | None] = None
    permanent_errors: ClassVar[Sequence[type[BaseException]]] = ()
    provider: ClassVar[ProviderContract | None] = None
    effect_types: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    on_busy: ClassVar[OnBusy] = "ack"
    batch: ClassVar[int] = 1
    batch_commit: ClassVar[BatchCommit] = "together"
    batch_wait: ClassVar[float] = 0.05
    moves_money: ClassVar[bool] = False
    amount: ClassVar[str | None] = None
    retention_completed: ClassVar[float | None] = None
    retention_failed: ClassVar[float | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if hooks.is_celerys_own(cls):  # made from `app.Task`, where that is ours: left as it is without us
            cls.__bases__ = (Task,)
            return
        super().__init_subclass__(**kwargs)
        hooks.check_class(cls, IdempotentTask)
        if inspect.isfunction(on_failed := cls.__dict__.get("on_failed")):
            cls.on_failed = staticmethod(on_failed)
        check_values(cls)

    @classmethod
    def bind(cls, app: Celery) -> Celery:
        # not in Celery's hook `on_bound`: applications override that one without calling ours
        symbol_by_name(INSTALL)()
        # Its own: of a class that was bound before, annotations would look the same.
        of_batches = [] if cls.__bound__ else sorted(vars(cls).keys() & {"batch_commit", "batch_wait", "rate_limit"})
        bound: Celery = super().bind(app)
        check_values(cls)  # from task_annotations
        check_batch(cls, of_batches)
        cls.Strategy = hooks.BATCHING if cls.batch > 1 else Task.Strategy
        hooks.move_into_attempt(cls, IdempotentTask)
        return bound

    # ------------------------------------------------------------ one delivery

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        if self.own_call is not None and self._is_running:
            return cast(R_co, self.run(*args, **kwargs))  # reached as `super().__call__` alone: see `hooks`
        return self._enter(args, kwargs)

    def _enter(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> R_co:
        """A call from outside the body: a delivery, or an eager call under its key."""
        request = self.request
        if request.called_directly or attempt_of(request) is not None:
            # A plain call is protected like any other, in a body, too: it runs in this process, under its key.
            if args and isinstance(args[0], Context):
                return cast(R_co, self._run_as_errback(args, kwargs))
            return cast(R_co, self.apply(args, kwargs, throw=True).get(disable_sync_subtasks=False))
        hooks.note_entered(request)
        try:
            if (prepared := prepared_for(request)) is None:
                outcome = self._deliver(delivery_of(self, request))
            else:
                request.update(prepared.left)
                outcome = self._deliver(prepared.delivery, prepared.answer.outcome)
            if isinstance(outcome, Raised) and not request.is_eager:
                following.note_failed(self, outcome.error)
                leave_out_values(outcome.error)  # Celery logs it, and sends it to Flower and to a result backend
        except SoftTimeLimitExceeded:
            if request.is_eager:
                raise
            note_interrupted(request)  # in our own code, and not in the body: the next delivery asks what is recorded
            log.warning("interrupted", task=self.name, task_id=request.id)
            raise Reject("time limit", requeue=True) from None
        except Exception as error:
            if request.is_eager:
                raise
            leave_out_values(error)
            log.exception("rejected", task=self.name, task_id=request.id)
            raise Reject(describe(error), requeue=False) from error
        if isinstance(outcome, Returned):
            return cast(R_co, outcome.value)
        raise outcome.error if request.is_eager else told_to_celery(outcome.error)

    def _deliver(self, delivery: Delivery, known: Outcome | None = None) -> Returned | Raised:
        """`known`: its outcome, if a batch has found that nothing is left to run."""
        try:
            if known is not None:
                return self._seen(delivery, known)
            # by the application's function, which may be away as Postgres may: that is no fault of the message's
            self._answer(delivery, partial(self.check_cell, delivery.id))
            varies = not delivery.is_eager and self.may_vary(delivery.headers)
            if (varies or delivery.eta is not None) and self._answer(delivery, partial(self._parked, delivery, varies)):
                return Raised(Ignore())
            if is_under_another(delivery):
                delivery = self._answer(delivery, partial(as_accepted, runtime_of(self.app), delivery))
            if delivery.is_revoked and self._answer(delivery, partial(is_anothers, runtime_of(self.app), delivery)):
                return Raised(Ignore(REVOKED))
            return self._seen(delivery, self._run(delivery))
        except Unanswered as unanswered:
            if delivery.is_eager:
                return Raised(unanswered.__cause__ or unanswered)
            return Raised(parking.put_back(self.app, delivery))

    def _run(self, delivery: Delivery) -> Outcome:
        token, claimed = claimed_for(request := self.request)
        runtime = runtime_of(self.app)
        policy = Policy.of(self, runtime.settings)
        while True:
            try:
                answer = partial(self._answer, delivery)
                outcome = run(runtime, delivery, policy, self._body, answer, self._new_attempt, token, claimed)
            finally:
                request.attempt = None
            note_end(request, outcome)
            if not (isinstance(outcome, Release) and delivery.is_eager):
                return outcome
            if outcome.give_back and outcome.cause is not None:
                return Ended(outcome.cause)  # "later" means that the caller calls again
            # else the next attempt follows here and now: there is no broker to deliver again

    # what a claim is run as
    _new_attempt: ClassVar[Callable[..., Attempt]] = Attempt

    def _body(self, attempt: Attempt) -> Any:
        note_begun(request := self.request)
        request.retries, request.attempt, request.asked = max(attempt.claim.attempts - 1, 0), attempt, None
        request.eta, request.replacement = (request.headers or {}).get(DUE_HEADER), None
        try:
            result = hooks.run_in_attempt(self)
            if request.asked is not None:
                raise request.asked
            # as Celery stores it
            return result.as_tuple() if isinstance(result, ResultBase) else result
        except Retry as retry:
            raise again(retry, self.app) from retry
        except (Ignore, Reject) as error:
            if (replacement := self._replacement()) is not None:
                return replacement
            control = type(error).__name__
            raise UnsupportedControl(f"{control} from a body would acknowledge past the record") from None

    def _seen(self, delivery: Delivery, outcome: Outcome) -> Returned | Raised:
        """What Celery sees of an outcome."""
        match outcome:
            case Finished(result=result):
                return self._returned(delivery, result)
            case Completed():
                try:
                    result = self._read(delivery, outcome.result)
                except Exception as error:
                    if isinstance(error, SoftTimeLimitExceeded):
                        raise
                    return Raised(error)
                return self._returned(delivery, result)
            case Ended(PermanentError(code=code)) | Failed(code=code) if code == REVOKED and not delivery.is_eager:
                return Raised(Ignore(REVOKED))
            case Ended(error):
                return Raised(error)
            case Release(cause=cause, delay=delay):
                return Raised(cause if isinstance(cause, Retry) else Retry(exc=cause, when=delay))
            case Failed(code, message):
                return Raised(OperationFailed(message, code))
            case Mismatch(generation):
                used: Refusal = FingerprintMismatch(f"{self.name}: this idempotency key was used with other arguments")
                return Raised(self._refuse(delivery, generation, used))
            case Foreign(generation, service):
                used = ServiceMismatch(f"{self.name}: this idempotency key is used by the application {service!r}")
                return Raised(self._refuse(delivery, generation, used))
            case Stale():
                stale = PermanentError(
                    "published too long ago: its operation may have ended, and is not known any more", "stale"
                )
                return Raised(self._kept(delivery, delivery.generation, stale))
            case Busy():
                return Raised(self._yield_to_holder(delivery))

    def _returned(self, delivery: Delivery, result: Any) -> Returned | Raised:
        hooks.note_carried_out(self.request)
        try:
            if is_replacement(result):
                return Returned(self._hand_over(result))
            following.send(self, result)
        except Ignore as replaced:
            return Raised(replaced)
        except UnsupportedControl as error:
            kept = self._kept(delivery, delivery.generation, error)
            return Raised(kept) if is_replacement(result) else Returned(result)
        return Returned(result)

    def _run_as_errback(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return run_as_errback(self, args, kwargs)

    def _refuse(self, delivery: Delivery, generation: int, error: Refusal) -> Refusal:
        """A request under a key that another one has used."""
        metrics.mismatches.labels(self.name).inc()
        return self._kept(delivery, generation, error)

    def _kept(self, delivery: Delivery, generation: int, error: KeptT) -> KeptT:
        """Keep a message, and what is wrong with it, as a dead letter, and change nothing else."""
        if not delivery.is_eager:
            self._answer(delivery, lambda: store_refusal(runtime_of(self.app), delivery, generation, error))
        log.warning(error.code, task=self.name, key=delivery.id.key)
        return error

    def _yield_to_holder(self, delivery: Delivery) -> Exception:
        """Acknowledge a duplicate once it has been counted. With on_busy="wait" it comes back for the result."""
        if delivery.is_eager:
            return OperationBusy(f"{self.name}: another attempt holds this operation")

        def park() -> None:
            runtime = runtime_of(self.app)
            with runtime.autocommit(delivery.id.tenant) as connection:
                parking.park_until_held_no_more(connection, delivery, runtime.settings)

        if self.on_busy == "wait":
            self._answer(delivery, park)
        return cast(Exception, Ignore())

    def _parked(self, delivery: Delivery, varies: bool) -> bool:
        runtime = runtime_of(self.app)
        with runtime.autocommit(delivery.id.tenant) as connection:
            park = parking.park_under_its_key if varies else parking.park_if_early
            return park(connection, delivery, runtime.settings)

    def _answer(self, delivery: Delivery, ask: Callable[[], T], /) -> T:
        """Ask the database for as long as this delivery can wait. Raises `Unanswered`."""

        def time_limit() -> float | None:
            own = (self.request.timelimit or (None,))[0] or self.time_limit
            return cast(float | None, own or self.app.conf.task_time_limit)

        budget = budget_of(self.request)
        return Waiting(self.name, time_limit=time_limit, is_eager=delivery.is_eager, budget=budget).answer(ask)


def idempotent_tasks(app: Celery) -> list[IdempotentTask]:
    """The application's tasks that are idempotent, by name."""
    return [task for _, task in sorted(app.tasks.items()) if isinstance(task, IdempotentTask)]
