"""What a saga calls: idempotent tasks, enqueued in the commit that records the calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from ..attempt.conclusions import is_declined
from ..errors import CallFailed, InvalidKey, Misuse
from ..reasons import REPLACED, RESULT_UNREADABLE
from ..store.answers import stored_error
from ..store.saga_steps import Recorded
from ..wire import keys
from ..worker.control import is_replacement
from . import arguments, stopping
from .misuse import raised_as_misuse
from .trouble import CannotRead, result_of
from .undo import Undo, checked

if TYPE_CHECKING:
    from .attempt import SagaAttempt


@dataclass(slots=True)
class Call:
    """One task that a saga calls. `name` is given where the code comes to it."""

    task: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    undo: Undo | None = None
    name: str = ""

    @property
    def fingerprint(self) -> str:
        return arguments.recorded(self.args, self.kwargs, self.task._bound(self.args, self.kwargs))


@raised_as_misuse()
def call(task: Any, /, *args: Any, undo: Any = None, **kwargs: Any) -> Call:
    """A call for `saga.gather`: `call(ship, order_id=1, undo=unship)`. Raises `Misuse`."""
    if not hasattr(task, "_enqueue"):
        raise Misuse(f"call: must be an idempotent task, got {task!r:.100}")
    task._bound(args, kwargs)
    return Call(task, args, kwargs, checked(undo, args, kwargs))


def run_all(attempt: SagaAttempt, calls: Sequence[Call]) -> list[Any]:
    """The results of tasks, which all run at once; waits until all have ended. Raises `CallFailed`."""
    calls = [replace(each) for each in calls]  # one may be given twice
    for each in calls:
        each.name = attempt.journal.name(each.task.name)
    rows = [attempt.recalled("call", each.name, each.fingerprint) for each in calls]
    if new := [each for each, row in zip(calls, rows, strict=True) if row is None]:
        attempt.check_may_begin()
        begin(attempt, [_row(attempt, each) for each in new], new)
    found = [row for row in rows if row is not None]
    if still_open := [row for row in found if row.state == "begun"]:
        attempt.wait(len(still_open))
    for row in found:
        if row.state == "failed":
            raise _failure(row)
    try:
        ended = [result_of(attempt.runtime, row) for row in found]
    except CannotRead as error:
        stopping.stop(attempt, RESULT_UNREADABLE, str(error), tries_again=True)
    for row, result in zip(found, ended, strict=True):
        if is_replacement(result):
            raise CallFailed(
                f"{row.call_task} was replaced, and a saga does not know when what replaces it ends", REPLACED
            )
    return ended


def begin(attempt: SagaAttempt, rows: Sequence[Recorded], calls: Sequence[Call]) -> NoReturn:
    """Record calls, send their messages, and wait for their ends, in one commit."""
    tenant = attempt.claim.id.tenant
    try:
        for row, each in zip(rows, calls, strict=True):
            attempt.record_with(row)
            options = {"idempotency_key": row.call_key, "tenant": tenant}
            # what is recorded can be undone: its arguments were within the limit, and are called with its result, unless
            # that is a large one
            beyond = attempt.runtime.settings.result_limit if row.kind == "undo" else 0
            each.task._enqueue(attempt.session, tuple(each.args), dict(each.kwargs), options, beyond=beyond)
    except BaseException:
        attempt.writes.roll_back()
        raise
    attempt.wait(len(rows))


def key_of(attempt: SagaAttempt, row: Recorded) -> str:
    """The key of what a saga calls: of this saga's row, this run of it and this place in it, and so of nothing else.

    It is recorded with the call. The rest of it is for people.
    """
    key = f"{attempt.saga.id}/{attempt.claim.generation}.{row.position}"
    try:
        return keys.check_key(f"{key}/{attempt.claim.id.key}/{row.name}")
    except InvalidKey:
        return key


def _row(attempt: SagaAttempt, each: Call) -> Recorded:
    row = attempt.new_row("call", each.name, "begun", each.fingerprint, each.undo)
    row.call_task, row.call_key = each.task.name, key_of(attempt, row)
    return row


def _failure(row: Recorded) -> CallFailed:
    error = stored_error(row.error or "")
    failure = CallFailed(error.message, error.code)
    failure.is_declined = is_declined(error)
    return failure
