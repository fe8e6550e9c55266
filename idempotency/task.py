"""IdempotentTask: claim, run, commit. The file to read first.

    @app.task(base=IdempotentTask, bind=True, key="{payment_id}")
    def capture_payment(self, payment_id): ...

Nothing leaves the wrapper unexplained, because whatever Celery sees decides whether the message is acknowledged:

    a value, or an exception of the body     the record is completed, or failed: acknowledged
    Retry                                    released, and the next delivery is committed: acknowledged
    Ignore                                   a duplicate in flight, and one row was counted: acknowledged
    Reject(requeue=False)                    everything else: the dead-letter queue stores it
"""

from __future__ import annotations

import inspect
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NoReturn

from celery import Celery, Task
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from celery.utils.time import maybe_make_aware
from kombu.utils.uuid import uuid
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from . import dead_letters, eager, keys, metrics, outbox, records
from .attempt import Attempt, AttemptSession, OnFailed, Policy, describe
from .crash_points import crash_point
from .delivery import Delivery
from .effects import Reconcile
from .endings import Ending, Raised, Release, Returned, end_for
from .errors import (
    AttemptsExhausted,
    Defer,
    FingerprintMismatch,
    IdempotencyError,
    InvalidArguments,
    LeaseLost,
    MissingKey,
    OperationBusy,
    OperationFailed,
    OutcomeInDoubt,
    PermanentError,
    SettingsError,
    UnsupportedControl,
)
from .handle import Handle
from .keys import KeyFunction, OperationId
from .lease import Hint
from .logs import log
from .message import (
    FINGERPRINT_HEADER,
    GENERATION_HEADER,
    KEY_HEADER,
    MESSAGE_VERSION,
    ORIGIN_HEADER,
    REVOKED_HEADER,
    TENANT_HEADER,
    VERSION_HEADER,
    WAITS_HEADER,
    Message,
)
from .records import Busy, Changed, Claimed, Completed, Failed, Mismatch
from .runtime import Runtime

# A doubt is resolved by claiming again. Each round moves the fence, so five in a row mean something is broken.
DOUBT_ROUNDS = 5
# How often a claim is tried again while Postgres is away; the message stays unacknowledged meanwhile.
POSTGRES_PAUSE = 0.5
# The options of enqueue() that are not arguments of the task.
ENQUEUE_OPTIONS = ("countdown", "eta", "priority", "queue", "task_id", "idempotency_key", "tenant", "ordering_key")

# Those of them, and of the task's own options, that shape its message.
TASK_OPTIONS = ("queue", "priority", "time_limit", "soft_time_limit")
# Ten years: beyond this a delay is a mistake, and Postgres' clock ends eventually.
MAX_DELAY = 10 * 365 * 86400.0

OnBusy = Literal["ack", "wait", "raise"]


class IdempotentTask(Task):
    """A Celery task whose database effects, result and messages are committed together, once per key.

    Use it as `base=`. The options stand in the decorator like Celery's own:

    key             a template (`"{customer_id}:{request_id}"`), a function of the arguments by name,
                    `content_hash(...)`, or None: then every call gives `idempotency_key=`
    on_failed       `on_failed(session, operation, error)`, run in the failing transaction
    permanent_errors exception types that end the operation at once
    on_busy         what a duplicate of a running operation does: "ack" (default), "wait", or "raise" (eager calls)
    max_attempts, retention_completed, retention_failed   override the settings; retentions in seconds
    """

    abstract = True
    acks_late = True
    reject_on_worker_lost = True
    # Celery would acknowledge a revoked message and leave its record open.
    Request = "idempotency.revocation:Request"
    # Ends in an acknowledgement without a dead letter.
    retry_on_worker_lost = False
    # A hard limit that passes before the claim must not acknowledge.
    acks_on_timeout = False
    # An exception leaves the wrapper only after the record says failed.
    acks_on_failure = True
    # Celery logs a result and shows it in Flower; a result may hold what neither should.
    resultrepr_maxsize = 1

    key: ClassVar[str | KeyFunction | None] = None
    on_failed: ClassVar[OnFailed | None] = None
    permanent_errors: ClassVar[Sequence[type[BaseException]]] = ()
    on_busy: ClassVar[OnBusy] = "ack"
    max_attempts: ClassVar[int | None] = None
    retention_completed: ClassVar[float | None] = None
    retention_failed: ClassVar[float | None] = None

    _key_function: ClassVar[KeyFunction | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for option in ("key", "on_failed"):
            if inspect.isfunction(value := cls.__dict__.get(option)):
                setattr(cls, option, staticmethod(value))
        if cls.on_busy not in ("ack", "wait", "raise"):
            raise SettingsError(f"on_busy: must be 'ack', 'wait' or 'raise', got {cls.on_busy!r}")
        cls._key_function = keys.template(cls.key) if isinstance(cls.key, str) else cls.key
        if (run := cls.__dict__.get("run")) is not None and cls._key_function is not None:
            parameters = inspect.signature(getattr(run, "__func__", run)).parameters
            for field in getattr(cls._key_function, "fields", ()):
                if field not in parameters:
                    raise SettingsError(f"key of {cls.__name__}: the task has no argument {field!r}")

    # ------------------------------------------------------------ claim, run, commit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.request.called_directly:
            # A plain call is protected like any other: it runs here, under the same key.
            return self.apply(args, kwargs, throw=True).get()
        try:
            outcome = self._perform(self._delivery())
        except Exception as error:
            if self.request.is_eager:
                raise
            log.exception("rejected", operation=self.name, task_id=self.request.id)
            raise Reject(describe(error), requeue=False) from error
        if isinstance(outcome, Raised):
            raise outcome.error
        return outcome.value

    def _perform(self, delivery: Delivery) -> Returned | Raised:
        runtime = Runtime.of(self.app)
        policy = Policy.of(self, runtime.settings)
        token = secrets.token_hex(16)
        ending: Ending | None = None
        for _ in range(DOUBT_ROUNDS):
            with metrics.phase(self.name, "claim"):
                answer = self._claim(runtime, delivery, token)
            match answer:
                case Claimed() as claim:
                    if claim.fingerprint != delivery.fingerprint:  # stored by an older rule: letters name it so
                        delivery = replace(delivery, fingerprint=claim.fingerprint)
                    self.request.retries = max(claim.attempts - 1, 0)
                    self.request.attempt = attempt = Attempt(runtime, claim, delivery, policy)
                    try:
                        if ending is None:
                            try:
                                return Returned(self._run(attempt))
                            except (LeaseLost, OutcomeInDoubt):
                                raise
                            except BaseException as error:
                                ending = end_for(error, attempt)
                        ending.apply(attempt)
                    except (LeaseLost, OutcomeInDoubt, DBAPIError, PoolTimeout, SoftTimeLimitExceeded):
                        if ending is not None and not isinstance(ending.outcome, Exception):
                            raise ending.outcome from None  # the process ends; recovery has the rest
                        continue  # claim again, with the same token: the record decides
                    finally:
                        attempt.close()
                        self.request.attempt = None
                    if isinstance(ending, Release) and delivery.is_eager and isinstance(ending.outcome, Exception):
                        if isinstance(ending.cause, Defer):
                            return Raised(ending.cause)  # later means that the caller calls again
                        return self._perform(delivery)  # nobody delivers again: the next attempt is here and now
                    return Raised(ending.outcome)
                case Completed() as completed:
                    metrics.duplicates.labels(self.name).inc()
                    return Returned(completed.value())
                case Failed(code, message):
                    metrics.duplicates.labels(self.name).inc()
                    return Raised(OperationFailed(message, code))
                case Mismatch(generation):
                    return Raised(self._refuse(runtime, delivery, generation))
                case Busy():
                    metrics.busy.labels(self.name).inc()
                    return self._yield_to_holder(runtime, delivery)
        raise IdempotencyError(f"{self.name}: still in doubt after {DOUBT_ROUNDS} rounds")

    def _run(self, attempt: Attempt) -> Any:
        crash_point("claimed")
        if self._is_revoked(attempt):
            raise PermanentError("revoked through Celery before it had ended", "revoked")
        if attempt.claim.attempts > attempt.policy.max_attempts:
            raise AttemptsExhausted(f"no result after {attempt.policy.max_attempts} attempts; the last one died")
        crash_point("body.entered")
        with metrics.phase(self.name, "body"):
            result = self.run(*self.request.args, **self.request.kwargs)
        with metrics.phase(self.name, "commit"):
            attempt.complete(result)
        return result

    def _claim(
        self, runtime: Runtime, delivery: Delivery, token: str
    ) -> Claimed | Completed | Failed | Mismatch | Busy:
        """Claim the operation, or learn from the record why not. Waits for Postgres as long as it takes."""
        leases, id = runtime.leases, delivery.id
        hint = Hint.FREE if delivery.resent else leases.take(id, token, delivery.fingerprint)
        if hint is Hint.GUARDED:
            return Busy()  # a duplicate was counted before this one: the record will be finished without it
        crash_point("lease.taken")
        while True:
            try:
                with runtime.autocommit() as connection:
                    if hint is Hint.HELD and self._counted(runtime, connection, delivery):
                        return Busy()
                    answer = self._ask(runtime, connection, delivery, token, synchronous=False)
                    if isinstance(answer, Changed) or (
                        isinstance(answer, Busy) and not self._counted(runtime, connection, delivery)
                    ):
                        continue  # the row became claimable meanwhile
                    break
            except (OperationalError, PoolTimeout, SoftTimeLimitExceeded) as error:
                # Postgres is away, or a lock or a connection was not to be had: try again, never acknowledge.
                log.warning("claim_waits", operation=self.name, error=describe(error))
                time.sleep(POSTGRES_PAUSE)
        if isinstance(answer, Claimed):
            metrics.claims.labels(self.name).inc()
            if answer.attempts > 1:
                metrics.takeovers.labels(self.name).inc()
            if hint is Hint.HELD or delivery.resent:
                leases.hold([(id, token, delivery.fingerprint)])
        elif hint is Hint.FREE:
            leases.drop(id, token, delivery.fingerprint)
        return answer

    def _ask(
        self, runtime: Runtime, connection: Connection, delivery: Delivery, token: str, *, synchronous: bool = True
    ) -> records.Answer:
        return records.claim(
            connection,
            delivery.id,
            token=token,
            fingerprint=delivery.fingerprint,
            message=delivery.message,
            holder=runtime.holder,
            lease=runtime.settings.lease,
            queue=delivery.queue,
            synchronous=synchronous,
            also=delivery.also,
        )

    def _counted(self, runtime: Runtime, connection: Connection, delivery: Delivery) -> bool:
        counted, holder = records.count_duplicate(connection, delivery.id, delivery.fingerprint, delivery.also)
        if counted and holder is not None:
            runtime.leases.guard(delivery.id, holder, delivery.fingerprint)
        return counted

    def _refuse(self, runtime: Runtime, delivery: Delivery, generation: int) -> FingerprintMismatch:
        """Another request under a used key: keep it as a dead letter, touch nothing else."""
        error = FingerprintMismatch(f"{self.name}: this idempotency key was used with other arguments")
        if not delivery.is_eager:
            with runtime.autocommit() as connection:
                dead_letters.store_refusal(
                    connection,
                    delivery.id,
                    delivery,
                    generation=generation,
                    reason="fingerprint_mismatch",
                    error=records.error_text("fingerprint_mismatch", str(error)),
                    service=runtime.settings.service,
                )
        metrics.mismatches.labels(self.name).inc()
        log.warning("fingerprint_mismatch", operation=self.name, key=delivery.id.key)
        return error

    def _yield_to_holder(self, runtime: Runtime, delivery: Delivery) -> Raised:
        """A duplicate in flight, counted: it may go. With on_busy="wait" it comes back for the result."""
        if delivery.is_eager:
            return Raised(OperationBusy(f"{self.name}: another attempt holds this operation"))
        if self.on_busy == "wait":
            waits = int(delivery.headers.get(WAITS_HEADER, 0))
            # 0.5 + 1 + 2 + … seconds: parked in the outbox, so that waiting never takes a worker's slot
            delay = 0.5 * 2**waits
            if 0.5 * (2**waits - 1) < runtime.settings.wait:
                message = Message.from_text(delivery.message)
                message.headers[WAITS_HEADER] = waits + 1
                with runtime.autocommit() as connection:
                    outbox.insert(
                        connection,
                        delivery.id,
                        delivery.fingerprint,
                        message,
                        queue=delivery.queue,
                        countdown=delay,
                        origin="retry",
                        generation=int(delivery.headers.get(GENERATION_HEADER, 1)),
                    )
        return Raised(Ignore())

    def _is_revoked(self, attempt: Attempt) -> bool:
        if attempt.claim.revoked or REVOKED_HEADER not in attempt.delivery.headers:
            return attempt.claim.revoked
        with attempt.runtime.autocommit() as connection:
            return records.revoke(connection, attempt.claim.id, attempt.claim.fingerprint, remembered=True)

    def revoke_terminated(self, request: Any) -> None:
        """Mark the operation whose attempt Celery terminates, so that its next claim ends it. For `revocation.py`."""
        runtime, delivery = Runtime.of(self.app), self._delivery(request)
        with runtime.engine.begin() as connection:
            # the worker's main process serves every other task meanwhile
            connection.exec_driver_sql("SET LOCAL lock_timeout = '3s'")
            # The attempt may have been killed before its claim, with no record to be marked.
            answer = self._ask(runtime, connection, delivery, secrets.token_hex(16))
            records.revoke(connection, delivery.id, delivery.fingerprint, remembered=False, also=delivery.also)
            if isinstance(answer, Claimed):
                records.release(connection, answer, delay=0.0, error=None, give_back=True)

    def _delivery(self, request: Any = None) -> Delivery:
        request = request or self.request
        headers = request.headers or {}
        arguments = keys.bind(self._signature, request.args or (), request.kwargs or {})
        id = self._operation(arguments, headers.get(KEY_HEADER), headers.get(TENANT_HEADER))
        message = Message.delivered(request)
        # by the rule of the message, so that the record agrees with the outbox row it came from
        fingerprint = keys.fingerprint(arguments, like=headers.get(FINGERPRINT_HEADER))
        return Delivery(
            id=id,
            fingerprint=fingerprint,
            also=keys.other_fingerprints(arguments, fingerprint),
            arguments=arguments,
            task_id=request.id,
            message=message.to_text(),
            headers=headers,
            queue=message.queue(self.app),
            resent=ORIGIN_HEADER in headers,
            is_eager=bool(request.is_eager),
        )

    # ------------------------------------------------------------ what a body uses

    @property
    def session(self) -> AttemptSession:
        """The SQLAlchemy session of this attempt: opened on first use, committed with the result."""
        return self._attempt.session

    def effect(
        self, name: str, fn: Callable[..., Any], *args: Any, reconcile: Reconcile | None = None, **kwargs: Any
    ) -> Any:
        """Call the outside world: `fn(*args, idempotency_key=..., **kwargs)`, its result recorded before it returns.

        No transaction may be open. `reconcile(*args, doubt=..., **kwargs)` is asked first when an earlier call has
        no recorded outcome. Raises `EffectUnknown`, `EffectMismatch`, `EffectNameReused`, `OpenTransaction`, `LeaseLost`.
        """
        return self._attempt.effect(name, fn, *args, reconcile=reconcile, **kwargs)

    def step(self, name: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Commit a database phase before the body goes on: `fn(session, *args, **kwargs)` and its result, once."""
        return self._attempt.step(name, fn, *args, **kwargs)

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
        """Let this attempt go and come back later, under the same key and task id; the delay is kept in Postgres.

        Raises `Retry`, or `AttemptsExhausted` beyond `max_retries`. Other arguments would be another operation.
        """
        if args is not None or kwargs is not None:
            raise UnsupportedControl("retry: other arguments are another operation; enqueue it under its own key")
        if isinstance(exc, PermanentError | Defer | LeaseLost | OutcomeInDoubt):
            raise exc  # autoretry_for must not turn a final word into another attempt
        if max_retries is not None and self.request.retries >= max_retries:
            raise AttemptsExhausted(f"no result after {max_retries} retries") from exc
        if eta is not None:
            countdown = max((maybe_make_aware(eta) - self.app.now()).total_seconds(), 0.0)
        retry = Retry(exc=exc, when=self.default_retry_delay if countdown is None else countdown)
        if throw:
            raise retry
        return retry

    def replace(self, sig: Any) -> NoReturn:
        raise UnsupportedControl("replace: the record would never end; enqueue the other task instead")

    # ------------------------------------------------------------ calls

    def enqueue(self, session: Session | Connection, /, *args: Any, **kwargs: Any) -> Handle:
        """Send this task with the caller's commit: `capture_payment.enqueue(session, payment_id=...)`.

        The arguments are the task's own, and of `apply_async`'s options countdown (seconds), eta (aware datetime),
        priority, queue, task_id, idempotency_key, tenant and ordering_key; an argument of the task wins over an option of its name.
        Raises `MissingKey`, `InvalidKey` and `InvalidArguments` at once; then nothing was written.
        """
        parameters = self._signature.parameters
        options = {name: kwargs.pop(name) for name in ENQUEUE_OPTIONS if name in kwargs and name not in parameters}
        countdown, eta = _delay(options.pop("countdown", None), options.pop("eta", None))
        task_id = str(options.pop("task_id", None) or uuid())
        id, headers = self._checked(args, kwargs, options.pop("idempotency_key", None), options.pop("tenant", None))
        ordering_key = options.pop("ordering_key", None)
        _check_options(self.app, task_id=task_id, **options)
        # what the decorator says about every message of this task holds here as in apply_async
        options = {name: value for name, value in self._get_exec_options().items() if name in TASK_OPTIONS} | options
        message = Message.composed(
            self.app, self.name, args, kwargs, task_id=task_id, headers=headers, **_shown(id), **options
        )
        outbox.insert(
            session,
            id,
            headers[FINGERPRINT_HEADER],
            message,
            queue=message.queue(self.app),
            countdown=countdown,
            eta=eta,
            ordering_key=ordering_key,
        )
        return Handle(self.app, id, task_id)

    def apply_async(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        task_id: str | None = None,
        *,
        idempotency_key: object = None,
        tenant: str | None = None,
        **options: Any,
    ) -> Any:
        """Send the task now. Protected against duplicates, not against a lost publish: that is what `enqueue` is for."""
        args, kwargs = tuple(args or ()), dict(kwargs or {})
        if (options.get("expires") or self.expires) is not None:
            raise InvalidArguments("expires: an accepted operation is never dropped; cancel it instead")
        given = options.pop("headers", None) or {}
        id, headers = self._checked(args, kwargs, idempotency_key, tenant, given)
        return super().apply_async(args, kwargs, task_id, headers={**given, **headers}, **(_shown(id) | options))

    def apply(
        self,
        args: Any = None,
        kwargs: Any = None,
        *,
        idempotency_key: object = None,
        tenant: str | None = None,
        **options: Any,
    ) -> Any:
        """Run the task here, eagerly, under its key; retries follow at once, and a `Defer` is raised.

        Raises `CallRefused` inside an open transaction of this thread: the task commits on a connection of its own.
        """
        eager.check_no_transaction(Runtime.of(self.app).engine.url)
        args, kwargs = tuple(args or ()), dict(kwargs or {})
        given = options.pop("headers", None) or {}
        _, headers = self._checked(args, kwargs, idempotency_key, tenant, given)
        return super().apply(args, kwargs, headers={**given, **headers}, **options)

    def _checked(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        key: object,
        tenant: str | None,
        headers: Mapping[str, Any] = MappingProxyType({}),
    ) -> tuple[OperationId, dict[str, Any]]:
        """Everything that can be refused about a call is refused where it is made."""
        arguments = keys.bind(self._signature, args, kwargs)
        key = headers.get(KEY_HEADER) if key is None else key
        tenant = headers.get(TENANT_HEADER) if tenant is None else tenant
        id = self._operation(arguments, key, tenant)
        limit = Runtime.of(self.app).settings.arguments_limit
        if (size := len(keys.canonical_json(arguments))) > limit:
            raise InvalidArguments(f"arguments: at most {limit} bytes as JSON, got {size}")
        sent = {
            KEY_HEADER: id.key,
            TENANT_HEADER: id.tenant,
            FINGERPRINT_HEADER: keys.fingerprint(arguments),
            VERSION_HEADER: MESSAGE_VERSION,
        }
        return id, sent

    def _operation(self, arguments: Mapping[str, Any], key: object, tenant: object) -> OperationId:
        if key is None and self._key_function is not None:
            key = type(self)._key_function(arguments)  # type: ignore[misc]
        if key is None:
            raise MissingKey(f"{self.name}: give idempotency_key=, or the task a key template")
        if tenant is None:
            tenant = Runtime.of(self.app).settings.tenant
        return OperationId(keys.check_key(tenant, field="tenant"), self.name, keys.check_key(key))

    @property
    def _signature(self) -> inspect.Signature:
        signature: inspect.Signature | None = self.__dict__.get("_cached_signature")
        if signature is None:
            signature = self.__dict__["_cached_signature"] = inspect.signature(self.run)
        return signature


def _shown(id: OperationId) -> dict[str, Any]:
    """What Flower and the logs may show of a call: its key, never its arguments."""
    return {"argsrepr": f"idempotency-key={id.key}", "kwargsrepr": "{}"}


def _delay(countdown: object, eta: object) -> tuple[float, datetime | None]:
    if countdown is None:
        countdown = 0.0
    if not isinstance(countdown, int | float) or not 0 <= countdown <= MAX_DELAY:
        raise InvalidArguments(f"countdown: must be between 0 and {MAX_DELAY:.0f} seconds, got {countdown!r}")
    if eta is not None and (not isinstance(eta, datetime) or eta.tzinfo is None):
        raise InvalidArguments("eta: must be a datetime with a time zone")
    return float(countdown), eta


def _check_options(app: Celery, *, task_id: str, queue: object = None, priority: object = None) -> None:
    """What would only fail in the relay, long after the caller's commit, is refused here."""
    if not 0 < len(task_id.encode()) <= 255:
        raise InvalidArguments(f"task_id: at most 255 bytes, got {len(task_id.encode())}")
    if queue is not None and queue not in app.amqp.queues:
        raise InvalidArguments(f"queue: {queue!r} is not among this application's task_queues")
    if priority is not None and (type(priority) is not int or not 0 <= priority <= 255):
        raise InvalidArguments(f"priority: must be an integer from 0 to 255, got {priority!r}")
