"""What Celery sends after a task: its callbacks, the next of its chain, its errbacks.

Celery's tracer sends them once the task has returned, and takes what that raises for the task's own error: a committed operation
would be a failure to its hooks and errbacks, and the refused call would be gone. So a call that can be seen to be refused is
refused where the whole is sent, and what turns out to be wrong later goes out as it is: the guard of its worker makes it a
dead letter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from celery import Celery, Signature, signature

if TYPE_CHECKING:
    from .calls import KeyedTask

# The option of a signature that follows a task in a worker. It never gets into a message.
FOLLOWS = "idempotency_follows"


def first_of(sig: Signature) -> list[Signature]:
    """The signatures that are sent first: their arguments are known. None of an empty chain."""
    match sig.subtask_type:
        case "group" | "chord":
            return [first for each in sig.tasks for first in first_of(each)]
        case "chain":
            return first_of(sig.tasks[0]) if sig.tasks else []
    return [sig]


def following(app: Celery, *embedded: Any) -> Iterator[Signature]:
    """The signatures in these options of a call: one, or a list, or none."""
    for each in embedded:
        for sig in each if isinstance(each, list | tuple) else [each] if each else []:
            yield signature(sig, app=app)


def note(task: KeyedTask, succeeded: bool) -> None:
    """Mark what Celery is about to send after this task."""
    request = task.request
    if request.is_eager:
        return
    if succeeded:
        request.callbacks = _marked(task.app, request.callbacks)
        if request.chain:
            request.chain = [*request.chain[:-1], *_marked(task.app, request.chain[-1:])]
    else:
        request.errbacks = _marked(task.app, request.errbacks)


def _marked(app: Celery, sigs: Sequence[Any] | None) -> list[Signature]:
    marked = list(following(app, sigs))
    for sig in marked:
        for first in first_of(sig):
            first.options[FOLLOWS] = True
    return marked
