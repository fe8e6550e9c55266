"""Header timestamps beyond Python's datetime: some producers send milliseconds where AMQP wants seconds.

py-amqp raises while it decodes such a message, before anything can refuse it: the worker ends, and so does the next one
that receives the message (py-amqp 5.3, `amqp.serialization`).
"""

from __future__ import annotations

from datetime import UTC, datetime, tzinfo
from typing import Any

from amqp import serialization


class _DatetimeMeta(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, datetime)


class _LenientDatetime(metaclass=_DatetimeMeta):
    """The part of `datetime` that py-amqp uses: `fromtimestamp` (until 5.3 `utcfromtimestamp`) and `isinstance`."""

    @staticmethod
    def fromtimestamp(seconds: float, tz: tzinfo | None = None) -> datetime:
        try:
            return datetime.fromtimestamp(seconds, tz)
        except (ValueError, OverflowError, OSError):
            return datetime.max.replace(tzinfo=tz or UTC)

    @classmethod
    def utcfromtimestamp(cls, seconds: float) -> datetime:
        return cls.fromtimestamp(seconds, UTC).replace(tzinfo=None)


def accept_any_timestamp() -> None:
    """Make py-amqp decode timestamps beyond the year 9999 as `datetime.max`, in the whole process."""
    module: Any = serialization
    module.datetime = _LenientDatetime
