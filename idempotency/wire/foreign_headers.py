"""Times in headers that Python has no datetime for: milliseconds where AMQP says seconds, as some producers send them.

py-amqp raises while it reads such a message, before there is one that could be refused: the worker ends, and so does the
next one that is handed it (py-amqp 5.3, `amqp.serialization`).
"""

from __future__ import annotations

from datetime import UTC, datetime, tzinfo
from typing import Any

from amqp import serialization


class _IsADatetime(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, datetime)


class _AnyTime(metaclass=_IsADatetime):
    """What py-amqp uses of `datetime`: to read a time, and to know one."""

    @staticmethod
    def fromtimestamp(seconds: float, tz: tzinfo | None = None) -> datetime:
        try:
            return datetime.fromtimestamp(seconds, tz)
        except (ValueError, OverflowError, OSError):
            return datetime.max.replace(tzinfo=tz or UTC)


def read_any_time() -> None:
    """Let py-amqp read a time beyond the year 9999 as the last one there is. For the whole process."""
    module: Any = serialization
    module.datetime = _AnyTime
