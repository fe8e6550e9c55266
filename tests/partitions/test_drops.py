"""Dropping a partition: only when nothing in it is needed, and whatever dies on the way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError, OperationalError

from idempotency.application import runtime_of
from idempotency.observe import crash_points
from idempotency.store import left_alone, partitions, periods, purge
from idempotency.store.answers import Claimed
from idempotency.upkeep import maintenance
from idempotency.wire.keys import OperationId
from tests.integration import test_purge as plain
from tests.support import operations as op
from tests.support.operations import at_once, completed, due, early, failed, record, started, status, wait_for_a_lock
from tests.support.partitions import into_the_past, purging_drops
from tests.support.purging import PUBLISHED, deliver_again, past_its_time

# The table's own tests, with all records in a partition that is over.
test_an_operation_past_its_retention_is_deleted_with_its_outbox_rows = (
    plain.test_an_operation_past_its_retention_is_deleted_with_its_outbox_rows
)
test_an_operation_with_an_outbox_row_that_is_not_settled_is_kept = (
    plain.test_an_operation_with_an_outbox_row_that_is_not_settled_is_kept
)
test_an_operation_with_an_open_dead_letter_is_kept_until_it_is_closed = (
    plain.test_an_operation_with_an_open_dead_letter_is_kept_until_it_is_closed
)
test_a_record_outlives_every_message_that_may_still_be_delivered = (
    plain.test_a_record_outlives_every_message_that_may_still_be_delivered
)
test_another_tenant_s_rows_keep_nothing_and_are_kept = plain.test_another_tenant_s_rows_keep_nothing_and_are_kept
test_a_purged_key_is_new_again_under_a_higher_fence = plain.test_a_purged_key_is_new_again_under_a_higher_fence

OLD = "records_before"


@pytest.fixture(autouse=True)
def dropping() -> Iterator[None]:
    with purging_drops():
        yield


def is_there(connection: Connection) -> bool:
    query = "SELECT to_regclass('idempotency_partitions.records_before') IS NOT NULL"
    return bool(connection.exec_driver_sql(query).scalar_one())


def without_place(row: Any) -> dict[str, Any]:
    return {name: value for name, value in row._mapping.items() if name != "placed_at"}


def test_what_is_needed_moves_as_it_is_and_the_rest_is_dropped(bank: Celery, connection: Connection) -> None:
    kept = [state(connection).id for state in (early, due, completed, failed)]
    before = [record(connection, id) for id in kept]
    gone = [past_its_time(connection) for _ in range(3)]
    assert maintenance.purge(bank) == len(gone)
    assert not is_there(connection)
    assert [without_place(record(connection, id)) for id in kept] == [without_place(each) for each in before]
    assert all(record(connection, id) is None for id in gone)


def test_nobody_is_moved_away_from_its_holder_and_the_partition_waits(bank: Celery, connection: Connection) -> None:
    held, gone = started(connection), past_its_time(connection)
    assert maintenance.purge(bank) == 1  # row by row
    assert is_there(connection)
    assert status(connection, held.id) == "started"
    assert record(connection, gone) is None
    assert op.claim(connection, gone).fence > held.fence  # type: ignore[union-attr]


def needed(connection: Connection, id: OperationId, service: str, horizon: float) -> bool:
    fields = {"partition": OLD, "service": service, "horizon": horizon, "most": 100}
    found = connection.exec_driver_sql(partitions._KEYS.format(function="survivors"), fields).all()
    return OperationId(*found[0]) == id if found else False


def stays(connection: Connection, id: OperationId, horizon: float) -> bool:
    """By what the purge of a plain table looks at."""
    query = f"""
        SELECT coalesce(({purge.OPERATIONS.columns.removesuffix("AS stays_until")}) > clock_timestamp(), false)
        FROM idempotency.records r WHERE r.key = %(key)s
    """
    return bool(connection.exec_driver_sql(query, {"key": id.key, "keep": 60.0, "horizon": horizon}).scalar_one())


@pytest.mark.parametrize("columns", [
    {},
    PUBLISHED,
    PUBLISHED | {"settled_at": "clock_timestamp()"},
    PUBLISHED | {"service": "'another'"},
    PUBLISHED | {"fingerprint": "'v1:another'"},
    {"status": "'failed'", "last_error": "'no'"},
    {"status": "'published'", "published_at": "clock_timestamp() - interval '1 minute'"},
    {"status": "'published'", "published_at": "clock_timestamp() - interval '1 minute'", "settled_at": "clock_timestamp()"},
    None,
])  # fmt: skip
def test_what_keeps_an_operation_is_the_same_as_in_a_plain_table(
    connection: Connection, columns: dict[str, str] | None
) -> None:
    id = past_its_time(connection)
    if columns is None:
        letter = "INSERT INTO idempotency.dead_letters (source, tenant, task, key, reason, payload) VALUES ('operation', :tenant, :task, :key, 'x', '')"
        connection.execute(text(letter), {"tenant": id.tenant, "task": id.task, "key": id.key})
    else:
        deliver_again(connection, id, **columns)
    into_the_past(connection)
    for horizon in (30.0, 3600.0):
        assert needed(connection, id, op.SERVICE, horizon) == stays(connection, id, horizon)


def test_another_application_s_operations_are_not_judged_here(bank: Celery, connection: Connection) -> None:
    mine, other = past_its_time(connection), past_its_time(connection)
    connection.execute(text("UPDATE idempotency.records SET service = 'another' WHERE key = :key"), {"key": other.key})
    assert maintenance.purge(bank) == 1
    assert record(connection, mine) is None
    assert status(connection, other) == "completed"


@pytest.mark.long
@pytest.mark.parametrize("moment", ["partition.cleared", "batch", "lock"])
def test_a_process_cut_off_before_the_drop_loses_and_doubles_nothing(
    engine: Engine, connection: Connection, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Between two batches that move, once all have moved, or while the drop waits for the table."""
    kept = [completed(connection).id for _ in range(3)]
    gone = [past_its_time(connection) for _ in range(3)]
    deliver_again(connection, gone[0], **PUBLISHED)
    into_the_past(connection)
    monkeypatch.setattr(partitions, "KEYS_AT_ONCE", 1)
    batches = iter(range(10))

    def cut_off() -> None:
        connection.exec_driver_sql("SELECT pg_terminate_backend(%(pid)s)", {"pid": pid})

    def hook(point: str) -> None:
        if point == moment:
            cut_off()

    columns = partitions._columns

    def then_columns(rows: Any) -> Any:
        if moment == "batch" and next(batches) == 2:
            cut_off()
        return columns(rows)

    crash_points.install(hook)
    monkeypatch.setattr(partitions, "_columns", then_columns)
    bounds = {"retention": 3600.0, "horizon": 60.0, "limit": 1000}
    with ExitStack() as stack:
        own = stack.enter_context(engine.connect())
        pid = own.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        if moment == "lock":
            reader = stack.enter_context(engine.connect())
            reader.exec_driver_sql("BEGIN; LOCK TABLE idempotency.records IN ACCESS SHARE MODE")
            threads = stack.enter_context(ThreadPoolExecutor(1))
            threads.submit(lambda: (wait_for_a_lock(connection), cut_off()))
        stack.enter_context(suppress(OperationalError))
        partitions.drop_past(own, whole(connection), op.SERVICE, **bounds)  # type: ignore[arg-type]
    crash_points.install(None)
    assert is_there(connection)
    left = connection.exec_driver_sql("SELECT key FROM idempotency.records").scalars().all()
    assert sorted(left) == sorted(id.key for id in kept + gone if moment == "batch" or id != gone[0])
    left_alone.forget()
    dropped, _ = partitions.drop_past(connection, whole(connection), op.SERVICE, **bounds)  # type: ignore[arg-type]
    assert dropped == (3 if moment == "batch" else 2)
    left = connection.exec_driver_sql("SELECT key FROM idempotency.records").scalars().all()
    assert sorted(left) == sorted(id.key for id in kept)
    assert not is_there(connection)


def whole(connection: Connection) -> periods.Partitions:
    found = periods.found(connection)
    assert found is not None
    return found


@pytest.mark.parametrize("late", ["row", "letter", "replayed"])
def test_what_comes_between_the_look_and_the_drop_keeps_the_partition(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    id = past_its_time(connection, failed)
    into_the_past(connection)
    keys = partitions._keys

    def then(*args: Any) -> Any:
        found = keys(*args)
        if args[2] == "laden" and args[-1] == 1:
            if late == "row":
                deliver_again(connection, id)
            elif late == "letter":
                letter = "INSERT INTO idempotency.dead_letters (source, tenant, task, key, reason, payload) VALUES ('operation', :tenant, :task, :key, 'x', '')"
                connection.execute(text(letter), {"tenant": id.tenant, "task": id.task, "key": id.key})
            else:
                connection.execute(text("""
                    UPDATE idempotency.records SET status = 'released', available_at = clock_timestamp(), completed_at = NULL,
                        expires_at = NULL, generation = 2 WHERE key = :key"""), {"key": id.key})  # fmt: skip
        return found

    monkeypatch.setattr(partitions, "_keys", then)
    found = whole(connection)
    bounds = {"retention": 3600.0, "horizon": 60.0, "limit": 1000}
    assert partitions.drop_past(connection, found, op.SERVICE, **bounds) == (0, False)  # type: ignore[arg-type]
    assert is_there(connection)
    assert record(connection, id) is not None


def test_no_partition_goes_before_it_has_ended(connection: Connection) -> None:
    found = periods.found(connection)
    assert found is not None
    present = next(each for each in found.all if each.begins_at and each.ends_at and each.ends_at > found.now)
    fields = {"partition": present.name, "service": op.SERVICE, "row": 0, "letter": 0}
    with pytest.raises(DBAPIError, match="must have ended"):
        connection.exec_driver_sql(partitions._REMOVE, fields)


def test_a_saga_s_rows_stay_when_its_record_moves_and_go_with_it(bank: Celery, connection: Connection) -> None:
    kept, gone = completed(connection).id, past_its_time(connection)
    for id in (kept, gone):
        saga = """
            INSERT INTO idempotency.sagas (tenant, task, key, entity_id, service, status, accepted_at)
            VALUES (:tenant, :task, :key, :key, 'bank', 'COMPLETED', clock_timestamp())"""
        connection.execute(text(saga), {"tenant": id.tenant, "task": id.task, "key": id.key})
    assert maintenance.purge(bank) == 1
    assert connection.exec_driver_sql("SELECT key FROM idempotency.sagas").scalars().all() == [kept.key]
    assert not is_there(connection)


def test_too_much_that_is_needed_is_not_moved(
    bank: Celery, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitions, "MOVED", 2)
    kept, gone = [completed(connection).id for _ in range(3)], past_its_time(connection)
    assert maintenance.purge(bank) == 1  # row by row
    assert is_there(connection)
    assert [status(connection, id) for id in kept] == ["completed"] * 3
    assert record(connection, gone) is None


def test_what_goes_one_by_one_goes_in_passes(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "FETCHED", 1)
    gone = [past_its_time(connection) for _ in range(4)]
    for id in gone[1:]:
        deliver_again(connection, id, **PUBLISHED)
    into_the_past(connection)
    passes = []
    while is_there(connection):
        answer = partitions.drop_past(
            connection, whole(connection), op.SERVICE, retention=3600.0, horizon=60.0, limit=2
        )
        passes.append(answer)
    assert passes == [(2, True), (2, False)]


@pytest.mark.long
def test_processes_at_once_drop_it_once(bank: Celery, connection: Connection) -> None:
    gone = [past_its_time(connection) for _ in range(30)]
    kept = [completed(connection).id for _ in range(5)]
    for id in gone[:10] + kept:
        deliver_again(connection, id, **PUBLISHED)
    into_the_past(connection)
    found = whole(connection)
    bounds = {"retention": 3600.0, "horizon": 60.0, "limit": 1000}

    def drop(_: int) -> int:
        with runtime_of(bank).autocommit() as own:
            return partitions.drop_past(own, found, op.SERVICE, **bounds)[0]  # type: ignore[arg-type]

    total = 0
    while is_there(connection):
        total += sum(at_once(4, drop))
    assert total <= len(gone)
    assert all(record(connection, id) is None for id in gone)
    assert all(status(connection, id) == "completed" for id in kept)


@pytest.mark.long
def test_claims_go_on_while_partitions_are_dropped(bank: Celery, connection: Connection) -> None:
    """Each key is claimed once, also when it moves meanwhile."""
    ids = [due(connection).id for _ in range(40)]
    into_the_past(connection)
    stop = threading.Event()

    def claim_all() -> int:
        # ours, which make a statement again that has met a record on its way
        with runtime_of(bank).autocommit() as own:
            return sum(isinstance(op.claim(own, id), Claimed) for id in ids)

    def drop() -> int:
        with runtime_of(bank).autocommit() as own:
            while not stop.is_set():
                found = periods.found(own)
                assert found is not None
                left_alone.forget()
                partitions.drop_past(own, found, op.SERVICE, retention=3600.0, horizon=60.0, limit=1000)
        return 0

    def act(number: int) -> int:
        if number == 3:
            return drop()
        try:
            return claim_all()
        finally:
            if number == 0:
                stop.set()

    assert sum(at_once(4, act)) == len(ids)
    assert connection.exec_driver_sql("SELECT count(*) FROM idempotency.records").scalar_one() == len(ids)


def test_what_cannot_be_moved_as_a_whole_is_not_moved(connection: Connection) -> None:
    """A key with a record in two partitions, which cannot be: the one would be deleted, and not be put where the other is."""
    id = completed(connection).id
    into_the_past(connection)
    connection.exec_driver_sql("ALTER TABLE idempotency.records DISABLE TRIGGER insert_once")
    columns = "tenant, task, key, status, fence, fingerprint, message, queue, service, completed_at, expires_at, response_code, result"
    connection.exec_driver_sql(f"INSERT INTO idempotency.records ({columns}) SELECT {columns} FROM idempotency.records")
    connection.exec_driver_sql("ALTER TABLE idempotency.records ENABLE TRIGGER insert_once")
    fields = {"partition": OLD, "tenants": [id.tenant], "tasks": [id.task], "keys": [id.key]}
    with pytest.raises(DBAPIError, match="of 1 operations only 0 could be moved"):
        connection.exec_driver_sql(partitions._MOVE, fields)
    assert connection.exec_driver_sql("SELECT count(*) FROM idempotency.records").scalar_one() == 2
