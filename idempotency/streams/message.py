"""A message of a stream, as its broker has it, and as a dead letter keeps it."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any

from ..store.stream_places import Place
from ..wire import keys
from ..wire.headers import KEY_HEADER
from ..wire.limits import BODY_LIMIT, beyond_limits

# How many bytes of a value beyond a limit its dead letter keeps.
VALUE_KEPT = 64 * 1024
# The name under which a letter's headers keep the message.
KEPT = "stream-message"
# Of a message that could not be read as a whole.
NAME_NOT_UTF8 = "headers: a name is not UTF-8"


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """One message: its topic, partition and offset, its key and value as bytes, and its headers.

    `value`: None for a message of Kafka that says its key is deleted. `headers`: names and values in their order; a name may come
    again. `timestamp`: seconds since 1970, if the broker says so. `unread`: what could not be read of it, besides the value, and
    so is not here; `unread_bytes`: parts of it, as they came. Such a message is never handled.
    """

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, Any]] = ()
    timestamp: float | None = None
    unread: str | None = None
    unread_bytes: Mapping[str, bytes] = field(default_factory=dict)

    def header(self, name: str) -> Any:
        """The last header of this name, bytes as text; None without one."""
        found = next((value for each, value in reversed(self.headers) if each == name), None)
        return found.decode("utf-8", "replace") if isinstance(found, bytes) else found

    @property
    def idempotency_key(self) -> Any:
        """The header `idempotency-key`."""
        return self.header(KEY_HEADER)

    @property
    def fingerprints(self) -> list[str]:
        """What makes the same key with other bytes another message: by every known rule, that of new records first.

        Without a value, another one than with an empty one; earlier versions had the same for both, so theirs is known, too.
        """
        by_bytes = keys.fingerprints({"sha256": hashlib.sha256(self.value or b"").hexdigest()}, None)
        if self.value:
            return by_bytes
        return [*keys.fingerprints({"value": "none" if self.value is None else "empty"}, None), *by_bytes]

    def beyond(self) -> str | None:
        """The limit that the message is beyond, and what was got; None: it is within all."""
        names = [name for name, _ in self.headers]
        if len(self.key or b"") > BODY_LIMIT:
            return f"key: at most {BODY_LIMIT} bytes"
        # a mapping would hide names that come again
        return beyond_limits(
            {"names": names, "values": [value for _, value in self.headers]}, self.value, body_limit=BODY_LIMIT
        )

    def kept(self, *, limit: int | None = None) -> dict[str, Any]:
        """The message as JSON, with its bytes as they are; `limit`: only so many bytes of the value, and no headers."""
        value = self.value if limit is None else (self.value or b"")[:limit]
        fields = {
            "topic": self.topic,
            "partition": self.partition,
            "offset": self.offset,
            "key": _as_json(None if limit is not None else self.key),
            "value": _as_json(value),
            "headers": [] if limit is not None else self._headers_as_json(),
            "timestamp": self.timestamp,
        }
        if self.unread_bytes:
            fields["unread"] = {name: _as_json(each) for name, each in self.unread_bytes.items()}
        return {KEPT: fields} if limit is None else {KEPT: fields | {"value_bytes": len(self.value or b"")}}

    def digest(self, place: Place) -> str:
        """Identifies the message among all, for its dead letter: the application, which a rename replaces, and a hash.

        The content is part of it, because a topic that was recreated has the same offsets again.
        """
        named = ["stream", place.consumer, self.topic, self.partition, self.offset, self.timestamp]
        found = hashlib.sha256(json.dumps([*named, self._headers_as_json()], default=repr).encode())
        for part in (self.key, self.value):
            found.update(b"-" if part is None else hashlib.sha256(part).digest())
        return f"{place.service}/{found.hexdigest()}"

    def _headers_as_json(self) -> list[list[Any]]:
        return [[_name(name), _as_json(each)] for name, each in self.headers]


def from_kept(headers: str) -> StreamMessage:
    """The message that a dead letter has kept. Raises `ValueError` if it has kept none."""
    try:
        fields: Mapping[str, Any] = json.loads(headers)[KEPT]
        return StreamMessage(
            fields["topic"],
            fields["partition"],
            fields["offset"],
            _bytes(fields["key"]),
            _bytes(fields["value"]),
            [(name, _from_json(value)) for name, value in fields["headers"]],
            fields["timestamp"],
        )
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"no message of a stream: {type(error).__name__}") from None


def kept_at(headers: str | None) -> Mapping[str, Any]:
    """Topic, partition and offset of the message that a dead letter has kept; empty: it has kept none."""
    try:
        fields = json.loads(headers or "{}")[KEPT]
        return {name: fields[name] for name in ("topic", "partition", "offset")}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}


def _as_json(value: Any) -> Any:
    """A value as JSON: bytes as text if they are UTF-8 without NUL, which Postgres refuses, else as base64.

    The other types are those that headers of AMQP may have.
    """
    if isinstance(value, datetime):
        return {"datetime": value.isoformat()}
    if isinstance(value, Decimal):
        return {"decimal": str(value)}
    if isinstance(value, dict):
        return {"table": {_name(name): _as_json(each) for name, each in value.items()}}
    if isinstance(value, list):
        return [_as_json(each) for each in value]
    if isinstance(value, bytes):
        try:
            text = value.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode()}
        return {"utf-8": text} if "\0" not in text else {"base64": base64.b64encode(value).decode()}
    return value


def _name(name: str | bytes) -> str:
    """A header's name, which py-amqp leaves as bytes if it is not UTF-8."""
    return name.decode("utf-8", "backslashreplace") if isinstance(name, bytes) else name


def _from_json(value: Any) -> Any:
    if isinstance(value, dict) and len(value) != 1:
        return value
    match value:
        case {"utf-8": kept}:
            return kept.encode()
        case {"base64": kept}:
            return base64.b64decode(kept)
        case {"datetime": kept}:
            return datetime.fromisoformat(kept)
        case {"decimal": kept}:
            return Decimal(kept)
        case {"table": kept}:
            return {name: _from_json(each) for name, each in kept.items()}
        case list():
            return [_from_json(each) for each in value]
    return value


def _bytes(value: Any) -> bytes | None:
    found = _from_json(value)
    if found is not None and not isinstance(found, bytes):
        raise TypeError(type(found).__name__)
    return found
