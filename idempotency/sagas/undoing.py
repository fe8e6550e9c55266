"""What undoes a step, an effect or a call of a saga: an idempotent task, whose operation is one of its own."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArguments, PermanentError, permanent_error
from ..store import sagas
from ..store.answers import Claimed, error_fields, error_text
from ..store.sagas import Recorded, SagaRow
from ..wire import encoding, keys, results
from ..wire.keys import OperationId

if TYPE_CHECKING:
    from .attempt import SagaAttempt
    from .journal import Journal

# The task's name, and the arguments of what it undoes, as JSON.
Undo = tuple[str, str]
# An undo that has a parameter of this name gets the result of what it undoes.
RESULT = "result"


def checked(undo: Any, args: Any, kwargs: Any) -> Undo | None:
    """What is recorded of `undo`. Raises `InvalidArguments` for anything but an idempotent task that takes the arguments."""
    if undo is None:
        return None
    if not hasattr(undo, "_enqueue"):
        raise InvalidArguments(f"undo: must be an idempotent task, an operation of its own; got {undo!r:.100}")
    given = {**kwargs, RESULT: None} if _wants_result(undo) else dict(kwargs)
    keys.bind(undo.signature_of_run, args, given)
    keys.canonical_json({"args": args, "kwargs": kwargs})
    return undo.name, encoding.dumps({"args": list(args), "kwargs": dict(kwargs)})


def arguments(task: Any, row: Recorded) -> tuple[list[Any], dict[str, Any]]:
    """What the undo of a row is called with."""
    given = encoding.loads(row.undo_arguments or "{}")
    kwargs = dict(given["kwargs"])
    if _wants_result(task):
        text = row.result if row.entry is None else row.entry.get("result")
        kwargs[RESULT] = results.from_text(text or "null")
    return list(given["args"]), kwargs


def key(claim: Claimed, name: str) -> str:
    """The key of an undo: another one than that of what it undoes."""
    from .calls import derived_key

    return derived_key(claim, f"undo/{name}")


def has_any(journal: Journal) -> bool:
    """Whether something has to be undone, or to be waited for, before the saga may fail."""
    return any(row.state == "begun" or (row.undo is not None and row.state == "done") for row in reversed(journal))


def reason(saga: SagaRow) -> PermanentError:
    """Why a saga was undone: the error that it ends with."""
    fields = error_fields(saga.error or error_text("cancelled", "cancelled"))
    return permanent_error(fields["message"], fields["code"])


def cancel_saga(attempt: SagaAttempt, tasks: Any, row: Recorded) -> None:
    """End a call first, if it is a saga, which may wait for days; any other task is waited for."""
    if row.call_task is None or row.call_key is None or not hasattr(tasks.get(row.call_task), "saga_entity"):
        return
    id = OperationId(attempt.claim.id.tenant, row.call_task, row.call_key)
    with attempt.runtime.autocommit(id.tenant) as connection:
        sagas.cancel(connection, id, error_text("cancelled", f"the saga {attempt.claim.id.task} is undone"))


def _wants_result(task: Any) -> bool:
    parameter = task.signature_of_run.parameters.get(RESULT)
    return parameter is not None and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY
