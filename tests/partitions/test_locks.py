"""Who inserts or moves keys stops those who want the same keys, and nobody else."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.pool import NullPool

from idempotency.application import runtime_of, settings_of
from idempotency.checks.partitions import AT_ONCE
from idempotency.checks.postgres import check_database
from idempotency.operate.cancel import cancel
from idempotency.operate.change import read
from idempotency.store import batches, statements
from idempotency.store.answers import Busy, Claimed
from idempotency.store.inserting import KEYS_AT_ONCE
from idempotency.store.migrations.partitioning import DEFAULT, PARTITIONS
from idempotency.wire.delivery import Delivery
from idempotency.wire.keys import OperationId
from tests.support import operations as op
from tests.support.operations import new_id
from tests.support.operators import ANN
from tests.support.tasks import accept, make_task

# Seconds: enough for a claim that does not wait.
SOON = 10
BOUNDS: Mapping[str, Any] = {"service": op.SERVICE, "holder": op.HOLDER, "lease": op.LEASE, "horizon": 3600.0}
# Of one partition and its indexes.
LOCKED_BY_PLANNING = f"""
SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND relation IN (
    SELECT '{PARTITIONS}.{DEFAULT}'::regclass
    UNION ALL SELECT indexrelid FROM pg_index WHERE indrelid = '{PARTITIONS}.{DEFAULT}'::regclass)
"""
HELD = "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'"


def new(many: int) -> list[Delivery]:
    return [Delivery(new_id(), op.FINGERPRINT, {}) for _ in range(many)]


def keys_of(claimed: Iterable[Sequence[Claimed]]) -> set[str]:
    return {claim.id.key for some in claimed for claim in some}


def claim_many(engine: Engine, ids: Sequence[OperationId]) -> set[str]:
    deliveries = [Delivery(id, op.FINGERPRINT, {}) for id in ids]
    with engine.connect() as own:
        return keys_of(batches.claim_new(own, deliveries, [f"{n}" for n in range(len(ids))], **BOUNDS))


def complete_new(connection: Connection, deliveries: Sequence[Delivery], lease: float = 60.0) -> set[str]:
    results = ["1"] * len(deliveries)
    bounds: Any = {"service": op.SERVICE, "holder": op.HOLDER, "retention": 3600.0, "lease": lease}
    return batches.complete_new(connection, deliveries, results, **bounds)


def claim(engine: Engine, id: OperationId) -> Any:
    with engine.connect() as own:
        return op.claim(own, id)


@pytest.mark.long
def test_an_on_failed_that_takes_its_time_stops_no_stranger(bank: Celery, engine: Engine) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def told(*_: Any) -> None:
        inside.set()
        assert go_on.wait(3 * SOON)

    def body(self: Any, account: str) -> None: ...

    task = make_task(bank, body, key="{account}", on_failed=told)
    id = accept(engine, task, "a")
    with runtime_of(bank).autocommit() as own:
        shown = read(own, id, "bank")
    batch = [OperationId("another", "unrelated.task", new_id().key) for _ in range(1000)]
    with ThreadPoolExecutor(2) as threads:
        cancelling = threads.submit(cancel, bank, shown, ANN)
        try:
            assert inside.wait(SOON)
            assert threads.submit(claim_many, engine, batch).result(SOON) == {each.key for each in batch}
        finally:
            go_on.set()
        cancelling.result(SOON)
    assert op.status(engine.connect(), id) == "failed"


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
        assert keys_of(batches.claim_new(holder, [Delivery(id, op.FINGERPRINT, {})], ["t"], **BOUNDS)) == {id.key}
        waiting = threads.submit(claim, engine, id)
        op.wait_for_a_lock(connection)
        assert claim_many(engine, [id]) == set()
        holder.exec_driver_sql("COMMIT")
        assert isinstance(waiting.result(SOON), Busy)


def test_what_is_completed_at_once_has_begun_before_its_end(engine: Engine) -> None:
    (delivery,) = new(1)
    with engine.connect() as connection:
        complete_new(connection, [delivery])
        found = op.record(connection, delivery.id)
    assert found.created_at == found.opened_at < found.completed_at


@pytest.mark.long
def test_batches_without_a_key_in_common_are_all_committed(engine: Engine) -> None:
    with engine.connect() as one, engine.connect() as other:
        one.exec_driver_sql("BEGIN")
        assert len(complete_new(one, new(KEYS_AT_ONCE))) == KEYS_AT_ONCE
        for _ in range(20):
            other.exec_driver_sql("BEGIN")
            assert len(complete_new(other, new(KEYS_AT_ONCE))) == KEYS_AT_ONCE
            other.exec_driver_sql("COMMIT")


def test_of_batches_with_a_key_in_common_the_second_is_without_it(engine: Engine) -> None:
    deliveries = new(KEYS_AT_ONCE)
    with engine.connect() as one, engine.connect() as other:
        one.exec_driver_sql("BEGIN")
        complete_new(one, deliveries[:1])
        other.exec_driver_sql("BEGIN")
        assert complete_new(other, deliveries) == {each.id.key for each in deliveries[1:]}


@pytest.mark.long
def test_a_consumer_that_is_frozen_before_its_commit_stops_no_stranger(engine: Engine) -> None:
    frozen = create_engine(engine.url, poolclass=NullPool).connect()  # SIGSTOP: its transaction is open, and idle
    complete_new(frozen, new(KEYS_AT_ONCE))
    began = time.monotonic()
    with engine.connect() as stranger:
        stranger.exec_driver_sql("SET lock_timeout = '1s'")
        for _ in range(200):
            assert isinstance(op.claim(stranger, new_id("another", "another.task")), Claimed)
    assert time.monotonic() - began < 3 * SOON
    frozen.invalidate()


def test_a_transaction_locks_few_keys_however_many_are_claimed(engine: Engine) -> None:
    """Each takes room in Postgres' table of locks, which all connections share."""
    with engine.connect() as own:
        assert batches.most_together(own, 10_000) == KEYS_AT_ONCE
        assert batches.most_together(own, 3) == 3
        most = []
        execute = statements.execute

        def counted(connection: Connection, *args: Any) -> Any:
            connection.exec_driver_sql("BEGIN")
            rows = execute(connection, *args).fetchall()
            most.append(connection.exec_driver_sql(HELD).scalar_one())
            connection.exec_driver_sql("COMMIT")
            return type("Answer", (), {"fetchall": lambda _: rows})()

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(batches, "execute", counted)
            ids = [new_id() for _ in range(2 * KEYS_AT_ONCE + 1)]
            deliveries = [Delivery(id, op.FINGERPRINT, {}) for id in ids]
            claimed = keys_of(batches.claim_new(own, deliveries, [f"{n}" for n in range(len(ids))], **BOUNDS))
    assert claimed == {id.key for id in ids}
    assert most == [KEYS_AT_ONCE, KEYS_AT_ONCE, 1]


def test_the_doctor_counts_the_room_for_locks(bank: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    def said() -> list[str]:
        findings = check_database(settings_of(bank))
        return [each.advice for each in findings if each.subject == "database max_locks_per_transaction"]

    assert said() == []
    monkeypatch.setattr("idempotency.checks.partitions.KEYS_AT_ONCE", 10_000)
    with runtime_of(bank).autocommit() as own:
        connections = own.exec_driver_sql("SELECT current_setting('max_connections')::int").scalar_one()
        own.exec_driver_sql("BEGIN")
        own.exec_driver_sql("EXPLAIN SELECT FROM idempotency.records WHERE key = 'k'")
        locks = own.exec_driver_sql(LOCKED_BY_PLANNING).scalar_one()
        own.exec_driver_sql("COMMIT")
    assert locks > 5
    needed = -(-AT_ONCE * (locks * 6 + 10_000) // connections)
    assert [advice.partition(":")[0] for advice in said()] == [f"raise it to {needed}"]


def test_beside_code_that_locks_otherwise_a_key_has_one_record(engine: Engine, connection: Connection) -> None:
    """Of an earlier checkout: a batch there has one of 4,096 locks for each of its keys, and says that they are locked."""
    id = new_id()
    with engine.connect() as earlier, ThreadPoolExecutor(1) as threads:
        earlier.exec_driver_sql("BEGIN")
        earlier.exec_driver_sql("SELECT set_config('idempotency.keys_locked', 'on', true)")
        assert isinstance(op.claim(earlier, id), Claimed)
        waiting = threads.submit(claim, engine, id)
        op.wait_for_a_lock(connection)
        earlier.exec_driver_sql("COMMIT")
        assert isinstance(waiting.result(SOON), Busy)
