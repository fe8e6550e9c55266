"""The task base for Django: `enqueue` in Django's own transaction, beside what Celery's DjangoTask has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Protocol, TypeVar, overload

from asgiref.sync import sync_to_async
from celery import Celery
from typing_extensions import ParamSpec, Unpack

from ... import events
from ...handle import Handle, R_co
from ...store.callers import is_async_caller, is_caller
from ...worker import decorator, task, using
from ...worker.using import CallOptions, P
from .integration import current_transaction

if TYPE_CHECKING:

    class TypedDjangoTask(Generic[P, R_co]):
        """`DjangoTask`, where Celery's own has no types."""

        def delay_on_commit(self, *args: P.args, **kwargs: P.kwargs) -> None: ...
        def apply_async_on_commit(self, *args: Any, **kwargs: Any) -> None: ...
else:
    from celery.contrib.django.task import DjangoTask

    class TypedDjangoTask:
        """`DjangoTask`, with the parameters that a type checker sees."""

        def __class_getitem__(cls, parameters: Any) -> Any:
            return DjangoTask


Q = ParamSpec("Q")
R = TypeVar("R")


class IdempotentTask(task.IdempotentTask[P, R_co], TypedDjangoTask[P, R_co], Generic[P, R_co]):
    """`idempotency.IdempotentTask`, enqueued on Django's connection: `capture.enqueue(payment_id=payment.pk)`."""

    abstract = True

    # without a session, which the base class's has
    def enqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:  # type: ignore[override]
        """Send this task with the transaction that is open on Django's connection.

        In `transaction.atomic()` it leaves when the block commits, and never if that rolls back. In a body it leaves
        with the attempt's commit. Outside of both it is accepted at once, like anything else that the ORM writes there.
        Arguments, options and errors are those of `idempotency.IdempotentTask.enqueue`; so is a session or connection
        given first.
        """
        with _transaction(args) as given:
            enqueue: Any = super().enqueue
            return enqueue(*given, *args, **kwargs)  # type: ignore[no-any-return]

    async def aenqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:  # type: ignore[override]
        """Send this task from an async view: `enqueue`, in Django's thread for sync code, as the ORM's async methods do.

        Django has no async `atomic()`, so it is accepted at once; for a transaction call a function by `sync_to_async`,
        or give an async session of SQLAlchemy first.
        """
        if args and is_async_caller(args[0]):
            aenqueue: Any = super().aenqueue
            return await aenqueue(*args, **kwargs)  # type: ignore[no-any-return]
        return await sync_to_async(self.enqueue)(*args, **kwargs)

    def using(self, **options: Unpack[CallOptions]) -> Using[P, R_co]:
        """The task with options for its next call: `welcome.using(countdown=60).enqueue(17)`."""
        made = super().using(**options)
        return Using(made._task, made._options)


class Using(using.Using[P, R_co], Generic[P, R_co]):
    """Returned by `task.using(...)`."""

    def enqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:  # type: ignore[override]
        """Send the task as `task.enqueue` does."""
        with _transaction(args) as given:
            enqueue: Any = super().enqueue
            return enqueue(*given, *args, **kwargs)  # type: ignore[no-any-return]

    async def aenqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:  # type: ignore[override]
        """Send the task as `task.aenqueue` does."""
        if args and is_async_caller(args[0]):
            aenqueue: Any = super().aenqueue
            return await aenqueue(*args, **kwargs)  # type: ignore[no-any-return]
        return await sync_to_async(self.enqueue)(*args, **kwargs)


@contextmanager
def _transaction(args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Django's transaction, for a call that does not begin with its own."""
    if args and is_caller(args[0]):
        yield ()
    else:
        with current_transaction() as session:
            yield (session,)


def publish(event_type: str, payload: Any, **options: Any) -> str:
    """Publish an event with the transaction that is open on Django's connection, as `idempotency.publish` does."""
    with current_transaction() as session:
        return events.publish(session, event_type, payload, **options)


TaskT = TypeVar("TaskT", bound=IdempotentTask)
TaskT_co = TypeVar("TaskT_co", bound=IdempotentTask, covariant=True)


class MakesTask(Protocol[TaskT_co]):
    """Turns a function, whose first parameter is the task, into that task."""

    def __call__(self, function: Callable[Concatenate[TaskT_co, Q], R], /) -> IdempotentTask[Q, R]: ...


@overload
def idempotent_task(app: Celery | None = None, /, *, base: type[TaskT], **options: Any) -> MakesTask[TaskT]: ...
@overload
def idempotent_task(app: Celery | None = None, /, **options: Any) -> MakesTask[IdempotentTask]: ...
def idempotent_task(
    app: Celery | None = None, /, *, base: type[IdempotentTask] = IdempotentTask, **options: Any
) -> Any:
    """Make an idempotent task of a function whose first parameter is the task, and keep its types.

    `idempotency.idempotent_task` for Django: a type checker knows `enqueue` without a session.
    """
    return decorator.idempotent_task(app, base=base, **options)
