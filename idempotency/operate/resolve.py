"""Resolve: say what became of an effect whose outcome was unknown."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

from celery import Celery
from pydantic import TypeAdapter, ValidationError
from sqlalchemy import Row

from ..application import runtime_of
from ..attempt import conclusions
from ..attempt.conclusions import Entry, NotDeclined
from ..attempt.effects import DidNotHappen, Happened
from ..attempt.runtime import Runtime
from ..errors import ChangeRefused, EffectUnknown, InvalidResult, PermanentError, Unfinished
from ..reasons import CANCELLED, RESOLVED
from ..store import corrections, ends, operations, saga_changes
from ..store.answers import error_fields, error_text, stored_error
from ..store.ends import FailedEnd
from ..store.sagas import COMPENSATING
from ..store.statements import repeatable
from ..wire import results
from ..wire.keys import OperationId
from .change import Change, Shown, audit, called, locked, repeated
from .ending import conclude, known_task, skipping_what_breaks, task_of
from .money import check_verified


def resolve_effect(
    app: Celery,
    shown: Shown,
    name: str,
    outcome: Happened | DidNotHappen,
    change: Change,
    *,
    end: bool = False,
    without_task: bool = False,
) -> str:
    """Record what a person found out about an effect whose outcome was unknown. Replay its dead letter to go on.

    Happened: the next attempt gets the result and calls nothing. DidNotHappen: it calls, under the effect's next key.
    With `end` the operation does not go on: what its end had to leave is undone, and `on_failed` is told the cause
    (`cancelled` if nothing but the unknown effect had ended it). A person's answer can be corrected while the operation
    is failed. The result is checked against the task's `effect_types`; an application without the task is refused,
    unless `without_task`. Returns the code that the operation has ended with now. Raises `ChangeRefused` and
    `InvalidResult`.
    """
    runtime = runtime_of(app)
    said = {"effect": name, "outcome": _digest(outcome), "end": end}

    @repeatable
    def resolve(skip: str | None) -> str:
        with runtime.engine.begin() as connection:
            if (done := repeated(connection, change, "resolve", shown.id, said=said)) is not None:
                return str(done.details["ended_as"])
            check_verified(app, connection, shown.id, change)
            row = locked(connection, shown, "resolve an effect of", "failed")
            entry, details, reason = _unresolved(shown.id, row, name), dict(said), None
            word: dict[str, Any] = {"state": "not_happened", "resolved": True}
            if isinstance(outcome, Happened):
                text = _checked_result(app, runtime, row.task, name, outcome.result, without_task=without_task)
                word |= {"state": "done", "result": text}
            resolved = {**entry, **word}
            ended = FailedEnd(row.error_code, row.error, changed={name: resolved})
            if end or row.error_code not in (EffectUnknown.default_code, Unfinished.default_code):
                entries = {**row.effects, name: resolved}
                if conclusions.is_open(entries):
                    raise ChangeRefused(f"{called(shown.id)}: another effect is still open; resolve it first")
                policy, arguments, broken = task_of(app, runtime, connection, row, without_task=without_task)
                cause, skip = _cause(row, change), skip or broken
                concluded = conclude(connection, shown.id, row, cause, policy, arguments, skip, entries=entries)
                ended = replace(concluded.end, changed={name: resolved, **concluded.end.changed})
                details |= {} if concluded.broken is None else {"on_failed_error": concluded.broken}
                reason = concluded.reason
            # which locks a saga that has called it: before the letters, as the end of the saga does
            fence = ends.conclude(connection, shown.id, ended, fence=row.fence)
            if reason is not None:
                corrections.update_open_letter(connection, shown.id, row.generation, ended, reason=reason)
            details |= {"state": word["state"], "ended_as": ended.code}
            audit(connection, change, "resolve", shown.id, row, fence=fence, details=details)
        return ended.code

    return skipping_what_breaks(resolve)


@repeatable
def resolve_effect_of_saga(
    app: Celery,
    id: OperationId,
    name: str,
    outcome: Happened | DidNotHappen,
    change: Change,
    *,
    without_task: bool = False,
) -> None:
    """Record what a person found out about an effect that keeps a saga from being undone; it goes on at once.

    Happened: its `undo` is run, if it has one. DidNotHappen: there is nothing to undo. If nothing but the unknown effect had
    ended the saga, it ends as `cancelled`. Raises `ChangeRefused` and
    `InvalidResult`.
    """
    runtime = runtime_of(app)
    said = {"effect": name, "outcome": _digest(outcome)}
    with runtime.engine.begin() as connection:
        if repeated(connection, change, "resolve", id, said=said) is not None:
            return
        check_verified(app, connection, id, change)
        # once it has stopped: before, the call may still be on its way, and its outcome be recorded
        saga = saga_changes.locked_stopped(connection, id, at_rest=True)
        if saga.status != COMPENSATING:
            raise ChangeRefused(
                f"{called(id)}: is {saga.status}; can only resolve an effect of a saga that is being undone"
            )
        word: dict[str, Any] = {"state": "not_happened", "resolved": True}
        if isinstance(outcome, Happened):
            text = _checked_result(app, runtime, id.task, name, outcome.result, without_task=without_task)
            word |= {"state": "done", "result": text}
        if not saga_changes.resolve(connection, saga, name, word):
            known = ", ".join(saga_changes.open_effects(connection, saga.id)) or "none"
            raise ChangeRefused(f"{called(id)}: has no effect {name!r} of unknown outcome; it has: {known}")
        if error_fields(saga.error)["code"] == EffectUnknown.default_code:
            saga_changes.end_with(connection, saga.id, error_text(RESOLVED, change.reason))
        saga_changes.go_on(connection, saga.id)
        row = operations.read_locked(connection, id)
        audit(connection, change, "resolve", id, row, details=said | {"state": word["state"]})


def _digest(outcome: Happened | DidNotHappen) -> str:
    """Tells one answer from another; the result itself must not be in the audit table."""
    if isinstance(outcome, DidNotHappen):
        return "not happened"
    text = json.dumps(outcome.result, sort_keys=True, default=str)
    return f"happened {hashlib.sha256(text.encode(errors='replace')).hexdigest()[:16]}"


def _unresolved(id: OperationId, row: Row[Any], name: str) -> Entry:
    """The effect's entry. Raises `ChangeRefused` if there is none, or if its outcome is known other than from a person."""
    entry: Entry | None = row.effects.get(name)
    if entry is None or entry["kind"] != "effect":
        known = ", ".join(sorted(n for n, e in row.effects.items() if e["kind"] == "effect")) or "none"
        raise ChangeRefused(f"{called(id)}: has no effect {name!r}; it has: {known}")
    # Once an undo has compensated it, its outcome stays: another would leave a refund without a payment, or two.
    if entry["state"] == "compensated" or (entry["state"] != "begun" and not entry.get("resolved")):
        raise ChangeRefused(f"{called(id)}: effect {name!r} is {entry['state']}, so its outcome is known")
    return entry


def _checked_result(app: Celery, runtime: Runtime, task: str, name: str, result: Any, *, without_task: bool) -> str:
    """The result as text. Raises `InvalidResult` if it is not what the task says that this effect returns."""
    text = results.to_text(result, limit=runtime.settings.result_limit, what=f"result of {name!r}")
    types = getattr(known_task(app, task, without_task=without_task), "effect_types", {})
    if name in types:
        try:
            # strict: what is recorded is the text as it is, so nothing is converted for the check alone
            TypeAdapter(types[name]).validate_json(text, strict=True)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(map(str, problem["loc"])) or "result"
            raise InvalidResult(f"result of {name!r}: {where}: {problem['msg']}") from None
    return text


def _cause(row: Row[Any], change: Change) -> PermanentError:
    """What had ended the operation beside the unknown effect; if nothing had, this person cancels it."""
    error = stored_error(row.error, of_cause=True)
    return NotDeclined(change.reason, CANCELLED) if error.code == EffectUnknown.default_code else error
