"""What py-amqp and kombu do with a message before there is one to examine.

Both are made to survive what would otherwise end the worker, and then the next one that receives the message (py-amqp 5.3,
`amqp.serialization`; kombu 5.6, `kombu.message`): timestamps beyond Python's datetime, because some producers send
milliseconds where AMQP wants seconds; headers that are nested so deep that reading them exhausts the stack; and a small body
that is decompressed to more than memory holds.
"""

from __future__ import annotations

import bz2
import lzma
import threading
import zlib
from collections.abc import Callable
from datetime import UTC, datetime, tzinfo
from struct import unpack_from
from typing import Any

import kombu.message
from amqp import serialization
from kombu.compression import decompress

from .limits import BODY_LIMIT, HEADERS_DEPTH

# Instead of what is deeper.
TOO_DEEP = "nested too deep"


class TooLarge(ValueError):
    """A message beyond a limit, which the text names."""


def bound_what_arrives() -> None:
    """Keep py-amqp and kombu, in the whole process, from failing on a message or running out of memory. Idempotent."""
    module: Any = serialization
    module.datetime = _LenientDatetime
    if not isinstance(module._read_item, _ShallowReader):
        module._read_item = _ShallowReader(module._read_item)
    kombu.message.decompress = _decompress


class _ShallowReader:
    """py-amqp's reader of a header, which calls itself for nested ones, with a limit."""

    def __init__(self, read: Callable[[Any, int], tuple[Any, int]]) -> None:
        self._read = read
        self._at = threading.local()

    def __call__(self, buffer: Any, offset: int) -> tuple[Any, int]:
        if chr(buffer[offset]) not in "FA":  # a table, an array
            return self._read(buffer, offset)
        depth = self._at.depth = getattr(self._at, "depth", 0) + 1
        try:
            if depth > HEADERS_DEPTH:
                (length,) = unpack_from(">I", buffer, offset + 1)
                return TOO_DEEP, offset + 5 + length
            return self._read(buffer, offset)
        finally:
            self._at.depth -= 1


# With a limit to what they return. Others (brotli, zstd) are used as kombu does.
_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("application/x-gzip", "gzip", "zlib"), zlib.decompressobj),
    **dict.fromkeys(("application/x-bz2", "bzip2", "bzip"), bz2.BZ2Decompressor),
    **dict.fromkeys(("application/x-lzma", "lzma", "xz"), lzma.LZMADecompressor),
}


def _decompress(body: Any, content_type: str) -> Any:
    if (start := _DECOMPRESSORS.get(content_type)) is None:
        return decompress(body, content_type)
    decompressor = start()
    found = decompressor.decompress(body, BODY_LIMIT + 1)
    if len(found) > BODY_LIMIT:
        raise TooLarge(f"body: at most {BODY_LIMIT} bytes, got more once it is decompressed")
    if not decompressor.eof:
        raise ValueError("body: not complete")
    return found


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
