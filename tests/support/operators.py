"""What operators do, as the tests need it: shown, changed, replayed; and a snapshot of what they must leave alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from celery import Celery
from sqlalchemy import Connection, text

from idempotency import OperationId
from idempotency.application import runtime_of
from idempotency.operate import discard
from idempotency.operate.change import Change, Shown, read
from idempotency.operate.replay import replay
from tests.support import operations as op
from tests.support.deliveries import Deliveries, Outcome, deliver_row

ANN = Change("ann", "ticket 42", is_verified=True)


def shown(connection: Connection, task: Any, key: str = "k") -> Shown:
    return read(connection, OperationId("default", task.name, key), "bank")


def replay_and_deliver(app: Celery, connection: Connection, deliveries: Deliveries, task: Any) -> Outcome:
    """Replay the newest open letter of the operation and deliver it."""
    id = OperationId("default", task.name, "k")
    letter = [each for each in op.dead_letters(connection, id) if each.status == "open"][-1]
    replay(app, letter.id, ANN)
    return deliver_row(deliveries, task, op.outbox(connection, id)[-1])


def act(app: Celery, step: Callable[..., object], *arguments: Any) -> None:
    """One step of a discard, in a transaction."""
    step = partial(step, app=app) if step is discard.approve else step
    with runtime_of(app).engine.begin() as connection:
        step(connection, *arguments)


def snapshot(connection: Connection) -> list[Any]:
    """Everything that a refused change must leave as it is."""
    tables = ("records", "outbox", "dead_letters", "discards", "audit")
    return [connection.execute(text(f"SELECT * FROM idempotency.{table}")).all() for table in tables]
