"""A message as RabbitMQ sends it from a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..wire.arriving import unreadable, unreadable_bytes
from .holdings import At
from .message import NAME_NOT_UTF8, StreamMessage

OFFSET_HEADER = "x-stream-offset"


def offset_of(message: Any) -> int | None:
    """Where a message is in its stream; None: it comes from no stream."""
    found = (message.headers or {}).get(OFFSET_HEADER)
    return found if isinstance(found, int) else None


def as_stream_message(at: At, offset: int, message: Any) -> StreamMessage:
    """The message, whatever of it could be read."""
    properties: Mapping[str, Any] = message.properties or {}
    own = [(name, value) for name, value in (message.headers or {}).items() if name != OFFSET_HEADER]
    # of a property, py-amqp leaves the number as it came; of a header it makes a datetime
    created = properties.get("timestamp")
    unread = unreadable(properties, message.delivery_info)
    if unread is None and any(isinstance(name, bytes) for name, _ in own):
        unread = NAME_NOT_UTF8
    return StreamMessage(
        *at,
        offset,
        None,
        bytes(message.body or b""),
        own,
        float(created) if isinstance(created, int) else None,
        unread,
        unreadable_bytes(properties, message.delivery_info),
    )
