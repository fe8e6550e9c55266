"""A message as confluent-kafka gives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .message import NAME_NOT_UTF8, StreamMessage


def as_stream_message(message: Any, without_time: int) -> StreamMessage:
    """The message, whatever of it could be read. `without_time`: the kind of a time-stamp that says nothing."""
    kind, created = message.timestamp()
    headers, unread = _headers_of(message)
    return StreamMessage(
        message.topic(),
        message.partition(),
        message.offset(),
        message.key(),
        message.value(),
        headers,
        created / 1000 if kind != without_time else None,
        unread,
    )


def _headers_of(message: Any) -> tuple[Sequence[tuple[str, Any]], str | None]:
    """The headers, and what is wrong if they cannot be had: confluent-kafka gives none of them if one's name is not UTF-8."""
    try:
        return message.headers() or (), None
    except Exception:  # a SystemError, of CPython's
        return (), NAME_NOT_UTF8
