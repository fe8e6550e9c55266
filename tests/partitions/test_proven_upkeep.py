"""What upkeep of partitions does not get over. Each test asserts the bad outcome."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.pool import NullPool

from idempotency.application import settings_of
from idempotency.checks.postgres import check_database
from idempotency.store import batches, partitions, periods, waking
from idempotency.store.migrations.partitioning import DEFAULT, PARTITIONS
from idempotency.upkeep import maintenance
from idempotency.wire.delivery import Delivery
from tests.partitions.test_claims import found, partition_of
from tests.partitions.test_upkeep import REFUSED, drop_all_but_default
from tests.support import operations as op
from tests.support.operations import completed, early, new_id
from tests.support.partitions import into_the_past
from tests.support.purging import past_its_time


def said(bank: Celery) -> list[str]:
    return [f"{each.level} {each.found}" for each in check_database(settings_of(bank)) if "partitions" in each.subject]


def test_after_a_server_whose_clock_was_ahead_no_partition_is_made_until_then(
    bank: Celery, connection: Connection
) -> None:
    """A failover to a server that is a year ahead, for one purge, and back."""
    ahead = replace(found(connection), now=found(connection).now + timedelta(days=365))
    for begins, ends in periods.missing(ahead):  # what a relay's `make_ahead` does there
        fields = {"name": periods.name_of(begins), "begins": begins, "ends": ends}
        assert connection.exec_driver_sql(partitions._MAKE, fields).scalar_one()
    assert said(bank) == ["ok 10, by day"]  # nobody is told
    # four days later, what was made ahead before is over
    for each in found(connection).all:
        if each.ends_at and each.ends_at < ahead.now:
            connection.exec_driver_sql(f"DROP TABLE {PARTITIONS}.{each.name}")
    id = completed(connection).id
    for _ in range(3):
        assert partitions.make_ahead(connection) == 0
        partitions.keep_up(connection, op.SERVICE, retention=3600.0, horizon=60.0, limit=1000)
    assert partition_of(connection, id) == DEFAULT  # for a year, with all that comes
    assert said(bank) == ["warning the default one has records"]  # and not that there is none for the present


def test_what_is_refused_hides_what_is_not_beyond_what_is_fetched(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look at a partition is limited before what is set aside is left out: 10,000 such rows (here two), and none is seen."""
    monkeypatch.setattr(partitions, "FETCHED", 2)
    bad = [completed(connection).id for _ in range(2)]
    good = [completed(connection).id for _ in range(3)]
    into_the_past(connection)
    connection.exec_driver_sql(
        REFUSED.format(key="x").replace("OLD.key = 'x'", "OLD.key IN ('%s', '%s')" % (bad[0].key, bad[1].key))
    )
    bounds: Any = {"retention": 3600.0, "horizon": 60.0, "limit": 1000}
    for _ in range(5):
        partitions._waiting.clear()
        assert partitions.drop_past(connection, found(connection), op.SERVICE, **bounds) == (0, False)
    assert {partition_of(connection, id) for id in good} == {"records_before"}
    connection.exec_driver_sql("DELETE FROM idempotency.set_aside")
    monkeypatch.setattr(partitions, "FETCHED", 10_000)  # the control
    partitions._waiting.clear()
    partitions.drop_past(connection, found(connection), op.SERVICE, **bounds)
    assert "records_before" not in {partition_of(connection, id) for id in good}


def test_a_wake_at_repeatable_read_is_refused_though_nobody_else_changes_the_operation(
    engine: Engine, connection: Connection
) -> None:
    """Its snapshot is of before the move: 40001 in an application's transaction, which the page says nothing of meets."""
    id = early(connection).id
    into_the_past(connection)
    own_engine = create_engine(engine.url, isolation_level="REPEATABLE READ", poolclass=NullPool)
    with own_engine.connect() as own:
        assert own.exec_driver_sql("SELECT current_setting('transaction_isolation')").scalar_one() == "repeatable read"
        fields = {"partition": "records_before", "tenants": [id.tenant], "tasks": [id.task], "keys": [id.key]}
        assert connection.exec_driver_sql(partitions._MOVE, fields).scalar_one() == 1
        with pytest.raises(OperationalError, match="moved to another partition|could not serialize"):
            waking.wake(own, id, op.SERVICE)


def test_one_database_s_partition_that_stays_is_left_alone_in_another_database_too(
    connection: Connection, plain: str
) -> None:
    """`_waiting` is by name alone, and every database has a `records_before` and a `records_otherwise`."""
    from tests.support.partitions import put_into_partitions

    bad = completed(connection).id
    into_the_past(connection)
    connection.exec_driver_sql(REFUSED.format(key=bad.key))
    connection.exec_driver_sql("ALTER TABLE idempotency.set_aside RENAME TO gone")  # whatever else is noted of it
    bounds: Any = {"retention": 3600.0, "horizon": 60.0, "limit": 1000}
    partitions._waiting["records_before"] = time.monotonic() + partitions.PAUSE  # as `_drop` notes for this database
    put_into_partitions(plain)
    with create_engine(plain, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as other:
        past_its_time(other)
        assert partitions.drop_past(other, found(other), op.SERVICE, **bounds) == (0, False)
        assert "records_before" in [each.name for each in found(other).all]
    partitions._waiting.clear()


BOUNDS: Any = {"service": op.SERVICE, "holder": op.HOLDER, "lease": op.LEASE, "horizon": 3600.0}


def new(many: int) -> list[Delivery]:
    return [Delivery(new_id(), op.FINGERPRINT, {}) for _ in range(many)]


def complete_new(connection: Connection, deliveries: list[Delivery]) -> set[str]:
    return batches.complete_new(
        connection,
        deliveries,
        ["1"] * len(deliveries),
        service=op.SERVICE,
        holder=op.HOLDER,
        retention=3600.0,
        lease=60.0,
    )


def test_two_batches_of_a_stream_without_a_key_in_common_do_not_both_commit(engine: Engine) -> None:
    """4,096 locks for all keys: of 100 keys of another batch, about two have a lock that this one holds, so that it is missing
    them; `together._record` then raises `Left`, which rolls back and runs again the bodies of all."""
    with engine.connect() as one, engine.connect() as other:
        one.exec_driver_sql("BEGIN")
        assert len(complete_new(one, new(100))) == 100
        missing = []
        for _ in range(20):
            other.exec_driver_sql("BEGIN")
            missing.append(100 - len(complete_new(other, new(100))))
            other.exec_driver_sql("ROLLBACK")
    print(f"missing of 100: {missing}")
    assert sum(each > 0 for each in missing) >= 14  # nine of ten are rolled back; on a plain table, none


def test_a_large_batch_of_a_stream_stops_all_claims_until_it_commits(engine: Engine) -> None:
    """`batch` may be 10,000: their keys have nine of ten locks, exclusively, from the statement's begin to the commit."""
    with engine.connect() as one, engine.connect() as stranger:
        one.exec_driver_sql("BEGIN")
        began = time.monotonic()
        assert len(complete_new(one, new(10_000))) == 10_000
        print(f"the statement alone: {time.monotonic() - began:.1f} s")
        stranger.exec_driver_sql("SET lock_timeout = '50ms'")
        waited = 0
        for _ in range(50):
            try:
                op.claim(stranger, new_id("another", "another.task"))
            except OperationalError:
                waited += 1
        print(f"claims that wait, of 50: {waited}")
        assert waited >= 40


RAISING = """
CREATE OR REPLACE FUNCTION {partitions}.make(of_partition text, begins timestamptz, ends timestamptz) RETURNS boolean
LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = '53100'; END $$
"""


def settled_row(connection: Connection) -> None:
    connection.exec_driver_sql(
        "INSERT INTO idempotency.outbox (message_id, tenant, task, key, fingerprint, message, queue, origin, status, published_at, settled_at, service) "
        "VALUES ('m', 'default', 't', 'k', 'v1:x', '{}', '', 'enqueue', 'published', '2001-01-01', '2001-01-01', 'bank')"
    )


def test_with_a_full_disk_what_would_make_room_is_not_dropped(bank: Celery, connection: Connection) -> None:
    """The missing partition is made first; that it cannot be made ends the whole pass, each time, and with it all purging."""
    ends = sorted(each.ends_at for each in found(connection).all if each.ends_at)
    newest = next(each for each in found(connection).all if each.ends_at == ends[-1])
    connection.exec_driver_sql(f"DROP TABLE {PARTITIONS}.{newest.name}")
    past_its_time(connection)
    into_the_past(connection)
    settled_row(connection)
    connection.exec_driver_sql(RAISING.format(partitions=PARTITIONS))
    for _ in range(3):
        with pytest.raises(OperationalError, match="No space left"):
            maintenance.purge(bank)
    assert "records_before" in [each.name for each in found(connection).all]  # a DROP TABLE would have given it back
    assert connection.exec_driver_sql("SELECT count(*) FROM idempotency.outbox").scalar_one() == 1


def test_one_partition_beyond_a_limit_of_the_server_stops_all_purging(bank: Celery, connection: Connection) -> None:
    """`temp_file_limit` (53400), or no room for locks (53200): the look at one large partition joins all of it. Class 53 is taken
    for a server that is away, so that no other partition is dropped, and no row of anything is purged, for ever."""
    past_its_time(connection)
    into_the_past(connection)
    op.age(connection, late := past_its_time(connection), expires_at=-86400 * 30)  # past all: it goes row by row
    settled_row(connection)
    connection.exec_driver_sql(f"""
        ALTER FUNCTION {PARTITIONS}.survivors(text, text, interval, bigint) RENAME TO looked_at;
        CREATE FUNCTION {PARTITIONS}.survivors(of_partition text, of_service text, horizon interval, most bigint)
        RETURNS TABLE (tenant text, task text, key text) LANGUAGE plpgsql AS $$
        BEGIN
            IF of_partition = 'records_before' THEN
                RAISE EXCEPTION 'temporary file size exceeds temp_file_limit (1048576kB)' USING ERRCODE = '53400';
            END IF;
            RETURN QUERY SELECT * FROM {PARTITIONS}.looked_at(of_partition, of_service, horizon, most);
        END $$
    """)
    for _ in range(3):
        with pytest.raises(OperationalError, match="temp_file_limit"):
            maintenance.purge(bank)
    assert op.record(connection, late) is not None
    assert connection.exec_driver_sql("SELECT count(*) FROM idempotency.outbox").scalar_one() == 1
    connection.exec_driver_sql(
        f"DROP FUNCTION {PARTITIONS}.survivors; ALTER FUNCTION {PARTITIONS}.looked_at RENAME TO survivors"
    )
    maintenance.purge(bank)  # the control
    assert op.record(connection, late) is None
    assert connection.exec_driver_sql("SELECT count(*) FROM idempotency.outbox").scalar_one() == 0


def test_each_partition_that_cannot_go_stops_all_claims_in_each_pass(engine: Engine, connection: Connection) -> None:
    """Beside a dump, a report or batches of streams: every overdue one is tried in every pass, with all claims waiting for 200 ms
    behind each try, and nothing is tried less often. Thirty of them: six seconds of each minute, of each relay."""
    for day in range(1, 31):
        connection.exec_driver_sql(
            f"CREATE TABLE {PARTITIONS}.records_old{day} (LIKE idempotency.records INCLUDING DEFAULTS)"
        )
    present = next(each for each in found(connection).all if each.begins_at and each.begins_at.year == 2000)
    connection.exec_driver_sql(f"DROP TABLE {PARTITIONS}.{present.name}")  # it is empty, and goes back to 2000
    for day in range(1, 31):
        connection.exec_driver_sql(
            f"ALTER TABLE idempotency.records ATTACH PARTITION {PARTITIONS}.records_old{day} "
            f"FOR VALUES FROM ('2020-01-{day:02} 00:00+00') TO ('2020-01-{day:02} 23:00+00')"
        )
    stop, waited = threading.Event(), []

    def claim() -> None:
        with engine.connect() as own:
            while not stop.is_set():
                began = time.monotonic()
                op.claim(own, new_id())
                waited.append(time.monotonic() - began)

    with create_engine(engine.url, poolclass=NullPool).connect() as reader:
        reader.exec_driver_sql("SELECT count(*) FROM idempotency.records")
        for _ in range(2):  # the second pass as the first
            waited.clear()
            stop.clear()
            claiming = threading.Thread(target=claim)
            claiming.start()
            began = time.monotonic()
            partitions.keep_up(connection, op.SERVICE, retention=3600.0, horizon=60.0, limit=1000)
            took = time.monotonic() - began
            stop.set()
            claiming.join()
            stalled = sum(each for each in waited if each > 0.1)
            print(
                f"\npass {took:.1f} s, claims stalled for {stalled:.1f} s of it, {sum(each > 0.1 for each in waited)} of {len(waited)} claims"
            )
            assert stalled > 4
            assert sum("old" in each.name for each in found(connection).all) == 30


def test_a_consumer_that_is_frozen_before_its_commit_stops_claims_of_strangers_for_half_a_lease(engine: Engine) -> None:
    """On a plain table only who wants one of its keys waits. Here one in five new keys of anybody, with a batch of 1,000."""
    frozen = create_engine(engine.url, poolclass=NullPool).connect()  # SIGSTOP: its transaction is open, and idle
    keys = new(1000)
    batches.complete_new(
        frozen, keys, ["1"] * len(keys), service=op.SERVICE, holder=op.HOLDER, retention=3600.0, lease=6.0
    )
    waited = []
    with engine.connect() as stranger:
        for _ in range(60):
            began = time.monotonic()
            op.claim(stranger, new_id("another", "another.task"))
            waited.append(time.monotonic() - began)
            if waited[-1] > 1:
                break
    print(f"\nthe {len(waited)}th claim waited {waited[-1]:.1f} s")
    assert waited[-1] > 2  # until the server disconnects it: half a lease, 30 s by default
    frozen.invalidate()
