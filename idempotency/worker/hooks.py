"""What Celery would run around a task's own code, before anything is recorded: moved into the attempt, or refused.

With `track_started` Celery stores the state STARTED; then it calls `before_start`, and then `__call__`. If one of these
raised outside the attempt, Celery would acknowledge the message, and neither a record nor a dead letter would say so.
Inside it, an error of the last two means what an error of the body means, and a result backend that is away is logged.

After an `IdempotentTask` Celery stores its result. If that raises, Celery takes it for an error of the task: the state is FAILURE
then, but neither errbacks nor `on_failure` are called, which might undo what was done.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from contextvars import ContextVar
from copy import deepcopy
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from celery import Task
from celery.states import STARTED

from ..attempt.sharing import SharingAttempt
from ..errors import SettingsError
from ..observe.logs import log

# The strategy of a task with batches, as Celery looks it up.
BATCHING = "idempotency.worker.batching:strategy"
# The task id of the last operation carried out here: Celery has forgotten its request when it calls `on_failure` for an error
# of its own.
_carried_out: ContextVar[str | None] = ContextVar("carried_out", default=None)
# A shallow copy of these is enough.
IMMUTABLE = frozenset((str, int, float, bool, bytes, type(None)))


def is_celerys_own(cls: type[Any]) -> bool:
    """Whether a class is a task of Celery itself, such as `celery.chord_unlock`: its messages have no keys."""
    return cls.__module__.partition(".")[0] == "celery"


def check_class(cls: Any, base: Any) -> None:
    """Raise `SettingsError` for a task class of which `base` would not see every message, or not call every part."""
    for name in ("Strategy", "start_strategy"):
        if getattr(cls, name) not in (getattr(Task, name), BATCHING):
            raise SettingsError(
                f"{cls.__name__}: defines its own {name}, as celery-batches' Batches does; that takes messages past the "
                "claim, so they could be lost or run twice: use a plain task for it"
            )
    after = cls.__mro__[cls.__mro__.index(base) + 1 :]
    for other in after:
        if other is not Task and "__call__" in vars(other):
            raise SettingsError(
                f"{cls.__name__}: the __call__ of {other.__name__} would never run; name {other.__name__} before "
                f"{base.__name__} among the bases"
            )


def move_into_attempt(cls: Any, base: Any) -> None:
    """Leave a class's `track_started`, and its own `before_start` and `__call__`, to `run_in_attempt`. Idempotent.

    Its own `on_failure` is not called for what has been carried out.
    """
    if cls.track_started:
        cls.tracks_attempts, cls.track_started = True, False
    if cls.before_start is not Task.before_start:
        cls.own_before_start = inspect.getattr_static(cls, "before_start")
        cls.before_start = Task.before_start
    if cls.on_failure is not Task.on_failure and not hasattr(cls.on_failure, "own"):
        cls.on_failure = _unless_carried_out(inspect.getattr_static(cls, "on_failure"))
    if cls.__call__ is not base.__call__ and not hasattr(cls.__call__, "own"):
        cls.own_call = inspect.getattr_static(cls, "__call__")
        cls.__call__ = _entrance(cls.own_call, base)


def _entrance(own: Callable[..., Any], base: Any) -> Callable[..., Any]:
    """What a task that defines `__call__` is called by: a delivery. Its `super().__call__` is `base.__call__`."""

    def enter(task: Any, *args: Any, **kwargs: Any) -> Any:
        if type(task).own_call is own:
            return base._enter(task, args, kwargs)
        return own(task, *args, **kwargs)  # `super().__call__` of a subclass

    enter.own = own  # type: ignore[attr-defined]
    return enter


def note_entered(request: Any) -> None:
    """Note that nothing is known yet of a message that is delivered."""
    if not request.is_eager:
        _carried_out.set(None)


def note_carried_out(request: Any) -> None:
    """Note that an operation has ended without a failure, whatever Celery fails at after it."""
    if not request.is_eager:  # in the hook of another one, say
        request.errbacks = None
        _carried_out.set(request.id)


def _unless_carried_out(own: Any) -> Callable[..., Any]:
    def on_failure(task: Any, exc: BaseException, task_id: str, *others: Any) -> Any:
        if task_id is not None and task_id == _carried_out.get():
            log.error("not_told_to_celery", task=task.name, task_id=task_id, error=type(exc).__name__)
            return None
        return own.__get__(task, type(task))(exc, task_id, *others)

    on_failure.own = own  # type: ignore[attr-defined]
    return on_failure


def run_in_attempt(task: Any) -> Any:
    """Run the task's own `before_start`, and its body, through its own `__call__` if it has one.

    Their arguments are a copy: what they change there is not what `on_failed` is told, nor what they get if they run again.
    """
    request = task.request
    shares = isinstance(request.attempt, SharingAttempt)  # others' locks would wait for the result backend
    if task.tracks_attempts and not request.is_eager and not shares and not _ignores_result(task, request):
        _store_started(task, request)
    sent = request.args, request.kwargs
    request.args, request.kwargs = _copied(sent[0]), _copied(sent[1])
    try:
        if task.own_before_start is not None:
            task.own_before_start(request.id, request.args, request.kwargs)
        if task.own_call is None:
            return task.run(*request.args, **request.kwargs)
        return task.own_call(*request.args, **request.kwargs)
    finally:
        request.args, request.kwargs = sent


def _copied(sent: Any) -> Any:
    is_by_name = isinstance(sent, dict)
    if not IMMUTABLE.issuperset(map(type, sent.values() if is_by_name else sent)):
        return deepcopy(sent)
    return sent.copy() if is_by_name else sent[:]


def _ignores_result(task: Any, request: Any) -> bool:
    """What the message says, else what the task does. Celery's function for it is there since 5.7 only."""
    said = vars(request).get("ignore_result")  # not its class's default, which no message has set
    return bool(task.ignore_result if said is None else said)


def _store_started(task: Any, request: Any) -> None:
    meta = {"pid": os.getpid(), "hostname": request.hostname}
    try:
        task.backend.store_result(request.id, meta, STARTED, request=request)
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:
        log.warning("started_not_stored", task=task.name, error=type(error).__name__)
