"""Compensation: a saga that has failed is undone, from the last of what it has recorded to the first, one at a time.

Each undo is a separate operation, with a key, attempts and a dead letter; the saga waits for its end. So it never runs
twice, and one that fails for good stops the saga where a person sees it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import EffectUnknown, PermanentError, Unfinished
from ..reasons import CANCELLED, COMPENSATION_FAILED, REPLACED, RESOLVED, RESULT_UNREADABLE
from ..store import saga_steps, sagas
from ..store.answers import error_fields, error_text, permanent_error, stored_error
from ..store.saga_steps import Recorded
from ..wire import results
from ..wire.keys import OperationId
from . import undo
from .calls import Call, begin, key_of
from .stopping import stop
from .trouble import CannotRead

if TYPE_CHECKING:
    from .attempt import SagaAttempt
    from .journal import Journal

# The codes of an operation that may have left something outside.
IN_DOUBT = (EffectUnknown.default_code, Unfinished.default_code)


def is_needed(journal: Journal) -> bool:
    """Whether something has to be undone, or its end to be waited for, before the saga may fail."""
    return any(_has_to_be_undone(journal, row) for row in reversed(journal))


def is_open(attempt: SagaAttempt) -> bool:
    """Whether the outcome of an effect is not known."""
    return any(row.state == "begun" and row.kind == "effect" for row in reversed(attempt.journal))


def run(attempt: SagaAttempt, tasks: Any) -> NoReturn:
    """Undo the next of what is recorded, and wait for it. Raises the error that the saga ends with once all is undone."""
    for row in attempt.journal.rows:
        if row.state == "begun" and row.kind == "call":
            _cancel_saga(attempt, tasks, row)
    for row in reversed(attempt.journal):
        if row.state == "begun" and row.kind == "effect":
            stop(attempt, EffectUnknown.default_code, f"effect {row.name!r}: begun, and the outcome is not known")
        if row.state == "begun" and row.kind == "call":
            attempt.wait(1)
        if (code := _left(attempt.journal, row)) is not None:
            stop(
                attempt,
                COMPENSATION_FAILED,
                f"the call {row.name!r} has ended as {code}: what it has done outside has to be resolved",
            )
        if _may_still_run(attempt.journal, row):
            why = f"the call {row.name!r} was replaced: what replaced it has to be seen to its end, and undone"
            stop(attempt, COMPENSATION_FAILED, why)
        if row.undo is not None and row.state == "done":
            _undo(attempt, tasks, row)
    attempt.is_undone = True
    raise final(attempt.saga)


def reason(saga: sagas.SagaRow) -> PermanentError:
    """Why a saga is undone."""
    return stored_error(saga.error or error_text(CANCELLED, "cancelled"))


def final(saga: sagas.SagaRow) -> PermanentError:
    """What a saga ends with once nothing is open: what was unknown has been found out and undone."""
    error = reason(saga)
    return permanent_error(str(error), RESOLVED) if error.code in IN_DOUBT else error


def _left(journal: Journal, row: Recorded) -> str | None:
    """Why a call that has failed may have left something outside, if no person has undone that."""
    if row.kind != "call" or row.state != "failed" or row.position in journal.undos:
        return None
    code = error_fields(row.error or "")["code"]
    return code if code in IN_DOUBT else None


def _has_to_be_undone(journal: Journal, row: Recorded) -> bool:
    undone = journal.undos.get(row.position)
    is_undone = undone is not None and undone.state == "done" and not _is_replaced(undone)
    return (
        row.state == "begun"
        or (row.undo is not None and row.state == "done" and not is_undone)
        or _left(journal, row) is not None
    )


def _may_still_run(journal: Journal, row: Recorded) -> bool:
    """Whether a call was replaced, and no person has said since that what replaced it has ended and is undone.

    It would do again what is undone before its end, or need what is undone of earlier rows.
    """
    if row.kind != "call" or row.state != "done" or row.position in journal.undos or not _is_replaced(row):
        return False
    return any(_has_to_be_undone(journal, other) for other in journal.rows if other.position <= row.position)


def _undo(attempt: SagaAttempt, tasks: Any, row: Recorded) -> None:
    undone = attempt.journal.undos.get(row.position)
    if undone is None:
        _begin_undo(attempt, tasks, row)
    if undone.state == "done" and _is_replaced(undone):
        # undone is what replaced it, if that does not fail
        error = error_text(REPLACED, "it was replaced, and a saga does not know when what replaces it ends")
        attempt.writes.alone(lambda c: saga_steps.was_replaced(c, attempt.claim, attempt.saga, undone.position, error))
        undone.state, undone.error = "failed", error
    if undone.state == "failed":
        why = "" if undone.error is None else f": {error_fields(undone.error)['message']}"
        stop(attempt, COMPENSATION_FAILED, f"the undo of {row.kind} {row.name!r} has failed{why}")
    if undone.state == "begun":
        attempt.wait(1)


def _is_replaced(row: Recorded) -> bool:
    return (row.result or "").startswith(results.REPLACED_BEGINS)


def _begin_undo(attempt: SagaAttempt, tasks: Any, row: Recorded) -> NoReturn:
    task = tasks.get(row.undo)
    if task is None:
        stop(
            attempt,
            COMPENSATION_FAILED,
            f"the undo of {row.kind} {row.name!r} is the task {row.undo}, which is gone",
            tries_again=True,
        )
    new = attempt.new_row("undo", f"undo {row.name}", "begun", None)
    new.undoes, new.call_task = row.position, task.name
    new.call_key = key_of(attempt, new)
    try:
        given = undo.arguments(task, row)
    except CannotRead as error:
        stop(attempt, RESULT_UNREADABLE, str(error), tries_again=True)
    begin(attempt, [new], [Call(task, *given)])


def _cancel_saga(attempt: SagaAttempt, tasks: Any, row: Recorded) -> None:
    """End a call, if it is a saga, which may wait for days; any other task is waited for.

    All at once: another saga may take long to be undone, or stop, and this one would go on meanwhile.
    """
    if row.call_task is None or row.call_key is None or not hasattr(tasks.get(row.call_task), "saga_entity"):
        return
    id = OperationId(attempt.claim.id.tenant, row.call_task, row.call_key)
    with attempt.runtime.autocommit(id.tenant) as connection:
        sagas.cancel(connection, id, error_text(CANCELLED, f"the saga {attempt.claim.id.task} is undone"))
