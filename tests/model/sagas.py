"""Sagas: what their attempts, also former ones, their calls, publishers and people write, beside a model of the rows.

As in the other programs a holder keeps what it has read, and acts on it long after others have changed that. What a saga's
code would do is drawn at random; how it is undone follows from what the holder has read, as in the library.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
from celery import Celery
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sqlalchemy import Connection, text

from idempotency.application import runtime_of
from idempotency.errors import ChangeRefused, ReplayRefused
from idempotency.store import dead_letters, ends, letters, saga_changes, saga_steps, sagas
from idempotency.store.answers import Busy, Claimed, Completed, Failed, error_text
from idempotency.store.ends import FailedEnd
from idempotency.store.saga_steps import Recorded
from idempotency.store.sagas import COMPENSATING, COMPLETED, FAILED, RUNNING
from idempotency.upkeep import maintenance
from idempotency.wire.delivery import Delivery
from idempotency.wire.keys import OperationId
from tests.model.choices import LATER, LEASE, RETENTION, nth, which
from tests.model.expected_sagas import Holder, Operation, Saga, Step
from tests.model.people import refused
from tests.model.world import finishing
from tests.support.bank import INSERT
from tests.support.operations import FINGERPRINT, MESSAGE, SERVICE, age, claim

TENANT, CALLED = "acme", "tests.called"
SAGAS = [OperationId(TENANT, "tests.saga", key) for key in ("s1", "s2")]
# The first is met more often: depth needs repetition.
some_saga = st.sampled_from([SAGAS[0], SAGAS[0], SAGAS[0], SAGAS[1]])
EVENT, MATCH = "picked", "order_id=7"

CLEAN = """
WITH a AS (DELETE FROM idempotency.sagas), b AS (DELETE FROM idempotency.saga_events),
     c AS (DELETE FROM idempotency.records), d AS (DELETE FROM idempotency.outbox), e AS (DELETE FROM entries)
DELETE FROM idempotency.dead_letters
"""
STORED = text("""
SELECT (SELECT coalesce(json_object_agg(r.task || ' ' || r.key, json_build_array(
            r.status, r.generation, coalesce(r.locked_until < clock_timestamp(), false),
            coalesce(r.available_at <= clock_timestamp(), false))), '{}') FROM idempotency.records r),
       (SELECT coalesce(json_object_agg(g.key, json_build_array(
            g.status, g.generation, g.signals, g.waits_for, g.stopped, g.error::jsonb ->> 'code')), '{}')
        FROM idempotency.sagas g),
       (SELECT coalesce(json_agg(json_build_array(
            g.key, s.generation, s.position, s.kind, s.state, s.event_id, s.undoes, s.call_key)
            ORDER BY g.key, s.generation, s.position), '[]')
        FROM idempotency.saga_steps s JOIN idempotency.sagas g ON g.id = s.saga_id),
       (SELECT coalesce(json_agg(e.id ORDER BY e.id), '[]') FROM idempotency.saga_events e),
       (SELECT coalesce(json_object_agg(o.task || ' ' || o.key, o.due), '{}') FROM (
            SELECT task, key, bool_or(available_at <= clock_timestamp()) AS due FROM idempotency.outbox
            WHERE status = 'pending' GROUP BY task, key) o),
       (SELECT coalesce(json_agg(account), '[]') FROM entries)
""")


class Sagas(RuleBasedStateMachine):
    """The library and the model, side by side."""

    def __init__(self, app: Celery, connection: Connection) -> None:
        super().__init__()
        self.app, self.connection, self.runtime = app, connection, runtime_of(app)
        connection.exec_driver_sql(CLEAN)
        self.operations: dict[OperationId, Operation] = {}
        self.sagas: dict[OperationId, Saga] = {}
        self.holders: list[Holder] = []
        # id of the event, and the only saga that may use it
        self.events: dict[int, OperationId | None] = {}
        self.entries: Counter[str] = Counter()
        self.numbers = 0

    # ------------------------------------------------------------ attempts

    def _number(self) -> int:
        self.numbers += 1
        return self.numbers

    def _claim(self, id: OperationId) -> Claimed | None:
        token = f"token-{self._number()}"
        answer = claim(self.connection, id, token=token, message=MESSAGE, queue="q", lease=LEASE)
        known = self.operations.get(id)
        if known is not None and known.has_ended:
            assert isinstance(answer, Completed if known.status == "completed" else Failed)
            return None
        if known is not None and not (known.due if known.status == "released" else known.lease_over):
            assert answer == Busy()
            return None
        operation = self.operations.setdefault(id, Operation())
        assert isinstance(answer, Claimed)
        assert answer.generation == operation.generation
        operation.status, operation.token, operation.fence = "started", token, answer.fence
        operation.lease_over = operation.due = False
        return answer

    @rule(id=some_saga)
    def attempt(self, id: OperationId) -> None:
        """A delivery: claimed, and what is recorded is read."""
        if (held := self._claim(id)) is None:
            return
        saga = self.sagas.get(id)
        is_new = saga is None
        if saga is None:
            saga = self.sagas[id] = Saga(generation=held.generation, since=len(self.events))
        if saga.generation < held.generation:  # replayed
            saga.generation, saga.status, saga.code = held.generation, RUNNING, None
        row = sagas.open_saga(self.connection, held, id.key, service=SERVICE)
        assert (row.status, row.signals, row.stopped, row.is_new) == (saga.status, saga.signals, saga.stopped, is_new)
        read = saga_steps.steps_of(self.connection, row, held)
        assert [(step.position, step.kind, step.state) for step in read] == [
            (step.position, step.kind, step.state) for step in saga.rows
        ]
        self.holders.append(Holder(held, row, [replace(step) for step in saga.rows]))

    def _matches(self, holder: Holder) -> bool:
        """Whether what the holder writes counts: it is the holder still, and the saga is as it has found it."""
        operation, saga = self.operations.get(holder.claim.id), self.sagas.get(holder.claim.id)
        return (
            operation is not None
            and saga is not None
            and (operation.status, operation.token) == ("started", holder.claim.token)
            and saga.status == holder.saga.status
        )

    def _row(self, holder: Holder, kind: str, state: str, **more: Any) -> tuple[Step, Recorded]:
        position = 1 + max((step.position for step in holder.rows), default=0)
        has_undo = more.pop("has_undo", False)
        undo = ("tests.undo", "{}") if has_undo else (None, None)
        step = Step(position, kind, state, more.get("event_id"), more.get("undoes"), more.get("call_key"), has_undo)
        return step, Recorded(position, f"{kind} {position}", kind, state, undo=undo[0], undo_arguments=undo[1], **more)

    def _add(self, holder: Holder, step: Step) -> None:
        self.sagas[holder.claim.id].rows.append(step)
        holder.rows.append(replace(step))

    def _let_go(self, holder: Holder, waits_for: int, *, stopped: str | None = None) -> None:
        """The model of `sagas.wait`, which has matched."""
        saga, operation = self.sagas[holder.claim.id], self.operations[holder.claim.id]
        is_late = saga.signals != holder.saga.signals
        saga.waits_for, saga.stopped = None if is_late else waits_for, stopped
        operation.release(due=is_late or waits_for == 0)

    @precondition(lambda self: self.holders)
    @rule(n=which, kind=st.sampled_from(["step", "step", "value"]), undo=st.booleans())
    def step(self, n: int, kind: str, undo: bool) -> None:
        holder = nth(self.holders, n)
        if holder.is_undoing:
            return
        matches = self._matches(holder)
        step, row = self._row(holder, kind, "done", result="1", has_undo=undo and kind == "step")
        if kind == "value":
            with self.runtime.autocommit(TENANT) as connection:
                assert saga_steps.record(connection, holder.claim, holder.saga, row) == matches
        else:
            with finishing(self.runtime, matches) as connection:
                connection.execute(INSERT, {"account": holder.claim.id.key, "amount": 1})
                saga_steps.record_with(connection, holder.claim, holder.saga, row, lease=LEASE)
        if matches:
            self._add(holder, step)
            self.entries[holder.claim.id.key] += kind == "step"

    @precondition(lambda self: self.holders)
    @rule(n=which, undo=st.booleans(), outcome=st.sampled_from(["done", "not_happened", None]))
    def effect(self, n: int, undo: bool, outcome: str | None) -> None:
        """Called, and its outcome recorded; or only called."""
        holder = nth(self.holders, n)
        open_ = next((step for step in holder.rows if (step.kind, step.state) == ("effect", "begun")), None)
        if open_ is None and not holder.is_undoing:
            matches = self._matches(holder)
            step, row = self._row(holder, "effect", "begun", entry={"state": "begun"}, has_undo=undo)
            assert (saga_steps.begin_effect(self.connection, holder.claim, holder.saga, row) is not None) == matches
            if matches:
                self._add(holder, step)
            open_ = step
        if open_ is not None and outcome is not None:
            self._outcome(holder, open_.position, outcome)

    def _outcome(self, holder: Holder, position: int, outcome: str) -> None:
        """Recorded whatever the saga is by now, if it is still the holder's."""
        operation = self.operations.get(holder.claim.id)
        is_held = operation is not None and (operation.status, operation.token) == ("started", holder.claim.token)
        saga = self.sagas.get(holder.claim.id)
        rows = [] if saga is None else [step for step in saga.rows if step.position == position]
        matches = is_held and bool(rows) and rows[0].state == "begun"
        change = {"state": outcome}
        assert saga_steps.change_effect(self.connection, holder.claim, holder.saga, position, change) == matches
        if matches:
            rows[0].state = outcome
            for step in holder.rows:
                step.state = outcome if step.position == position else step.state

    @precondition(lambda self: self.holders)
    @rule(n=which, calls=st.sampled_from([1, 1, 2]), undo=st.booleans())
    def call(self, n: int, calls: int, undo: bool) -> None:
        """So many calls are recorded, and waited for, in one commit."""
        holder = nth(self.holders, n)
        if not holder.is_undoing:
            self._call(holder, [{"kind": "call", "has_undo": undo} for _ in range(calls)])

    def _call(self, holder: Holder, calls: list[dict[str, Any]]) -> None:
        matches, steps = self._matches(holder), []
        mine = Holder(holder.claim, holder.saga, list(holder.rows))
        with finishing(self.runtime, matches) as connection:
            for each in calls:
                each = {"call_task": CALLED, "call_key": f"c{self._number()}", **each}
                step, row = self._row(mine, each.pop("kind"), "begun", **each)
                mine.rows.append(step)
                steps.append(step)
                saga_steps.record_with(connection, holder.claim, holder.saga, row, lease=LEASE)
            sagas.wait(connection, holder.claim, holder.saga, waits_for=len(calls), seconds=None, lease=LEASE)
        if matches:
            for step in steps:
                self._add(holder, step)
            self._let_go(holder, len(calls))

    @precondition(lambda self: self.holders)
    @rule(n=which, is_over=st.booleans())
    def wait_for_event(self, n: int, is_over: bool) -> None:
        """Begun, or met again: an event that is there ends it, or its time; otherwise the saga lets go."""
        holder = nth(self.holders, n)
        if holder.is_undoing:
            return
        matches = self._matches(holder)
        begun = next((step for step in holder.rows if (step.kind, step.state) == ("wait", "begun")), None)
        event = self._usable(holder.claim.id)
        with finishing(self.runtime, matches) as connection:
            found = saga_steps.find_event(connection, holder.claim, holder.saga, EVENT, MATCH, lease=LEASE)
            assert (None if found is None else found[0]) == event
            step = begun
            if step is None:
                step, row = self._row(holder, "wait", "begun", event_type=EVENT, match=MATCH, seconds=LATER)
                if event is not None:
                    step.state = row.state = "done"
                    step.event = row.event_id = event
                saga_steps.record_with(connection, holder.claim, holder.saga, row, lease=LEASE)
            elif event is not None or is_over:
                saga_steps.decide(
                    connection,
                    holder.claim,
                    holder.saga,
                    step.position,
                    "timed_out" if event is None else "done",
                    result=None,
                    event_id=event,
                    lease=LEASE,
                )
            goes_on = event is not None or (begun is not None and is_over)
            if not goes_on:
                sagas.wait(connection, holder.claim, holder.saga, waits_for=1, seconds=LATER, lease=LEASE)
        if not matches:
            return
        if begun is None:
            self._add(holder, step)
        elif goes_on:
            for each in (
                begun,
                next(row for row in self.sagas[holder.claim.id].rows if row.position == begun.position),
            ):
                each.state, each.event = "timed_out" if event is None else "done", event
        if not goes_on:
            self._let_go(holder, 1)

    def _usable(self, id: OperationId) -> int | None:
        saga = self.sagas.get(id)
        if saga is None:
            return None
        numbers = sorted(self.events)[saga.since :]
        return next((n for n in numbers if self.events[n] in (None, id) and n not in saga.used()), None)

    @precondition(lambda self: self.holders)
    @rule(n=which)
    def give_up(self, n: int) -> None:
        """The saga fails: from now on it is undone."""
        holder = nth(self.holders, n)
        if not holder.is_undoing:
            self._compensate(holder)

    def _compensate(self, holder: Holder) -> None:
        saga, matches = self.sagas.get(holder.claim.id), self._matches(holder)
        undoing = replace(holder.saga, status=COMPENSATING)
        with finishing(self.runtime, matches) as connection:
            sagas.compensate(connection, holder.saga, error_text("refused", "no"), lease=LEASE)
            sagas.wait(connection, holder.claim, undoing, waits_for=0, seconds=0.0, lease=LEASE)
        if saga is not None and matches:
            saga.is_undone_from_now_on("refused")
            self._let_go(holder, 0)

    @precondition(lambda self: self.holders)
    @rule(n=which)
    def go_on(self, n: int) -> None:
        """What the holder's saga comes to next: its end, or the next undo, from the last of what it has read to the first."""
        holder = nth(self.holders, n)
        if holder.is_undoing:
            self._undo(holder)
        elif not any(step.state == "begun" for step in holder.rows):
            self._end(holder)

    def _undo(self, holder: Holder) -> None:
        undos = {step.undoes: step for step in holder.rows if step.kind == "undo"}
        for step in reversed([step for step in holder.rows if step.kind != "undo"]):
            undo = undos.get(step.position)
            if step.state == "begun" and step.kind != "wait":
                self._let_go_of(holder, "effect_unknown" if step.kind == "effect" else None)
            elif step.has_undo and step.state == "done" and undo is None:
                self._call(holder, [{"kind": "undo", "undoes": step.position}])
            elif undo is not None and undo.state != "done":
                self._let_go_of(holder, "compensation_failed" if undo.state == "failed" else None)
            else:
                continue
            return
        self._end(holder)

    def _let_go_of(self, holder: Holder, stopped: str | None) -> None:
        """Wait for the end of a call, or stop."""
        matches = self._matches(holder)
        with finishing(self.runtime, matches) as connection:
            if stopped is not None:
                self._store_letter(connection, holder.claim, stopped)
            sagas.wait(connection, holder.claim, holder.saga, waits_for=1, seconds=None, lease=LEASE, stopped=stopped)
        if matches:
            self._let_go(holder, 1, stopped=stopped)

    def _end(self, holder: Holder) -> None:
        saga, operation, matches = (
            self.sagas.get(holder.claim.id),
            self.operations.get(holder.claim.id),
            self._matches(holder),
        )
        status = FAILED if holder.is_undoing else COMPLETED
        with finishing(self.runtime, matches) as connection:
            sagas.end(connection, holder.saga, status, lease=LEASE)
            if holder.saga.stopped is not None:
                letters.close(connection, holder.claim.id, holder.saga.stopped)
            self._finish(connection, holder.claim, status == COMPLETED)
        if saga is not None and operation is not None and matches:
            saga.status, saga.stopped, saga.waits_for = status, None, None
            operation.end("completed" if status == COMPLETED else "failed")

    def _finish(self, connection: Connection, held: Claimed, completes: bool) -> None:
        if completes:
            ends.complete(connection, held, "1", retention=RETENTION, lease=LEASE)
        else:
            self._store_letter(connection, held, "refused")
            end = FailedEnd("refused", error_text("refused", "no"))
            ends.fail(connection, held, end, retention=RETENTION, lease=LEASE)

    @precondition(lambda self: self.holders)
    @rule(n=which, what=st.sampled_from(["step", "effect", "call", "wait_for_event", "give_up", "go_on"]))
    def be_overtaken(self, n: int, what: str) -> None:
        """The lease ends in the middle of an attempt, another one takes over, and the first one goes on."""
        holder = nth(self.holders, n)
        if self._matches(holder):
            self._age(holder.claim.id)
            self.attempt(holder.claim.id)
        now = len(self.holders) - 1 - self.holders.index(holder)
        match what:
            case "step":
                self.step(now, "step", undo=True)
            case "effect":
                self.effect(now, undo=True, outcome="done")
            case "call":
                self.call(now, 1, undo=True)
            case "wait_for_event":
                self.wait_for_event(now, is_over=True)
            case "give_up":
                self.give_up(now)
            case "go_on":
                self.go_on(now)

    def _store_letter(self, connection: Connection, held: Claimed, reason: str) -> None:
        delivery = Delivery(held.id, FINGERPRINT, {}, "task-id", MESSAGE, {}, "q")
        error = error_text(reason, "no")
        letters.store_failure(connection, delivery, held, reason=reason, last_error=error, service=SERVICE)

    # ------------------------------------------------------------ what is called, and events

    def _called(self) -> list[str]:
        return [step.call for saga in self.sagas.values() for rows in saga.steps.values() for step in rows if step.call]

    @precondition(lambda self: self._called())
    @rule(n=which, completes=st.booleans())
    def a_call_ends(self, n: int, completes: bool) -> None:
        """Its operation, from its claim to its end; whoever has called it is told in the same commit."""
        id = OperationId(TENANT, CALLED, nth(self._called(), n))
        if (held := self._claim(id)) is None:
            return
        with self.runtime.engine.begin() as connection:
            self._finish(connection, held, completes)
        self.operations[id].end("completed" if completes else "failed")
        for caller, saga in self.sagas.items():
            for step in (step for rows in saga.steps.values() for step in rows if step.call == id.key):
                if step.state == "begun" or (step.kind == "undo" and step.state == "failed" and completes):
                    step.state = "done" if completes else "failed"
                    self._signal(caller)

    def _signal(self, id: OperationId) -> None:
        saga = self.sagas[id]
        saga.signals += 1
        if saga.waits_for == 1:
            self._resume(id)
        saga.waits_for = saga.waits_for - 1 if saga.waits_for is not None and saga.waits_for > 1 else None

    def _resume(self, id: OperationId) -> None:
        operation = self.operations.get(id)
        if operation is not None and operation.status == "released":
            operation.due = True

    @rule(only=st.sampled_from([None, None, SAGAS[0], SAGAS[1]]))
    def an_event_comes(self, only: OperationId | None) -> None:
        """Published; or a person gives it to one saga."""
        saga_id = None
        if only is not None:
            if only not in self.sagas:
                return
            query = text("SELECT id FROM idempotency.sagas WHERE key = :key")
            saga_id = self.connection.execute(query, {"key": only.key}).scalar_one()
        event = json.dumps({"data": None})
        with self.runtime.engine.begin() as connection:
            saga_steps.keep_event(connection, TENANT, SERVICE, EVENT, MATCH, f"e{self._number()}", event, saga=saga_id)
        query = text("SELECT max(id) FROM idempotency.saga_events")
        self.events[self.connection.execute(query).scalar_one()] = only
        for id, saga in self.sagas.items():
            if only in (None, id) and self._waits(saga):
                self._signal(id)

    @precondition(lambda self: self.holders)
    @rule(n=which, waits=st.sampled_from([1, 2]))
    def an_event_is_there(self, n: int, waits: int) -> None:
        """Before the code comes to its waits."""
        self.an_event_comes(None)
        for _ in range(waits):
            self.wait_for_event(n, is_over=False)

    def _waits(self, saga: Saga) -> bool:
        return any((step.kind, step.state) == ("wait", "begun") for rows in saga.steps.values() for step in rows)

    # ------------------------------------------------------------ people

    @rule(id=some_saga)
    def cancel(self, id: OperationId) -> None:
        saga, operation = self.sagas.get(id), self.operations.get(id)
        generation = 1 if operation is None else operation.generation
        may = saga is None or saga.status == RUNNING or saga.generation < generation
        assert sagas.cancel(self.connection, id, error_text("cancelled", "no longer wanted")) == may
        if may:
            if saga is None:
                saga = self.sagas[id] = Saga(since=len(self.events))
            saga.generation, saga.waits_for = generation, None
            saga.is_undone_from_now_on("cancelled")
            if operation is not None:
                self._resume(id)

    @rule(id=some_saga)
    def retry(self, id: OperationId) -> None:
        """A stopped saga goes on; what has failed to be undone runs again first."""
        saga = self.sagas.get(id)
        failed = [] if saga is None else [step for step in saga.rows if (step.kind, step.state) == ("undo", "failed")]
        undos = [OperationId(TENANT, CALLED, str(step.call)) for step in failed]
        again = [undo for undo in undos if self.operations[undo].status == "failed"]
        may = saga is not None and saga.stopped is not None
        with refused(not may, ChangeRefused), self.runtime.engine.begin() as connection:
            saga_changes.retry(connection, id, service=SERVICE, app=self.app)
        if saga is None or not may:
            return
        for undo in again:
            self._reopen(undo)
        if not undos:
            self._signal(id)

    def _reopen(self, id: OperationId) -> None:
        operation = self.operations[id]
        operation.release(due=True)
        operation.generation += 1

    @rule(id=some_saga)
    def replay(self, id: OperationId) -> None:
        """The letter of a saga that has failed: it begins anew."""
        query = text(
            "SELECT max(id) FROM idempotency.dead_letters WHERE key = :key AND task = :task AND status = 'open'"
        )
        letter = self.connection.execute(query, {"key": id.key, "task": id.task}).scalar_one()
        operation = self.operations.get(id)
        if letter is None:
            assert operation is None or operation.status != "failed"
            return
        may = operation is not None and operation.status == "failed"
        with refused(not may, ReplayRefused), self.runtime.engine.begin() as connection:
            dead_letters.replay(connection, letter, service=SERVICE, app=self.app)
        if may:
            self._reopen(id)

    # ------------------------------------------------------------ time

    @precondition(lambda self: self.operations)
    @rule(n=which)
    def its_time_comes(self, n: int) -> None:
        """A lease is over, or a wait's time."""
        self._age(nth(list(self.operations), n))

    def _age(self, id: OperationId) -> None:
        operation = self.operations[id]
        if operation.status == "started":
            age(self.connection, id, locked_until=-3600)
            operation.lease_over = True
        elif operation.status == "released":
            age(self.connection, id, available_at=-3600)
            query = text("UPDATE idempotency.outbox SET available_at = 'epoch' WHERE task = :task AND key = :key")
            self.connection.execute(query, {"task": id.task, "key": id.key})
            operation.due = True

    @rule()
    def recover(self) -> None:
        orphans = [each for each in self.operations.values() if each.status == "started" and each.lease_over]
        assert maintenance.recover(self.app) == len(orphans)
        for each in orphans:
            each.release(due=True)

    # ------------------------------------------------------------ what must hold

    @invariant()
    def check(self) -> None:
        stored = self.connection.execute(STORED).one()
        operations = {f"{id.task} {id.key}": each.shown() for id, each in self.operations.items()}
        assert stored[0] == operations
        assert stored[1] == {id.key: saga.shown() for id, saga in self.sagas.items()}
        assert stored[2] == [
            [id.key, generation, *step.shown()]
            for id, saga in sorted(self.sagas.items(), key=lambda each: each[0].key)
            for generation in sorted(saga.steps)
            for step in sorted(saga.steps[generation], key=lambda step: step.position)
        ]
        assert stored[3] == sorted(self.events)
        assert Counter(stored[5]) == +self.entries
        for id, operation in self.operations.items():
            if operation.status == "released":  # its next delivery is there, and not due before it is
                assert f"{id.task} {id.key}" in stored[4]
                assert stored[4][f"{id.task} {id.key}"] or not operation.due

    @invariant()
    def nothing_is_used_or_undone_twice(self) -> None:
        for saga in self.sagas.values():
            steps = [step for rows in saga.steps.values() for step in rows]
            used = [step.event for step in steps if step.event is not None]
            assert len(used) == len(set(used))
            undone = [(n, step.undoes) for n, rows in saga.steps.items() for step in rows if step.kind == "undo"]
            assert len(undone) == len(set(undone))
            if saga.status == FAILED:
                made = {step.position for step in saga.rows if step.has_undo and step.state == "done"}
                assert made == {step.undoes for step in saga.rows if (step.kind, step.state) == ("undo", "done")}
