"""A server whose DateStyle is not ISO (`SQL, DMY`, `German`): a plain table is purged, one in partitions is not."""

from __future__ import annotations

import pytest
from celery import Celery
from sqlalchemy import create_engine, make_url
from sqlalchemy.pool import NullPool

from idempotency.application import close_runtime
from idempotency.upkeep import maintenance
from tests.support import operations as op
from tests.support.purging import past_its_time


@pytest.mark.parametrize("style", ["SQL, DMY", "German"])
@pytest.mark.parametrize("kind", ["plain", "partitioned"])
def test_a_datestyle(bank: Celery, plain: str, database: str, style: str, kind: str) -> None:
    url = plain if kind == "plain" else database
    with create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as connection:
        connection.exec_driver_sql(f"ALTER DATABASE {make_url(url).database} SET datestyle = '{style}'")
        connection.exec_driver_sql(f"ALTER DATABASE {make_url(url).database} SET timezone = 'Asia/Kolkata'")
        gone = past_its_time(connection)
        op.age(connection, gone, expires_at=-86400 * 30)
    bank.conf.idempotency_database_url = url
    close_runtime(bank)
    if kind == "plain":
        assert maintenance.purge(bank) == 1
        return
    with pytest.raises(Exception) as raised:
        maintenance.purge(bank)
    print(f"\n{type(raised.value).__name__}: {raised.value}")
