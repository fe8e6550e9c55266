"""What a saga calls: a task with its arguments, and the key of its operation."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidArguments, InvalidKey
from ..store.answers import Claimed
from ..wire import keys
from . import undoing


@dataclass(slots=True)
class Call:
    """One task that a saga calls. `name` is given where the code comes to it."""

    task: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    undo: undoing.Undo | None
    name: str = ""

    @property
    def fingerprint(self) -> str:
        return keys.fingerprint({"args": self.args, "kwargs": self.kwargs})

    def key(self, claim: Claimed) -> str:
        return derived_key(claim, self.name)


def call(task: Any, /, *args: Any, undo: Any = None, **kwargs: Any) -> Call:
    """A call for `saga.gather`: `call(ship, order_id=1, undo=unship)`. Raises `InvalidArguments`."""
    if not hasattr(task, "_enqueue"):
        raise InvalidArguments(f"call: must be an idempotent task, got {task!r:.100}")
    task._bound(args, kwargs)
    return Call(task, args, kwargs, undoing.checked(undo, args, kwargs))


def derived_key(claim: Claimed, name: str) -> str:
    """The key of what a saga calls: readable, if it is short enough. A replay of the saga calls anew."""
    again = "" if claim.generation == 1 else f"@{claim.generation}"
    readable = f"{claim.id.task}/{claim.id.key}/{name}{again}"
    try:
        return keys.check_key(readable)
    except InvalidKey:
        return f"saga-{hashlib.sha256(readable.encode()).hexdigest()}"
