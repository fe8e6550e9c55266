"""What a saga calls: idempotent tasks, enqueued in the commit that records the calls."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import CallFailed, InvalidArguments, InvalidKey
from ..store import saga_steps
from ..store.answers import Claimed, error_fields
from ..store.saga_steps import Recorded
from ..wire import keys, results
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
        return keys.fingerprint({"args": self.args, "kwargs": self.kwargs})


def call(task: Any, /, *args: Any, undo: Any = None, **kwargs: Any) -> Call:
    """A call for `saga.gather`: `call(ship, order_id=1, undo=unship)`. Raises `InvalidArguments`."""
    if not hasattr(task, "_enqueue"):
        raise InvalidArguments(f"call: must be an idempotent task, got {task!r:.100}")
    task._bound(args, kwargs)
    return Call(task, args, kwargs, checked(undo, args, kwargs))


def run_all(attempt: SagaAttempt, calls: Sequence[Call]) -> list[Any]:
    """The results of tasks, which all run at once; waits until all have ended. Raises `CallFailed`."""
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
            raise CallFailed(*_failure(row))
    return [results.from_text(row.result or "null") for row in found]


def begin(attempt: SagaAttempt, rows: Sequence[Recorded], calls: Sequence[Call]) -> NoReturn:
    """Record calls, send their messages, and wait for their ends, in one commit."""
    tenant = attempt.claim.id.tenant
    try:
        for row, each in zip(rows, calls, strict=True):
            attempt.record_with(row)
            options = {"idempotency_key": row.call_key, "tenant": tenant}
            each.task._enqueue(attempt.session, tuple(each.args), dict(each.kwargs), options)
        positions = [row.position for row in rows]
        ended = saga_steps.settle_calls(attempt.session.connection(), attempt.claim, attempt.saga, positions)
    except BaseException:
        attempt.writes.roll_back()
        raise
    attempt.wait(len(rows) - ended)


def derived_key(claim: Claimed, name: str) -> str:
    """The key of what a saga calls: readable, if it is short enough. A replay of the saga calls anew."""
    again = "" if claim.generation == 1 else f"@{claim.generation}"
    readable = f"{claim.id.task}/{claim.id.key}/{name}{again}"
    try:
        return keys.check_key(readable)
    except InvalidKey:
        return f"saga-{hashlib.sha256(readable.encode()).hexdigest()}"


def _row(attempt: SagaAttempt, each: Call) -> Recorded:
    row = attempt.new_row("call", each.name, "begun", each.fingerprint, each.undo)
    row.call_task, row.call_key = each.task.name, derived_key(attempt.claim, each.name)
    return row


def _failure(row: Recorded) -> tuple[str, str]:
    fields = error_fields(row.error or "")
    return fields["message"], fields["code"]
