"""How large a message may be, and how deep, wherever it arrives."""

from __future__ import annotations

from collections.abc import Mapping
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


def beyond_limits(headers: Mapping[Any, Any], body: bytes | str | None, *, body_limit: int) -> str | None:
    """Which limit a message breaks, and what was got; looks at nothing that has to be decoded."""
    if (size := len(body or b"")) > body_limit:
        return f"body: at most {body_limit} bytes, got {size}"
    size = count = depth = 0
    level: list[Any] = [headers]
    while level:
        depth += 1
        if depth > HEADERS_DEPTH:
            return f"headers: nested at most {HEADERS_DEPTH} deep"
        inner: list[Any] = []
        for each in level:
            names, values = (each.keys(), each.values()) if isinstance(each, Mapping) else ((), each)
            if any(isinstance(name, bytes) for name in names):  # as py-amqp leaves what it cannot decode
                return "headers: a name is not UTF-8"
            size += sum(map(_size, names))
            count += len(each)
            for value in values:
                if isinstance(value, Mapping | list | tuple):
                    inner.append(value)
                else:
                    size += _size(value)
        level = inner
    if count > HEADERS_COUNT:
        return f"headers: at most {HEADERS_COUNT}, with those inside others, got {count}"
    if size > HEADERS_LIMIT:
        return f"headers: at most {HEADERS_LIMIT} bytes, got {size}"
    return None


def _size(value: object) -> int:
    return len(value) if isinstance(value, str | bytes | bytearray | memoryview) else 8
