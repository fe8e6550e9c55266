"""What undoes a step, an effect or a call of a saga: an idempotent task, called with the same arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from ..application import runtime_of
from ..errors import Misuse
from ..store.saga_steps import Recorded
from ..wire import encoding, keys
from .misuse import raised_as_misuse
from .trouble import result_of

# The task's name, and the arguments of what it undoes, as JSON.
Undo = tuple[str, str]
# An undo that has a parameter of this name gets the result of what it undoes.
RESULT = "result"


@raised_as_misuse()
def checked(undo: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Undo | None:
    """What is recorded of `undo`. Raises `Misuse` for anything but an idempotent task that takes the arguments."""
    if undo is None:
        return None
    if not hasattr(undo, "_enqueue"):
        raise Misuse(f"undo: must be an idempotent task, so that it is a separate operation; got {undo!r:.100}")
    wants_result = _wants_result(undo)
    if wants_result and RESULT in kwargs:
        raise Misuse(f"undo: {undo.name} gets the result of what it undoes as {RESULT!r}, which is an argument here")
    keys.bind(undo.signature_of_run, args, {**kwargs, RESULT: None} if wants_result else dict(kwargs))
    limit = runtime_of(undo.app).settings.arguments_limit
    if (size := len(keys.canonical_json({"args": args, "kwargs": kwargs}))) > limit:
        raise Misuse(f"undo: {undo.name}: arguments of at most {limit} bytes as JSON, got {size}")
    return undo.name, encoding.dumps({"args": list(args), "kwargs": dict(kwargs)})


def arguments(undo: Any, row: Recorded) -> tuple[list[Any], dict[str, Any]]:
    """What the undo of a row is called with."""
    given = encoding.loads(row.undo_arguments or "")
    kwargs = dict(given["kwargs"])
    if _wants_result(undo):
        kwargs[RESULT] = result_of(runtime_of(undo.app), row)
    return list(given["args"]), kwargs


def _wants_result(undo: Any) -> bool:
    parameter = undo.signature_of_run.parameters.get(RESULT)
    return parameter is not None and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY
