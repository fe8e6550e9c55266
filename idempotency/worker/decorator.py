"""`@idempotent_task(app, key=...)`: `@app.task(base=IdempotentTask, bind=True, key=...)` for a type checker.

Celery's own decorator has no types, so what it returns accepts any argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from celery import Celery

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
def idempotent_task(app: Celery, /, *, base: type[TaskT], **options: Any) -> MakesTask[TaskT]: ...
@overload
def idempotent_task(app: Celery, /, **options: Any) -> MakesTask[IdempotentTask]: ...
def idempotent_task(app: Celery, /, *, base: type[IdempotentTask] = IdempotentTask, **options: Any) -> Any:
    """Make an idempotent task of a function whose first parameter is the task itself, and keep its types.

        @idempotent_task(app, name="payments.capture", key="{payment_id}")
        def capture_payment(self: IdempotentTask, payment_id: str) -> dict[str, str]: ...

    The options are those of `@app.task`, with those of `IdempotentTask`; `base` is a subclass of it. From then on a type
    checker refuses `capture_payment.enqueue(session, payment=1)`, and knows what `handle.result()` returns.
    """
    return app.task(base=base, bind=True, **options)
