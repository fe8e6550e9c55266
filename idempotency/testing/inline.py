"""The outbox of a test, run here and now: what was enqueued, then what that enqueued, until nothing is left."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from celery import Celery
from celery.exceptions import Retry
from sqlalchemy import Row

from ..application import runtime_of
from ..errors import Undecided
from ..sagas import SagaTask
from ..store import saga_steps
from ..store import testing as stored
from ..store.answers import stored_error
from ..store.outbox import EXTERNAL
from ..wire.keys import OperationId
from ..wire.message import Message
from ..worker.eager import check_no_transaction
from .database import forget_hints, require_test_database
from .tracing import trace

# Deliveries in one run: a task that enqueues itself for ever would not end the test.
LIMIT = 100


@dataclass(frozen=True, slots=True)
class Enqueued:
    """A message that waits in the outbox."""

    task: str
    key: str
    args: Any
    kwargs: Any


@dataclass(frozen=True, slots=True)
class Ran:
    """One delivery, and the operation after it.

    `status`: "completed", "failed", or "released" if another attempt follows or a saga waits. `error`: what the body
    raised, or why a saga has stopped.
    """

    task: str
    key: str
    status: str
    result: Any
    error: BaseException | None


class Outbox:
    """The outbox of an application's test database. Messages run in this process: no relay, broker or worker is needed.

    One process at a time: it runs whatever waits in the database. Raises `ValueError` for a database without the
    word "test" in its name, unless it is `allow_database`.
    """

    def __init__(self, app: Celery, *, allow_database: str | None = None) -> None:
        app.loader.import_default_modules()
        app.finalize()
        self._app = app
        # whose providers have not decided
        self._undecided: set[OperationId] = set()
        with runtime_of(app).autocommit() as connection:
            require_test_database(connection, allowed=allow_database)

    @property
    def waiting(self) -> list[Enqueued]:
        """The messages that `run` would begin with, in this order."""
        with runtime_of(self._app).autocommit() as connection:
            return [_enqueued(row) for row in stored.pending_rows(connection, self._undecided)]

    def run(self, *, may_fail: bool = False, limit: int = LIMIT) -> list[Ran]:
        """Run what waits, in the order in which it was enqueued, and what is enqueued meanwhile. Returns every delivery.

        Each is a delivery as in a worker: claimed, run, committed. Delays pass at once: countdown, eta, the pause before
        the next attempt. A saga that waits does so until what it waits for has happened, or `pass_time`; an operation
        whose provider has not decided (`Undecided`), until `Handle.wake` or `pass_time`. Events for consumers outside the
        application are taken off, and not sent.

        Raises, unless `may_fail`, the exception with which an operation has failed that no saga has called, or why a saga
        has stopped; `CallRefused` while this thread has a transaction open on the database; `AssertionError` after
        `limit` deliveries, or for a task that the application does not have.
        """
        check_no_transaction(runtime_of(self._app))
        ran: list[Ran] = []
        while True:
            self._check_limit(limit, ran)
            if (row := self._next()) is None:
                return ran
            if row.task.startswith(EXTERNAL):
                continue
            delivered, raises = self._deliver(row)
            ran.append(delivered)
            if raises and delivered.error is not None and not may_fail:
                raise delivered.error

    def _check_limit(self, limit: int, ran: list[Ran]) -> None:
        """Raise `AssertionError` if another message would be beyond it, and leave that where it is."""
        left = [each for each in self.waiting if not each.task.startswith(EXTERNAL)] if len(ran) >= limit else []
        assert not left, f"the outbox is not empty after {limit} deliveries; next: {left[0].task} {left[0].key}"

    def pass_time(self, duration: timedelta | float) -> None:
        """Bring the deadlines of all waits and sleeps nearer, as if so much time had passed. `run` goes on from there.

        Raises `ValueError` for a negative duration.
        """
        seconds = duration.total_seconds() if isinstance(duration, timedelta) else float(duration)
        if seconds < 0:
            raise ValueError(f"pass_time: time does not go back, got {duration}")
        with runtime_of(self._app).autocommit() as connection:
            stored.pass_time(connection, seconds)

    def reset(self) -> None:
        """Delete all operations, their messages and their dead letters, so that every key is new."""
        runtime = runtime_of(self._app)
        with runtime.autocommit() as connection:
            ids = stored.forget_all(connection)
        self._undecided.clear()
        forget_hints(runtime.settings, ids)

    def _next(self) -> Row[Any] | None:
        with runtime_of(self._app).autocommit() as connection:
            saga_steps.signal(connection)  # events of a transaction that never commits, as a test's may be
            return stored.take_row(connection, self._undecided)

    def _deliver(self, row: Row[Any]) -> tuple[Ran, bool]:
        """One delivery, and whether its error is the test's to see."""
        task = self._app.tasks.get(row.task)
        assert task is not None, f"{row.task}: the application has no such task; is its module in `include`?"
        id = OperationId(row.tenant, row.task, row.key)
        message = Message.from_text(row.message)
        with runtime_of(self._app).autocommit() as connection:
            stored.ripen(connection, id)
        seen = trace(
            self._app,
            task,
            message.marked(origin=row.origin, outbox_id=row.message_id, generation=row.generation),
        )
        assert seen.state != "REJECTED", f"{row.task} {row.key}: the message was rejected: {seen.value}"
        with runtime_of(self._app).autocommit() as connection:
            record, of_sagas = stored.outcome(connection, id), stored.of_sagas(connection, id)
        status = "" if record is None else record.status
        error = seen.value if isinstance(seen.value, BaseException) else None
        error = getattr(error, "exc", None) or (None if _waits(task, error) else error)
        self._undecided.discard(id)
        if isinstance(error, Undecided):
            self._undecided.add(id)
        if of_sagas.stopped is not None:
            error = stored_error(of_sagas.stopped)
        result = None if record is None or record.result is None else runtime_of(self._app).read_result(record.result)
        raises = of_sagas.stopped is not None or (status == "failed" and not of_sagas.is_called)
        return Ran(row.task, row.key, status, result, error), raises


def _waits(task: Any, error: BaseException | None) -> bool:
    """Whether a saga has let go of its attempt without an error, to wait."""
    return isinstance(task, SagaTask) and isinstance(error, Retry)


def _enqueued(row: Row[Any]) -> Enqueued:
    body = json.loads(Message.from_text(row.message).body)
    args, kwargs = body[:2] if isinstance(body, list) else ([body], {})
    return Enqueued(row.task, row.key, args, kwargs)
