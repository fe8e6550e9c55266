"""The scenarios: what is done to a task, one fresh state after the other, and the comparison after each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import uuid4

from celery.canvas import Signature

from ..wire import results
from ..wire.keys import OperationId
from ..wire.message import Message
from ..worker.task import IdempotentTask
from .differences import (
    CALLS,
    EFFECTS,
    ENQUEUED,
    KEY_HINT,
    OUTCOME,
    RESULT,
    SENT,
    Difference,
    Left,
    Masked,
    NotIdempotent,
    Row,
    acts,
    first_difference,
    masked,
)
from .ground import Ground
from .processes import Delivery, Does, Interruption, Journal
from .recording import RecordingServer

# Beyond the attempts that the task may use: an operation that has not ended by then does not end.
MORE_DELIVERIES = 10
AGAIN_HINT = "something that is not begun afresh: a table that setup= does not bring back, a cache, a file, a counter; or chance."
POINTS = {
    "hint.left": "before the claim",
    "claimed": "after the claim",
    "body.entered": "as the body began",
    "step.recorded": "in a step, before its COMMIT",
    "step.committed": "after the COMMIT of a step",
    "effect.begun": "before the call of an effect",
    "effect.called": "after the call of an effect, before its result was recorded",
    "effect.recorded": "after the result of an effect was recorded",
    "finish.written": "after the body, before the finishing COMMIT",
    "finish.committed": "after the finishing COMMIT, before the message was acknowledged",
    "released": "after the attempt was let go",
}
# Where a process is stopped while another one takes over: in the body, with no transaction of the attempt open.
OVERTAKEN = ("body.entered", "step.committed", "effect.begun", "effect.called", "effect.recorded")
# Interrupted here, an effect has no recorded outcome, and is called again under the same key.
IN_DOUBT = ("effect.begun", "effect.called")


@dataclass(frozen=True, slots=True)
class Checked:
    """What was tried, and which columns two plain runs do not agree in, so that nothing was said about them."""

    scenarios: tuple[str, ...]
    not_compared: tuple[str, ...]


class AssertIdempotent:
    """The fixture `assert_idempotent`: call it with a task and its arguments."""

    def __init__(self, server: RecordingServer) -> None:
        self._server = server

    def __call__(
        self,
        task: IdempotentTask | Signature,
        /,
        *args: Any,
        setup: Callable[[], object] | None = None,
        tables: Sequence[object] = (),
        ignore: Sequence[str] = (),
        may_fail: bool = False,
        allow_database: str | None = None,
        timeout: float = 60.0,
        **kwargs: Any,
    ) -> Checked:
        """Run the task under every fault; raise `NotIdempotent` at the first difference from a plain run.

        The arguments are the task's own. A signature (`task.s(...)`) serves where a name is taken, and for the options
        `idempotency_key` and `tenant` (`task.s(...).set(idempotency_key=...)`).

        setup           brings and commits the rows the task needs; called before each scenario
        tables          what the task writes to: names, mapped classes or tables. Emptied before each scenario
        ignore          "table.column" that may differ; "table" that the task may write to, and nobody compares.
                        Besides tables: outcome, sent, effects, calls, enqueued, result
        may_fail        the plain run may end as failed
        allow_database  the name of the database, when it does not say that it is one for tests
        timeout         seconds for each delivery

        Raises `ValueError` for a check that cannot be made.
        """
        __tracebackhide__ = True
        if isinstance(task, Signature):
            args, kwargs, options, task = tuple(task.args), dict(task.kwargs), dict(task.options), task.type
        else:
            options = {}
        if not isinstance(task, IdempotentTask):
            raise ValueError(f"assert_idempotent: needs an IdempotentTask, got {type(task).__name__}")
        ground = Ground(task.app, tables, allow_database=allow_database)
        try:
            ignored = ground.ignored(ignore)
            check = _Check(task, args, kwargs, options, ground, self._server, setup, timeout, may_fail, ignored)
            checked = check.run()
            ground.clear()
            return checked
        except BaseException:
            with suppress(Exception):  # nothing may stand in front of what was found
                ground.clear()
            raise
        finally:
            ground.close()
            self._server.forget()


class _Check:
    def __init__(
        self,
        task: IdempotentTask,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: dict[str, Any],
        ground: Ground,
        server: RecordingServer,
        setup: Callable[[], object] | None,
        timeout: float,
        may_fail: bool,
        ignored: Masked,
    ) -> None:
        self._task = task
        self._args, self._kwargs, self._options = args, kwargs, options
        self._ground, self._server = ground, server
        self._setup, self._timeout, self._may_fail, self._ignored = setup, timeout, may_fail, ignored
        self._points: list[tuple[str, int]] = []
        self._id: OperationId | None = None
        self._names: list[str] = []
        # of the scenario under way
        self._deliveries: list[Delivery] = []
        task.app.finalize()

    def run(self) -> Checked:
        __tracebackhide__ = True
        plain = self._left("run plainly", self._plainly)
        self._require_success(plain)
        points = self._points
        again = self._left("run plainly a second time, on a fresh state", self._plainly)
        unsure = masked(plain, again)
        not_compared = tuple(f"{heading}.{column}" for heading, column in sorted(unsure))
        compare = _Comparison(self._title, plain, self._ignored | unsure, not_compared)
        compare(self._names[-1], again, hint=AGAIN_HINT)
        for name, scenario, in_doubt in self._scenarios(points):
            compare(name, self._left(name, scenario), in_doubt=in_doubt)
        return Checked(tuple(self._names), not_compared)

    # ------------------------------------------------------------ scenarios

    def _scenarios(self, points: Sequence[tuple[str, int]]) -> Iterator[tuple[str, Callable[[], None], bool]]:
        """Name, what is done, and whether a call may be made again."""
        yield "called twice by the application, with the same arguments", self._called_twice, False
        for times in (2, 3):
            yield f"delivered {times} times", partial(self._delivered, times), False
        for point, number in points:
            kill = Interruption(Does.KILL, point, number)
            name = f"killed (SIGKILL) {_where(point, number)}, then delivered again"
            yield name, partial(self._killed, kill), point in IN_DOUBT
        if ("body.entered", 1) in points:
            yield "delivered again while it runs", self._delivered_while_running, False
        yield "two deliveries at the same moment", self._at_once, False
        for point, number in points:
            if point in OVERTAKEN:
                stop = Interruption(Does.STOP, point, number)
                name = f"stopped {_where(point, number)}, its lease lost; goes on after another attempt has finished"
                yield name, partial(self._overtaken, stop), point in IN_DOUBT
        for point, number in _commits(points):
            what = "a step" if point == "step.recorded" else "the finish"
            ordinal = "" if number == 1 else f" ({number})"
            for does, how in (
                (Does.LOSE_ANSWER, "carried out, and its answer lost"),
                (Does.LOSE_COMMIT, "lost with its connection"),
            ):
                lose = Interruption(does, point, number)
                yield f"the COMMIT of {what}{ordinal} {how}", partial(self._killed, lose), False

    def _plainly(self) -> None:
        message = self._message()
        self._points = self._deliver(message).points
        self._finish(message)

    def _called_twice(self) -> None:
        self._plainly()
        self._deliver(self._message())

    def _delivered(self, times: int) -> None:
        message = self._message()
        self._deliver(message)
        self._finish(message)
        for _ in range(times - 1):
            self._deliver(message)

    def _killed(self, interruption: Interruption) -> None:
        message = self._message()
        self._deliver(message, interruption)
        self._deliver_later(message)
        self._finish(message)

    def _delivered_while_running(self) -> None:
        message = self._message()
        first = self._start(message, Interruption(Does.STOP, "body.entered"))
        self._await(first, stopped=True)
        self._deliver(message)
        first.resume()
        self._await(first)
        self._finish(message)

    def _at_once(self) -> None:
        message = self._message()
        barrier, opener = os.pipe()
        try:
            both = [self._start(message, barrier=barrier) for _ in range(2)]
            os.write(opener, b"go")
            for each in both:
                self._await(each)
        finally:
            os.close(barrier)
            os.close(opener)
        self._finish(message)

    def _overtaken(self, stop: Interruption) -> None:
        message = self._message()
        first = self._start(message, stop)
        self._await(first, stopped=True)
        self._deliver_later(message)
        self._finish(message)
        first.resume()
        self._await(first)
        self._finish(message)

    # ------------------------------------------------------------ deliveries

    def _message(self) -> Message:
        """The message that a call of the application sends, under the key that it makes."""
        options = dict(self._options)
        key, tenant = options.pop("idempotency_key", None), options.pop("tenant", None)
        given = options.pop("headers", None) or {}
        id, headers = self._task._checked(self._args, self._kwargs, key, tenant, given)
        self._ground.meet(id)
        if self._id is None:
            self._id = id
        elif id != self._id:
            difference = Difference("the idempotency key", self._id.key, id.key, KEY_HINT)
            raise NotIdempotent(_report(self._title, "the same call, made again", difference, ()))
        routing = {name: options[name] for name in ("queue", "priority") if name in options}
        return Message.composed(
            self._task.app,
            self._task.name,
            self._args,
            self._kwargs,
            task_id=str(uuid4()),
            headers={**given, **headers},
            **routing,
        )

    def _start(
        self, message: Message, interruption: Interruption | None = None, *, barrier: int | None = None
    ) -> Delivery:
        delivery = Delivery(self._task.app, self._task, message, interruption=interruption, barrier=barrier)
        self._deliveries.append(delivery)
        return delivery

    def _await(self, delivery: Delivery, *, stopped: bool = False) -> None:
        if not delivery.wait(self._timeout, stopped=stopped):
            raise self._stuck(f"a delivery did not end within {self._timeout:g} s")
        journal = delivery.journal()
        if journal.broken:
            raise RuntimeError(f"{self._title}: a delivery broke, {self._names[-1]}:\n{journal.broken}")
        if journal.outcome == "REJECTED":
            raise self._stuck(f"a delivery was rejected: {journal.error}")

    def _deliver(self, message: Message, interruption: Interruption | None = None) -> Journal:
        delivery = self._start(message, interruption)
        self._await(delivery)
        return delivery.journal()

    def _deliver_later(self, message: Message) -> Journal:
        """Deliver it as recovery does: when the lease is over, or the next delivery due."""
        assert self._id is not None
        self._ground.ripen(self._id)
        return self._deliver(message.marked(origin="recover", outbox_id="0"))

    def _finish(self, message: Message) -> None:
        """Deliver until the operation has ended."""
        assert self._id is not None
        policy = self._task.max_attempts or self._task.app.conf.get("idempotency_max_attempts") or 5
        for _ in range(policy + MORE_DELIVERIES):
            if self._ground.status(self._id) in ("completed", "failed"):
                return
            self._deliver_later(message)
        raise self._stuck(f"the operation has not ended after {policy + MORE_DELIVERIES} deliveries")

    def _stuck(self, what: str) -> NotIdempotent:
        last = next((journal for each in reversed(self._deliveries) if (journal := each.journal()).error), None)
        lines = [f"{self._title}: {what}", "", f"    Scenario:  {self._names[-1]}"]
        if last is not None:
            lines.append(f"    Last seen: {last.outcome} {last.error}")
        return NotIdempotent("\n".join(lines))

    # ------------------------------------------------------------ what is left

    def _left(self, name: str, scenario: Callable[[], None]) -> Left:
        __tracebackhide__ = True
        self._names.append(name)
        self._ground.clear()
        self._server.forget()
        if self._setup is not None:
            self._setup()
        others = self._ground.others() if len(self._names) == 1 else None
        try:
            scenario()
            if others is not None:
                self._require_named(others)
            return self._read()
        finally:
            for delivery in self._deliveries:
                delivery.end()
            self._deliveries.clear()

    def _read(self) -> Left:
        assert self._id is not None
        record = self._ground.record(self._id)
        error = {} if record.status == "completed" else json.loads(record.error)
        result = results.from_text(record.result) if record.result is not None else None
        journals = [delivery.journal() for delivery in self._deliveries]
        calls = list(self._server.calls)
        rows: dict[str, Sequence[Row]] = {
            OUTCOME: [{"status": record.status, **error}],
            SENT: [sent for journal in journals for sent in journal.sent],
            EFFECTS: [{"name": name} for name in record.effects],
            CALLS: acts(calls),
            ENQUEUED: self._ground.enqueued(),
            RESULT: [result if isinstance(result, dict) and result else {"value": result}],
        }
        return Left({**self._ground.rows(), **rows}, calls)

    def _require_success(self, plain: Left) -> None:
        outcome = plain.rows[OUTCOME][0]
        if outcome["status"] == "failed" and not self._may_fail:
            raise ValueError(
                f"{self._title}: the plain run failed, so there is nothing to compare with: {outcome['code']}: "
                f"{outcome['message']}\n(may_fail=True says that it is meant to; else look at setup=, which has to commit)"
            )

    def _require_named(self, before: dict[str, tuple[int, int]]) -> None:
        after = self._ground.others()
        written = [name for name, state in after.items() if state != before.get(name)]
        unnamed = [name for name in written if (name, "*") not in self._ignored]
        if unnamed:
            raise ValueError(
                f"{self._title}: the plain run writes to {', '.join(unnamed)} too. Name it in tables=, so that it is "
                "emptied and compared, or in ignore="
            )

    @property
    def _title(self) -> str:
        values = [*map(repr, self._args), *(f"{name}={value!r}" for name, value in self._kwargs.items())]
        return f"{self._task.name}({', '.join(values)})"


class _Comparison:
    """Compares what scenarios leave with what the plain run left."""

    def __init__(self, title: str, plain: Left, ignored: Masked, not_compared: Sequence[str]) -> None:
        self._title, self._plain, self._ignored, self._not_compared = title, plain, ignored, not_compared

    def __call__(self, name: str, left: Left, *, in_doubt: bool = False, hint: str | None = None) -> None:
        __tracebackhide__ = True
        difference = first_difference(self._plain, left, self._ignored, in_doubt=in_doubt)
        if difference is not None:
            if hint is not None:
                difference = replace(difference, hint=hint)
            raise NotIdempotent(_report(self._title, name, difference, self._not_compared))


def _report(title: str, scenario: str, difference: Difference, not_compared: Sequence[str]) -> str:
    lines = [
        f"{title} is not idempotent",
        "",
        f"    Scenario:  {scenario}",
        f"    Where:     {difference.where}",
        f"    Expected:  {difference.expected}",
        f"    Seen:      {difference.seen}",
        f"    Usually:   {difference.hint}",
    ]
    if not_compared:
        lines.append(f"    Not compared, because two plain runs differ in it: {', '.join(not_compared)}")
    return "\n".join(lines)


def _where(point: str, number: int) -> str:
    return POINTS.get(point, f"at {point}") + ("" if number == 1 else f" ({number})")


def _commits(points: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """The commits of the body's session; of an attempt that opens none, its finishing statement."""
    commits = [(point, number) for point, number in points if point in ("step.recorded", "finish.written")]
    if ("finish.written", 1) not in commits and ("finish.committed", 1) in points:
        commits.append(("body.entered", 1))
    return commits
