"""A server that writes times in another way: psycopg reads none with a time zone then, so our connections say how."""

from __future__ import annotations

import pytest
from celery import Celery
from sqlalchemy import create_engine, make_url
from sqlalchemy.pool import NullPool

from idempotency.application import close_runtime, runtime_of, settings_of
from idempotency.checks.findings import Level
from idempotency.checks.postgres import check_database
from idempotency.store import lost, periods
from idempotency.store.migrations.partitioning import PARTITIONS
from idempotency.upkeep import maintenance
from tests.support import operations as op
from tests.support.purging import past_its_time


@pytest.mark.few(1)
@pytest.mark.parametrize("style", ["SQL, DMY", "German"])
@pytest.mark.parametrize("kind", ["plain", "partitioned"])
def test_upkeep_goes_on(bank: Celery, plain: str, database: str, style: str, kind: str) -> None:
    url = plain if kind == "plain" else database
    with create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as own:
        before = periods.found(own)
        if before is not None:  # the newest is to be made again
            newest = max((each for each in before.all if each.begins_at), key=lambda each: each.begins_at or before.now)
            own.exec_driver_sql(f"DROP TABLE {PARTITIONS}.{newest.name}")
        own.exec_driver_sql(f"ALTER DATABASE {make_url(url).database} SET datestyle = '{style}'")
        # "IST" is also Israel's time
        own.exec_driver_sql(f"ALTER DATABASE {make_url(url).database} SET timezone = 'Asia/Kolkata'")
        gone = past_its_time(own)
        op.age(own, gone, expires_at=-86400 * 30)
    bank.conf.idempotency_database_url = url
    close_runtime(bank)
    assert maintenance.purge(bank) == 1
    with runtime_of(bank).autocommit() as connection:
        lost.settle(connection)
        after = periods.found(connection)
        if before is not None and after is not None:
            assert (newest.name, newest.begins_at, newest.ends_at) in {
                (each.name, each.begins_at, each.ends_at) for each in after.all
            }
    with runtime_of(bank).transaction() as connection:
        connection.exec_driver_sql("SELECT clock_timestamp()").one()
        style = connection.exec_driver_sql("SELECT current_setting('datestyle')").scalar_one()
    assert style == "ISO, DMY"  # what a body's statement has as text is read as the database does
    assert (before is None) == (after is None) == (kind == "plain")
    assert [str(each) for each in check_database(settings_of(bank)) if each.level is Level.REFUSAL] == []
