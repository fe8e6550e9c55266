"""The task base for Django: `enqueue` in Django's own transaction, beside what Celery's DjangoTask has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery.contrib.django.task import DjangoTask
from typing_extensions import Unpack

from ... import events
from ...handle import Handle
from ...store.callers import is_caller
from ...worker import task, using
from ...worker.using import CallOptions
from .integration import current_transaction


class IdempotentTask(task.IdempotentTask, DjangoTask):
    """`idempotency.IdempotentTask`, enqueued on Django's connection: `capture.enqueue(payment_id=payment.pk)`."""

    abstract = True

    def enqueue(self, /, *args: Any, **kwargs: Any) -> Handle:
        """Send this task with the transaction that is open on Django's connection.

        In `transaction.atomic()` it leaves when the block commits, and never if that rolls back. In a body it leaves
        with the attempt's commit. Outside of both it is accepted at once, like anything else that the ORM writes there.
        Arguments, options and errors are those of `idempotency.IdempotentTask.enqueue`; so is a session or connection
        given first.
        """
        with _transaction(args) as given:
            return super().enqueue(*given, *args, **kwargs)

    def using(self, **options: Unpack[CallOptions]) -> Using:
        """The task with options for its next call: `welcome.using(countdown=60).enqueue(17)`."""
        made = super().using(**options)
        return Using(made._task, made._options)


class Using(using.Using[..., Any]):
    """Returned by `task.using(...)`."""

    def enqueue(self, /, *args: Any, **kwargs: Any) -> Handle:
        """Send the task as `task.enqueue` does."""
        with _transaction(args) as given:
            return super().enqueue(*given, *args, **kwargs)


@contextmanager
def _transaction(args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Django's transaction, for a call that does not begin with one of its own."""
    if args and is_caller(args[0]):
        yield ()
    else:
        with current_transaction() as session:
            yield (session,)


def publish(event_type: str, payload: Any, **options: Any) -> str:
    """Publish an event with the transaction that is open on Django's connection, as `idempotency.publish` does."""
    with current_transaction() as session:
        return events.publish(session, event_type, payload, **options)
