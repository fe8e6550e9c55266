"""The fixture: every scenario on a fresh state, and the comparison after each."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from celery import Celery
from celery.canvas import Signature

from ..application import settings_of
from ..sagas import SagaTask
from ..worker.task import IdempotentTask
from .call import CallUnderTest
from .database import prepare
from .differences import CALLS, EFFECTS, ENQUEUED, OUTCOME, RESULT, SENT, Left, Masked, Row, acts, masked
from .ground import Ground
from .recording import RecordingServer
from .report import Comparison
from .scenarios import plainly, scenarios

T = TypeVar("T")
AGAIN_HINT = (
    "something that does not start afresh: a table that setup= does not bring back, a cache, a file, a counter; or "
    "chance."
)


@dataclass(frozen=True, slots=True)
class Checked:
    """What was tried, and the columns that were not compared because two plain runs differ in them."""

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

        The arguments are the task's own. Give a signature (`task.s(...)`) if an argument has the name of an option below,
        or to set `idempotency_key` and `tenant` (`task.s(...).set(idempotency_key=...)`).

        setup           creates and commits the rows that the task needs; called before each scenario
        tables          what the task writes to: names, mapped classes or tables; emptied before each scenario
        ignore          "table.column" that may differ; "table" that the task may write to and that is not compared.
                        Besides tables: outcome, sent, effects, calls, enqueued, result
        may_fail        the plain run may end as failed
        allow_database  the name of the database, if it does not say that it is for tests
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
        if isinstance(task, SagaTask):
            raise ValueError(
                f"assert_idempotent: {task.name} is a saga, which may wait for days; check the tasks that it calls, and run "
                "it with idempotency_outbox"
            )
        _migrate_once(task.app, allow_database)
        ground = Ground(task.app, tables, allow_database=allow_database)
        try:
            ignored = ground.ignored(ignore)
            call = CallUnderTest(task, args, kwargs, options, ground, timeout)
            checked = _Check(call, ground, self._server, setup, may_fail, ignored).run()
            ground.clear()
            return checked
        except BaseException:
            with suppress(Exception):  # must not hide what was found
                ground.clear()
            raise
        finally:
            ground.close()
            self._server.forget()


# The databases whose tables are of this version.
_migrated: set[str] = set()


def _migrate_once(app: Celery, allow_database: str | None) -> None:
    url = settings_of(app).database_url.get_secret_value()
    if url not in _migrated:
        prepare(app, allow_database=allow_database)
        _migrated.add(url)


class _Check:
    def __init__(
        self,
        call: CallUnderTest,
        ground: Ground,
        server: RecordingServer,
        setup: Callable[[], object] | None,
        may_fail: bool,
        ignored: Masked,
    ) -> None:
        self._call, self._ground, self._server = call, ground, server
        self._setup, self._may_fail, self._ignored = setup, may_fail, ignored
        self._names: list[str] = []

    def run(self) -> Checked:
        __tracebackhide__ = True
        points, plain = self._left("run plainly", plainly)
        self._require_success(plain)
        _, again = self._left("run plainly a second time, on a fresh state", plainly)
        unsure = masked(plain, again)
        not_compared = tuple(f"{heading}.{column}" for heading, column in sorted(unsure))
        compare = Comparison(self._call.title, plain, self._ignored | unsure, not_compared)
        compare(self._call.scenario, again, hint=AGAIN_HINT)
        for scenario in scenarios(points):
            _, left = self._left(scenario.name, scenario.run)
            compare(scenario.name, left, in_doubt=scenario.in_doubt)
        return Checked(tuple(self._names), not_compared)

    def _left(self, name: str, scenario: Callable[[CallUnderTest], T]) -> tuple[T, Left]:
        """What a scenario returns, and what it leaves."""
        __tracebackhide__ = True
        is_first = not self._names
        self._names.append(name)
        self._call.scenario = name
        self._ground.clear()
        self._server.forget()
        if self._setup is not None:
            self._setup()
        others = self._ground.others() if is_first else None
        try:
            returned = scenario(self._call)
            if others is not None:
                self._require_named(others)
            return returned, self._read()
        finally:
            self._call.end()

    def _read(self) -> Left:
        record = self._ground.record(self._call.id)
        error = {} if record.status == "completed" else json.loads(record.error)
        result = self._ground.result(record)
        calls = list(self._server.calls)
        rows: dict[str, Sequence[Row]] = {
            OUTCOME: [{"status": record.status, **error}],
            SENT: [sent for journal in self._call.journals() for sent in journal.sent],
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
                f"{self._call.title}: the plain run failed, so there is nothing to compare with: {outcome['code']}: "
                f"{outcome['message']}\n(may_fail=True says that it is meant to; else look at setup=, which has to commit)"
            )

    def _require_named(self, before: dict[str, tuple[int, int]]) -> None:
        after = self._ground.others()
        written = [name for name, state in after.items() if state != before.get(name)]
        unnamed = [name for name in written if (name, "*") not in self._ignored]
        if unnamed:
            raise ValueError(
                f"{self._call.title}: the plain run writes to {', '.join(unnamed)} too. Name it in tables=, so that it is "
                "emptied and compared, or in ignore="
            )
