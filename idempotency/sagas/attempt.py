"""One run of a saga's code: what it has recorded is read, what is new is recorded in rows, and it waits without holding
anything.

A saga ends in two commits. The first says why it is undone (`COMPENSATING`); from then on nothing forward is recorded.
The second, when everything is undone, ends its operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn

from ..attempt import effects, entries
from ..attempt.attempt import Attempt
from ..attempt.conclusions import Concluded
from ..attempt.policy import Policy
from ..attempt.runtime import Runtime
from ..errors import CallFailed, EffectUnknown, InvalidArguments, OpenTransaction, PermanentError, Waiting
from ..observe.crash_points import crash_point
from ..observe.logs import log
from ..store import letters, sagas
from ..store.answers import Claimed, error_fields, error_text
from ..store.sagas import COMPENSATING, COMPLETED, FAILED, Recorded
from ..wire import results
from ..wire.delivery import Delivery
from ..wire.keys import fingerprint
from . import undoing
from .calls import Call
from .journal import Journal, Mismatch

# Of each generation, so that a replay does not get the provider's answers of the run that was undone.
NUMBERS = 1000
# Seconds until a saga whose code does not fit is tried again: a deploy may be half done. Doubled each time, up to the last.
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0
# What a dead letter of a stopped saga says.
MISMATCH, NOT_UNDONE = "saga_mismatch", "compensation_failed"
MAX_WAIT = timedelta(days=3650)


@dataclass(frozen=True, slots=True)
class _Wait:
    """What the code waits for: an event, or (without a type) only time."""

    kind: str
    name: str
    args: str
    seconds: float
    event_type: str | None = None
    match: str | None = None


class SagaAttempt(Attempt):
    """One run of a saga's code."""

    saga: sagas.SagaRow
    journal: Journal

    def __init__(self, runtime: Runtime, claim: Claimed, delivery: Delivery, policy: Policy, *, entity_id: str) -> None:
        super().__init__(runtime, claim, delivery, policy)
        self.first_number = 1 + NUMBERS * (claim.generation - 1)
        self._entity_id = entity_id
        self._positions: dict[str, int] = {}
        self._undo_of: dict[str, undoing.Undo | None] = {}
        # whether the code was entered, and so has to come to all that is recorded
        self.has_run = False
        self._is_undone = False

    def prepare(self) -> None:
        with self.runtime.autocommit(self.claim.id.tenant) as connection:
            self.saga = sagas.open_saga(connection, self.claim, self._entity_id)
            rows = [] if self.saga.is_new else sagas.steps_of(connection, self.saga, self.claim)
        self.journal = Journal(rows)
        self.claim.effects.update(self.journal.effects())
        self._positions = {name: entry["position"] for name, entry in self.claim.effects.items()}
        if self.is_undone_now:
            # what ended it is decided: this run only undoes
            self.claim = replace(self.claim, revoked=False)
            self.delivery = replace(self.delivery, is_revoked=False)

    @property
    def is_undone_now(self) -> bool:
        return self.saga.status == COMPENSATING

    # ------------------------------------------------------------ what the code does

    def step(self, name: str, fn: Callable[..., Any], *args: Any, undo: Any = None, **kwargs: Any) -> Any:
        name = self.journal.name(name)
        arguments = fingerprint({"args": args, "kwargs": kwargs})
        if (row := self._recalled("step", name, arguments)) is not None:
            assert row.result is not None
            return results.from_text(row.result)
        entries.refuse_coroutine(f"step {name!r}", fn)
        row = self._new("step", name, "done", arguments, undoing.checked(undo, args, kwargs))
        self.check_may_begin()
        session = self.session
        try:
            result = fn(session, *args, **kwargs)
            row.result = entries.as_text(self, name, result)
            session.flush()
            self.writes.in_session(lambda c: sagas.record_with(c, self.claim, self.saga, row, lease=self._lease))
        except BaseException:
            session.rollback()
            raise
        crash_point("step.recorded")
        self.writes.commit()
        self.journal.add(row)
        crash_point("step.committed")
        self.writes.follow_up()
        return results.from_text(row.result)

    def effect(self, name: str, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
        reconcile, undo = options.pop("reconcile", None), options.pop("undo", None)
        call = effects.Call(self.journal.name(name), fn, args, options, reconcile)
        self._recalled("effect", call.name, call.fingerprint)
        self._undo_of[call.name] = undoing.checked(undo, args, options)
        return effects.effect(self, call)

    def call(self, calls: Sequence[Call]) -> list[Any]:
        """The results of tasks, which all run at once: enqueued in the commit that records them. Raises `CallFailed`."""
        for call in calls:
            call.name = self.journal.name(call.task.name)
        rows = [self._recalled("call", call.name, call.fingerprint) for call in calls]
        new = [call for call, row in zip(calls, rows, strict=True) if row is None]
        if new:
            self._begin_calls(new)
        found = [row for row in rows if row is not None]
        if open_calls := [row for row in found if row.state == "begun"]:
            self._wait(len(open_calls))
        for row in found:
            if row.state == "failed":
                assert row.error is not None
                raise _failure(row)
        return [results.from_text(row.result or "null") for row in found]

    def _begin_calls(self, calls: Sequence[Call]) -> NoReturn:
        self.check_may_begin()
        begun = []
        for call in calls:
            row = self._new("call", call.name, "begun", call.fingerprint, call.undo)
            row.call_task, row.call_key = call.task.name, call.key(self.claim)
            begun.append(row)
            self.journal.last = row.position
        self._enqueue(begun, [(call.task, call.args, call.kwargs) for call in calls])

    def _enqueue(self, rows: Sequence[Recorded], sent: Sequence[tuple[Any, Any, Any]]) -> NoReturn:
        """Record calls, send them, and wait for them, in one commit."""
        session, tenant = self.session, self.claim.id.tenant
        try:
            for row, (task, args, kwargs) in zip(rows, sent, strict=True):
                self.writes.in_session(
                    lambda c, row=row: sagas.record_with(c, self.claim, self.saga, row, lease=self._lease)  # type: ignore[misc]
                )
                task._enqueue(session, tuple(args), dict(kwargs), {"idempotency_key": row.call_key, "tenant": tenant})
            positions = [row.position for row in rows]
            ended = sagas.settle_calls(session.connection(), self.claim, self.saga, positions)
        except BaseException:
            session.rollback()
            raise
        self._wait(len(rows) - ended)

    def wait_for(self, event_type: str, match: str, timeout: float) -> Any | None:
        """The event, or None once the time is over."""
        args = fingerprint({"match": match})
        wait = _Wait("wait", self.journal.name(event_type), args, timeout, event_type, match)
        row = self._decided(wait)
        return None if row.result is None else results.from_text(row.result)

    def sleep(self, name: str, seconds: float) -> None:
        self._decided(_Wait("timer", self.journal.name(name), fingerprint({}), seconds))

    def value(self, name: str, make: Callable[[], Any]) -> Any:
        """A value that is made once and recorded."""
        name = self.journal.name(name)
        if (row := self._recalled("value", name, None)) is None:
            self.check_may_begin()
            row = self._new("value", name, "done", None, None)
            row.result = entries.as_text(self, name, make())
            self._record(row)
        return results.from_text(row.result or "null")

    def version(self, name: str) -> bool:
        known = self.journal.version(name)
        if known is None:
            self.check_may_begin()
            self._record(self._new("version", name, "done", None, None))
            return True
        return known

    # ------------------------------------------------------------ waiting

    def _decided(self, wait: _Wait) -> Recorded:
        """The row of a wait that has an end. Until then, waits. One transaction finds the event and records it, or waits."""
        row = self._recalled(wait.kind, wait.name, wait.args)
        if row is not None and row.state != "begun":
            return row
        self.check_may_begin()
        session, event = self.session, None
        try:
            if wait.event_type is not None:
                assert wait.match is not None
                event = sagas.find_event(session.connection(), self.claim, self.saga, wait.event_type, wait.match)
            if row is None:
                row = self._begun(wait, event)
                self.writes.in_session(lambda c: sagas.record_with(c, self.claim, self.saga, row, lease=self._lease))
                is_new, is_over = True, event is not None or wait.seconds <= 0
            else:
                is_new, is_over = False, event is not None or row.is_due
            if is_over and row.state == "begun":
                self._decide(row, event)
        except BaseException:
            session.rollback()
            raise
        if not is_over:
            self._wait(1, wait.seconds if is_new else row.due_in)
        crash_point("wait.decided")
        self.writes.commit()
        if is_new:
            self.journal.add(row)
        return row

    def _begun(self, wait: _Wait, event: tuple[int, str] | None) -> Recorded:
        row = self._new(wait.kind, wait.name, "begun", wait.args, None)
        row.seconds, row.event_type, row.match = wait.seconds, wait.event_type, wait.match
        if event is not None:
            row.state, row.event_id, row.result = "done", *event
        return row

    def _decide(self, row: Recorded, event: tuple[int, str] | None) -> None:
        row.event_id, row.result = event or (None, None)
        row.state = "done" if event is not None or row.kind == "timer" else "timed_out"
        state, result, event_id = row.state, row.result, row.event_id
        self.writes.in_session(
            lambda c: sagas.decide(
                c, self.claim, self.saga, row.position, state, result=result, event_id=event_id, lease=self._lease
            )
        )

    def _wait(self, waits_for: int, seconds: float | None = None, *, stopped: str | None = None) -> NoReturn:
        """Let go of everything, in the commit of what was recorded for it."""
        now = 0.0 if waits_for == 0 else seconds
        self.writes.in_session(
            lambda c: sagas.wait(
                c, self.claim, self.saga, waits_for=waits_for, seconds=now, lease=self._lease, stopped=stopped
            )
        )
        if stopped is None:
            self._close_letter()
        crash_point("saga.waits")
        self.writes.commit()
        crash_point("saga.waiting")
        self.writes.follow_up()
        raise Waiting

    # ------------------------------------------------------------ what is recorded, and where

    def _recalled(self, kind: str, name: str, args: str | None) -> Recorded | None:
        """What is recorded where the code has come to. Raises `LeaseLost`, `OpenTransaction` and `Waiting`."""
        self.check_lease()
        if self.writes.in_transaction:
            raise OpenTransaction(f"{name!r}: the session has a transaction open; a saga reads and writes in its steps")
        try:
            return self.journal.next(kind, name, args)
        except Mismatch as mismatch:
            self._stop(MISMATCH, str(mismatch))

    def _new(self, kind: str, name: str, state: str, args: str | None, undo: undoing.Undo | None) -> Recorded:
        row = Recorded(self.next_position(), name, kind, state, args)
        if undo is not None:
            row.undo, row.undo_arguments = undo
        return row

    def _record(self, row: Recorded) -> None:
        self.writes.alone(lambda c: sagas.record(c, self.claim, self.saga, row))
        self.journal.add(row)

    @property
    def _lease(self) -> float:
        return self.runtime.settings.lease

    def next_position(self) -> int:
        return self.journal.last + 1

    def begin_effect(self, name: str, entry: dict[str, Any]) -> float:
        position = self._positions.get(name)
        row = self._new("effect", name, "begun", entry["args"], self._undo_of[name])
        row.position = entry["position"] = position or row.position
        row.entry = entry
        begun_at: float = self.writes.alone(lambda c: sagas.begin_effect(c, self.claim, self.saga, row))
        self._positions[name] = row.position
        if position is None:
            self.journal.add(row)
        return begun_at

    def change_effect(self, name: str, change: dict[str, Any]) -> None:
        position, lease = self._positions[name], self._lease
        if self.writes.in_transaction:
            self.writes.together(
                lambda c: sagas.change_effect_with(c, self.claim, self.saga, position, change, lease=lease)
            )
        else:
            self.writes.alone(lambda c: sagas.change_effect(c, self.claim, self.saga, position, change))

    # ------------------------------------------------------------ how it ends

    def complete(self, result: Any) -> None:
        self._check_read()
        results.to_text(result, limit=self.runtime.settings.result_limit)  # before the saga's row is locked
        self.writes.in_session(lambda c: sagas.end(c, self.saga, COMPLETED))
        self._close_letter()
        super().complete(result)

    def fail(self, error: PermanentError, *, cause: BaseException | None = None) -> PermanentError:
        self.writes.roll_back()
        if self.is_undone_now and not self._is_undone:
            self._stop(NOT_UNDONE, f"{error.code}: {error}")  # its attempts are used up
        if not self._is_undone:
            self._check_read()
            self.check_lease()
            if not isinstance(error, EffectUnknown):
                self._ask_once_more()
            if undoing.has_any(self.journal):
                self._begin_to_undo(error)
        return super().fail(error, cause=cause)

    def _fail(self, error: PermanentError, described: str, *, skip: str | None) -> Concluded:
        self.writes.in_session(lambda c: sagas.end(c, self.saga, FAILED))
        self._close_letter()
        # what is left of its effects has no undo, and is left as it is
        entries_left, self.claim = self.claim.effects, replace(self.claim, effects={})
        try:
            return super()._fail(error, described, skip=skip)
        finally:
            self.claim = replace(self.claim, effects=entries_left)

    def _begin_to_undo(self, error: PermanentError) -> NoReturn:
        """The first of the two commits of a saga that fails: from here on it is only undone."""
        stored = error_text(error.code, str(error))
        self.writes.alone(lambda c: sagas.compensate(c, self.claim, self.saga, stored))
        crash_point("saga.compensating")
        log.warning("saga_is_undone", code=error.code, **self.writes.names)
        self.saga = replace(self.saga, status=COMPENSATING, error=stored)
        self._wait(0)

    def undo(self, tasks: Any) -> NoReturn:
        """Undo the next of what is recorded, from the last to the first, and wait for it; or end the saga."""
        for row in reversed(self.journal):
            undone = self.journal.undos.get(row.position)
            if row.state == "begun" and row.kind == "effect":
                self._stop("effect_unknown", f"effect {row.name!r}: begun, and the outcome is not known")
            if row.state == "begun" and row.kind == "call":
                undoing.cancel_saga(self, tasks, row)
                self._wait(1)
            if row.undo is None or row.state != "done" or (undone is not None and undone.state == "done"):
                continue
            if undone is None:
                self._begin_undo(tasks, row)
            if undone.state == "failed":
                why = "" if undone.error is None else f": {error_fields(undone.error)['message']}"
                self._stop(NOT_UNDONE, f"the undo of {row.kind} {row.name!r} has failed{why}")
            self._wait(1)
        self._is_undone = True
        raise undoing.reason(self.saga)

    def _begin_undo(self, tasks: Any, row: Recorded) -> NoReturn:
        task = tasks.get(row.undo)
        if task is None:
            self._stop(NOT_UNDONE, f"the undo of {row.kind} {row.name!r} is the task {row.undo}, which is gone")
        args, kwargs = undoing.arguments(task, row)
        undo = self._new("undo", f"undo {row.name}", "begun", None, None)
        undo.undoes, undo.call_task = row.position, task.name
        undo.call_key = undoing.key(self.claim, row.name)
        self._enqueue([undo], [(task, args, kwargs)])

    def _check_read(self) -> None:
        """A saga whose code ends before it has come to all that is recorded is another saga: it stops."""
        if not self.has_run:
            return
        try:
            self.journal.check_read()
        except Mismatch as mismatch:
            self._stop(MISMATCH, str(mismatch))

    def _stop(self, reason: str, why: str) -> NoReturn:
        """Go no further without a deploy or a person: a dead letter says why. What is recorded stays as it is."""
        self.writes.roll_back()
        self.check_lease()
        session = self.session
        if self.saga.stopped != reason:
            self._close_letter()  # a person has seen to what had stopped it before
        letters.store_failure(
            session.connection(),
            self.delivery,
            self.claim,
            reason=reason,
            last_error=error_text(reason, why),
            service=self.runtime.settings.service,
        )
        log.error("saga_stopped", reason=reason, why=why, **self.writes.names)
        pause = None if reason != MISMATCH else min(FIRST_PAUSE * 2.0 ** min(self.saga.stops, 20), LONGEST_PAUSE)
        self._wait(1, pause, stopped=reason)

    def _close_letter(self) -> None:
        """It goes on: nobody has to see to what had stopped it."""
        if self.saga.stopped is not None:
            letters.close(self.session.connection(), self.claim.id, self.saga.stopped)


def seconds_of(what: str, given: timedelta | float) -> float:
    """A duration in seconds. Raises `InvalidArguments`, which names the limit."""
    duration = given if isinstance(given, timedelta) else timedelta(seconds=given)
    if not timedelta(0) <= duration <= MAX_WAIT:
        raise InvalidArguments(f"{what}: must be 0 to {MAX_WAIT.days} days, got {duration}")
    return duration.total_seconds()


def _failure(row: Recorded) -> CallFailed:
    fields = error_fields(row.error or "")
    return CallFailed(fields["message"], fields["code"])
