"""A provider's refusal as it is recorded, so that the next attempt of a body that handles it gets the same one."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from typing import Any

from ..errors import InvalidResult, PermanentError, StoredRefusal
from ..store.statements import ERROR_LIMIT, said_by
from ..text import without_values
from ..wire import results

# Bytes of JSON that an application's own error may keep beside code and message.
ATTRIBUTES_LIMIT = 4096


def recorded(error: PermanentError, generation: int) -> dict[str, Any]:
    kind = type(error)
    refused = {
        "code": error.code,
        "message": without_values(said_by(error))[:ERROR_LIMIT],
        # so that an `except` of the body catches it in the next attempt, too
        "type": f"{kind.__module__}:{kind.__qualname__}",
        "is_stored": isinstance(error, StoredRefusal),
        "attributes": _attributes(error),
    }
    return {"refused": refused, "generation": generation}


def refusal_of(entry: Mapping[str, Any], generation: int) -> PermanentError | None:
    """The refusal that an earlier attempt of this generation got, if it did."""
    refused = entry.get("refused")
    if entry["state"] != "not_happened" or refused is None or entry["generation"] != generation:
        return None
    plain = (StoredRefusal if refused["is_stored"] else PermanentError)(refused["message"], refused["code"])
    if (kind := _error_type(refused["type"])) is None or refused["attributes"] is None:
        return plain
    try:
        error = kind.__new__(kind, refused["message"], refused["code"])
        PermanentError.__init__(error, refused["message"], refused["code"])
        error.__dict__.update(results.from_text(refused["attributes"]))
        str(error)
    except Exception:  # a class with another constructor
        return plain
    return error


def _attributes(error: PermanentError) -> str | None:
    """The attributes of an application's own error as JSON; None if they are not JSON, or too long."""
    # the message as it was given: the class's own `__str__` is applied again
    own = {name: value for name, value in vars(error).items() if name not in ("code", "__notes__")}
    own["message"] = without_values(error.message)[:ERROR_LIMIT]
    try:
        return results.to_text(own, limit=ATTRIBUTES_LIMIT)
    except InvalidResult:
        return None


def _error_type(name: str) -> type[PermanentError] | None:
    """The class of the error by its name; None if there is no such class any more, or it has no importable name."""
    try:
        found = pkgutil.resolve_name(name)
    except Exception:  # from the module's own code
        return None
    return found if isinstance(found, type) and issubclass(found, PermanentError) else None
