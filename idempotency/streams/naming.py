"""Patterns that name a message's operation or tenant by what is in it: `{event[id]}`, `{event[order][id]}:{key}`."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import MissingKey, SettingsError
from ..wire import keys
from .message import StreamMessage

Naming = Callable[[Any, StreamMessage], str]

_FIELD = re.compile(r"(event|header)((?:\[[^\[\]]+\])+)|key")
_PART = re.compile(r"\[([^\[\]]+)\]")


def naming(pattern: str, what: str) -> Naming:
    """Make names from a pattern of fields: `event[…]` of the decoded event, `header[…]`, and `key`, the message's own.

    Values of several fields are encoded and separated as in a task's key template. Raises `SettingsError`.
    """
    try:
        parts = list(string.Formatter().parse(pattern))
    except ValueError as error:
        raise SettingsError(f"{what} {pattern!r}: {error}") from None
    paths: dict[str, tuple[str, ...]] = {}
    plain = ""
    for literal, field, spec, conversion in parts:
        plain += literal.replace("{", "{{").replace("}", "}}")
        if field is None:
            continue
        if spec or conversion or (found := _FIELD.fullmatch(field)) is None:
            raise SettingsError(f"{what} {pattern!r}: must be made of event[…], header[…] and key, got {field!r}")
        path = (found[1] or "key", *_PART.findall(found[2] or ""))
        name = f"{path[0]}_{len(paths)}" if (name := re.sub(r"\W", "_", "_".join(path))) in paths else name
        paths[name] = path
        plain += f"{{{name}}}"
    try:
        template = keys.template(plain)
    except SettingsError as error:
        raise SettingsError(str(error).replace(repr(plain), repr(pattern)).replace("key template", what)) from None

    def name_of(event: Any, message: StreamMessage) -> str:
        return template({name: _found(path, event, message) for name, path in paths.items()})

    return name_of


def _found(path: tuple[str, ...], event: Any, message: StreamMessage) -> Any:
    if path == ("key",):
        return None if message.key is None else message.key.decode("utf-8", "replace")
    if path[0] == "header":
        return message.header(path[1])
    for part in path[1:]:
        if isinstance(event, Mapping):
            event = event.get(part)
        elif isinstance(event, list) and part.isdigit() and int(part) < len(event):
            event = event[int(part)]
        else:
            raise MissingKey(f"event[{']['.join(path[1:])}]: the event has no such member")
    return event
