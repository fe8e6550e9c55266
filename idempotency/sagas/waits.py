"""Waits: for an event, or only for a time. Each has one winner, which is recorded; a deadline is set once, by the database."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..errors import Misuse
from ..observe.crash_points import crash_point
from ..store import saga_steps
from ..store.saga_steps import Recorded
from ..wire import results
from ..wire.keys import fingerprint

if TYPE_CHECKING:
    from .attempt import SagaAttempt

MAX_WAIT = timedelta(days=3650)


@dataclass(frozen=True, slots=True)
class Wait:
    """What the code waits for: an event, or (without a type) only time."""

    kind: str
    name: str
    args: str
    seconds: float
    event_type: str | None = None
    match: str | None = None


def wait_for(attempt: SagaAttempt, event_type: str, match: str, timeout: float) -> Any | None:
    """The event, or None once the time is over."""
    name = attempt.journal.name(event_type)
    row = _decided(attempt, Wait("wait", name, fingerprint({"match": match}), timeout, event_type, match))
    return None if row.result is None else results.from_text(row.result)


def sleep(attempt: SagaAttempt, seconds: float) -> None:
    """Wait for a time."""
    _decided(attempt, Wait("timer", attempt.journal.name("sleep"), fingerprint({}), seconds))


def seconds_of(what: str, given: timedelta | float) -> float:
    """A duration in seconds; 0 if it is negative. Raises `Misuse`, which names the limit."""
    try:
        duration = given if isinstance(given, timedelta) else timedelta(seconds=given)
    except (TypeError, ValueError, OverflowError) as error:
        raise Misuse(f"{what}: must be a timedelta or seconds, at most {MAX_WAIT.days} days: {error}") from error
    if duration > MAX_WAIT:
        raise Misuse(f"{what}: must be at most {MAX_WAIT.days} days, got {duration}")
    return max(0.0, duration.total_seconds())


def _decided(attempt: SagaAttempt, wait: Wait) -> Recorded:
    """The row of a wait that has ended. Until then, waits: one transaction finds the event and records it, or lets go."""
    row = attempt.recalled(wait.kind, wait.name, wait.args)
    if row is not None and row.state not in ("begun", "not_happened"):
        return row
    attempt.check_may_begin()  # one that has not happened was closed when the saga began to be undone
    try:
        event = _find_event(attempt, wait)
        if row is None:
            row = _begun(attempt, wait, event)
            attempt.record_with(row)
            is_new, left = True, wait.seconds
        else:
            is_new, left = False, 0.0 if row.due_in is None else row.due_in
        is_over = event is not None or left <= 0
        if is_over and row.state == "begun":
            _decide(attempt, row, event)
    except BaseException:
        attempt.writes.roll_back()
        raise
    if not is_over:
        attempt.wait(1, left)
    crash_point("wait.decided")
    attempt.writes.commit()
    if is_new:
        attempt.journal.add(row)
    return row


def _find_event(attempt: SagaAttempt, wait: Wait) -> tuple[int, str] | None:
    if wait.event_type is None or wait.match is None:
        return None
    connection = attempt.session.connection()
    return saga_steps.find_event(
        connection, attempt.claim, attempt.saga, wait.event_type, wait.match, lease=attempt.lease
    )


def _begun(attempt: SagaAttempt, wait: Wait, event: tuple[int, str] | None) -> Recorded:
    row = attempt.new_row(wait.kind, wait.name, "begun", wait.args)
    row.seconds, row.event_type, row.match = wait.seconds, wait.event_type, wait.match
    if event is not None:
        row.state, row.event_id, row.result = "done", *event
    return row


def _decide(attempt: SagaAttempt, row: Recorded, event: tuple[int, str] | None) -> None:
    row.event_id, row.result = event or (None, None)
    row.state = "done" if event is not None or row.kind == "timer" else "timed_out"
    attempt.writes.in_session(
        lambda c: saga_steps.decide(
            c,
            attempt.claim,
            attempt.saga,
            row.position,
            row.state,
            result=row.result,
            event_id=row.event_id,
            lease=attempt.lease,
        )
    )
