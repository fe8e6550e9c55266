"""A provider's refusal, as it is recorded: a body that handles it is handed the same one in its next attempt."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from typing import Any

from ..errors import InvalidResult, PermanentError, StoredRefusal
from ..store.statements import ERROR_LIMIT
from ..wire import results

# Bytes of JSON that an application's own error may keep beside code and message.
ATTRIBUTES_LIMIT = 4096


def recorded(error: PermanentError, generation: int) -> dict[str, Any]:
    kind = type(error)
    refused = {
        "code": error.code,
        "message": str(error)[:ERROR_LIMIT],
        # so that a body which handles the refusal does so in its next attempt, too
        "type": f"{kind.__module__}:{kind.__qualname__}",
        "is_stored": isinstance(error, StoredRefusal),
        "attributes": _attributes(error),
    }
    return {"refused": refused, "generation": generation}


def refusal_of(entry: Mapping[str, Any], generation: int) -> PermanentError | None:
    """The refusal that an earlier attempt of this generation was given."""
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
    except Exception:  # a class that is made otherwise
        return plain
    return error


def _attributes(error: PermanentError) -> str | None:
    """What the application keeps on its own error, as JSON; None where that is none, or too long to be kept."""
    # the message as it was given: what `str()` makes of it, it makes again
    own = {name: value for name, value in vars(error).items() if name not in ("code", "__notes__")}
    own["message"] = error.message[:ERROR_LIMIT]
    try:
        return results.to_text(own, limit=ATTRIBUTES_LIMIT)
    except InvalidResult:
        return None


def _error_type(name: str) -> type[PermanentError] | None:
    """The class that an error was raised as; None where it cannot be found any more, or by its name at all."""
    try:
        found = pkgutil.resolve_name(name)
    except Exception:  # the module's own code
        return None
    return found if isinstance(found, type) and issubclass(found, PermanentError) else None
