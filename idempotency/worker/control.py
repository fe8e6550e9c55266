"""What a body may say to Celery about its own task: retry it, or replace it. And what it may not."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, NoReturn

from celery import Celery, Signature, signature
from celery.backends.base import DisabledBackend
from celery.exceptions import Ignore, ImproperlyConfigured, Reject, Retry
from celery.result import allow_join_result
from celery.utils.time import maybe_make_aware
from kombu.exceptions import SerializationError

from ..application import runtime_of
from ..attempt.endings import MAX_DELAY
from ..attempt.policy import Policy
from ..errors import (
    CallRefused,
    Defer,
    InvalidArguments,
    LeaseLost,
    OutcomeInDoubt,
    PermanentError,
    ResultErased,
    RetriesExhausted,
    SettingsError,
    Unanswered,
    UnsupportedControl,
)
from ..handle import R_co
from ..observe.logs import log
from ..store.statements import describe
from ..wire import keys, results
from ..wire.delivery import Delivery
from .body import RunningTask
from .calls import KeyedTask
from .following import first_of
from .using import P

# Wrong with the replacement or the application's settings, whatever the broker says: no such queue, no arguments that fit.
NEVER_SENT = (CallRefused, ImproperlyConfigured, SerializationError, NotImplementedError, ValueError, TypeError,
              LookupError, AttributeError)  # fmt: skip
# Operations that replace each other in a circle would send each other forever.
LONGEST_REPLACEMENT = 1_000


class InvalidReplacement(InvalidArguments, ImproperlyConfigured):
    """No task can be replaced with this. Celery's error, with its message."""


class ControlledTask(RunningTask[P, R_co], Generic[P, R_co]):
    """Celery's retry and replace, for a task whose record decides. Use `IdempotentTask`."""

    abstract = True

    # what `retry` raises when there is none left, for bodies that catch it
    MaxRetriesExceededError = RetriesExhausted

    max_attempts: ClassVar[int | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._read_max_retries()

    @classmethod
    def bind(cls, app: Celery) -> Celery:
        bound: Celery = super().bind(app)
        cls._read_max_retries()  # from task_annotations
        return bound

    @classmethod
    def _read_max_retries(cls) -> None:
        """Celery's `max_retries` is the same limit as `max_attempts`, which counts the first attempt, too."""
        given = inspect.getattr_static(cls, "max_retries")
        if not isinstance(given, property):
            _check_retries(f"max_retries of {cls.__name__}", given)
            if (attempts := cls.__dict__.get("max_attempts")) not in (None, given + 1):
                raise SettingsError(
                    f"max_retries={given} and max_attempts={attempts} of {cls.__name__}: give one of them"
                )
            cls.max_attempts = given + 1
            cls.max_retries = ControlledTask.__dict__["max_retries"]  # type: ignore[method-assign]
        of_autoretry = getattr(cls, "retry_kwargs", None) or {}
        if "max_retries" in of_autoretry:
            _check_retries(f"retry_kwargs of {cls.__name__}: max_retries", retries := of_autoretry["max_retries"])
            if cls.max_attempts is None:
                cls.max_attempts = retries + 1
            elif cls.max_attempts <= retries:
                raise SettingsError(
                    f"retry_kwargs of {cls.__name__}: max_retries={retries} is more than its max_attempts={cls.max_attempts} "
                    f"allow; give the task max_retries={retries}"
                )

    @property
    def max_retries(self) -> int:
        """How often this task is tried again: one less than its `max_attempts`."""
        return Policy.of(self, runtime_of(self.app).settings).max_attempts - 1

    @max_retries.setter
    def max_retries(self, retries: int) -> None:
        self.__dict__["max_attempts"] = retries + 1

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

        `countdown` in seconds, `eta` as an aware datetime. Raises `Retry`; with `throw=False` returns it, and the attempt is
        let go once the body has returned. Raises an `exc` that is a final error; `RetriesExhausted` beyond `max_retries`,
        and without an `exc` beyond the task's own; `InvalidArguments` for a delay of more than ten years;
        `UnsupportedControl` for other arguments, which would be another operation, and for more retries than the task has.
        """
        if not self._is_this_call(args, kwargs):
            raise UnsupportedControl("retry: other arguments are another operation; enqueue it under its own key")
        if isinstance(exc, PermanentError | Defer | LeaseLost | OutcomeInDoubt | Ignore | Reject):
            raise exc  # autoretry_for must not turn a final error into another attempt
        if max_retries is not None and max_retries > self.max_retries:
            raise UnsupportedControl(
                f"retry: max_retries={max_retries} is more than the task's own {self.max_retries}, after which the operation "
                f"ends; give the task max_retries={max_retries}"
            )
        if max_retries is None and exc is None:
            max_retries = self.max_retries
        if max_retries is not None and self.request.retries >= max_retries:
            raise RetriesExhausted(f"no result after {max_retries} retries") from exc
        if eta is not None:
            countdown = max((maybe_make_aware(eta) - self.app.now()).total_seconds(), 0.0)
        if countdown is not None and countdown > MAX_DELAY:
            raise InvalidArguments(f"retry: countdown: at most {MAX_DELAY:.0f} seconds, got {countdown:g}")
        retry = Retry(exc=exc, when=self.default_retry_delay if countdown is None else countdown)
        retry.__cause__ = exc  # Celery's own copy, `retry.exc`, is another error if this one cannot be pickled
        if throw:
            raise retry
        self.request.asked = retry  # the body may go on; then it has not ended its operation
        return retry

    def _is_this_call(self, args: Any, kwargs: Any) -> bool:
        """Whether arguments given to `retry` are those of this attempt; what is not given stays."""
        if args is None and kwargs is None:
            return True
        mine = self._bound(self.request.args, self.request.kwargs)
        positional, named = self._as_sent(args, kwargs)
        try:
            given = dict(self.signature_of_run.bind_partial(*positional, **named).arguments)
            if args is None or kwargs is None:
                given = {**mine, **given}
            return keys.canonical_json(given) == keys.canonical_json(mine)
        except (TypeError, InvalidArguments):
            return False

    def replace(self, sig: Any) -> NoReturn:
        """End this operation here, and leave its result, chain and callbacks to another signature.

        The operation completes with this attempt's writes. Then `sig` is sent under its task id, and again for each
        duplicate of this operation, so its tasks should be idempotent, too. Sent like the next task of a chain: not part
        of the commit. Raises `CallRefused` for a signature that could not be sent (also an `ImproperlyConfigured` where
        Celery raises that) or is this operation itself, `UnsupportedControl` for the thousandth replacement in a row.
        """
        if self.request.replaced_task_nesting >= LONGEST_REPLACEMENT:
            raise UnsupportedControl(f"replace: at most {LONGEST_REPLACEMENT} times in a row")
        limit = runtime_of(self.app).settings.result_limit
        wrapped = {results.REPLACED: sig}  # as it is stored, always in the record: SQL looks for it there
        plain = results.from_text(results.to_text(wrapped, limit=limit, what="replacement"))[results.REPLACED]
        replacement: Signature = signature(plain, app=self.app)
        if "chord" in replacement.options:
            raise InvalidReplacement("A signature replacing a task must not be part of a chord")
        if (
            replacement.subtask_type in ("group", "chord")
            and not self.request.is_eager
            and isinstance(self.backend, DisabledBackend)
        ):
            raise InvalidArguments("replace: a group or a chord needs a result backend")
        if _is_empty_chain(replacement):
            raise InvalidReplacement("Cannot replace with an empty chain")
        for first in first_of(replacement):
            task = self.app.tasks.get(first.task)
            if isinstance(task, KeyedTask) and task._check_call(first) == self._attempt.claim.id:
                raise InvalidArguments(
                    "replace: by this operation itself, which has then ended; retry it, or give another key"
                )
        self.request.replacement = {results.REPLACED: plain}
        raise Ignore("replaced")

    def _replacement(self) -> Any:
        """The result of this attempt if its body has called `replace`, as the JSON that a duplicate reads."""
        replacement, self.request.replacement = self.request.replacement, None
        return replacement

    def _hand_over(self, result: Mapping[str, Any]) -> Any:
        """Send the replacement of an operation that is committed. Raises `Ignore`; returns its result if it is eager.

        Raises `Unanswered` if it could not be sent: it is owed, so the message has to come back. Raises
        `UnsupportedControl` if it never can be.
        """
        if self.request.replaced_task_nesting >= LONGEST_REPLACEMENT:
            raise UnsupportedControl(f"replace: at most {LONGEST_REPLACEMENT} times in a row")
        try:
            return super().replace(signature(result[results.REPLACED], app=self.app))
        except Ignore:
            raise
        except Exception as error:
            # an eager call has run it; some OSErrors are ValueErrors, too
            if isinstance(error, NEVER_SENT) and not isinstance(error, OSError) and not self.request.is_eager:
                raise UnsupportedControl(f"replace: its signature cannot be sent: {describe(error)}") from error
            raise Unanswered(f"{self.name}: its replacement could not be sent") from error

    def _read(self, delivery: Delivery, stored: str) -> Any:
        """The stored result, for a duplicate. Raises, for a caller, what reading it raises.

        For a message it is `Ignore`, also if the result was erased: the operation is carried out, and no failure, whose errbacks
        might undo what was done.
        """
        try:
            return runtime_of(self.app).read_result(stored)
        except Exception as error:
            if delivery.is_eager:
                raise
            say = log.info if isinstance(error, ResultErased) else log.error
            say("result_unreadable", task=self.name, key=delivery.id.key, error=type(error).__name__)
            raise Ignore("its result cannot be read") from error

    def on_replace(self, sig: Signature) -> Any:
        if self.request.is_eager:
            with allow_join_result():  # nothing waits: each result is there when it is asked for
                return sig.apply().get()
        return super().on_replace(sig)


def _is_empty_chain(sig: Signature) -> bool:
    """Whether nothing would be sent; of an empty group something is: what takes its results, which are none."""
    return sig.subtask_type == "chain" and all(map(_is_empty_chain, sig.tasks))


def _check_retries(name: str, given: object) -> None:
    if type(given) is not int or given < 0:
        raise SettingsError(f"{name}: must be 0 or more, got {given!r}; every operation ends")


def is_replacement(result: Any) -> bool:
    """Whether this is the stored result of an operation that was replaced."""
    return isinstance(result, dict) and result.keys() == {results.REPLACED}
