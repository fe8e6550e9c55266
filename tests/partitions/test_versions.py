"""Functions of partitions that an earlier checkout has made: `migrate` brings them up to date, and the doctor refuses them."""

from __future__ import annotations

import hashlib

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.pool import NullPool

from idempotency.application import settings_of
from idempotency.checks.postgres import check_database
from idempotency.store import partitioning
from idempotency.store.migrations.partitioning import FUNCTIONS, PARTITIONS, VERSION
from tests.support.commands import runner

# As an earlier checkout had them: no version, no `keep_place`, and a mover that is not this one.
EARLIER = f"""
DROP FUNCTION {PARTITIONS}.version();
DROP TRIGGER keep_place ON idempotency.records;
DROP FUNCTION {PARTITIONS}.keep_place();
CREATE OR REPLACE FUNCTION {PARTITIONS}.move(of_partition text, tenants text[], tasks text[], keys text[]) RETURNS bigint
LANGUAGE sql AS 'SELECT 0::bigint'
"""
MADE = f"""
SELECT p.proname || ' ' || md5(p.prosrc || p.proconfig::text) FROM pg_proc p
WHERE p.pronamespace = '{PARTITIONS}'::regnamespace AND p.proname <> 'version'
UNION ALL
SELECT tgname FROM pg_trigger WHERE tgrelid = 'idempotency.records'::regclass AND NOT tgisinternal ORDER BY 1
"""


def refused(bank: Celery) -> list[str]:
    return [str(each) for each in check_database(settings_of(bank)) if each.subject.startswith("database partitions: ")]


@pytest.mark.few(1)
@pytest.mark.parametrize("command", [(), ("--partitioned", "day")])
def test_migrating_brings_them_up_to_date_and_until_then_the_doctor_refuses_them(
    bank: Celery,
    connection: Connection,
    command: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = list(connection.exec_driver_sql(MADE).scalars())
    assert refused(bank) == []
    connection.exec_driver_sql(EARLIER)
    assert len(list(connection.exec_driver_sql(MADE).scalars())) == len(made) - 2
    (said,) = refused(bank)
    assert f"of version 1, need {VERSION}; run `idempotency migrate`" in said
    assert runner(monkeypatch, capsys)("migrate", *command).status == 0
    assert list(connection.exec_driver_sql(MADE).scalars()) == made
    assert refused(bank) == []


def test_newer_ones_are_left_as_they_are(engine: Engine, connection: Connection, bank: Celery) -> None:
    connection.exec_driver_sql(FUNCTIONS.replace("%", "%%").replace(f"SELECT {VERSION}'", f"SELECT {VERSION + 1}'", 1))
    connection.exec_driver_sql("DROP TRIGGER keep_place ON idempotency.records")
    partitioning.renew(engine)
    assert partitioning.functions_version(connection) == VERSION + 1
    assert "keep_place" not in list(connection.exec_driver_sql(MADE).scalars())
    assert refused(bank) == []


def test_a_plain_table_is_left_as_it_is(plain: str) -> None:
    own = create_engine(plain, poolclass=NullPool)
    partitioning.renew(own)
    with own.connect() as connection:
        assert connection.exec_driver_sql(f"SELECT to_regnamespace('{PARTITIONS}') IS NULL").scalar_one()


def test_functions_that_have_changed_have_another_version() -> None:
    """Or nobody would bring them up to date. After a change: raise `VERSION`, and note both here."""
    assert (VERSION, hashlib.sha256(FUNCTIONS.encode()).hexdigest()[:16]) == (3, "0b0f2241dbb56c3d")
