"""The task base for Django: `enqueue` in Django's own transaction, beside what Celery's DjangoTask has."""

from __future__ import annotations

from typing import Any

from celery.contrib.django.task import DjangoTask
from sqlalchemy import Connection
from sqlalchemy.orm import Session

from ... import events
from ...handle import Handle
from ...worker import task
from .integration import current_transaction


class IdempotentTask(task.IdempotentTask, DjangoTask):
    """`idempotency.IdempotentTask`, enqueued on Django's connection: `capture.enqueue(payment_id=payment.pk)`."""

    abstract = True

    def enqueue(self, /, *args: Any, **kwargs: Any) -> Handle:
        """Send this task with the transaction that is open on Django's connection.

        In `transaction.atomic()` it leaves when the block commits, and never if that rolls back. In a body it leaves
        with the attempt's commit. Outside of both it is accepted at once, like anything else that the ORM writes there.
        Arguments, options and errors are those of `idempotency.IdempotentTask.enqueue`; so is a SQLAlchemy session
        given first.
        """
        if args and isinstance(args[0], Session | Connection):
            return super().enqueue(*args, **kwargs)
        with current_transaction() as session:
            return super().enqueue(session, *args, **kwargs)


def publish(event_type: str, payload: Any, **options: Any) -> str:
    """Publish an event with the transaction that is open on Django's connection, as `idempotency.publish` does."""
    with current_transaction() as session:
        return events.publish(session, event_type, payload, **options)
