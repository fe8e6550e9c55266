"""One record for a key, in whichever partition: claims at once, batches, and what comes while a partition is missing."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text

from idempotency.application import runtime_of
from idempotency.store import batches, partitions, periods
from idempotency.store.answers import Busy, Claimed, Completed
from idempotency.store.inserting import is_partitioned
from idempotency.store.migrations.partitioning import DEFAULT, OTHERWISE
from idempotency.wire.delivery import Delivery
from idempotency.wire.keys import OperationId
from tests.support import operations as op
from tests.support.operations import at_once, completed, new_id, record, started, wait_for_a_lock
from tests.support.partitions import into_the_past, put_into_partitions
from tests.support.processes import eventually

COUNT = text("SELECT count(*) FROM idempotency.records WHERE key = :key")


def test_of_many_claims_of_one_key_one_gets_it(engine: Engine) -> None:
    id = new_id()

    def claim(_: int) -> Any:
        with engine.connect() as connection:
            return op.claim(connection, id)

    answers = at_once(8, claim)
    assert sum(isinstance(answer, Claimed) for answer in answers) == 1
    assert sum(isinstance(answer, Busy) for answer in answers) == 7
    with engine.connect() as connection:
        assert connection.execute(COUNT, {"key": id.key}).scalar_one() == 1


def test_without_the_trigger_one_key_has_many_holders(engine: Engine) -> None:
    """The control of the one above: nothing else keeps a key from two records, not even when they come one after the other.

    At once, two may come in one microsecond: those have the same primary key.
    """
    id = new_id()
    with engine.connect() as connection:
        connection.exec_driver_sql("ALTER TABLE idempotency.records DISABLE TRIGGER insert_once")
        answers = [op.claim(connection, id) for _ in range(8)]
        assert all(isinstance(answer, Claimed) for answer in answers)
        assert connection.execute(COUNT, {"key": id.key}).scalar_one() == 8


def test_a_claim_sees_what_another_partition_got_while_it_waited(engine: Engine) -> None:
    """Its statement began before: only the trigger's own snapshot shows the record."""
    id = new_id()
    with (
        engine.connect() as holder,
        engine.connect() as watching,
        engine.connect() as waiting,
        ThreadPoolExecutor(1) as threads,
    ):
        holder.exec_driver_sql("BEGIN")
        first = op.claim(holder, id)
        # across the border: as if the one had come just before midnight and the other just after
        holder.exec_driver_sql("SELECT pg_catalog.set_config('idempotency.moving', 'on', true)")
        holder.execute(
            text("UPDATE idempotency.records SET placed_at = '2000-01-01' WHERE key = :key"), {"key": id.key}
        )
        second = threads.submit(op.claim, waiting, id)
        wait_for_a_lock(watching)
        holder.exec_driver_sql("COMMIT")
        assert isinstance(second.result(10), Busy)
        assert isinstance(first, Claimed)
        assert watching.execute(COUNT, {"key": id.key}).scalar_one() == 1


def test_a_record_of_an_old_partition_answers_and_is_taken_over(connection: Connection) -> None:
    done, held = completed(connection), started(connection)
    op.age(connection, held.id, locked_until=-1)
    into_the_past(connection)
    answer = op.claim(connection, done.id)
    assert isinstance(answer, Completed)
    again = op.claim(connection, held.id)
    assert isinstance(again, Claimed)
    assert (again.attempts, again.taken_over) == (2, True)
    assert connection.execute(COUNT, {"key": held.id.key}).scalar_one() == 1


def test_batches_with_the_same_keys_share_them_out_without_a_deadlock(bank: Celery) -> None:
    ids = [new_id() for _ in range(300)]
    barrier = threading.Barrier(4)

    def claim(number: int) -> set[str]:
        order = sorted(ids, key=lambda id: hash((number, id.key)))
        deliveries = [Delivery(id, op.FINGERPRINT, {}) for id in order]
        with runtime_of(bank).autocommit() as connection:
            assert is_partitioned(connection)
            barrier.wait()
            bounds = {"service": op.SERVICE, "holder": op.HOLDER, "lease": op.LEASE, "horizon": 3600.0}
            claimed = batches.claim_new(connection, deliveries, [str(number)] * len(ids), **bounds)  # type: ignore[arg-type]
            return {claim.id.key for some in claimed for claim in some}

    claimed = at_once(4, claim)
    assert sum(map(len, claimed)) == len(ids)
    assert set().union(*claimed) == {id.key for id in ids}


@pytest.mark.long
def test_what_comes_while_no_partition_is_there_is_claimed_and_moves_later(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(periods, "MARGIN", timedelta(seconds=1))
    for each in found(connection).all:
        if not each.is_default:
            connection.exec_driver_sql(f"DROP TABLE idempotency_partitions.{each.name}")
    done, held = completed(connection), started(connection)
    assert partition_of(connection, done.id) == partition_of(connection, held.id) == DEFAULT
    assert partitions.make_ahead(connection) == 4
    first = found(connection)
    # until the present has a partition, there is nowhere to go
    assert partitions.empty_default(connection, replace(first, now=first.now - timedelta(days=1)), limit=100) == 0
    eventually(
        lambda: partitions.empty_default(connection, found(connection), limit=100), what="a partition of the present"
    )
    assert partition_of(connection, done.id) == first.all[0].name
    assert partition_of(connection, held.id) == DEFAULT  # nobody takes it from its holder


def found(connection: Connection) -> periods.Partitions:
    partitions_found = periods.found(connection)
    assert partitions_found is not None
    return partitions_found


def partition_of(connection: Connection, id: OperationId) -> str:
    query = text("SELECT tableoid::regclass::text FROM idempotency.records WHERE key = :key")
    return str(connection.execute(query, {"key": id.key}).scalar_one()).rpartition(".")[2]


@pytest.mark.parametrize("width", ["hour", "day", "week"])
def test_partitions_are_whole_periods_made_ahead_once(connection: Connection, width: str) -> None:
    connection.exec_driver_sql(f"COMMENT ON SCHEMA idempotency_partitions IS '{width}'")
    partitions.make_ahead(connection)
    assert partitions.make_ahead(connection) == 0
    made = found(connection)
    assert periods.missing(made) == []
    for before, after in zip(made.all, made.all[1:-1], strict=False):
        assert before.ends_at == after.begins_at
    assert made.last is not None
    assert made.last >= made.wanted


@pytest.mark.parametrize("is_told", [True, False])
def test_a_partition_is_made_without_a_look_at_the_default_one(connection: Connection, is_told: bool) -> None:
    """All claims wait meanwhile, and after days without a relay the default one is full. Its CHECK tells Postgres enough."""
    for each in found(connection).all:
        if not each.is_default:
            connection.exec_driver_sql(f"DROP TABLE idempotency_partitions.{each.name}")
    id = completed(connection).id
    assert partition_of(connection, id) == DEFAULT
    if not is_told:  # the control
        connection.exec_driver_sql(f"ALTER TABLE idempotency_partitions.{DEFAULT} DROP CONSTRAINT placed_otherwise")
    driver: Any = connection.connection.driver_connection
    said: list[str] = []
    driver.add_notice_handler(lambda notice: said.append(notice.message_primary))
    connection.exec_driver_sql("SET client_min_messages = debug1")
    assert partitions.make_ahead(connection) == 4
    known = f'updated partition constraint for default partition "{DEFAULT}" is implied by existing constraints'
    assert said.count(known) == (4 if is_told else 0)


def test_what_earlier_code_has_put_into_the_default_one_is_placed_apart(engine: Engine, connection: Connection) -> None:
    connection.exec_driver_sql(f"ALTER TABLE idempotency_partitions.{DEFAULT} DROP CONSTRAINT placed_otherwise")
    for each in found(connection).all:
        if not each.is_default:
            connection.exec_driver_sql(f"DROP TABLE idempotency_partitions.{each.name}")
    id = completed(connection).id
    connection.exec_driver_sql("UPDATE idempotency.records SET placed_at = clock_timestamp()")
    put_into_partitions(engine.url.render_as_string(hide_password=False))
    assert partition_of(connection, id) == DEFAULT
    assert f"{record(connection, id).placed_at:%Y}" == OTHERWISE[:4]
