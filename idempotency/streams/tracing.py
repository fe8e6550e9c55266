"""The span of a stream's message, or of those that share a transaction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..attempt.runtime import Runtime
from ..observe.traces import PARENT_HEADER, STATE_HEADER
from .declaring import Stream
from .message import StreamMessage
from .sources import KafkaTopics


@contextmanager
def handled(runtime: Runtime, stream: Stream, messages: Sequence[StreamMessage]) -> Iterator[None]:
    """Handle messages under one span: of one, in its trace; of several, in a trace of its own that is linked to theirs."""
    if (traces := runtime.traces) is None:
        yield
        return
    first, carriers = messages[0], [_carrier(each) for each in messages]
    attributes: dict[str, str | int | bool] = {
        "messaging.system": "kafka" if isinstance(stream.source, KafkaTopics) else "rabbitmq",
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "messaging.destination.name": first.topic,
        "messaging.destination.partition.id": str(first.partition),
        "idempotency.task": stream.task,
    }
    if len(messages) > 1:
        attributes["messaging.batch.message_count"] = len(messages)
    headers = carriers[0] if len(messages) == 1 else {}
    with traces.span(f"process {first.topic}", "consumer", headers=headers, attributes=attributes) as span:
        for carrier in carriers if len(messages) > 1 else ():
            span.link(carrier, "message")
        yield


def _carrier(message: StreamMessage) -> dict[str, Any]:
    return {name: message.header(name) for name in (PARENT_HEADER, STATE_HEADER)}
