"""Partitioning a table that is in use: what it keeps, who goes on, later migrations, roles, and the doctor."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from celery import Celery
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.pool import NullPool

from idempotency.application import runtime_of, settings_of
from idempotency.checks.findings import Level
from idempotency.checks.postgres import check_database
from idempotency.errors import SettingsError
from idempotency.settings import Settings
from idempotency.store import operations, partitioning, partitions, periods, purge, roles, schema
from idempotency.store.answers import Claimed, Completed
from idempotency.store.migrations.indexes import create_index
from idempotency.store.migrations.partitioning import PARTITIONS
from idempotency.store.record import COLUMNS
from idempotency.store.rights import APPLICATION, OPERATOR, RELAY
from tests.partitions.test_claims import found
from tests.support import operations as op
from tests.support.commands import runner
from tests.support.operations import completed, failed, new_id, record, started, status
from tests.support.partitions import fine, into_the_past, put_into_partitions
from tests.support.purging import deliver_again
from tests.support.roles import PASSWORDS, url_of

pytestmark = pytest.mark.long

PLAIN = text("SELECT relkind = 'r' FROM pg_class WHERE oid = 'idempotency.records'::regclass")
OF_RECORDS = """
    SELECT regexp_replace(pg_get_indexdef(indexrelid), ' ON (ONLY )?\\S+ ', ' ON records '), indisvalid FROM pg_index
    WHERE indrelid = '{}'::regclass AND NOT indisprimary ORDER BY 1
"""


@pytest.fixture
def connection(plain: str) -> Iterator[Connection]:
    """Each statement commits."""
    engine = create_engine(plain, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with engine.connect() as connection:
        yield connection


def test_all_that_was_there_is_there_with_its_indexes(plain: str, connection: Connection) -> None:
    done, no, held = completed(connection), failed(connection), started(connection)
    before = [record(connection, each.id) for each in (done, no, held)]
    indexes = connection.exec_driver_sql(OF_RECORDS.format("idempotency.records")).all()
    put_into_partitions(plain)
    assert not connection.execute(PLAIN).scalar_one()
    after = [record(connection, each.id) for each in (done, no, held)]
    assert [tuple(row)[:-1] for row in after] == [tuple(row) for row in before]
    assert connection.exec_driver_sql(OF_RECORDS.format("idempotency.records")).all() == indexes
    connection.connection.invalidate()
    again = create_engine(plain, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with again.connect() as connection:
        answer = op.claim(connection, done.id)
        assert isinstance(answer, Completed)
        new = started(connection)
        assert connection.execute(text("SELECT count(*) FROM idempotency.records")).scalar_one() == 4
        # who reads by a view reads them, too
        connection.execute(text("SELECT * FROM idempotency.saga_instances"))
        assert new.fence > held.fence


def test_it_may_be_done_again_with_another_width_and_migrating_leaves_it(plain: str, connection: Connection) -> None:
    put_into_partitions(plain, "day")
    put_into_partitions(plain, "hour")
    schema.migrate(create_engine(plain, poolclass=NullPool))
    made = found(connection)
    assert made.width == "hour"
    assert periods.missing(made) == []


def test_what_was_interrupted_is_done_again(
    plain: str, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(partitioning, "_exchange", fail)
        with pytest.raises(KeyboardInterrupt):
            put_into_partitions(plain)
    assert connection.execute(PLAIN).scalar_one()
    done = completed(connection)  # the plain table works as ever
    put_into_partitions(plain)
    assert status(connection, done.id) == "completed"


def test_processes_that_run_go_on_with_a_new_connection(bank: Celery, plain: str) -> None:
    bank.conf.idempotency_database_url = plain
    runtime = runtime_of(bank)
    id = new_id()
    with runtime.autocommit() as connection:
        assert isinstance(op.claim(connection, new_id()), Claimed)
    put_into_partitions(plain)
    with pytest.raises(OperationalError), runtime.autocommit() as connection:
        op.claim(connection, id)
    with runtime.autocommit() as connection:
        assert isinstance(op.claim(connection, id), Claimed)


def test_who_reads_goes_on_with_the_same_connection(bank: Celery, plain: str) -> None:
    """What Postgres has prepared for it before means the same afterwards."""
    bank.conf.idempotency_database_url = plain
    runtime = runtime_of(bank)
    with runtime.autocommit() as connection:
        id = completed(connection).id

    def read() -> list[Any]:
        with runtime.autocommit() as connection:
            driver: Any = connection.connection.driver_connection
            prepared = connection.exec_driver_sql("SELECT count(*) FROM pg_prepared_statements").scalar_one()
            found = operations.read_locked(connection, id), operations.operation(connection, id)
            return [driver.info.backend_pid, prepared > 0, found]

    for _ in range(8):
        before = read()
    assert before[1]
    put_into_partitions(plain)
    assert read() == before


def test_a_connection_from_before_a_column_is_given_up(bank: Celery, plain: str) -> None:
    bank.conf.idempotency_database_url = plain
    runtime, id = runtime_of(bank), new_id()
    for _ in range(8):
        with runtime.autocommit() as connection:
            operations.operation(connection, id)
    with create_engine(plain, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as own:
        own.exec_driver_sql("ALTER TABLE idempotency.outbox ADD COLUMN another text")
    with pytest.raises(OperationalError, match="cached plan"), runtime.autocommit() as connection:
        operations.operation(connection, id)
    with runtime.autocommit() as connection:
        operations.operation(connection, id)


def test_a_whole_record_has_all_columns(connection: Connection) -> None:
    row = record(connection, completed(connection).id)
    # a link is not worth a migration before the deploy
    assert set(row._mapping) - {"trace"} == set(re.findall(r"\w+", COLUMNS))


def test_a_width_that_there_is_not_is_refused(
    bank: Celery, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runner(monkeypatch, capsys)
    answer = run("migrate", "--partitioned", "month")
    assert answer.status
    assert "--partitioned: must be one of hour, day, week, got 'month'" in answer.error
    assert run("migrate", "--partitioned", "week", "--json").document["partitioned"] == "week"
    with pytest.raises(SettingsError, match="hour, day, week"):
        partitioning.require_width("")


def test_a_migration_builds_an_index_on_every_partition(plain: str, connection: Connection) -> None:
    put_into_partitions(plain)
    statement = "CREATE INDEX CONCURRENTLY records_tried ON idempotency.records (attempts) WHERE status = 'failed'"
    for _ in range(2):  # an interrupted one begins again
        with create_engine(plain, poolclass=NullPool).connect() as own:
            context = MigrationContext.configure(own, opts={"transaction_per_migration": True})
            with context.begin_transaction(), Operations.context(context):
                create_index(statement)
    partitions.make_ahead(connection)
    valid = "SELECT indisvalid FROM pg_index WHERE indexrelid = 'idempotency.records_tried'::regclass"
    assert connection.exec_driver_sql(valid).scalar_one()
    of_parts = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'idempotency.records_tried'::regclass"
    parts = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'idempotency.records'::regclass"
    assert connection.exec_driver_sql(of_parts).scalar_one() == connection.exec_driver_sql(parts).scalar_one()


# ---------------------------------------------------------------- roles


@pytest.mark.plain  # it makes rows old by itself
@pytest.mark.parametrize("first", ["roles", "partitions"])
def test_a_relay_keeps_up_with_partitions_and_the_application_cannot(
    plain: str, connection: Connection, first: str
) -> None:
    owner = create_engine(plain, poolclass=NullPool)
    if first == "roles":
        roles.create(owner, PASSWORDS)
        put_into_partitions(plain)
    else:
        put_into_partitions(plain)
        roles.create(owner, PASSWORDS)
    connection.connection.invalidate()
    with create_engine(plain, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as mine:
        kept, gone = completed(mine).id, completed(mine).id
        op.age(mine, gone, expires_at=-1)
        into_the_past(mine)
    with create_engine(url_of(RELAY, plain), isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as relay:
        dropped, _, late = partitions.keep_up(relay, op.SERVICE, retention=3600.0, horizon=60.0, limit=1000)
        assert (dropped, late > 0) == (1, True)
        assert status(relay, kept) == "completed"
    with create_engine(
        url_of(APPLICATION, plain), isolation_level="AUTOCOMMIT", poolclass=NullPool
    ).connect() as application:
        application.exec_driver_sql("SET idempotency.tenant = 'default'")
        assert isinstance(op.claim(application, kept), Completed)
        assert isinstance(op.claim(application, new_id()), Claimed)
        with pytest.raises(DBAPIError, match=r"row-level security|permission denied"):
            op.claim(application, new_id("another"))
        for forbidden in (
            f"SELECT {PARTITIONS}.remove('records_otherwise', 'bank', 0, 0)",
            f"SELECT * FROM {PARTITIONS}.records_otherwise",
        ):
            with pytest.raises(DBAPIError, match="permission denied"):
                application.exec_driver_sql(forbidden)
    for role in (APPLICATION, RELAY, OPERATOR):
        found = check_database(Settings.read({"database_url": url_of(role, plain), "service": "bank"}))
        assert [str(each) for each in found if each.level is Level.REFUSAL] == []
        assert [str(each) for each in found if "partitions" in each.subject and each.level is not Level.OK] == []


# ---------------------------------------------------------------- the doctor


def test_the_doctor_says_what_upkeep_has_not_done(bank: Celery, engine: Engine) -> None:
    def said() -> list[str]:
        return [
            f"{each.level} {each.found}"
            for each in check_database(settings_of(bank))
            if each.subject == "database partitions"
        ]

    with engine.connect() as connection:
        made = found(connection)
        assert said() == [fine(6, made)]
        for each in made.all:
            if not each.is_default:
                connection.exec_driver_sql(f"DROP TABLE {PARTITIONS}.{each.name}")
        completed(connection)
        assert said() == ["warning none for the present", "warning the default one has records"]
        connection.exec_driver_sql("COMMENT ON SCHEMA idempotency_partitions IS 'hour'")
        connection.exec_driver_sql(f"""
            DO $$ BEGIN EXECUTE format('CREATE TABLE {PARTITIONS}.records_x PARTITION OF idempotency.records '
                'FOR VALUES FROM (%%L) TO (%%L)', now() - interval '1 minute', now() + interval '2 minutes'); END $$
        """)
        assert any("none after" in each for each in said())
        purge.operations(connection, op.SERVICE, horizon=0.0, limit=1)
        deliver_again(connection, new_id())
