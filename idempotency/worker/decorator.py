"""`@idempotent_task(app, key=...)`: `@app.task(base=IdempotentTask, bind=True, key=...)` for a type checker.

Celery's own decorator has no types, so what it returns accepts any argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from celery import Celery, shared_task

from .task import IdempotentTask

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
TaskT = TypeVar("TaskT", bound=IdempotentTask)
TaskT_co = TypeVar("TaskT_co", bound=IdempotentTask, covariant=True)


class MakesTask(Protocol[TaskT_co]):
    """Turns a function, whose first parameter is the task, into that task."""

    def __call__(self, function: Callable[Concatenate[TaskT_co, P], R], /) -> IdempotentTask[P, R]: ...


@overload
def idempotent_task(app: Celery | None = None, /, *, base: type[TaskT], **options: Any) -> MakesTask[TaskT]: ...
@overload
def idempotent_task(app: Celery | None = None, /, **options: Any) -> MakesTask[IdempotentTask]: ...
def idempotent_task(
    app: Celery | None = None, /, *, base: type[IdempotentTask] = IdempotentTask, **options: Any
) -> Any:
    """Make an idempotent task of a function whose first parameter is the task itself, and keep its types.

        @idempotent_task(app, name="payments.capture", key="{payment_id}")
        def capture_payment(self: IdempotentTask, payment_id: str) -> dict[str, str]: ...

    The options are those of `@app.task`, with those of `IdempotentTask`; `base` is a subclass of it. Without `app` it is a
    task of every application, as with Celery's `@shared_task`. From then on a type checker refuses
    `capture_payment.enqueue(session, payment=1)`, and knows what `handle.result()` returns.
    """
    decorator = shared_task if app is None else app.task
    return decorator(base=base, bind=True, **options)
