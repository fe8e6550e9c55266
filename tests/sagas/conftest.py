"""Sagas run in this process, delivery by delivery, as the outbox says; a test may make time pass."""

from __future__ import annotations

import contextlib
from typing import Any

import kombu
import pytest
from celery import Celery
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from idempotency.application import runtime_of
from idempotency.errors import CallFailed
from idempotency.letters import storing
from idempotency.operate.replay import replay
from idempotency.sagas import saga
from idempotency.store import testing as stored
from idempotency.wire.message import Message
from tests.support.deliveries import Deliveries, Outcome, deliver_row
from tests.support.operators import ANN

_DUE = text("""
UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp()
WHERE id = (SELECT id FROM idempotency.outbox
            WHERE status = 'pending' AND available_at <= clock_timestamp() ORDER BY available_at, id LIMIT 1)
RETURNING *
""")

_TAKE = text("""
UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp()
WHERE id = (SELECT min(id) FROM idempotency.outbox WHERE status = 'pending' AND task = :task) RETURNING *
""")


class Stage:
    """The application of a test, its database, and the deliveries that are due."""

    def __init__(self, app: Celery, engine: Engine, deliveries: Deliveries) -> None:
        self.app, self.engine, self._deliveries = app, engine, deliveries

    def enqueue(self, task: Any, *args: Any, **kwargs: Any) -> Any:
        with Session(runtime_of(self.app).engine) as session:
            handle = task.enqueue(session, *args, **kwargs)
            session.commit()
        return handle

    def goes_on_without(self, task: Any) -> None:
        """Run a saga to its end that calls a task, and goes on when that fails."""

        @saga("parent", key="{id}", app=self.app)
        def parent(saga: Any, id: str) -> Any:
            with contextlib.suppress(CallFailed):
                saga.call(task)

        handle = self.enqueue(parent, "r1")
        self.run()
        assert handle.status() == "completed"

    def deliver(self) -> Outcome | None:
        """Deliver what is due first."""
        with self.engine.connect() as connection:
            row = connection.execute(_DUE).one_or_none()
        return None if row is None else deliver_row(self._deliveries, self.app.tasks[row.task], row)

    def message_dies(self, task: str) -> None:
        """The message of a task has waited in its queue for longer than is allowed."""
        with self.engine.connect() as connection:
            row = connection.execute(_TAKE, {"task": task}).one()
        message = Message.from_text(row.message).marked(origin=row.origin, outbox_id=row.message_id)
        death = [{"queue": self.app.conf.task_default_queue, "reason": "rejected"}]
        dead = kombu.Message(
            body=message.body,
            headers={**message.headers, "x-death": death},
            content_type="application/json",
            content_encoding="utf-8",
            delivery_info={"exchange": "", "routing_key": ""},
            accept={"application/json"},
        )
        storing.store(self.app, dead)

    def run(self, limit: int = 200) -> list[Outcome]:
        """Deliver whatever is due until nothing is."""
        ran: list[Outcome] = []
        while (outcome := self.deliver()) is not None:
            ran.append(outcome)
            assert len(ran) < limit
        return ran

    def hold(self, task: str) -> None:
        """Let the next delivery of a task be due in an hour."""
        with self.engine.begin() as connection:
            held = connection.execute(
                text("""UPDATE idempotency.outbox SET available_at = now() + interval '1 hour'
                        WHERE task = :task AND status = 'pending'"""),
                {"task": task},
            )
            assert held.rowcount == 1

    def publish(self, event_type: str, data: Any) -> str:
        from idempotency import publish

        with Session(runtime_of(self.app).engine) as session:
            event_id = publish(session, event_type, data, app=self.app)
            session.commit()
        return event_id

    def pass_time(self, seconds: float) -> None:
        with self.engine.begin() as connection:
            stored.pass_time(connection, seconds)

    def replay(self, task: str) -> None:
        """Replay the open dead letters of a task, as a person does."""
        with self.engine.connect() as connection:
            query = text("SELECT id FROM idempotency.dead_letters WHERE task = :task AND status = 'open'")
            for id in connection.execute(query, {"task": task}).scalars():
                replay(self.app, id, ANN)

    def saga(self, key: str) -> Any:
        """The row of `saga_instances`."""
        with self.engine.connect() as connection:
            return connection.execute(
                text("SELECT * FROM idempotency.saga_instances WHERE key = :key"), {"key": key}
            ).one()

    def saga_of(self, task: str) -> Any:
        """The row of the only saga of a type."""
        with self.engine.connect() as connection:
            query = text("SELECT * FROM idempotency.saga_instances WHERE saga_type = :task")
            return connection.execute(query, {"task": task}).one()

    def steps(self, key: str) -> list[tuple[str, str, str]]:
        """Kind, name and state of all that the saga has recorded."""
        with self.engine.connect() as connection:
            rows = connection.execute(
                text("""SELECT kind, name, state FROM idempotency.saga_steps s JOIN idempotency.sagas g ON g.id = s.saga_id
                        WHERE g.key = :key ORDER BY s.generation, s.position"""),
                {"key": key},
            )
            return [(row.kind, row.name, row.state) for row in rows]

    def accounts(self) -> list[str]:
        """The accounts of all entries, in the order in which they were written."""
        with self.engine.connect() as connection:
            return list(connection.execute(text("SELECT account FROM entries ORDER BY id")).scalars())

    def letters(self) -> list[tuple[str, str, str]]:
        with self.engine.connect() as connection:
            rows = connection.execute(text("SELECT task, reason, status FROM idempotency.dead_letters ORDER BY id"))
            return [(row.task, row.reason, row.status) for row in rows]


@pytest.fixture
def stage(bank: Celery, engine: Engine, deliveries: Deliveries) -> Stage:
    return Stage(bank, engine, deliveries)
