"""What upkeep does with partitions, whoever runs it, whatever is refused, and a little at a time."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

from idempotency.application import runtime_of, settings_of
from idempotency.checks.partitions import MANY
from idempotency.checks.postgres import check_database
from idempotency.store import left_alone, partitions, periods
from idempotency.store.inserting import is_partitioned
from idempotency.store.migrations.partitioning import DEFAULT, PARTITIONS
from idempotency.store.sweeps import Pace
from idempotency.upkeep import maintenance
from tests.partitions.test_claims import found, partition_of
from tests.support import operations as op
from tests.support.operations import completed, new_id, record
from tests.support.partitions import fine, into_the_past, put_into_partitions
from tests.support.processes import eventually
from tests.support.purging import PUBLISHED, deliver_again, past_its_time

pytestmark = pytest.mark.long

BOUNDS: Any = {"retention": 3600.0, "horizon": 60.0, "limit": 1000}

REFUSED = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.key = '{key}' THEN RAISE EXCEPTION 'no' USING ERRCODE = 'check_violation'; END IF;
    RETURN OLD;
END $$;
CREATE TRIGGER refuse BEFORE DELETE ON idempotency.records FOR EACH ROW EXECUTE FUNCTION refuse()
"""


def drop_all_but_default(connection: Connection) -> None:
    for each in found(connection).all:
        if not each.is_default:
            connection.exec_driver_sql(f"DROP TABLE {PARTITIONS}.{each.name}")


def aside(connection: Connection) -> list[str]:
    query = "SELECT key FROM idempotency.set_aside WHERE sweep = 'partitions'"
    return list(connection.exec_driver_sql(query).scalars())


# ---------------------------------------------------------------- rows that Postgres refuses


def test_one_refused_row_in_the_default_partition_stops_nothing_else(
    bank: Celery, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(periods, "MARGIN", timedelta(seconds=1))
    drop_all_but_default(connection)
    bad, good = completed(connection).id, completed(connection).id
    assert {partition_of(connection, id) for id in (bad, good)} == {DEFAULT}
    connection.exec_driver_sql(REFUSED.format(key=bad.key))
    letter = "INSERT INTO idempotency.dead_letters (source, reason, payload, status, closed_at) VALUES ('broker', 'x', '', 'discarded', '2001-01-01')"
    connection.exec_driver_sql(letter)
    partitions.make_ahead(connection)

    def is_moved() -> bool:
        maintenance.purge(bank)
        return partition_of(connection, good) != DEFAULT

    eventually(is_moved, what="a partition of the present")
    assert partition_of(connection, bad) == DEFAULT
    assert aside(connection) == [bad.key]
    gone = past_its_time(connection)
    op.age(connection, gone, expires_at=-86400 * 30)
    assert maintenance.purge(bank) == 1
    assert record(connection, gone) is None


def test_one_refused_row_of_a_partition_that_is_over_keeps_it_and_nothing_else(connection: Connection) -> None:
    bad, good = completed(connection).id, completed(connection).id
    into_the_past(connection)
    connection.exec_driver_sql(REFUSED.format(key=bad.key))
    assert partitions.drop_past(connection, found(connection), op.SERVICE, **BOUNDS) == (0, False)
    assert partition_of(connection, bad) == "records_before"
    assert partition_of(connection, good) != "records_before"
    assert aside(connection) == [bad.key]


def test_those_that_are_refused_hide_no_others(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many they are: the look at a partition is limited, and what is set aside is left out of it afterwards."""
    monkeypatch.setattr(partitions, "FETCHED", 2)
    bad, good = ([completed(connection).id for _ in range(3)] for _ in range(2))
    into_the_past(connection)
    keys = "', '".join(id.key for id in bad)
    connection.exec_driver_sql(REFUSED.format(key="x").replace("OLD.key = 'x'", f"OLD.key IN ('{keys}')"))
    for _ in range(4):
        left_alone.forget()
        partitions.drop_past(connection, found(connection), op.SERVICE, **BOUNDS)
    assert {partition_of(connection, id) for id in bad} == {"records_before"}
    assert "records_before" not in {partition_of(connection, id) for id in good}


# ---------------------------------------------------------------- what is short


def settled_row(connection: Connection) -> None:
    connection.exec_driver_sql(
        "INSERT INTO idempotency.outbox (message_id, tenant, task, key, fingerprint, message, queue, origin, status, published_at, settled_at, service) "
        "VALUES ('m', 'default', 't', 'k', 'v1:x', '{}', '', 'enqueue', 'published', '2001-01-01', '2001-01-01', 'bank')"
    )


def rows(connection: Connection) -> int:
    return int(connection.exec_driver_sql("SELECT count(*) FROM idempotency.outbox").scalar_one())


def test_with_a_full_disk_none_is_made_and_what_makes_room_is_dropped(bank: Celery, connection: Connection) -> None:
    drop_newest(connection)
    past_its_time(connection)
    into_the_past(connection)
    settled_row(connection)
    connection.exec_driver_sql(f"""
        CREATE OR REPLACE FUNCTION {PARTITIONS}.make(of_partition text, begins timestamptz, ends timestamptz) RETURNS boolean
        LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'No space left on device' USING ERRCODE = '53100'; END $$
    """)
    assert maintenance.purge(bank) == 1
    assert "records_before" not in [each.name for each in found(connection).all]
    assert rows(connection) == 0


def before_its_look(connection: Connection, what: str) -> None:
    """Have this done before each look at what is needed in `records_before`."""
    connection.exec_driver_sql(f"""
        ALTER FUNCTION {PARTITIONS}.survivors(text, text, interval, bigint) RENAME TO looked_at;
        CREATE FUNCTION {PARTITIONS}.survivors(of_partition text, of_service text, horizon interval, most bigint)
        RETURNS TABLE (tenant text, task text, key text) LANGUAGE plpgsql AS $$
        BEGIN
            IF of_partition = 'records_before' THEN {what}; END IF;
            RETURN QUERY SELECT * FROM {PARTITIONS}.looked_at(of_partition, of_service, horizon, most);
        END $$
    """)


@pytest.mark.parametrize(("state", "goes_on"), [("53400", True), ("53200", True), ("53300", False), ("57P03", False)])
def test_one_partition_beyond_a_limit_of_the_server_stays_and_all_else_is_purged(
    bank: Celery, connection: Connection, state: str, goes_on: bool
) -> None:
    """`temp_file_limit`, say: the look at one large partition joins all of it. A server that is away ends the pass."""
    into_the_past(connection)
    op.age(connection, late := past_its_time(connection), expires_at=-86400 * 30)  # past all: it goes row by row
    settled_row(connection)
    before_its_look(connection, f"RAISE EXCEPTION 'beyond a limit' USING ERRCODE = '{state}'")
    if goes_on:
        assert maintenance.purge(bank) == 1
    else:
        with pytest.raises(OperationalError, match="beyond a limit"):
            maintenance.purge(bank)
    assert (record(connection, late) is None) == goes_on
    assert rows(connection) == (0 if goes_on else 1)


def test_a_partition_whose_look_takes_too_long_stays_and_all_else_is_purged(
    bank: Celery, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Postgres ends the look: one that only the relay gave up would go on there, beside the next one."""
    monkeypatch.setattr(partitions, "LOOK_WITHIN", 0.5)
    into_the_past(connection)
    op.age(connection, late := past_its_time(connection), expires_at=-86400 * 30)
    settled_row(connection)
    before_its_look(connection, "PERFORM pg_sleep(30)")
    assert maintenance.purge(bank) == 1
    assert record(connection, late) is None
    assert rows(connection) == 0
    looking = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%%survivors%%' AND state = 'active' AND pid <> pg_backend_pid()"
    assert connection.exec_driver_sql(looking).scalar_one() == 0
    with runtime_of(bank).autocommit() as ours:
        assert left_alone.is_left(ours, "records_before")
        # its next statements have no such limit
        assert ours.exec_driver_sql("SHOW statement_timeout").scalar_one() == "0"


def test_upkeep_tells_that_it_lives_before_each_look(connection: Connection) -> None:
    names = overdue(connection, 3)
    told: list[float] = []
    pace = Pace(progressed=lambda seconds=0.0: told.append(seconds))
    partitions.keep_up(connection, op.SERVICE, **BOUNDS, pace=pace)
    assert not {each.name for each in found(connection).all} & names
    # what lives there; each kind of what is needed there, twice; and the removal
    assert told.count(partitions.LOOK_WITHIN) == 6 * len(names)


# ---------------------------------------------------------------- locks that others hold


def test_beside_one_who_reads_claims_wait_once_and_then_not_for_a_while(
    engine: Engine, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dump or a report keeps all partitions from going, and behind each try for the lock all claims wait."""
    old = overdue(connection, 30)
    stop, waited = threading.Event(), []

    def claim() -> None:
        with engine.connect() as own:
            while not stop.is_set():
                began = time.monotonic()
                op.claim(own, new_id())
                waited.append(time.monotonic() - began)

    def tries() -> int:
        """In one pass, how often the lock of the whole table was waited for."""
        before = len(asked)
        partitions.keep_up(connection, op.SERVICE, **BOUNDS)
        return len(asked) - before

    asked: list[str] = []
    remove = partitions._REMOVE
    event.listen(
        connection,
        "before_cursor_execute",
        lambda c, u, statement, *_: asked.append(statement) if statement == remove else None,
    )
    with create_engine(engine.url, poolclass=NullPool).connect() as reader:
        reader.exec_driver_sql("SELECT count(*) FROM idempotency.records")
        claiming = threading.Thread(target=claim)
        claiming.start()
        try:
            assert [tries() for _ in range(3)] == [1, 0, 0]
        finally:
            stop.set()
            claiming.join()
        assert sum(each for each in waited if each > 0.1) < 3  # thirty tries would be six seconds
        monkeypatch.setattr(left_alone, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 61))
        assert [tries() for _ in range(2)] == [1, 0]
        monkeypatch.setattr(left_alone, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 122))
        assert tries() == 0  # twice as long
    assert sum(each.name in old for each in found(connection).all) == 30
    left_alone.forget()
    assert tries() == 30
    assert not any(each.name in old for each in found(connection).all)


def test_a_row_that_somebody_has_locked_keeps_its_partition_and_no_other(
    engine: Engine, connection: Connection
) -> None:
    gone = past_its_time(connection)
    deliver_again(connection, gone, **PUBLISHED)
    into_the_past(connection)
    with create_engine(engine.url, poolclass=NullPool).connect() as relay:
        relay.exec_driver_sql("SELECT FROM idempotency.outbox FOR UPDATE")
        assert partitions.drop_past(connection, found(connection), op.SERVICE, **BOUNDS) == (0, False)
        assert not left_alone.is_left(connection)
        assert record(connection, gone) is not None
    assert partitions.drop_past(connection, found(connection), op.SERVICE, **BOUNDS) == (1, False)


def overdue(connection: Connection, many: int) -> set[str]:
    """So many partitions, without anything in them, that ended long ago."""
    drop_all_but_default(connection)
    names = {f"records_old{day}" for day in range(1, many + 1)}
    for day in range(1, many + 1):
        connection.exec_driver_sql(
            f"CREATE TABLE {PARTITIONS}.records_old{day} PARTITION OF idempotency.records "
            f"FOR VALUES FROM ('2020-01-{day:02} 00:00+00') TO ('2020-01-{day:02} 23:00+00')"
        )
    partitions.make_ahead(connection)
    return names


def test_what_stays_in_one_database_is_not_left_alone_in_another(
    engine: Engine, connection: Connection, plain: str
) -> None:
    """Every database has a `records_before`."""
    put_into_partitions(plain)
    with create_engine(plain, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as other:
        for each in (connection, other):
            past_its_time(each)
            into_the_past(each)
        left_alone.leave(connection, "records_before")
        left_alone.leave_all(connection)
        assert partitions.drop_past(other, found(other), op.SERVICE, **BOUNDS) == (1, False)
    assert partitions.drop_past(connection, found(connection), op.SERVICE, **BOUNDS) == (0, False)


# ---------------------------------------------------------------- gaps


def test_after_a_server_whose_clock_was_ahead_what_lies_between_is_made(bank: Celery, connection: Connection) -> None:
    """A failover to a server that is a year ahead, for one purge, and back."""
    now = found(connection).now
    ahead = replace(found(connection), now=now + timedelta(days=365))
    for begins, ends in periods.missing(ahead):  # what a relay's `make_ahead` does there
        fields = {"name": periods.name_of(begins), "begins": begins, "ends": ends}
        assert connection.exec_driver_sql(partitions._MAKE, fields).scalar_one()
    assert said(bank) == [fine(10, found(connection))]
    between = drop_newest(connection, before=ahead.now - timedelta(days=1))
    assert [each.startswith("warning none after ") for each in said(bank)] == [True]  # a gap, whatever comes behind it
    partitions.make_ahead(connection)
    assert between in [each.name for each in found(connection).all]
    for each in found(connection).all:
        if each.ends_at and each.ends_at < ahead.now:
            connection.exec_driver_sql(f"DROP TABLE {PARTITIONS}.{each.name}")
    assert said(bank) == ["warning none for the present"]
    assert partitions.make_ahead(connection) == 4
    assert periods.missing(found(connection)) == []


def drop_newest(connection: Connection, before: datetime | None = None) -> str:
    """Drop the newest partition, or the newest before a time; returns its name."""
    made = [each for each in found(connection).all if each.ends_at and (before is None or each.ends_at < before)]
    newest = max(made, key=lambda each: each.ends_at or each.begins_at)  # type: ignore[arg-type, return-value]
    connection.exec_driver_sql(f"DROP TABLE {PARTITIONS}.{newest.name}")
    return newest.name


@pytest.mark.parametrize("hole", range(4))
def test_whatever_is_missing_in_between_is_found(connection: Connection, hole: int) -> None:
    whole = found(connection)
    ahead = [each for each in whole.all if each.ends_at and each.ends_at > whole.now]  # in their order
    assert len(ahead) == 4
    gone = ahead[hole]
    left = replace(whole, all=[each for each in whole.all if each is not gone])
    (missed,) = periods.missing(left)
    assert missed[1] == gone.ends_at
    assert (missed[0] == gone.begins_at) == (hole > 0)  # of the present, what is still to come
    assert left.last == (gone.begins_at if hole else None)


# ---------------------------------------------------------------- a little at a time


def test_a_pass_moves_no_more_than_its_limit_and_says_so(connection: Connection) -> None:
    kept = [completed(connection).id for _ in range(5)]
    into_the_past(connection)
    bounds = {"retention": 3600.0, "horizon": 60.0, "limit": 2}
    left = []
    for _ in range(3):
        _, more = partitions.drop_past(connection, found(connection), op.SERVICE, **bounds)  # type: ignore[arg-type]
        left.append((sum(partition_of(connection, id) == "records_before" for id in kept), more))
    assert left == [(3, True), (1, True), (0, False)]
    assert "records_before" not in [each.name for each in found(connection).all]


# ---------------------------------------------------------------- who claims nothing


def test_upkeep_that_ran_before_makes_and_drops_them(bank: Celery, plain: str) -> None:
    bank.conf.idempotency_database_url = plain
    maintenance.purge(bank)
    with runtime_of(bank).autocommit() as its:
        assert not is_partitioned(its)
    put_into_partitions(plain)
    with create_engine(plain, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as connection:
        drop_all_but_default(connection)
        gone = past_its_time(connection)
        into_the_past(connection)
        assert periods.missing(found(connection))
        assert maintenance.purge(bank) == 1
        assert not periods.missing(found(connection))
        assert "records_before" not in [each.name for each in found(connection).all]
        assert record(connection, gone) is None
    with runtime_of(bank).autocommit() as its:
        assert is_partitioned(its)


# ---------------------------------------------------------------- how long they are


def said(bank: Celery) -> list[str]:
    return [f"{each.level} {each.found}" for each in check_database(settings_of(bank)) if "partitions" in each.subject]


@pytest.mark.parametrize(
    ("width", "longer"), [("hour", "take longer ones"), ("day", "take longer ones"), ("week", "shorten the retentions")]
)
def test_the_doctor_says_when_there_are_too_many(bank: Celery, connection: Connection, width: str, longer: str) -> None:
    overdue(connection, 30)
    connection.exec_driver_sql(f"COMMENT ON SCHEMA {PARTITIONS} IS '{width}'")
    settings = settings_of(bank)
    (finding,) = (each for each in check_database(settings) if f"more than {MANY}" in each.found)
    assert (finding.level, finding.advice) == ("warning", f"each look-up asks all of them; {longer}")


@pytest.mark.parametrize("comment", ["NULL", "'partitions of the records'"])
def test_without_its_comment_upkeep_goes_on_as_before_and_the_doctor_says_so(
    bank: Celery, connection: Connection, comment: str
) -> None:
    """`pg_dump --no-comments` leaves it out."""
    assert said(bank) == [fine(6, found(connection))]
    gone = completed(connection).id
    op.age(connection, gone, expires_at=-86400 * 30)
    connection.exec_driver_sql(f"COMMENT ON SCHEMA {PARTITIONS} IS {comment}")
    assert maintenance.purge(bank) == 1
    assert record(connection, gone) is None
    assert said(bank) == ["warning nothing says how long they are; made by day, as before"]
    put_into_partitions(bank.conf.idempotency_database_url)
    assert said(bank) == [fine(5, found(connection))]  # that of before is gone


@pytest.mark.parametrize("width", ["hour", "week"])
def test_without_its_comment_they_are_as_long_as_those_that_were_made(connection: Connection, width: str) -> None:
    drop_all_but_default(connection)
    connection.exec_driver_sql(f"COMMENT ON SCHEMA {PARTITIONS} IS '{width}'")
    partitions.make_ahead(connection)
    connection.exec_driver_sql(f"COMMENT ON SCHEMA {PARTITIONS} IS NULL")
    assert (found(connection).width, found(connection).is_told) == (width, False)
    drop_all_but_default(connection)
    assert found(connection).width == periods.DEFAULT_WIDTH
