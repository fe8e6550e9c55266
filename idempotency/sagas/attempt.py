"""One run of a saga's code: what it has recorded is read, what is new is recorded in rows, and it waits without holding
anything.

A saga ends in two commits. The first says why it is undone (`COMPENSATING`); from then on nothing forward is recorded.
The second, when everything is undone, ends its operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from ..attempt import conclusions, effects, entries, refusals
from ..attempt.attempt import Attempt
from ..attempt.conclusions import Concluded
from ..attempt.endings import Waiting
from ..attempt.policy import Policy
from ..attempt.refusals import refusal_of
from ..attempt.runtime import Runtime
from ..errors import AttemptsExhausted, CallRefused, EffectUnknown, Misuse, PermanentError, WrongCell
from ..observe.crash_points import crash_point
from ..observe.logs import log
from ..reasons import COMPENSATION_FAILED, SAGA_MISMATCH
from ..store import saga_steps, sagas
from ..store.answers import Claimed, error_text
from ..store.saga_steps import Recorded
from ..store.sagas import COMPENSATING, COMPLETED, FAILED
from ..wire import results
from ..wire.delivery import Delivery
from . import arguments, compensation, stopping
from .journal import Journal, Mismatch
from .misuse import raised_as_misuse
from .trouble import TRANSIENT, final_as_refusal
from .undo import Undo, checked

# Of each generation, so that a replay does not get the provider's answers of the run that was undone.
NUMBERS = 1000


class SagaAttempt(Attempt):
    """One run of a saga's code."""

    saga: sagas.SagaRow
    journal: Journal
    # after a doubt, too: whether its code fits what is recorded is known only where it has run
    fails_by_running = True

    def __init__(
        self, runtime: Runtime, claim: Claimed, delivery: Delivery, policy: Policy, *, entity_id: str | None
    ) -> None:
        super().__init__(runtime, claim, delivery, policy)
        self.first_number = 1 + NUMBERS * (claim.generation - 1)
        self._entity_id = entity_id
        self._positions: dict[str, int] = {}
        self._undo_of: dict[str, Undo | None] = {}
        # whether the code was entered, and so has to come to all that is recorded
        self.has_run = False
        # whether nothing is left to undo
        self.is_undone = False
        # whether a step or effect runs, or something else that the saga does
        self._is_used = False
        # what the next attempt may not meet
        self._unrecorded: Exception | None = None
        # whether it is noted that the code has come to all that is recorded
        self.has_reached = False
        self._status_at_end = COMPLETED

    def prepare(self) -> None:
        with self.runtime.autocommit(self.claim.id.tenant) as connection:
            self.saga = sagas.open_saga(connection, self.claim, self._entity_id, service=self.runtime.settings.service)
            rows = [] if self.saga.is_new else saga_steps.steps_of(connection, self.saga, self.claim)
        self.journal = Journal(rows)
        self.claim.effects.update(self.journal.effects())
        self._positions = {name: entry["position"] for name, entry in self.claim.effects.items()}
        if self.is_compensating:
            # what ended it is decided: this run only undoes
            self.claim = replace(self.claim, revoked=False)
            self.delivery = replace(self.delivery, is_revoked=False)

    @property
    def released_as(self) -> tuple[Any, str]:
        return self.saga.id, self.saga.status

    @property
    def is_compensating(self) -> bool:
        return self.saga.status == COMPENSATING

    # ------------------------------------------------------------ what the code does

    @contextmanager
    def used(self) -> Iterator[SagaAttempt]:
        """One use of the saga by its code. Code that catches an error which is not recorded comes no further with it.

        The next attempt may not meet that error, and would come elsewhere; and an effect may be open.
        """
        if self._is_used:
            self._unrecorded = Misuse(
                "used inside a step or effect, whose function is not run again: use the saga after it"
            )
        self.raise_unrecorded()
        self._is_used = True
        try:
            yield self
        except Misuse as error:
            self._unrecorded = error
            raise
        except CallRefused as error:  # the same each time, except in a deploy that changes `cell_of`
            if isinstance(error, WrongCell):
                self._unrecorded = error
            raise
        except Exception as error:
            reached = {name: entry for name, entry in self.claim.effects.items() if name in self.calls}
            if not isinstance(error, PermanentError) or conclusions.is_open(reached):
                self._unrecorded = error
            raise
        finally:
            self._is_used = False

    def raise_unrecorded(self, error: BaseException | None = None) -> None:
        """Raise an error that the code has caught although it is not recorded: the next attempt may not meet it.

        Not if `error` was raised because of it. A `Misuse`, or what says nothing about the saga, is raised in any case.
        """
        unrecorded = self._unrecorded
        if isinstance(unrecorded, (Misuse, *TRANSIENT)):
            raise unrecorded
        while error is not None and error is not unrecorded:
            error = error.__cause__ or error.__context__
        if unrecorded is not None and error is None:
            raise unrecorded

    def step(self, name: str, fn: Callable[..., Any], /, *args: Any, undo: Any = None, **kwargs: Any) -> Any:
        name = self.journal.name(name)
        given = arguments.recorded(args, kwargs, arguments.named(partial(fn, None), args, kwargs))
        if (row := self.recalled("step", name, given)) is not None:
            if row.entry is not None and (refusal := refusal_of(row.entry, self.claim.generation)) is not None:
                raise refusal
            assert row.result is not None
            return results.from_text(row.result)
        with raised_as_misuse():
            entries.refuse_coroutine(f"step {name!r}", fn)
        row = self.new_row("step", name, "done", given, checked(undo, args, kwargs))
        self.check_may_begin()
        with self.runtime.traced("step", step=name):
            self._take_step(row, self.session, fn, args, kwargs)
        return results.from_text(row.result or "null")

    def _take_step(self, row: Recorded, session: Any, fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        try:
            result = final_as_refusal(self.policy, fn, session, *args, **kwargs)
            self.raise_unrecorded()
            row.result = entries.as_text(self, row.name, result)
            session.flush()
            self.record_with(row)
        except PermanentError as refusal:
            session.rollback()
            self._record_refusal(row, refusal)
            raise
        except BaseException:
            session.rollback()
            raise
        crash_point("step.recorded")
        self.writes.commit()
        self.journal.add(row)
        crash_point("step.committed")
        self.writes.follow_up()

    def _record_refusal(self, row: Recorded, refusal: PermanentError) -> None:
        """Record that a step has failed for good: the code may catch that, and has to get the same error the next time."""
        row.state, row.result, row.undo, row.undo_arguments = "failed", None, None, None
        row.entry = {"state": "not_happened"} | refusals.recorded(refusal, self.claim.generation)
        self._record(row)

    def effect(self, name: str, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        reconcile, undo = options.pop("reconcile", None), options.pop("undo", None)
        name = self.journal.name(name)
        given = arguments.recorded(args, options, arguments.named(fn, args, options, idempotency_key=""))
        row = self.recalled("effect", name, given)
        call = effects.Call(name, fn, args, options, reconcile, recorded_as=given if row is None else row.args)
        self._undo_of[call.name] = checked(undo, args, options)
        try:
            return effects.effect(self, call)
        except CallRefused as refused:
            if call.name in self.calls:  # by the function itself
                raise
            raise Misuse(str(refused)) from refused

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
        self.note_reached()
        if known is None:
            self.check_may_begin()
            self._record(self.new_row("version", name, "done", None, None))
            return True
        return known

    # ------------------------------------------------------------ waiting

    def wait(self, waits_for: int, seconds: float | None = None, *, stopped: tuple[str, str] | None = None) -> NoReturn:
        """Let go of everything, in the commit of what was recorded for it. `stopped`: the reason, and why."""
        now, reason = 0.0 if waits_for == 0 else seconds, stopped and stopped[0]
        self.writes.in_session(
            lambda c: sagas.wait(
                c, self.claim, self.saga, waits_for=waits_for, seconds=now, lease=self.lease, stopped=reason
            )
        )
        stopping.write_letter(self, stopped)
        crash_point("saga.waits")
        self.writes.commit()
        crash_point("saga.waiting")
        self.writes.follow_up()
        raise Waiting

    # ------------------------------------------------------------ what is recorded, and where

    def recalled(self, kind: str, name: str, args: str | None) -> Recorded | None:
        """What is recorded where the code has come to. Raises `LeaseLost`, `Misuse` and `Waiting`."""
        self.check_lease()
        if self.writes.in_transaction:
            raise Misuse(f"{name!r}: the session has a transaction open; a saga reads and writes in its steps")
        try:
            row = self.journal.next(kind, name, args)
        except Mismatch as mismatch:
            stopping.stop(self, SAGA_MISMATCH, str(mismatch), tries_again=True)
        self.note_reached()
        return row

    def note_reached(self) -> None:
        """Note that the code has come to all that is recorded, unless this is the first of several attempts.

        If processes die in every attempt, that tells code that fails where it is new from code that no longer gets there.
        """
        is_noted = self.claim.attempts > 1 or self.policy.max_attempts == 1
        if self.is_compensating or self.has_reached or not is_noted or self.journal.unread is not None:
            return
        self.has_reached = True
        with self.runtime.autocommit(self.claim.id.tenant) as connection:
            sagas.note_reached(connection, self.claim, self.saga, self.journal.last)

    def new_row(self, kind: str, name: str, state: str, args: str | None, undo: Undo | None = None) -> Recorded:
        """The next thing to record."""
        row = Recorded(self.next_position(), name, kind, state, args, seen=self.journal.seen)
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
        self.raise_unrecorded()
        stopping.check_read(self)
        self._status_at_end = COMPLETED
        super().complete(result)

    def before_end(self) -> None:
        self.writes.in_session(lambda c: sagas.end(c, self.saga, self._status_at_end, lease=self.lease))
        stopping.close_letter(self)

    def fail(self, error: PermanentError, *, cause: BaseException | None = None) -> PermanentError:
        self.writes.roll_back()
        if isinstance(cause, TRANSIENT) and self.claim.attempts < self.policy.max_attempts:
            self.release(delay=self.runtime.settings.retry_base, error=cause)  # whatever `permanent_errors` says
            raise Waiting
        if self.is_compensating and isinstance(error, AttemptsExhausted) and not compensation.is_needed(self.journal):
            # only `on_failed` is left, and the processes that have run it have died
            self.is_undone, error = True, compensation.final(self.saga)
        if self.is_compensating and not self.is_undone:
            if self.has_run or isinstance(error, AttemptsExhausted):
                stopping.stop(self, COMPENSATION_FAILED, f"{error.code}: {error}", tries_again=True)
            self.wait(0)  # decided before the saga was cancelled
        if not self.is_undone:
            stopping.check_fits(self, error, cause)
            self.check_lease()
            if not isinstance(error, EffectUnknown):
                self._ask_once_more()
            if compensation.is_needed(self.journal):
                self._begin_to_undo(error)
        return super().fail(error, cause=cause)

    def _fail(self, error: PermanentError, described: str, *, skip: str | None) -> Concluded:
        self._status_at_end = FAILED
        # what is left of its effects has no undo, and is left as it is
        entries_left, self.claim = self.claim.effects, replace(self.claim, effects={})
        try:
            return super()._fail(error, described, skip=skip)
        finally:
            self.claim = replace(self.claim, effects=entries_left)

    def _begin_to_undo(self, error: PermanentError) -> NoReturn:
        """The first of the two commits of a saga that fails: from here on it is only undone, with its own attempts."""
        stored = error_text(error.code, str(error), declined=conclusions.is_declined(error))
        self.writes.in_session(lambda c: sagas.compensate(c, self.saga, stored, lease=self.lease))
        self.saga = replace(self.saga, status=COMPENSATING, error=stored)
        log.warning("saga_is_undone", code=error.code, **self.writes.names)
        crash_point("saga.compensating")
        self.wait(0)
