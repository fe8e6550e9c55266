"""A revocation with `terminate=True` in a transaction of its own, without `repeatable`: its claim waits for the mover's lock, not the row."""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.app.task import Context
from sqlalchemy import Connection, Engine

from idempotency.worker.deliveries import delivery_of
from idempotency.worker.revocation import revoke_terminated
from tests.support import operations as op
from tests.support.deliveries import request_of
from tests.support.operations import early, record
from tests.support.partitions import while_it_moves
from tests.support.tasks import make_task


def test_it_is_recorded_while_the_record_moves(bank: Celery, engine: Engine, connection: Connection) -> None:
    def body(self: Any, account: str) -> None: ...

    task = make_task(bank, body, key="{account}")
    context = Context(request_of(bank, task, "m1"), args=["a"], kwargs={}, is_eager=False, called_directly=False)
    delivery = delivery_of(task, context)
    early(connection, delivery.id, fingerprint=delivery.fingerprint)
    while_it_moves(engine, connection, delivery.id, lambda: revoke_terminated(task, context))
    assert record(connection, delivery.id).revoked_generation == 1
    assert op.status(connection, delivery.id) == "released"
