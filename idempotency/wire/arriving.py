"""What py-amqp and kombu do with a message before there is one to examine.

Both are made to survive what would otherwise end the worker, and then the next one that receives the message (py-amqp 5.3,
`amqp.serialization`; kombu 5.6, `kombu.message`): timestamps beyond Python's datetime, because some producers send
milliseconds where AMQP wants seconds; headers that are nested so deep that reading them exhausts the stack; properties that
are not UTF-8, or not what AMQP says; and a small body that is decompressed to more than memory holds.
"""

from __future__ import annotations

import bz2
import lzma
import re
import threading
import zlib
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, tzinfo
from struct import unpack_from
from typing import Any

import kombu.message
from amqp import abstract_channel, serialization
from amqp.basic_message import Message as AmqpMessage
from amqp.spec import Basic
from kombu.compression import decompress

from .limits import BODY_LIMIT, HEADERS_DEPTH

# Instead of what is deeper.
TOO_DEEP = "nested too deep"
# The name, among a message's properties, of the bytes from the first one on that could not be read.
REST = "rest"


class TooLarge(ValueError):
    """A message beyond a limit, which the text names."""


def bound_what_arrives() -> None:
    """Keep py-amqp and kombu, in the whole process, from failing on a message or running out of memory. Idempotent."""
    module: Any = serialization
    module.datetime = _LenientDatetime
    if not isinstance(module._read_item, _ShallowReader):
        module._read_item = _ShallowReader(module._read_item)
    module.PROPERTY_CLASSES[Basic.CLASS_ID] = _read_properties
    abstract_channel.loads = _read_arguments
    kombu.message.decompress = _decompress


def unreadable(*fields: Mapping[str, Any] | None) -> str | None:
    """What is wrong with a message, by its properties and by what came with its delivery; None: all was read.

    What is not UTF-8 is there as bytes. Over a broker that has no AMQP, nothing is found.
    """
    return next(
        (_what(name) for each in fields for name, value in (each or {}).items() if isinstance(value, bytes)), None
    )


def unreadable_bytes(*fields: Mapping[str, Any] | None) -> dict[str, bytes]:
    """The parts of these fields that could not be read, as they came."""
    return {name: value for each in fields for name, value in (each or {}).items() if isinstance(value, bytes)}


def _what(name: str) -> str:
    return "properties: not as AMQP has them" if name == REST else f"{name}: not UTF-8"


def _read_properties(buffer: Any, offset: int) -> tuple[dict[str, Any], int]:
    """As py-amqp reads them, unless it cannot."""
    try:
        found, end = serialization.decode_properties_basic(buffer, offset)
    except Exception:
        end = len(buffer) + 1
    return (found, end) if end <= len(buffer) else (_read_as_far_as_possible(buffer, offset), len(buffer))


def _read_as_far_as_possible(buffer: Any, offset: int) -> dict[str, Any]:
    """Properties, the text that is not UTF-8 as bytes; from the first one that is not as AMQP says, bytes as `REST`."""
    found: dict[str, Any] = {}
    try:
        (flags,) = unpack_from(">H", buffer, offset)
        offset += 2
        for place, (name, kind) in enumerate(AmqpMessage.PROPERTIES):
            if not flags & 0x8000 >> place:
                continue
            if kind == "s":
                found[name], offset = _read_text(buffer, offset)
            elif kind == "F":
                table = found[name] = {}
                offset = _read_table(table, buffer, offset)
            else:
                (found[name],), offset = serialization.loads(kind, buffer, offset)
    except Exception:
        found[REST] = bytes(buffer[offset:])
    return found


def _read_text(buffer: Any, offset: int) -> tuple[str | bytes, int]:
    end = offset + 1 + buffer[offset]
    if end > len(buffer):
        raise ValueError("beyond the frame")
    text = bytes(buffer[offset + 1 : end])
    try:
        return text.decode("utf-8", "surrogatepass"), end  # as py-amqp
    except UnicodeDecodeError:
        return text, end


def _read_table(table: dict[Any, Any], buffer: Any, offset: int) -> int:
    """Add to the table what can be read of it."""
    (length,) = unpack_from(">I", buffer, offset)
    offset += 4
    end = offset + length
    while offset < end:
        name, offset = _read_text(buffer, offset)
        value, offset = serialization._read_item(buffer, offset)
        if offset > len(buffer):
            raise ValueError("beyond the frame")
        table[name] = value
    if offset != end:
        raise ValueError("beyond the table")
    return offset


def _read_arguments(form: str, buffer: Any, offset: int) -> tuple[list[Any], int]:
    """What a method is called with, such as a delivery's routing key. What is not UTF-8 is left as bytes."""
    try:
        found: tuple[list[Any], int] = serialization.loads(form, buffer, offset)
        return found
    except UnicodeDecodeError:
        pass
    values: list[Any] = []
    for kind in re.findall("b+|.", form):  # bits are packed together
        if kind == "s":
            value, offset = _read_text(buffer, offset)
            values.append(value)
        else:
            some, offset = serialization.loads(kind, buffer, offset)
            values += some
    return values, offset


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
