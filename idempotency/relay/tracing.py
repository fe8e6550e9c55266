"""The spans of what a relay has published: one for each message, in the trace that its headers name."""

from __future__ import annotations

from collections.abc import Sequence

from celery import Celery

from ..broker.batch import Published
from ..observe.traces import Traces
from ..wire.headers import ORIGIN_HEADER
from ..wire.message import Message


def trace_published(
    traces: Traces, app: Celery, batch: Sequence[tuple[str, Message]], result: Published, times: tuple[int, int]
) -> None:
    """Make the spans of a batch, which was sent as one: all have its times, in nanoseconds since 1970.

    A message without a trace has none, and one that is still open is sent again. What is sent does not change: its attempts
    are children of the span that enqueued it, as this one is.
    """
    confirmed = set(result.confirmed)
    for id, message in batch:
        refused = result.refused.get(id)
        if id not in confirmed and refused is None:
            continue
        # one that is refused may lack a route
        queue = message.queue(app) if id in confirmed else ""
        traces.past(
            f"publish {queue}".rstrip(),
            "client",
            message.headers,
            times,
            attributes={
                "messaging.system": "celery",
                "messaging.operation.type": "send",
                "messaging.operation.name": "publish",
                "messaging.destination.name": queue,
                "messaging.message.id": str(message.headers.get("id", id)),
                "messaging.batch.message_count": len(batch),
                "idempotency.origin": str(message.headers.get(ORIGIN_HEADER, "enqueue")),
            },
            failed=None if refused is None else "refused",
        )
