"""DeduplicatedTask: a task whose record is in a store, apart from its effects. docs/stores.md says what that gives up.

What Celery is told decides whether the message is acknowledged, so this is all that ever leaves the wrapper here:

    a value, or an exception of the body     the record is completed, or failed: acknowledged
    Retry                                    released, or held by another attempt, or the store does not answer: a copy of the
                                             message is published, and confirmed if the broker does that. Then acknowledged
    Reject(requeue=True)                     the worker stops, or the copy could not be published: back in the queue
    OperationFailed, FingerprintMismatch     it had failed, or the key was used with other arguments: acknowledged
    Reject(requeue=False)                    the message names no operation: to the queue's dead-letter target, if it has one
    Ignore                                   it was completed, and its result cannot be read: acknowledged
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, cast

from celery import Celery, Task
from celery.exceptions import Ignore, Reject, Retry
from celery.result import ResultBase
from celery.utils.imports import symbol_by_name

from ..attempt.endings import Ended, Finished, Release
from ..attempt.policy import Policy
from ..errors import (
    FingerprintMismatch,
    OperationBusy,
    OperationFailed,
    Unanswered,
    UnknownVersion,
    UnsupportedControl,
)
from ..handle import R_co
from ..observe.logs import log
from ..settings import Settings
from ..store.answers import Completed, Failed, Mismatch
from ..store.statements import describe, leave_out_values
from ..stores.run import Outcome, StoreAttempt, run
from ..stores.runtime import StoreRuntime
from ..stores.store import StoreBusy, Stored
from ..wire import keys
from ..wire.delivery import Delivery
from ..wire.headers import FINGERPRINT_HEADER, KEY_HEADER, TENANT_HEADER, senders_headers
from . import hooks
from .absent import NotHere, Without, check_absent
from .coming_again import Later, cell_unknown, pause_for, put_off, retried, watch_for
from .options import check_values
from .retrying import RetriedTask, again, told_to_celery
from .store_runtimes import store_runtime_of
from .using import P
from .waiting import SHARE_OF_TIME_LIMIT, Waiting

# No import, as in Celery: installation.py imports this module.
INSTALL = "idempotency.installation:install_for_stores"
# Seconds until a message comes back that has waited for the store as long as a delivery may.
PUT_BACK = 60.0


class DeduplicatedTask(Without, RetriedTask[P, R_co], Generic[P, R_co]):
    """A Celery task whose duplicates are answered; a crash between its effect and its record repeats the effect, under the same key.

    Its record is in Redis or DynamoDB (`idempotency_store`), so it needs no Postgres, and cannot share a commit with anything.
    Concurrent deliveries of one key are held off, and whoever has lost its claim records nothing. Use it as `base=`:

    key             a template (`"{customer_id}:{request_id}"`), a function of the arguments by name,
                    `content_hash(...)`, or None: then every call gives `idempotency_key=`
    store           an address instead of the setting `idempotency_store`
    permanent_errors exception types that end the operation at once
    max_attempts    how often the body may run; Celery's `max_retries` says the same without the first attempt
    retention_completed, retention_failed   how long the result answers duplicates, and how long a key stays failed, in seconds

    In the body, `self.outside_key` is the key for calls outside, and `self.fence` the number of its claim, for a target that
    remembers the highest one.
    """

    abstract = True
    Request = "idempotency.worker.revocation:KeyedRequest"

    store: ClassVar[str | None] = None
    permanent_errors: ClassVar[Sequence[type[BaseException]]] = ()
    retention_completed: ClassVar[float | None] = None
    retention_failed: ClassVar[float | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if hooks.is_celerys_own(cls):  # made from `app.Task`, where that is ours: left as it is without us
            cls.__bases__ = (Task,)
            return
        super().__init_subclass__(**kwargs)
        hooks.check_class(cls, DeduplicatedTask)
        cls._check()

    @classmethod
    def bind(cls, app: Celery) -> Celery:
        symbol_by_name(INSTALL)()
        bound: Celery = super().bind(app)
        cls._check()  # from task_annotations
        hooks.move_into_attempt(cls, DeduplicatedTask)
        return bound

    @classmethod
    def _check(cls) -> None:
        check_absent(cls)
        check_values(cls)

    # ------------------------------------------------------------ what a body uses

    @property
    def outside_key(self) -> str:
        """The idempotency key for calls outside: the same in every attempt, delivery and worker of this operation."""
        return self._attempt.outside_key

    @property
    def fence(self) -> int:
        """The number of this claim, higher than those of all claims of this operation before."""
        return self._attempt.claim.fence

    @property
    def tenant(self) -> str:
        """Whose operation this is."""
        return self._attempt.claim.id.tenant

    def check_lease(self) -> None:
        """Raise `LeaseLost` when another attempt may hold the operation; for long loops, and before a call that matters."""
        self._attempt.check_lease()

    # ------------------------------------------------------------ calls

    def apply_async(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        *,
        idempotency_key: object = None,
        tenant: str | None = None,
        **options: Any,
    ) -> Any:
        """Send the task now, under its key. Not protected against a lost publish: call it again, under the same key.

        Raises `MissingKey`, `InvalidKey` and `InvalidArguments`, also for `expires`, `expiration` and a `serializer` other than
        json; then nothing was sent.
        """
        celerys = (task_id, producer, link, link_error, shadow)
        named = {"idempotency_key": idempotency_key, "tenant": tenant}
        return self._send(self._as_sent(args, kwargs), celerys, named, dict(options))

    def apply(
        self,
        args: Any = None,
        kwargs: Any = None,
        *,
        idempotency_key: object = None,
        tenant: str | None = None,
        **options: Any,
    ) -> Any:
        """Run the task here, eagerly, under its key; retries follow at once, and a `Defer` is raised."""
        args, kwargs = self._as_sent(args, kwargs)
        given = senders_headers(options.pop("headers", None) or {})
        _, headers = self._checked(args, kwargs, idempotency_key, tenant, given)
        return super().apply(args, kwargs, headers={**given, **headers}, **options)

    def recorded(self, idempotency_key: object, *, tenant: str | None = None) -> Stored | None:
        """What the store has of an operation now, its result as it is stored; None: nothing. Raises `InvalidKey` and `StoreAway`."""
        return self._runtime.store.read(self._operation({}, keys.check_key(idempotency_key), tenant))

    def drop(self, idempotency_key: object, *, tenant: str | None = None) -> bool:
        """Forget an operation that has ended, so that the next call under its key runs. False: it has not ended, or there is none.

        That call has the same `outside_key`. Raises `InvalidKey`, and `StoreAway` if the store does not answer.
        """
        return self._runtime.store.drop(self._operation({}, keys.check_key(idempotency_key), tenant))

    # ------------------------------------------------------------ one delivery

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        if self.own_call is not None and self._is_running:
            return cast(R_co, self.run(*args, **kwargs))  # reached as `super().__call__` alone: see `hooks`
        return self._enter(args, kwargs)

    def _enter(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> R_co:
        """A call from outside the body: a delivery, or an eager call under its key."""
        request = self.request
        if request.called_directly or self._is_running:
            # a plain call is protected like any other
            return cast(R_co, self.apply(args, kwargs, throw=True).get(disable_sync_subtasks=False))
        try:
            delivery = self._delivery()
            later = cell_unknown(self, delivery, PUT_BACK)
        except Exception as error:
            if request.is_eager:
                raise
            log.exception("rejected", task=self.name, task_id=request.id)
            raise Reject(describe(error), requeue=False) from error
        if later is not None:
            raise put_off(self, delivery, later)
        try:
            told = self._told(delivery)
        except Exception as error:
            if request.is_eager:
                raise
            log.exception("not_decided", task=self.name, task_id=request.id)
            told = Later(PUT_BACK, describe(error))  # no defect of the message's, which may be claimed by now
        if isinstance(told, Later):
            raise put_off(self, delivery, told)
        if isinstance(told, BaseException):
            if not request.is_eager:  # Celery logs it, and sends it to Flower and to a result backend
                leave_out_values(getattr(told, "exc", None) or told)
                told = told_to_celery(told)
            raise retried(self, delivery, told) if isinstance(told, Retry) else told
        return cast(R_co, told)

    def _delivery(self) -> Delivery:
        """The message at hand, whichever cell its tenant is of. Raises `CallRefused` if it names no operation."""
        request = self.request
        headers = request.headers or {}
        arguments = self._bound(request.args or (), request.kwargs or {})
        id = self._operation_anywhere(arguments, headers.get(KEY_HEADER), headers.get(TENANT_HEADER))
        fingerprint, *also = keys.fingerprints(arguments, headers.get(FINGERPRINT_HEADER))
        return Delivery(
            id=id,
            fingerprint=fingerprint,
            also=also,
            arguments=arguments,
            task_id=request.id,
            headers=headers,
            is_eager=bool(request.is_eager),
        )

    def _told(self, delivery: Delivery) -> Any:
        """What Celery is told of a delivery: a value, an exception, or `Later`."""
        try:
            outcome = self._run(delivery)
        except (Unanswered, UnknownVersion) as unanswered:  # a worker of newer code takes what this one does not know
            why, claims = unanswered.__cause__ or unanswered, getattr(unanswered, "claims", "")
            return why if delivery.is_eager else Later(PUT_BACK, describe(why), unanswered=claims)
        match outcome:
            case Finished(result=result):
                return result
            case Completed(result=stored):
                return self._read(delivery, stored)
            case Ended(error):
                return error
            case Release(cause=cause, delay=delay):
                return cause if isinstance(cause, Retry) else Retry(exc=cause, when=delay)
            case Failed(code, message):
                return OperationFailed(message, code)
            case Mismatch():
                log.warning(FingerprintMismatch.code, task=self.name, key=delivery.id.key)
                return FingerprintMismatch(f"{self.name}: this idempotency key was used with other arguments")
            case StoreBusy(due_in=due_in, seen=mark):
                if delivery.is_eager:
                    return OperationBusy(f"{self.name}: another attempt holds this operation")
                pause = pause_for(delivery, self._settings.lease, due_in, mark)
                return Later(pause, "another attempt holds this operation", mark)

    def _run(self, delivery: Delivery) -> Outcome:
        request, runtime, settings = self.request, self._runtime, self._settings
        policy = Policy(
            self.max_attempts or settings.max_attempts,
            self.retention_completed or settings.retention_completed,
            self.retention_failed or settings.store_retention_failed,
            settings.provider_key_retention,
            permanent_errors=tuple(self.permanent_errors),
        )
        watch = watch_for(delivery, self._patience)
        while True:
            waiting = Waiting(self.name, time_limit=self._time_limit, is_eager=delivery.is_eager)
            try:
                outcome = run(runtime, delivery, policy, self._body, waiting.answer, watch)
            finally:
                request.attempt = None
            if not delivery.is_eager:
                return outcome
            if isinstance(outcome, StoreBusy) and outcome.seen and not watch.seen:
                # no message comes back that could be told: watch the holder now
                watch = replace(watch, seen=outcome.seen)
            elif not isinstance(outcome, Release):
                return outcome
            elif outcome.give_back and outcome.cause is not None:
                return Ended(outcome.cause)  # "later" means that the caller calls again
            else:
                time.sleep(min(outcome.delay, settings.retry_cap))  # here and now: there is no broker to deliver again

    def _body(self, attempt: StoreAttempt) -> Any:
        request = self.request
        request.retries, request.attempt, request.asked = max(attempt.claim.attempts - 1, 0), attempt, None
        try:
            result = hooks.run_in_attempt(self)
            if request.asked is not None:
                raise request.asked
            return result.as_tuple() if isinstance(result, ResultBase) else result  # as Celery stores it
        except Retry as retry:
            raise again(retry, self.app) from retry
        except (Ignore, Reject) as error:
            raise UnsupportedControl(f"{type(error).__name__} from a body would acknowledge past the record") from None

    def _read(self, delivery: Delivery, stored: str) -> Any:
        try:
            return self._runtime.read_result(stored)
        except Exception as error:
            if delivery.is_eager:
                return error
            # it was carried out, which is no failure: errbacks might undo it
            log.error("result_unreadable", task=self.name, key=delivery.id.key, error=type(error).__name__)
            return Ignore("its result cannot be read")

    @property
    def _runtime(self) -> StoreRuntime:
        return store_runtime_of(self.app, self.store)

    @property
    def _settings(self) -> Settings:
        return self._runtime.settings

    @property
    def _is_running(self) -> bool:
        return isinstance(getattr(self.request, "attempt", None), StoreAttempt)

    @property
    def _attempt(self) -> StoreAttempt:
        if not self._is_running:
            raise NotHere(f"{self.name}: outside_key and fence exist only while the task runs")
        attempt: StoreAttempt = self.request.attempt
        return attempt

    @property
    def _patience(self) -> float:
        """Seconds that a claim may watch a holder, before a time limit of either kind ends this delivery."""
        if self.request.is_eager:
            return math.inf
        _, soft = self.request.timelimit or (None, None)
        limits = self._time_limit(), soft or self.soft_time_limit or self.app.conf.task_soft_time_limit
        return min((SHARE_OF_TIME_LIMIT * limit for limit in limits if limit), default=math.inf)

    def _time_limit(self) -> float | None:
        limit: float | None = (self.request.timelimit or (None,))[0] or self.time_limit or self.app.conf.task_time_limit
        return limit


def deduplicated_tasks(app: Celery) -> list[DeduplicatedTask]:
    """The application's tasks whose records are in a store, by name."""
    return [task for _, task in sorted(app.tasks.items()) if isinstance(task, DeduplicatedTask)]
