"""A backend for Django's own tasks: `django.tasks` of Django 6, or the package `django-tasks` before it.

    TASKS = {"default": {"BACKEND": "idempotency.contrib.django.backend.IdempotentBackend"}}

A task is enqueued with the transaction that is open on Django's connection and runs in Celery's workers, as one
operation for each `enqueue`: what it writes by the ORM is committed once, with its result. It is retried like any
idempotent task. Of Django's signals only `task_enqueued` is sent: an attempt may be repeated, so it neither starts nor
finishes a task.
"""

from __future__ import annotations

import json
from typing import Any

import django
from celery import shared_task
from django.utils import timezone
from django.utils.crypto import get_random_string
from django.utils.module_loading import import_string

if django.VERSION >= (6, 0):
    from django.tasks import TaskContext, TaskResult, TaskResultStatus
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import TaskError
    from django.tasks.exceptions import TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued
else:
    from django_tasks import TaskContext, TaskResult, TaskResultStatus
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import TaskError
    from django_tasks.exceptions import TaskResultDoesNotExist
    from django_tasks.signals import task_enqueued

from ...application import runtime_of
from ...attempt.conclusions import NotDeclined
from ...errors import Defer, SettingsError
from ...store import operations
from ...wire.keys import OperationId
from ...wire.message import Message
from .integration import celery_app
from .task import IdempotentTask

# The name of the one Celery task that runs them all: part of every key, so it never changes.
NAME = "idempotency.django_task"
# Seconds until a worker is asked again for a function that it does not have: as long as it has waited, within these.
FIRST_PAUSE, LAST_PAUSE = 1.0, 60.0
DEFAULT_QUEUE = "default"  # Django's name for it; Celery's has its own
STATUS = {
    "started": TaskResultStatus.RUNNING,
    "released": TaskResultStatus.READY,
    "completed": TaskResultStatus.SUCCESSFUL,
    "failed": TaskResultStatus.FAILED,
}


@shared_task(base=IdempotentTask, bind=True, name=NAME)
def run_django_task(self: IdempotentTask, path: str, args: list[Any], kwargs: dict[str, Any], backend: str) -> Any:
    """Call one of Django's tasks; `path` is where the decorated function is found."""
    task = _found(self, path)
    if not task.takes_context:
        return task.call(*args, **kwargs)
    attempts = self.request.retries + 1
    result = _result(
        task.using(backend=backend), self.request.headers["idempotency-key"], args, kwargs, TaskResultStatus.RUNNING
    )
    result.worker_ids.extend([str(self.request.hostname)] * attempts)
    return task.call(TaskContext(task_result=result), *args, **kwargs)


def _found(self: IdempotentTask, path: str) -> Any:
    """The function, or the answer of a worker to a task that it does not know: later, as one for a newer worker."""
    try:
        return import_string(path)
    except ImportError as error:
        age, grace = self._attempt.claim.age, runtime_of(self.app).settings.unknown_task_grace
        if age >= grace:
            raise NotDeclined(f"{path}: {error}", "unknown_task") from error
        raise Defer(min(max(age, FIRST_PAUSE), LAST_PAUSE), f"{path} cannot be imported: {error}") from error


class IdempotentBackend(BaseTaskBackend):
    """Enqueues in Django's transaction; see the module."""

    supports_defer = True
    supports_async_task = True
    supports_get_result = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        if self.options:
            raise SettingsError(
                f"TASKS[{alias!r}]: OPTIONS: there are none; the options of {NAME} are Celery's and the library's settings"
            )

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Enqueue with the open transaction, or at once outside of one. Raises `InvalidArguments` for what is not JSON."""
        self.validate_task(task)
        result = _result(task, get_random_string(32), args, kwargs, TaskResultStatus.READY, enqueued_at=timezone.now())
        options: dict[str, Any] = {} if task.queue_name == DEFAULT_QUEUE else {"queue": task.queue_name}
        if task.run_after is not None:
            options["eta"] = (
                task.run_after if timezone.is_aware(task.run_after) else timezone.make_aware(task.run_after)
            )
        run_django_task.enqueue(
            task.module_path, result.args, result.kwargs, self.alias, idempotency_key=result.id, **options
        )
        task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> Any:
        """Read a task's state from its record. Raises `TaskResultDoesNotExist`, also until its `enqueue` is committed."""
        runtime = runtime_of(celery_app())
        with runtime.autocommit(runtime.settings.tenant) as connection:
            id = OperationId(runtime.settings.tenant, NAME, result_id)
            stored = operations.operation(connection, id, with_payload=True)
        record = stored["record"] or {}
        sources = [record, *stored["outbox"]]
        message = next((source["message"] for source in sources if source.get("message")), None)
        if message is None:
            raise TaskResultDoesNotExist(result_id)
        (path, args, kwargs, backend), _, _ = json.loads(Message.from_text(message).body)
        status = STATUS.get(record.get("status", "released"), TaskResultStatus.READY)
        try:
            task = import_string(path)
        except ImportError as error:
            raise TaskResultDoesNotExist(f"{result_id}: of {path}, which is gone") from error
        result = _result(
            task.using(backend=backend),
            result_id,
            args,
            kwargs,
            status,
            enqueued_at=min(source["created_at"] for source in sources if source),
            started_at=record.get("created_at"),
            last_attempted_at=record.get("updated_at"),
            finished_at=record.get("completed_at"),
        )
        result.worker_ids.extend([record.get("locked_by") or "unknown"] * record.get("attempts", 0))
        if status == TaskResultStatus.SUCCESSFUL:
            object.__setattr__(result, "_return_value", runtime.read_result(record["result"]))
        if status == TaskResultStatus.FAILED:
            failed = f"{record['error']['code']}: {record['error']['message']}"
            result.errors.append(TaskError(exception_class_path="idempotency.errors.OperationFailed", traceback=failed))
        return result


def _result(task: Any, id: str, args: Any, kwargs: Any, status: Any, **times: Any) -> Any:
    """A result with these times; the others are not known."""
    return TaskResult(
        task=task,
        id=id,
        status=status,
        args=args,
        kwargs=kwargs,
        backend=task.backend,
        errors=[],
        worker_ids=[],
        **dict.fromkeys(("enqueued_at", "started_at", "finished_at", "last_attempted_at")) | times,
    )
