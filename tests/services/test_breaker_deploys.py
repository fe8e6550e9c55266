"""Deploys, other applications and copies: each test passes while the bug is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, Row
from sqlalchemy.orm import Session

from idempotency import FingerprintMismatch, IdempotentTask, OperationId, maintenance, operators
from idempotency.dead_letters import ReplayRefused
from idempotency.operators import Change
from idempotency.reconcile import reconcile
from tests import operations as op
from tests.deliveries import Deliveries
from tests.services.test_core import age, make_task
from tests.services.test_operators import deliver_row

ANN = Change("ann", "ticket 42")
Record = Callable[[str], Row[Any]]
Entries = Callable[[str], int]


@pytest.fixture
def connection(engine: Engine) -> Any:
    with engine.connect() as connection:
        yield connection


def test_a_renamed_parameter_strands_every_operation_between_attempts(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    """Called with positional arguments; attempt 1 is released; a deploy renames a parameter (account -> account_id). The
    worker computes the fingerprint anew from today's names and ignores the one in the message, which is the record's own:
    its next delivery is refused as another request. The letter cannot be replayed (the record is released, under another
    fingerprint), nothing else delivers, the operation never ends. Breaks: an operation in flight survives a deploy.
    """

    def old(self: Any, account: str) -> None:
        raise ValueError("again")

    task = make_task(bank, old)
    with Session(engine) as session, session.begin():
        task.enqueue(session, "a", idempotency_key="k")
    assert deliver_row(deliveries, task, op.outbox(connection)[0]).state == "RETRY"
    age(engine, "k")
    retry = op.outbox(connection)[-1]

    def new(self: Any, account_id: str) -> str:
        return account_id

    del bank.tasks[task.name]
    renamed = bank.task(base=IdempotentTask, bind=True, name=task.name, shared=False)(new)
    assert json.loads(retry.message)["headers"]["idempotency-fingerprint"] == record("k").fingerprint
    assert isinstance(deliver_row(deliveries, renamed, retry).value, FingerprintMismatch)
    (letter,) = op.dead_letters(connection)
    with pytest.raises(ReplayRefused):
        operators.replay(bank, letter.id, ANN)
    op.sent(connection, OperationId("default", task.name, "k"))
    for _ in range(3):
        maintenance.recover(bank)
        reconcile(bank)
    assert (record("k").status, op.outbox(connection)[-1].status) == ("released", "published")
