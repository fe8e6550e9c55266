"""The span of a message that is sent, in whose trace every attempt of it is."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from ..attempt.runtime import Runtime
from ..observe.traces import Span
from ..wire.message import Message

# `enqueue` writes a message for a relay to send, so by OpenTelemetry's conventions it creates it.
_TYPES = {"enqueue": "create", "send": "send"}


def span_of(
    runtime: Runtime, operation: Literal["enqueue", "send"], task: str, headers: Mapping[str, Any]
) -> AbstractContextManager[Span | None]:
    """A span around a call of a task, in the current trace, or else in that of the headers that it is given.

    A tracing tool that has a span of its own for the message opens it inside this one. Without tracing: None.
    """
    if (traces := runtime.traces) is None:
        return nullcontext()
    attributes = {
        "messaging.system": "celery",
        "messaging.operation.type": _TYPES[operation],
        "messaging.operation.name": operation,
        "idempotency.task": task,
    }
    return traces.span(operation, "producer", headers=headers, attributes=attributes)


def note_message(span: Span, message: Message, queue: str) -> None:
    """Say where a message goes, which is known once Celery has put it together."""
    span.rename(f"enqueue {queue}")
    span.note({"messaging.destination.name": queue, "messaging.message.id": str(message.headers.get("id", ""))})
