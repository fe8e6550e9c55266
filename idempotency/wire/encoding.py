"""JSON with the types that Celery's JSON supports, in Celery's encoding, whether or not kombu is loaded.

Without kombu, results and fingerprints are the same text as with it (kombu.utils.json, version 5.6). Types that an
application registers with kombu work only where kombu is loaded.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

# How deep `first_defect` looks, and the longest name of a member that it shows.
DEEPEST_PATH = 20
LONGEST_NAME = 40

# By type, subclasses first: marker, encoder, decoder.
_TYPES: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    datetime: ("datetime", datetime.isoformat, datetime.fromisoformat),
    date: ("date", date.isoformat, lambda text: datetime.fromisoformat(text).date()),
    time: ("time", time.isoformat, time.fromisoformat),
    Decimal: ("decimal", str, Decimal),
    UUID: ("uuid", lambda value: {"hex": value.hex}, lambda fields: UUID(**fields)),
}
_READERS: dict[str, Callable[[Any], Any]] = {
    **{marker: read for marker, _, read in _TYPES.values()},
    "bytes": lambda text: text.encode(),
    "base64": lambda text: base64.b64decode(text.encode()),
}


def dumps(value: Any, *, allow_nan: bool = True) -> str:
    """Encode a value. Raises `TypeError` for an unknown type, `ValueError` for NaN unless allowed."""
    return json.dumps(value, default=_encoded, allow_nan=allow_nan)


def loads(text: str) -> Any:
    """Decode what `dumps` returned. Raises `ValueError` for an unknown type."""
    return json.loads(text, object_hook=_decoded)


def first_defect(value: Any, path: str = "", depth: int = 0) -> str | None:
    """Where in a value something is not JSON, and what: `order.lines[2].price: Money`. None: nothing can be named.

    Names members that could be names of fields; others may be data, and are shown as `[*]`. Never shows a value.
    """
    if depth > DEEPEST_PATH:
        return None
    if isinstance(value, dict):
        wrong = next((key for key in value if not isinstance(key, str | int | float | None)), None)
        if wrong is not None:
            return f"{path}: a {type(wrong).__name__} as the name of a member".removeprefix(": ")
        inner = ((each, f"{path}{_member(name)}".removeprefix(".")) for name, each in value.items())
    elif isinstance(value, list | tuple):
        inner = ((each, f"{path}[{position}]") for position, each in enumerate(value))
    else:
        return _defect_of(value, path)
    return next((found for each, where in inner if (found := first_defect(each, where, depth + 1)) is not None), None)


def _defect_of(value: Any, path: str) -> str | None:
    try:
        dumps(value, allow_nan=False)
    except ValueError:
        return f"{path}: NaN or infinity" if isinstance(value, float) else f"{path}: {type(value).__name__}"
    except TypeError:
        return f"{path}: {type(value).__name__}"
    return None


def _member(name: object) -> str:
    is_name = isinstance(name, str) and name.isidentifier() and len(name) <= LONGEST_NAME
    return f".{name}" if is_name else "[*]"


def _encoded(value: Any) -> Any:
    if (kombu := _kombu()) is not None:
        return kombu.JSONEncoder().default(value)
    if (reduce := getattr(value, "__json__", None)) is not None:
        return reduce()
    for kind, (marker, write, _) in _TYPES.items():
        if isinstance(value, kind):
            return _marked(marker, write(value))
    if isinstance(value, bytes):
        try:
            return _marked("bytes", value.decode())
        except UnicodeDecodeError:
            return _marked("base64", base64.b64encode(value).decode())
    raise TypeError(f"{type(value).__name__} is not JSON")


def _decoded(fields: dict[str, Any]) -> Any:
    if fields.keys() != {"__type__", "__value__"}:
        return fields
    if (kombu := _kombu()) is not None:
        return kombu.object_hook(fields)
    if (read := _READERS.get(fields["__type__"])) is None:
        raise ValueError(f"unknown type {fields['__type__']!r}")
    return read(fields["__value__"])


def _marked(marker: str, value: Any) -> dict[str, Any]:
    return {"__type__": marker, "__value__": value}


def _kombu() -> Any:
    return sys.modules.get("kombu.utils.json")
