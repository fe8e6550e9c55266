"""How large a message may be, and how deep, wherever it arrives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# Bytes of a body, as it comes and decompressed: RabbitMQ accepts no more by default.
BODY_LIMIT = 16 * 1024 * 1024
# How deep a body may be nested: the arguments (`keys.MAX_DEPTH`) and what Celery puts around them and beside them. Far enough
# below Python's limit for code that walks through it.
BODY_DEPTH = 250
# Headers: bytes of names and values, how many there are with those inside others, how deep they are nested. RabbitMQ and
# py-amqp agree on frames of 128 KiB, and headers must fit in one.
HEADERS_LIMIT = 128 * 1024
HEADERS_COUNT = 2000
HEADERS_DEPTH = 32
# What is sent of them: so much less that they arrive together with what is added on the way: our marks by a relay, what a broker
# notes of a delivery, and, in the frame, the other properties.
_ADDED_COUNT = 100
_ADDED_BYTES = 8 * 1024
# What counts as eight bytes.
_OF_A_WORD = frozenset((int, bool, float, type(None)))
# Bytes that AMQP writes for each header beside its name and its value.
_AROUND = 6


def beyond_limits(headers: Mapping[Any, Any], body: bytes | str | None, *, body_limit: int) -> str | None:
    """Which limit a message breaks, and what was got; looks at nothing that has to be decoded."""
    if (size := len(body or b"")) > body_limit:
        return f"body: at most {body_limit} bytes, got {size}"
    return _beyond(headers, HEADERS_LIMIT, HEADERS_COUNT, _size, around=0)


def too_much_to_send(headers: Mapping[str, Any]) -> str | None:
    """Which limit headers break that are to be sent, and what was got: what is sent has to arrive."""
    return _beyond(headers, HEADERS_LIMIT - _ADDED_BYTES, HEADERS_COUNT - _ADDED_COUNT, _bytes, around=_AROUND)


def _beyond(
    headers: Mapping[Any, Any], most: int, most_headers: int, size_of: Callable[[object], int], *, around: int
) -> str | None:
    size = count = depth = 0
    level: list[Any] = [headers]
    while level:
        depth += 1
        if depth > HEADERS_DEPTH:
            return f"headers: nested at most {HEADERS_DEPTH} deep"
        inner: list[Any] = []
        for each in level:
            names, values = (each.keys(), each.values()) if isinstance(each, Mapping) else ((), each)
            count += len(each)
            for name in names:
                if type(name) is str and name.isascii():
                    size += len(name)
                elif isinstance(name, bytes):  # as py-amqp leaves what it cannot decode
                    return "headers: a name is not UTF-8"
                else:
                    size += size_of(name)
            for value in values:
                # Most are of these, and no function is called for them: this is done for every message.
                if (kind := type(value)) is str and value.isascii():
                    size += len(value)
                elif kind in _OF_A_WORD:
                    size += 8
                elif kind is not str and isinstance(value, Mapping | list | tuple):
                    inner.append(value)
                else:
                    size += size_of(value)
        level = inner
    if count > most_headers:
        return f"headers: at most {most_headers}, with those inside others, got {count}"
    if (size := size + count * around) > most:
        return f"headers: at most {most} bytes, got {size}"
    return None


def _size(value: object) -> int:
    """Bytes; of text, its characters, which is quick to say."""
    return len(value) if isinstance(value, str | bytes | bytearray | memoryview) else 8


def _bytes(value: object) -> int:
    """Bytes as it is sent: what JSON lacks, such as bytes and times, is kept and sent as its text."""
    if value is None or isinstance(value, int | float):
        return 8
    text = value if isinstance(value, str) else str(value)
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
