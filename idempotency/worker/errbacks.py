"""An idempotent task that Celery calls as an errback of the new style, in the process of the task that has failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..wire import keys
from ..wire.delivery import Delivery

if TYPE_CHECKING:
    from .task import IdempotentTask


def run_as_errback(task: IdempotentTask[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the task here, once for each failed task id.

    What Celery passes (request, exception, traceback) cannot travel in a message: if this process dies, the failed
    task's message comes back, and Celery calls the errback again.
    """
    failed, arguments = args[0], {"task_id": args[0].id, "args": list(args[3:]), "kwargs": dict(kwargs)}
    id = task._operation(arguments, keys.content_hash(*arguments)(arguments), None)
    delivery = Delivery(id, keys.fingerprint(arguments), arguments, task_id=failed.id, is_eager=True)
    task.push_request(id=failed.id, args=args, kwargs=kwargs, is_eager=True, called_directly=False)
    try:
        outcome: Any = task._deliver(delivery)
    finally:
        task.pop_request()
    if (error := getattr(outcome, "error", None)) is not None:
        raise error
    return outcome.value
