"""What upkeep does with partitions, whoever runs it, whatever is refused, and a little at a time."""

from __future__ import annotations

from datetime import timedelta

import pytest
from celery import Celery
from sqlalchemy import Connection, create_engine
from sqlalchemy.pool import NullPool

from idempotency.application import runtime_of, settings_of
from idempotency.checks.postgres import check_database
from idempotency.store import partitions, periods
from idempotency.store.inserting import is_partitioned
from idempotency.store.migrations.partitioning import DEFAULT, PARTITIONS
from idempotency.upkeep import maintenance
from tests.partitions.test_claims import found, partition_of
from tests.support import operations as op
from tests.support.operations import completed, record
from tests.support.partitions import into_the_past, put_into_partitions
from tests.support.processes import eventually
from tests.support.purging import past_its_time

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
    monkeypatch.setattr(periods, "MARGIN", timedelta(0))
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
    bounds = {"retention": 3600.0, "horizon": 60.0, "limit": 1000}
    assert partitions.drop_past(connection, found(connection), op.SERVICE, **bounds) == (0, False)  # type: ignore[arg-type]
    assert partition_of(connection, bad) == "records_before"
    assert partition_of(connection, good) != "records_before"
    assert aside(connection) == [bad.key]


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


@pytest.mark.parametrize("comment", ["NULL", "'partitions of the records'"])
def test_without_its_comment_upkeep_goes_on_as_before_and_the_doctor_says_so(
    bank: Celery, connection: Connection, comment: str
) -> None:
    """`pg_dump --no-comments` leaves it out."""
    assert said(bank) == ["ok 6, by day"]
    gone = completed(connection).id
    op.age(connection, gone, expires_at=-86400 * 30)
    connection.exec_driver_sql(f"COMMENT ON SCHEMA {PARTITIONS} IS {comment}")
    assert maintenance.purge(bank) == 1
    assert record(connection, gone) is None
    assert said(bank) == ["warning nothing says how long they are; made by day, as before"]
    put_into_partitions(bank.conf.idempotency_database_url)
    assert said(bank) == ["ok 5, by day"]  # that of before is gone


@pytest.mark.parametrize("width", ["hour", "week"])
def test_without_its_comment_they_are_as_long_as_those_that_were_made(connection: Connection, width: str) -> None:
    drop_all_but_default(connection)
    connection.exec_driver_sql(f"COMMENT ON SCHEMA {PARTITIONS} IS '{width}'")
    partitions.make_ahead(connection)
    connection.exec_driver_sql(f"COMMENT ON SCHEMA {PARTITIONS} IS NULL")
    assert (found(connection).width, found(connection).is_told) == (width, False)
    drop_all_but_default(connection)
    assert found(connection).width == periods.OTHERWISE
