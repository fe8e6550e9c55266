"""Claims of strangers wait for nobody who ends an operation slowly, though 4,096 locks are for all keys."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text

from idempotency.application import runtime_of
from idempotency.operate.cancel import cancel
from idempotency.operate.change import read
from idempotency.store import batches
from idempotency.store.answers import Busy, Claimed
from idempotency.store.inserting import lock_of
from idempotency.wire.delivery import Delivery
from idempotency.wire.keys import OperationId
from tests.support import operations as op
from tests.support.operations import new_id
from tests.support.operators import ANN
from tests.support.tasks import accept, make_task

LOCK = text(f"SELECT {lock_of('cast(:tenant AS text)', 'cast(:task AS text)', 'cast(:key AS text)')}")
# Seconds: enough for a claim that does not wait.
SOON = 10


def number(connection: Connection, id: OperationId) -> int:
    return int(connection.execute(LOCK, {"tenant": id.tenant, "task": id.task, "key": id.key}).scalar_one())


def beside(connection: Connection, id: OperationId, task: str) -> OperationId:
    """An operation of another task that shares the lock of this one."""
    keys = "SELECT key FROM generate_series(1, 100000) n, CAST(n AS text) key"
    query = text(f"{keys} WHERE {lock_of(':tenant', ':task', 'key')} = :number LIMIT 1")
    key = connection.execute(query, {"tenant": "another", "task": task, "number": number(connection, id)}).scalar_one()
    return OperationId("another", task, str(key))


def claim_many(engine: Engine, ids: list[OperationId]) -> set[str]:
    bounds: Any = {"service": op.SERVICE, "holder": op.HOLDER, "lease": op.LEASE, "horizon": 3600.0}
    deliveries = [Delivery(id, op.FINGERPRINT, {}) for id in ids]
    with engine.connect() as own:
        return set(batches.claim_new(own, deliveries, [f"{n}" for n in range(len(ids))], **bounds))


def claim(engine: Engine, id: OperationId) -> Any:
    with engine.connect() as own:
        return op.claim(own, id)


def test_an_on_failed_that_takes_its_time_stops_no_stranger(
    bank: Celery, engine: Engine, connection: Connection
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def told(*_: Any) -> None:
        inside.set()
        assert go_on.wait(3 * SOON)

    def body(self: Any, account: str) -> None: ...

    task = make_task(bank, body, key="{account}", on_failed=told)
    id = accept(engine, task, "a")
    with runtime_of(bank).autocommit() as own:
        shown = read(own, id, "bank")
    unlucky = beside(connection, id, "unrelated.task")
    batch = [OperationId("another", "unrelated.task", new_id().key) for _ in range(100)]
    with ThreadPoolExecutor(3) as threads:
        cancelling = threads.submit(cancel, bank, shown, ANN)
        try:
            assert inside.wait(SOON)
            claimed = threads.submit(claim_many, engine, [*batch, unlucky]).result(SOON)
            assert claimed == {each.key for each in batch if number(connection, each) != number(connection, id)}
            assert isinstance(threads.submit(claim, engine, unlucky).result(SOON), Claimed)
        finally:
            go_on.set()
        cancelling.result(SOON)
    assert op.status(connection, id) == "failed"


@pytest.mark.parametrize("first", ["batch", "alone"])
def test_who_claims_one_key_and_who_claims_many_do_not_both_get_it(
    engine: Engine, connection: Connection, first: str
) -> None:
    id = new_id()
    with engine.connect() as holder, ThreadPoolExecutor(1) as threads:
        holder.exec_driver_sql("BEGIN")
        if first == "alone":
            assert isinstance(op.claim(holder, id), Claimed)
            assert claim_many(engine, [id]) == set()  # and does not wait
            holder.exec_driver_sql("COMMIT")
            return
        bounds: Any = {"service": op.SERVICE, "holder": op.HOLDER, "lease": op.LEASE, "horizon": 3600.0}
        assert set(batches.claim_new(holder, [Delivery(id, op.FINGERPRINT, {})], ["t"], **bounds)) == {id.key}
        waiting = threads.submit(claim, engine, id)
        op.wait_for_a_lock(connection)
        assert claim_many(engine, [id]) == set()
        holder.exec_driver_sql("COMMIT")
        assert isinstance(waiting.result(SOON), Busy)
