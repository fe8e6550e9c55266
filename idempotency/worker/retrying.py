"""Celery's `retry` and `max_retries`, for a task whose record counts the attempts."""

from __future__ import annotations

import inspect
from asyncio import CancelledError
from datetime import datetime
from typing import Any, ClassVar, Generic

from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery import Celery
from celery.exceptions import Ignore, Reject, Retry
from celery.utils.time import maybe_make_aware

from ..attempt.endings import MAX_DELAY
from ..errors import (
    Again,
    Defer,
    InvalidArguments,
    LeaseLost,
    OperationFailed,
    OutcomeInDoubt,
    PermanentError,
    RetriesExhausted,
    SettingsError,
    UnsupportedControl,
)
from ..handle import R_co
from ..store.statements import describe
from ..wire import keys
from .keyed import Keyed
from .options import name_of
from .using import P

# From a body they are errors like others. Celery would take them to mean that the worker or its process has ended, or is to end.
OF_THE_WORKER = (CancelledError, MemoryError, Terminated, TimeLimitExceeded, WorkerLostError)


class RetriedTask(Keyed[P, R_co], Generic[P, R_co]):
    """A task whose attempts are counted on a record. Use `IdempotentTask` or `DeduplicatedTask`."""

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
            _check_retries(f"max_retries of {name_of(cls)}", given)
            if (attempts := cls.__dict__.get("max_attempts")) not in (None, given + 1):
                raise SettingsError(
                    f"max_retries={given} and max_attempts={attempts} of {name_of(cls)}: give one of them"
                )
            cls.max_attempts = given + 1
            cls.max_retries = RetriedTask.__dict__["max_retries"]  # type: ignore[method-assign]
        of_autoretry = getattr(cls, "retry_kwargs", None) or {}
        if "max_retries" in of_autoretry:
            _check_retries(f"retry_kwargs of {name_of(cls)}: max_retries", retries := of_autoretry["max_retries"])
            if cls.max_attempts is None:
                cls.max_attempts = retries + 1
            elif cls.max_attempts <= retries:
                raise SettingsError(
                    f"retry_kwargs of {name_of(cls)}: max_retries={retries} is more than its max_attempts={cls.max_attempts} "
                    f"allow; give the task max_retries={retries}"
                )

    @property
    def max_retries(self) -> int:
        """How often this task is tried again: one less than its `max_attempts`."""
        return (self.max_attempts or self._settings.max_attempts) - 1

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
        """Let go and try again later, under the same key and task id; the delay is kept in the record.

        `countdown` in seconds, `eta` as an aware datetime. Raises `Retry`; with `throw=False` returns it, and the attempt is
        let go once the body has returned. Raises an `exc` that is a final error; `RetriesExhausted` beyond `max_retries`,
        and without an `exc` beyond the task's own; `InvalidArguments` for a delay of more than ten years, or of NaN;
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
            countdown = _seconds_until(eta, self.app)
        when = self.default_retry_delay if countdown is None else countdown  # None: the task's own back-off
        retry = Retry(exc=exc, when=None if when is None else _checked(when))
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


def again(retry: Retry, app: Celery) -> Again:
    """What a `Retry` that ends a body asks for, also one that the body has made itself. Raises `InvalidArguments` for its delay."""
    when = _seconds_until(retry.when, app) if isinstance(retry.when, datetime) else retry.when
    delay = float(_checked(when)) if isinstance(when, int | float) else None
    return Again(delay, retry.__cause__ or retry.exc or retry)


def _seconds_until(time: datetime, app: Celery) -> float:
    return max(float((maybe_make_aware(time) - app.now()).total_seconds()), 0.0)


def _checked(countdown: float) -> float:
    """Seconds; below 0 they are over. Raises `InvalidArguments`."""
    if not countdown <= MAX_DELAY:  # NaN is not, either
        raise InvalidArguments(f"retry: countdown: at most {MAX_DELAY:.0f} seconds, got {countdown}")
    return max(countdown, 0)


def _check_retries(name: str, given: object) -> None:
    if type(given) is not int or given < 0:
        raise SettingsError(f"{name}: must be 0 or more, got {given!r}; every operation ends")


def told_to_celery(error: BaseException) -> BaseException:
    """The error of a body, or what stands for it where Celery would take it for something else."""
    if not isinstance(error, OF_THE_WORKER):
        return error
    told = OperationFailed(describe(error), type(error).__name__)
    told.__cause__ = error
    return told
