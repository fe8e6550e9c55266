"""Steps: database phases, each committed once before the body goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..observe.crash_points import crash_point
from ..store import effects
from ..wire import results
from ..wire.keys import fingerprint
from . import conclusions, entries

if TYPE_CHECKING:
    from .attempt import Attempt


def step(
    attempt: Attempt,
    name: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    undo: conclusions.Undo | None,
) -> Any:
    """Commit a database phase together with its recorded result, unless it is recorded already."""
    arguments = fingerprint({"args": args, "kwargs": kwargs})
    recorded = entries.recorded(attempt, name, "step", arguments)
    if recorded is not None:
        return results.from_text(recorded["result"])
    entries.refuse_coroutine(f"step {name!r}", fn)
    attempt.check_may_begin()
    entry: dict[str, Any] = {
        "kind": "step",
        "state": "done",
        "args": arguments,
        "position": attempt.next_position(),
        "undo": None if undo is None else _undo_named(name, undo),
    }
    session = attempt.session
    with attempt.runtime.traced("step", step=name):
        try:
            result = fn(session, *args, **kwargs)
            entry["result"] = entries.as_text(attempt, name, result)
            session.flush()
            lease = attempt.runtime.settings.lease
            attempt.writes.in_session(lambda c: effects.record_step(c, attempt.claim, name, entry, lease=lease))
        except BaseException:
            session.rollback()
            raise
        crash_point("step.recorded")
        attempt.writes.commit()
    attempt.claim.effects[name] = entry
    crash_point("step.committed")
    attempt.writes.follow_up()
    return results.from_text(entry["result"])


def _undo_named(name: str, undo: conclusions.Undo) -> str:
    if conclusions.answers_for_effects(undo):
        entries.check_call(f"step {name!r}: undo", undo, None, None, effects={})
    else:
        entries.check_call(f"step {name!r}: undo", undo, None, None)
    return conclusions.reference(undo)
