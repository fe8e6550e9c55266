"""An attempt's round trips to Postgres, as libpq's trace counts them. A change that saves one changes its number here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine, text

from benchmarks.round_trips import counted
from idempotency import IdempotentTask, OperationId
from idempotency.application import runtime_of
from idempotency.attempt.batch import claim_together
from idempotency.attempt.heartbeat import JobTime
from idempotency.store.inserting import is_partitioned
from idempotency.wire.delivery import Delivery
from tests.support.deliveries import Deliveries
from tests.support.tasks import ROW, make_task

COMMIT = {"BEGIN": 1, "COMMIT": 1}


def idle(self: IdempotentTask) -> None:
    """Not even a session."""


def insert(self: IdempotentTask) -> None:
    self.session.execute(ROW)


def outside(self: IdempotentTask) -> None:
    self.effect("call", lambda idempotency_key: 1)


def phases(self: IdempotentTask) -> None:
    self.step("first", lambda session: session.execute(ROW) and None)
    self.session.execute(ROW)


@pytest.mark.parametrize(
    ("body", "trips"),
    [
        (idle, {"statement": 2}),  # the claim, and the end with its commit
        (insert, {"statement": 3} | COMMIT),
        (outside, {"statement": 4}),  # and the effect's beginning and its result
        (phases, {"statement": 5, "BEGIN": 2, "COMMIT": 2}),
    ],
)
def test_an_attempt_costs_so_many_round_trips(
    bank: Celery, deliveries: Deliveries, engine: Engine, body: Callable[..., Any], trips: dict[str, int]
) -> None:
    runtime, task = runtime_of(bank), make_task(bank, body)
    for number in range(8):  # connections, and psycopg prepares a statement at its fifth execution
        assert deliveries.deliver(task, key=f"before{number}").state == "SUCCESS"
    with counted([runtime.engine.connect, runtime.autocommit]) as counts:
        assert deliveries.deliver(task, key="measured").state == "SUCCESS"
    assert counts == trips
    with counted([runtime.engine.connect, runtime.autocommit]) as counts:
        assert deliveries.deliver(task, key="measured").state == "SUCCESS"  # a duplicate, after the end
    # in partitions, one that inserts nothing, and one that says why
    assert counts == {"statement": 2 if in_partitions(engine) else 1}


def in_partitions(engine: Engine) -> bool:
    with engine.connect() as connection:
        return is_partitioned(connection)


def test_a_thousand_leases_are_renewed_by_one_round_trip(bank: Celery, engine: Engine) -> None:
    runtime = runtime_of(bank)
    deliveries = [
        Delivery(OperationId("default", "t", f"k{number:04}"), "f" * 64, {}, message="{}") for number in range(1000)
    ]
    answers = claim_together(runtime, deliveries, [f"{n:032x}" for n in range(len(deliveries))], JobTime())
    until = text("SELECT min(locked_until) FROM idempotency.records")
    with engine.connect() as connection:
        before = connection.execute(until).scalar_one()
    for _ in range(8):
        runtime.heartbeat.run_once()
    with counted([runtime._heartbeat_engine.connect]) as counts:
        runtime.heartbeat.run_once()
    assert counts == {"statement": 1}
    with engine.connect() as connection:
        assert connection.execute(until).scalar_one() > before
    for answer in answers:
        runtime.heartbeat.drop(answer.token)
