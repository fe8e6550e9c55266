"""IdempotentTask: claim, run, commit. The file to read first.

    @app.task(base=IdempotentTask, bind=True, key="{payment_id}")
    def capture_payment(self, payment_id): ...

Nothing leaves the wrapper unexplained, because whatever Celery sees decides whether the message is acknowledged:

    a value, or an exception of the body     the record is completed, or failed: acknowledged
    Retry                                    released, and the next delivery is committed: acknowledged
    Ignore                                   a duplicate in flight, and one row was counted: acknowledged
    Reject(requeue=False)                    a defect of the message, and what nobody foresaw in a claimed operation: the
                                             dead-letter queue stores it
    Ignore, Reject(requeue=True)             no answer from Postgres: it is in the outbox or the queue again (`waiting.py`)
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NoReturn

from celery import Celery, Task
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.utils.uuid import uuid
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from . import conclusions, dead_letters, eager, keys, metrics, outbox, records
from .attempt import Attempt, Policy
from .conclusions import OnFailed, Undo
from .crash_points import crash_point
from .delivery import Delivery
from .effects import Reconcile
from .endings import MAX_DELAY, Ending, Raised, Release, RetriesExhausted, Returned, end_for
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
    ETA_HEADER,
    FINGERPRINT_HEADER,
    GENERATION_HEADER,
    KEY_HEADER,
    MESSAGE_VERSION,
    ORIGIN_HEADER,
    OUTBOX_HEADER,
    REVOKED_HEADER,
    TENANT_HEADER,
    VERSION_HEADER,
    WAITS_HEADER,
    Message,
)
from .providers import ProviderContract
from .publisher import Published, Publisher
from .records import Busy, Changed, Claimed, Completed, Failed, Mismatch
from .runtime import Runtime
from .session import AttemptSession
from .statements import describe
from .waiting import Unanswered, Waiting, is_stopping

# A doubt is resolved by claiming again. Each round moves the fence, so five in a row mean something is broken.
DOUBT_ROUNDS = 5
# Until a last look that met a Postgres in trouble is taken again; `defer_budget` bounds how often.
LOOK_PAUSE = 5.0
# Seconds in the outbox for a delivery that got no answer though Postgres takes it there: somebody has to mend that.
PUT_BACK = 60.0
# Seconds for the confirm of a copy; the hard time limit may be near.
CONFIRM_TIMEOUT = 5.0
# The options of enqueue() that are not arguments of the task.
ENQUEUE_OPTIONS = ("countdown", "eta", "priority", "queue", "task_id", "idempotency_key", "tenant", "ordering_key")

# Those of them, and of the task's own options, that shape its message.
TASK_OPTIONS = ("queue", "priority", "time_limit", "soft_time_limit")
OnBusy = Literal["ack", "wait", "raise"]


class IdempotentTask(Task):
    """A Celery task whose database effects, result and messages are committed together, once per key.

    Use it as `base=`. The options stand in the decorator like Celery's own:

    key             a template (`"{customer_id}:{request_id}"`), a function of the arguments by name,
                    `content_hash(...)`, or None: then every call gives `idempotency_key=`
    on_failed       `on_failed(session, operation, error)`, run in the failing transaction
    permanent_errors exception types that end the operation at once
    provider        what the provider of its effects promises about idempotency keys (`idempotency.providers`)
    effect_types    what its effects return, by name (any type pydantic checks): a person's word is held against it
    on_busy         what a duplicate does in a worker while the operation runs: "ack" (default; "raise" means the same)
                    or "wait"; an eager call raises `OperationBusy` whatever this says
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
    provider: ClassVar[ProviderContract | None] = None
    effect_types: ClassVar[Mapping[str, Any]] = MappingProxyType({})
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
            delivery = self._delivery()
            try:
                outcome = Raised(Ignore()) if self._is_early(delivery) else self._perform(delivery)
            except Unanswered as unanswered:
                raise self._put_back(delivery, unanswered) from unanswered.__cause__
        except (Ignore, Reject):
            raise
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
        delivery = self._as_accepted(runtime, delivery)
        token = secrets.token_hex(16)
        ending: Ending | None = None
        decided: Claimed | None = None  # the claim under which the ending was decided
        for _ in range(DOUBT_ROUNDS):
            with metrics.phase(self.name, "claim"):
                answer = self._claim(runtime, delivery, token)
            match answer:
                case Claimed() as claim:
                    if decided is not None and not claim.resumes(decided):
                        # An ending belongs to the attempt that decided it: this is another one, on other ground.
                        ending = None
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
                                ending, decided = end_for(error, attempt), claim
                        outcome = ending.apply(attempt)
                    except (LeaseLost, OutcomeInDoubt, DBAPIError, PoolTimeout, SoftTimeLimitExceeded):
                        if ending is not None and not isinstance(ending.outcome, Exception):
                            raise ending.outcome from None  # the process ends; recovery has the rest
                        continue  # claim again, with the same token: the record decides
                    finally:
                        attempt.close()
                        self.request.attempt = None
                    if isinstance(ending, Release) and delivery.is_eager and isinstance(ending.outcome, Exception):
                        if ending.give_back and ending.cause is not None:
                            return Raised(ending.cause)  # later means that the caller calls again
                        return self._perform(delivery)  # nobody delivers again: the next attempt is here and now
                    return Raised(outcome)
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
        if (end := self._end_without_body(attempt)) is not None:
            return self._look_once_more(attempt, end)
        crash_point("body.entered")
        with metrics.phase(self.name, "body"):
            result = self.run(*self.request.args, **self.request.kwargs)
        with metrics.phase(self.name, "commit"):
            attempt.complete(result)
        return result

    def _end_without_body(self, attempt: Attempt) -> PermanentError | None:
        """Why this claim ends the operation instead of running its body, if it does."""
        if attempt.claim.attempts > attempt.policy.max_attempts:
            attempt.note_spent()  # from here on counted by the record: the next deploy may change the limit
        if self._is_revoked(attempt):
            return PermanentError("revoked through Celery before it had ended", "revoked")
        if attempt.claim.spent_at is not None:
            return AttemptsExhausted(f"no result after {attempt.claim.spent_at - 1} attempts")
        return None

    def _look_once_more(self, attempt: Attempt, end: PermanentError) -> Any:
        """Finish what has happened outside, if asking the provider allows it; begin nothing. Else raise `end`.

        One attempt beyond the last, however often that is given back: a body that kills its process ends with it.
        """
        claim = attempt.claim
        if not conclusions.has_acted(claim.effects) or (claim.spent_at is not None and claim.attempts > claim.spent_at):
            raise end
        attempt.ends_as = end
        try:
            result = self.run(*self.request.args, **self.request.kwargs)
        except (LeaseLost, OutcomeInDoubt, Defer):
            raise
        except (OperationalError, PoolTimeout) as error:
            # Postgres is to blame: a look that could not be taken concludes nothing
            raise Defer(LOOK_PAUSE, f"the last look met {describe(error)}") from error
        except Exception as error:
            raise end from error
        if attempt.stopped or attempt.passed_over("begun"):
            raise end  # the body has gone on without what it was refused, or did not come to what is unknown
        attempt.complete(result)
        return result

    def _claim(
        self, runtime: Runtime, delivery: Delivery, token: str
    ) -> Claimed | Completed | Failed | Mismatch | Busy:
        """Claim the operation, or learn from the record why not. Raises `Unanswered`."""
        leases, id = runtime.leases, delivery.id
        hint = Hint.FREE if delivery.resent else leases.take(id, token, delivery.fingerprint)
        if hint is Hint.GUARDED:
            return Busy()  # a duplicate was counted before this one: the record will be finished without it
        crash_point("lease.taken")

        def ask() -> Claimed | Completed | Failed | Mismatch | Busy:
            with runtime.autocommit() as connection:
                if hint is Hint.HELD and self._counted(runtime, connection, delivery):
                    return Busy()
                while True:
                    answer = self._ask(runtime, connection, delivery, token, synchronous=False)
                    if isinstance(answer, Busy) and self._counted(runtime, connection, delivery):
                        return answer
                    if not isinstance(answer, Changed | Busy):
                        return answer
                    # the row became claimable meanwhile

        answer = self._waiting(delivery).answer(ask)
        if isinstance(answer, Claimed):
            metrics.claims.labels(self.name).inc()
            if answer.taken_over:
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

    def _as_accepted(self, runtime: Runtime, delivery: Delivery) -> Delivery:
        """The delivery under the fingerprint that it was accepted with, if a deploy has renamed parameters since.

        The message's word alone proves nothing: what is stored under that fingerprint has to be this very message.
        """
        given = delivery.headers.get(FINGERPRINT_HEADER)
        computed = [delivery.fingerprint, *delivery.also]
        if given in (None, *computed) or not keys.is_fingerprint(given):
            return delivery
        body = Message.from_text(delivery.message).body

        def is_stored() -> bool:
            with runtime.autocommit() as connection:
                return records.is_accepted(connection, delivery.id, str(given), body)

        if not self._waiting(delivery).answer(is_stored):
            return delivery
        return replace(delivery, fingerprint=str(given), also=computed)

    def _waiting(self, delivery: Delivery) -> Waiting:
        limit = (self.request.timelimit or (None,))[0] or self.time_limit or self.app.conf.task_time_limit
        return Waiting(self.name, time_limit=limit, is_eager=delivery.is_eager)

    def _is_early(self, delivery: Delivery) -> bool:
        """Whether its time has not come by the database's clock; then it waits in the outbox, and this one may go."""
        if (eta := delivery.eta) is None:
            return False
        runtime = Runtime.of(self.app)

        def park() -> bool:
            with runtime.autocommit() as connection:
                if records.has_come(connection, eta):
                    return False
                self._park(connection, delivery, Message.from_text(delivery.message), eta=eta)
                return True

        return self._waiting(delivery).answer(park)

    def _park(
        self,
        connection: Connection,
        delivery: Delivery,
        message: Message,
        *,
        countdown: float = 0.0,
        eta: datetime | None = None,
    ) -> None:
        """Write the next delivery of this message to the outbox: the relay sends it when it is due."""
        outbox.insert(
            connection,
            delivery.id,
            delivery.fingerprint,
            message,
            queue=delivery.queue,
            countdown=countdown,
            eta=eta,
            origin="retry",
            generation=int(delivery.headers.get(GENERATION_HEADER, 1)),
        )

    def _put_back(self, delivery: Delivery, unanswered: Unanswered) -> Any:
        """End a delivery that has waited long enough without losing its message. Returns what is to be raised.

        The outbox keeps it, if Postgres takes that; otherwise the broker, as a confirmed copy at the end of its queue:
        a message that is only handed back comes at once, and its delivery limit counts that. Only a worker that shuts
        down, or has lost the broker, leaves it at that.
        """
        if delivery.is_eager:
            return unanswered.__cause__ or unanswered
        to, message = "queue", Message.from_text(delivery.message)
        if not is_stopping():
            to = "outbox" if self._parked(delivery, message) else "copy" if self._copied(delivery, message) else to
        metrics.put_back.labels(self.name, to).inc()
        log.warning("put_back", operation=self.name, key=delivery.id.key, to=to)
        if to == "queue":
            return Reject("no answer from Postgres", requeue=True)
        return Ignore()

    def _parked(self, delivery: Delivery, message: Message) -> bool:
        try:
            with Runtime.of(self.app).autocommit() as connection:
                self._park(connection, delivery, message, countdown=PUT_BACK, eta=delivery.eta)
        except Exception:
            return False
        return True

    def _copied(self, delivery: Delivery, message: Message) -> bool:
        id = str(delivery.headers.get(OUTBOX_HEADER) or uuid())
        message = message.marked(
            origin=delivery.headers.get(ORIGIN_HEADER) or "retry",
            outbox_id=id,
            generation=int(delivery.headers.get(GENERATION_HEADER, 1)),
        )
        if delivery.eta is not None:
            message.headers["eta"] = delivery.eta.isoformat()
        publisher, published = Publisher(self.app, confirm_timeout=CONFIRM_TIMEOUT), Published()
        try:
            publisher.publish([(id, message)], published)
        except Exception:
            return False
        finally:
            publisher.close()
        return bool(published.confirmed)

    def _counted(self, runtime: Runtime, connection: Connection, delivery: Delivery) -> bool:
        counted, holder = records.count_duplicate(connection, delivery.id, delivery.fingerprint, delivery.also)
        if counted and holder is not None:
            runtime.leases.guard(delivery.id, holder, delivery.fingerprint)
        return counted

    def _refuse(self, runtime: Runtime, delivery: Delivery, generation: int) -> FingerprintMismatch:
        """Another request under a used key: keep it as a dead letter, touch nothing else."""
        error = FingerprintMismatch(f"{self.name}: this idempotency key was used with other arguments")
        if not delivery.is_eager:

            def store() -> None:
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

            self._waiting(delivery).answer(store)
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

                def park() -> None:
                    with runtime.autocommit() as connection:
                        self._park(connection, delivery, message, countdown=delay)

                self._waiting(delivery).answer(park)
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
        if request.is_eager:
            message = message.routed(
                self.app, self.name, request.args or (), request.kwargs or {}
            )  # should this process die, a worker goes on with it
        # by the rule of the message, so that the record agrees with the outbox row it came from
        fingerprint, *also = keys.fingerprints(arguments, headers.get(FINGERPRINT_HEADER))
        return Delivery(
            id=id,
            fingerprint=fingerprint,
            also=also,
            arguments=arguments,
            task_id=request.id,
            message=message.to_text(),
            headers=headers,
            queue=message.queue(self.app),
            resent=ORIGIN_HEADER in headers or bool((request.delivery_info or {}).get("redelivered")),
            is_eager=bool(request.is_eager),
            eta=maybe_make_aware(maybe_iso8601(headers[ETA_HEADER])) if headers.get(ETA_HEADER) else None,
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

    def step(self, name: str, fn: Callable[..., Any], *args: Any, undo: Undo | None = None, **kwargs: Any) -> Any:
        """Commit a database phase before the body goes on: `fn(session, *args, **kwargs)` and its result, once.

        If the operation ends without success, `undo(session, result)` takes the step back in the failing transaction,
        the last step first, and a replay does the step again. It is a function that can be imported by its name. No
        undo runs while an effect is unknown, nor over a later effect that has happened, unless it accepts
        `effects` (their results by name) and answers for them. Raises as `effect` does.
        """
        return self._attempt.step(name, fn, *args, undo=undo, **kwargs)

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

    # ------------------------------------------------------------ calls

    def enqueue(self, session: Session | Connection, /, *args: Any, **kwargs: Any) -> Handle:
        """Send this task with the caller's commit: `capture_payment.enqueue(session, payment_id=...)`.

        The arguments are the task's own, and of `apply_async`'s options countdown (seconds), eta (aware datetime),
        priority, queue, task_id, idempotency_key, tenant and ordering_key; an argument of the task wins over an option
        of its name.
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
        eager.check_no_transaction(Runtime.of(self.app))
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
