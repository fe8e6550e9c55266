"""The suite's tasks on our base: each gets it where it is made, and its calls get a key if they have none."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from celery import Celery

from idempotency import IdempotentTask

# Tasks made in these modules are the suite's own; Celery's built-in ones stay as they are.
SUITE = "t.integration"


class KeyedPerCall(IdempotentTask):
    """Each call that names no key is an operation of its own. An error is its end, as in Celery, unless it is retried."""

    abstract = True
    permanent_errors = (Exception,)
    key = staticmethod(lambda arguments: str(uuid4()))  # type: ignore[assignment]  # mypy takes it for a method


def install(configuration: dict[str, Any]) -> None:
    """From now on, make the suite's tasks on our base, and configure every application for it."""
    from_function, register = Celery._task_from_fun, Celery.register_task

    def made(app: Celery, fun: Any, name: Any = None, base: Any = None, **options: Any) -> Any:
        if fun.__module__.startswith(SUITE):
            base = KeyedPerCall if base is None else _mixed(base)
            # refused at start, because an accepted operation is never dropped; the suite's one task that has it never
            # gets old enough
            options.pop("expires", None)
        return from_function(app, fun, name=name, base=base, **options)

    def registered(app: Celery, task: Any, **options: Any) -> Any:
        kind = task if isinstance(task, type) else type(task)
        return register(app, _mixed(kind) if kind.__module__.startswith(SUITE) else task, **options)

    Celery._task_from_fun, Celery.register_task = made, registered
    Celery.on_init = lambda app: app.add_defaults(configuration)


def _mixed(kind: type) -> type:
    if issubclass(kind, IdempotentTask):
        return kind
    return type(kind.__name__, (KeyedPerCall, kind), {"__module__": kind.__module__, "abstract": False})
