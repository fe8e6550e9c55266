"""One run of a saga's code: what it has recorded is read, what is new is recorded in rows, and it waits without holding
anything.

A saga ends in two commits. The first says why it is undone (`COMPENSATING`); from then on nothing forward is recorded.
The second, when everything is undone, ends its operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from ..attempt import effects, entries, refusals
from ..attempt.attempt import Attempt
from ..attempt.conclusions import Concluded
from ..attempt.endings import Waiting
from ..attempt.policy import Policy
from ..attempt.refusals import refusal_of
from ..attempt.runtime import Runtime
from ..errors import AttemptsExhausted, EffectUnknown, OpenTransaction, PermanentError
from ..observe.crash_points import crash_point
from ..observe.logs import log
from ..store import letters, saga_steps, sagas
from ..store.answers import Claimed, error_text
from ..store.saga_steps import Recorded
from ..store.sagas import COMPENSATING, COMPLETED, FAILED
from ..wire import results
from ..wire.delivery import Delivery
from ..wire.keys import fingerprint
from . import compensation
from .journal import Journal, Mismatch
from .undo import Undo, checked

# Of each generation, so that a replay does not get the provider's answers of the run that was undone.
NUMBERS = 1000
# Seconds until a saga whose code does not fit is tried again: a deploy may be half done. Doubled each time, up to the last.
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0


class SagaAttempt(Attempt):
    """One run of a saga's code."""

    saga: sagas.SagaRow
    journal: Journal

    def __init__(self, runtime: Runtime, claim: Claimed, delivery: Delivery, policy: Policy, *, entity_id: str) -> None:
        super().__init__(runtime, claim, delivery, policy)
        self.first_number = 1 + NUMBERS * (claim.generation - 1)
        self._entity_id = entity_id
        self._positions: dict[str, int] = {}
        self._undo_of: dict[str, Undo | None] = {}
        # whether the code was entered, and so has to come to all that is recorded
        self.has_run = False
        # what has ended a step or an effect without being recorded: the code may catch it, but not go on from it
        self._unrecorded: BaseException | None = None
        # whether nothing is left to undo
        self.is_undone = False

    def prepare(self) -> None:
        with self.runtime.autocommit(self.claim.id.tenant) as connection:
            self.saga = sagas.open_saga(connection, self.claim, self._entity_id)
            rows = [] if self.saga.is_new else saga_steps.steps_of(connection, self.saga, self.claim)
        self.journal = Journal(rows)
        self.claim.effects.update(self.journal.effects())
        self._positions = {name: entry["position"] for name, entry in self.claim.effects.items()}
        if self.is_compensating:
            # what ended it is decided: this run only undoes
            self.claim = replace(self.claim, revoked=False)
            self.delivery = replace(self.delivery, is_revoked=False)

    @property
    def is_compensating(self) -> bool:
        return self.saga.status == COMPENSATING

    # ------------------------------------------------------------ what the code does

    def step(self, name: str, fn: Callable[..., Any], *args: Any, undo: Any = None, **kwargs: Any) -> Any:
        name = self.journal.name(name)
        arguments = fingerprint({"args": args, "kwargs": kwargs})
        if (row := self.recalled("step", name, arguments)) is not None:
            if row.entry is not None and (refusal := refusal_of(row.entry, self.claim.generation)) is not None:
                raise refusal
            assert row.result is not None
            return results.from_text(row.result)
        entries.refuse_coroutine(f"step {name!r}", fn)
        row = self.new_row("step", name, "done", arguments, checked(undo, args, kwargs))
        self.check_may_begin()
        session = self.session
        try:
            result = fn(session, *args, **kwargs)
            row.result = entries.as_text(self, name, result)
            session.flush()
            self.record_with(row)
        except PermanentError as refusal:
            session.rollback()
            self._record_refusal(row, refusal)
            raise
        except BaseException as error:
            session.rollback()
            self._unrecorded = error
            raise
        crash_point("step.recorded")
        self.writes.commit()
        self.journal.add(row)
        crash_point("step.committed")
        self.writes.follow_up()
        return results.from_text(row.result)

    def _record_refusal(self, row: Recorded, refusal: PermanentError) -> None:
        """Record that a step has failed for good: the code may catch that, and has to get the same error the next time."""
        row.state, row.result, row.undo, row.undo_arguments = "failed", None, None, None
        row.entry = {"state": "not_happened"} | refusals.recorded(refusal, self.claim.generation)
        self._record(row)

    def effect(self, name: str, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
        reconcile, undo = options.pop("reconcile", None), options.pop("undo", None)
        call = effects.Call(self.journal.name(name), fn, args, options, reconcile)
        self.recalled("effect", call.name, call.fingerprint)
        self._undo_of[call.name] = checked(undo, args, options)
        try:
            return effects.effect(self, call)
        except BaseException as error:
            if self.claim.effects.get(call.name, {}).get("state", "begun") == "begun" or not isinstance(
                error, PermanentError
            ):
                self._unrecorded = error
            raise

    def value(self, name: str, make: Callable[[], Any]) -> Any:
        """A value that is made once and recorded."""
        name = self.journal.name(name)
        if (row := self.recalled("value", name, None)) is None:
            self.check_may_begin()
            row = self.new_row("value", name, "done", None, None)
            row.result = entries.as_text(self, name, make())
            self._record(row)
        return results.from_text(row.result or "null")

    def version(self, name: str) -> bool:
        known = self.journal.version(name)
        if known is None:
            self.check_may_begin()
            self._record(self.new_row("version", name, "done", None, None))
            return True
        return known

    # ------------------------------------------------------------ waiting

    def wait(self, waits_for: int, seconds: float | None = None, *, stopped: str | None = None) -> NoReturn:
        """Let go of everything, in the commit of what was recorded for it."""
        now = 0.0 if waits_for == 0 else seconds
        self.writes.in_session(
            lambda c: sagas.wait(
                c, self.claim, self.saga, waits_for=waits_for, seconds=now, lease=self.lease, stopped=stopped
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

    def recalled(self, kind: str, name: str, args: str | None) -> Recorded | None:
        """What is recorded where the code has come to. Raises `LeaseLost`, `OpenTransaction` and `Waiting`.

        And what a step or an effect has raised before without its being recorded: the next run may not meet it.
        """
        if self._unrecorded is not None:
            raise self._unrecorded
        self.check_lease()
        if self.writes.in_transaction:
            raise OpenTransaction(f"{name!r}: the session has a transaction open; a saga reads and writes in its steps")
        try:
            return self.journal.next(kind, name, args)
        except Mismatch as mismatch:
            self.stop(sagas.MISMATCH, str(mismatch))

    def new_row(self, kind: str, name: str, state: str, args: str | None, undo: Undo | None = None) -> Recorded:
        """The next thing to record."""
        row = Recorded(self.next_position(), name, kind, state, args)
        self.journal.last = row.position
        if undo is not None:
            row.undo, row.undo_arguments = undo
        return row

    def record_with(self, row: Recorded) -> None:
        """Record something in the session's transaction."""
        self.writes.in_session(lambda c: saga_steps.record_with(c, self.claim, self.saga, row, lease=self.lease))

    def _record(self, row: Recorded) -> None:
        self.writes.alone(lambda c: saga_steps.record(c, self.claim, self.saga, row))
        self.journal.add(row)

    @property
    def lease(self) -> float:
        return self.runtime.settings.lease

    def next_position(self) -> int:
        return self.journal.last + 1

    def begin_effect(self, name: str, entry: dict[str, Any]) -> float:
        position = self._positions.get(name)
        row = self.new_row("effect", name, "begun", entry["args"], self._undo_of[name])
        row.position = entry["position"] = position or row.position
        row.entry = entry
        begun_at: float = self.writes.alone(lambda c: saga_steps.begin_effect(c, self.claim, self.saga, row))
        self._positions[name] = row.position
        if position is None:
            self.journal.add(row)
        return begun_at

    def change_effect(self, name: str, change: dict[str, Any]) -> None:
        position, lease = self._positions[name], self.lease
        if self.writes.in_transaction:
            self.writes.together(
                lambda c: saga_steps.change_effect_with(c, self.claim, self.saga, position, change, lease=lease)
            )
        else:
            self.writes.alone(lambda c: saga_steps.change_effect(c, self.claim, self.saga, position, change))
        self.journal.change(position, change)

    # ------------------------------------------------------------ how it ends

    def complete(self, result: Any) -> None:
        if self._unrecorded is not None:
            raise self._unrecorded
        self._check_read()
        results.to_text(result, limit=self.runtime.settings.result_limit)  # before the saga's row is locked
        self.writes.in_session(lambda c: sagas.end(c, self.saga, COMPLETED))
        self._close_letter()
        super().complete(result)

    def fail(self, error: PermanentError, *, cause: BaseException | None = None) -> PermanentError:
        self.writes.roll_back()
        if self.is_compensating and not self.is_undone:
            if self.has_run or isinstance(error, AttemptsExhausted):
                self.stop(sagas.NOT_UNDONE, f"{error.code}: {error}")
            self.wait(0)  # decided before the saga was cancelled
        if not self.is_undone:
            self._check_read()
            self.check_lease()
            if not isinstance(error, EffectUnknown):
                self._ask_once_more()
            if compensation.is_needed(self.journal):
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
        """The first of the two commits of a saga that fails: from here on it is only undone, with attempts of its own."""
        stored = error_text(error.code, str(error))
        self.writes.in_session(lambda c: sagas.compensate(c, self.saga, stored))
        self.saga = replace(self.saga, status=COMPENSATING, error=stored)
        log.warning("saga_is_undone", code=error.code, **self.writes.names)
        crash_point("saga.compensating")
        self.wait(0)

    def _check_read(self) -> None:
        """A saga whose code ends before it has come to all that is recorded is another saga: it stops."""
        if not self.has_run:
            return
        try:
            self.journal.check_read()
        except Mismatch as mismatch:
            self.stop(sagas.MISMATCH, str(mismatch))

    def stop(self, reason: str, why: str) -> NoReturn:
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
        pause = None if reason != sagas.MISMATCH else min(FIRST_PAUSE * 2.0 ** min(self.saga.stops, 20), LONGEST_PAUSE)
        self.wait(1, pause, stopped=reason)

    def _close_letter(self) -> None:
        """It goes on: nobody has to see to what had stopped it."""
        if self.saga.stopped is not None:
            letters.close(self.session.connection(), self.claim.id, self.saga.stopped)
