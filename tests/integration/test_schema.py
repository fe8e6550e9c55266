"""The tables: how a database gets them, and what they refuse to hold."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, inspect, text
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.pool import NullPool

import idempotency
import services
from idempotency.errors import SettingsError
from idempotency.store import schema
from tests.support.operations import at_once, in_background, wait_for_a_lock
from tests.support.processes import eventually

TABLES = {"records", "outbox", "dead_letters", "relay_sleep", "audit", "discards", "operators", "alerts", "set_aside"}
TABLES |= {"dead_letter_tries", "compatibility", "processes", "alarms"}
TABLES |= {"lanes", "markers", "settled"}
TABLES |= {"api_keys", "waiters"}
TABLES |= {"audit_chain", "audit_head"}
TABLES |= {"sagas", "saga_steps", "saga_events"}
TABLES |= {"webhook_endpoints", "webhook_secrets", "webhook_deliveries", "webhook_attempts"}
TABLES |= {"stream_positions", "stream_members"}
TABLES |= {"letter_edits", "former_fingerprints"}


@pytest.fixture(scope="module")
def migrated(servers: services.Services, template: str) -> Iterator[Engine]:
    """One migrated database for the tests that leave nothing behind."""
    name = f"checks_{uuid4().hex[:8]}"
    engine = create_engine(servers.create_database(name), poolclass=NullPool)
    schema.migrate(engine)
    yield engine
    servers.drop_database(name)


@pytest.fixture
def connection(migrated: Engine) -> Iterator[Connection]:
    """A connection whose work is undone."""
    with migrated.connect() as connection:
        yield connection
        connection.rollback()


# ---------------------------------------------------------------- migrations


def test_migrating_twice_changes_nothing(empty: Engine) -> None:
    first = schema.migrate(empty)
    with empty.begin() as connection:
        connection.execute(text("SELECT nextval('idempotency.fence')"))
    assert schema.migrate(empty) == first
    with empty.connect() as connection:
        assert schema.current_revision(connection) == first
        assert connection.execute(text("SELECT nextval('idempotency.fence')")).scalar_one() == 2


@pytest.mark.long
def test_four_callers_at_once_migrate_once(empty: Engine) -> None:
    revisions = at_once(4, lambda _: schema.migrate(empty))
    assert len(set(revisions)) == 1
    assert set(inspect(empty).get_table_names(schema.SCHEMA)) == TABLES | {schema.VERSION_TABLE}


def test_an_empty_database_is_not_current_and_a_migrated_one_is(empty: Engine) -> None:
    with empty.connect() as connection, pytest.raises(SettingsError, match=r"at none, need .*idempotency migrate"):
        schema.require_compatible(connection)
    schema.migrate(empty)
    with empty.connect() as connection:
        schema.require_compatible(connection)


def set_versions(connection: Connection, schema_version: str, compatible_from: str) -> None:
    """As a migration of newer code leaves them."""
    connection.execute(text("UPDATE idempotency.schema_version SET version_num = :v"), {"v": schema_version})
    connection.execute(text("UPDATE idempotency.compatibility SET compatible_from = :v"), {"v": compatible_from})
    connection.commit()


def test_newer_tables_are_accepted_if_they_say_that_this_code_may_run(empty: Engine) -> None:
    revision = schema.migrate(empty)
    with empty.connect() as connection:
        set_versions(connection, "later", revision)
        schema.require_compatible(connection)
    assert schema.migrate(empty) == "later"  # an older release deployed again leaves them as they are


def test_newer_tables_that_need_newer_code_are_refused_with_both(empty: Engine) -> None:
    revision = schema.migrate(empty)
    refused = f"at later, needs code of revision late, this is {revision}"
    with empty.connect() as connection:
        set_versions(connection, "later", "late")
        with pytest.raises(SettingsError, match=refused):
            schema.require_compatible(connection)
    with pytest.raises(SettingsError, match=refused):
        schema.migrate(empty)


@pytest.mark.parametrize(("oldest", "accepted"), [("0008", True), ("0009", False)])
def test_older_tables_are_accepted_down_to_the_oldest_the_code_can_use(
    empty: Engine, monkeypatch: pytest.MonkeyPatch, oldest: str, accepted: bool
) -> None:
    schema.migrate(empty, "0008")
    monkeypatch.setattr(schema, "OLDEST_SCHEMA", oldest)
    with empty.connect() as connection:
        if accepted:
            schema.require_compatible(connection)
        else:
            with pytest.raises(SettingsError, match="at 0008, need 0009; run `idempotency migrate`"):
                schema.require_compatible(connection)


def test_the_newest_migration_says_which_code_may_run(empty: Engine) -> None:
    schema.migrate(empty)
    with empty.connect() as connection:
        assert schema._compatible_from(connection) in schema._known()


# ---------------------------------------------------------------- while everything else goes on

INDEX = "CREATE INDEX CONCURRENTLY outbox_by_origin ON idempotency.outbox (origin)"
WITH_AN_INDEX = f"""
from alembic import op

from idempotency.store.migrations.indexes import create_index

revision = "9999"
down_revision = "{{head}}"


def upgrade() -> None:
    op.execute("ALTER TABLE idempotency.outbox ADD COLUMN IF NOT EXISTS note text")
    create_index("{INDEX}")


def downgrade() -> None:
    op.execute("ALTER TABLE idempotency.outbox DROP COLUMN note")
"""


@pytest.fixture
def with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more migration: a column and an index of a table in use."""
    copy = tmp_path / "migrations"
    shutil.copytree(Path(idempotency.__file__).parent / "store/migrations", copy)
    (copy / "versions" / "v9999_with_an_index.py").write_text(WITH_AN_INDEX.format(head=schema._known()[0]))
    monkeypatch.setattr(schema, "MIGRATIONS", copy)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the times, so that a test need not wait."""
    monkeypatch.setattr(schema, "LOCK_TIMEOUT", schema.LOCK_TIMEOUT / 10)
    monkeypatch.setattr(schema, "LOCK_PAUSE", schema.LOCK_PAUSE / 10)


def indexes(engine: Engine) -> set[str]:
    with engine.connect() as connection:
        valid = """SELECT indexrelid::regclass::text FROM pg_index
                   WHERE indisvalid AND indrelid = 'idempotency.outbox'::regclass"""
        return set(connection.execute(text(valid)).scalars())


@pytest.mark.long
def test_nothing_queues_for_long_behind_a_migration_that_waits(empty: Engine, quick: None) -> None:
    """An open transaction has the table; readers pass while the migration tries again, and it gets through after."""
    schema.migrate(empty, "0008")
    with empty.connect() as holder, empty.connect() as reader, empty.connect() as watcher:
        holder.execute(text("SELECT count(*) FROM idempotency.outbox"))
        migrated = in_background(lambda: schema.migrate(empty))
        reader.execute(text("SET statement_timeout = '1s'"))  # a migration that waited on would exceed it
        reader.commit()
        for _ in range(3):
            wait_for_a_lock(watcher)
            watcher.rollback()
            reader.execute(text("SELECT count(*) FROM idempotency.outbox"))  # queues behind it, and passes
            reader.commit()
        assert not migrated.done()
        holder.rollback()
        assert migrated.result(30) == schema._known()[0]


def test_a_lock_that_is_never_free_ends_the_migration_with_its_error(
    empty: Engine, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "MIGRATION_TIMEOUT", 0.0)
    schema.migrate(empty, "0008")
    with empty.connect() as holder:
        holder.execute(text("SELECT count(*) FROM idempotency.outbox"))
        with pytest.raises(OperationalError, match="lock timeout"):
            schema.migrate(empty)
    with empty.connect() as connection:
        assert schema.current_revision(connection) == "0008"
    schema.migrate(empty)


@pytest.mark.long
def test_a_migration_that_deadlocks_with_a_transaction_is_tried_again(empty_database: str) -> None:
    """0011 takes exclusive locks on six tables in one transaction."""
    engine = create_engine(empty_database)
    schema.migrate(engine, "0010")
    with engine.connect() as application:
        # an application that is still accepting work: a row in the outbox, and then a look at a record
        application.execute(text("LOCK TABLE idempotency.outbox IN ROW EXCLUSIVE MODE"))
        migrated = in_background(lambda: schema.migrate(engine))
        with create_engine(empty_database).connect() as watching:
            eventually(
                lambda: watching.execute(
                    text(
                        "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'idempotency.outbox'::regclass"
                    )
                ).scalar_one()
            )
        with contextlib.suppress(OperationalError):  # one of the two is chosen to fail
            application.execute(text("SELECT operation FROM idempotency.records"))
        application.rollback()
        assert migrated.result(60) == schema._known()[0]
    engine.dispose()


@pytest.mark.long
def test_an_index_is_built_while_a_transaction_that_uses_its_table_is_open(
    empty: Engine, quick: None, with_an_index: None
) -> None:
    schema.migrate(empty, schema._known()[1])
    with empty.connect() as writer, empty.connect() as other, empty.connect() as watcher:
        for connection in (writer, other):
            connection.execute(text("SET statement_timeout = '1s'"))
            connection.commit()
        migrated = in_background(lambda: schema.migrate(empty))
        eventually(lambda: "note" in columns(empty), what="the column")
        writer.execute(text("UPDATE idempotency.relay_sleep SET until = until"))
        insert(other, "outbox", OUTBOX)  # nothing waits for the index
        other.commit()
        writer.commit()
        assert migrated.result(30) == "9999"
        assert watcher.execute(text("SHOW lock_timeout")).scalar_one() == "0"
    assert "idempotency.outbox_by_origin" in indexes(empty)


def columns(engine: Engine) -> set[str]:
    return {column["name"] for column in inspect(engine).get_columns("outbox", schema.SCHEMA)}


def test_an_index_whose_build_was_interrupted_is_rebuilt(empty: Engine, with_an_index: None) -> None:
    schema.migrate(empty, schema._known()[1])
    with empty.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        insert(connection, "outbox", OUTBOX)
        insert(connection, "outbox", OUTBOX | {"message_id": "'f'"})
        with pytest.raises(IntegrityError):  # leaves an invalid index under the name
            connection.execute(text(INDEX.replace("CREATE INDEX", "CREATE UNIQUE INDEX")))
    assert "idempotency.outbox_by_origin" not in indexes(empty)
    schema.migrate(empty)
    assert "idempotency.outbox_by_origin" in indexes(empty)


@pytest.mark.long
def test_four_callers_at_once_build_an_index_once(empty: Engine, with_an_index: None, quick: None) -> None:
    """The index build would wait for a migration that waited for its turn in a statement."""
    schema.migrate(empty, schema._known()[1])
    assert at_once(4, lambda _: schema.migrate(empty)) == ["9999"] * 4
    assert "idempotency.outbox_by_origin" in indexes(empty)


@pytest.mark.parametrize(
    "path",
    sorted((Path(idempotency.__file__).parent / "store/migrations/versions").glob("v*.py")),
    ids=lambda path: path.stem,
)
def test_indexes_of_tables_in_use_are_built_concurrently(path: Path) -> None:
    if path.stem < "v0005":  # no table was in use before
        return
    source = path.read_text()
    new = set(re.findall(r"CREATE TABLE (?:IF NOT EXISTS )?(\S+)", source))
    upgrade = source.partition("def downgrade")[0]
    built = re.findall(r"CREATE (?:UNIQUE )?INDEX (?!CONCURRENTLY)[^;]*? ON (\S+)", upgrade)
    assert set(built) <= new, "use idempotency.store.migrations.indexes.create_index"


def test_nothing_is_put_outside_our_schema(empty: Engine) -> None:
    before = set(inspect(empty).get_table_names("public"))
    schema.migrate(empty)
    assert set(inspect(empty).get_table_names("public")) == before


def downgrade(engine: Engine, revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(idempotency.__file__).parent / "store/migrations"))
    with engine.connect() as connection:  # each migration begins its own transaction
        config.attributes["connection"] = connection
        command.downgrade(config, revision)


# Of each key its rows in order, by their status; a failed one that a person has dealt with has no open letter.
BEFORE_LANES = """
INSERT INTO idempotency.outbox (event_id, tenant, operation, key, fingerprint, message, origin, ordering_key, status,
    published_at, last_error)
SELECT k || n, 't', 'o', k || n, 'v1:f', '{}', 'enqueue', nullif(k, 'none'), s,
       CASE s WHEN 'published' THEN clock_timestamp() END, CASE s WHEN 'failed' THEN 'refused' END
FROM (VALUES ('free', 1, 'published'), ('free', 2, 'pending'), ('free', 3, 'pending'), ('blocked', 1, 'failed'),
             ('blocked', 2, 'pending'), ('settled', 1, 'failed'), ('settled', 2, 'pending'), ('gone', 1, 'published'),
             ('none', 1, 'pending')) row (k, n, s) ORDER BY n;
INSERT INTO idempotency.dead_letters (source, outbox_id, reason, payload)
SELECT 'relay', id, 'unpublishable', '' FROM idempotency.outbox WHERE key = 'blocked1'
"""


def test_old_rows_have_lanes_after_a_migration_and_after_the_way_back(empty: Engine) -> None:
    schema.migrate(empty, "0005")
    with empty.begin() as connection:
        connection.exec_driver_sql(BEFORE_LANES)
    for _ in range(2):
        schema.migrate(empty)
        with empty.connect() as connection:
            lanes = connection.exec_driver_sql("SELECT ordering_key, blocked FROM idempotency.lanes ORDER BY 1").all()
            places = (
                connection.exec_driver_sql("SELECT key FROM idempotency.outbox WHERE place IS NULL").scalars().all()
            )
        assert [tuple(lane) for lane in lanes] == [("blocked", True), ("free", False), ("settled", False)]
        assert places == ["settled1"]
        downgrade(empty, "0005")


BEFORE_WORDS = """
INSERT INTO idempotency.outbox (event_id, tenant, operation, key, fingerprint, message, origin, status, published_at)
VALUES ('e', 't', 'shop.pay', 'k', 'v1:f', '{}', 'reconcile', 'published', now());
INSERT INTO idempotency.dead_letters (source, event_id, tenant, operation, key, task, reason, payload, status, settled_at)
VALUES ('broker', 'e', 't', 'shop.pay', 'k', 'pay', 'rejected', '', 'replayed', '2026-01-02 03:04:05Z');
INSERT INTO idempotency.set_aside (sweep, id, operation, error, until) VALUES ('reconcile', '1', 'shop.pay', 'e', now());
INSERT INTO idempotency.audit (actor, action, tenant, operation, key) VALUES ('ann', 'release', 't', 'shop.pay', 'k')
"""
IN_WORDS = """
SELECT o.message_id, o.task, o.origin, d.message_id, d.task, d.header_task, d.closed_at, s.sweep, s.task, a.task
FROM idempotency.outbox o, idempotency.dead_letters d, idempotency.set_aside s, idempotency.audit a
"""


@pytest.mark.long
def test_rows_of_before_are_there_under_the_new_names_and_can_go_back(empty: Engine) -> None:
    schema.migrate(empty, "0010")
    with empty.begin() as connection:
        connection.exec_driver_sql(BEFORE_WORDS)
    closed = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    for _ in range(2):
        schema.migrate(empty)
        with empty.connect() as connection:
            row = connection.exec_driver_sql(IN_WORDS).one()
            assert schema._compatible_from(connection) == "0011", "code of before must not run on these tables"
        assert tuple(row) == (
            "e",
            "shop.pay",
            "resend",
            "e",
            "shop.pay",
            "pay",
            closed,
            "resend",
            "shop.pay",
            "shop.pay",
        )
        downgrade(empty, "0010")
    with empty.connect() as connection:
        assert connection.exec_driver_sql("SELECT origin FROM idempotency.outbox").scalar_one() == "reconcile"


def test_a_downgrade_takes_everything_away_and_can_be_undone(empty: Engine) -> None:
    schema.migrate(empty)
    downgrade(empty, "base")
    assert not TABLES & set(inspect(empty).get_table_names(schema.SCHEMA))
    with empty.connect() as connection, pytest.raises(SettingsError):
        schema.require_compatible(connection)
    schema.migrate(empty)
    with empty.connect() as connection:
        schema.require_compatible(connection)


# ---------------------------------------------------------------- what the tables refuse

NOW = "clock_timestamp()"
KEY = {"tenant": "'t'", "task": "'o'", "key": "'k'", "fingerprint": "'v1:f'", "message": "'{}'"}

STARTED = KEY | {"status": "'started'", "fence": "1", "token": "'x'", "locked_until": NOW, "locked_by": "'h'"}
RELEASED = KEY | {"status": "'released'", "fence": "1", "available_at": NOW}
TERMINAL = {"token": "'x'", "locked_by": "'h'", "completed_at": NOW, "expires_at": NOW}
COMPLETED = KEY | TERMINAL | {"status": "'completed'", "fence": "1", "result": "'null'", "response_code": "200"}
FAILED = (
    KEY
    | TERMINAL
    | {"status": "'failed'", "fence": "1", "error": "'{}'", "error_code": "'no_account'", "response_code": "422"}
)
LEGAL_RECORDS = {"started": STARTED, "released": RELEASED, "completed": COMPLETED, "failed": FAILED}

OUTBOX = KEY | {"message_id": "'e'", "origin": "'enqueue'"}
LETTER = {"source": "'operation'", "reason": "'r'", "payload": "'{}'"}

# The constraint that refuses, the legal row, and the change that makes it illegal.
ILLEGAL_RECORDS = [
    ("records_status_check", STARTED, {"status": "'running'"}),
    ("records_key_check", STARTED, {"key": "''"}),
    ("records_key_check", STARTED, {"key": "repeat('k', 256)"}),
    ("records_generation_check", STARTED, {"generation": "0"}),
    ("records_attempts_check", STARTED, {"attempts": "-1"}),
    ("started_has_a_holder", STARTED, {"token": "NULL"}),
    ("started_has_a_holder", STARTED, {"locked_by": "NULL"}),
    ("started_has_a_holder", STARTED, {"locked_until": "NULL"}),
    ("started_has_a_holder", RELEASED, {"locked_until": NOW}),
    ("started_has_a_holder", COMPLETED, {"locked_until": NOW}),
    ("started_has_a_holder", FAILED, {"locked_until": NOW}),
    ("released_has_no_holder", RELEASED, {"token": "'x'"}),
    ("released_has_no_holder", RELEASED, {"locked_by": "'h'"}),
    ("released_has_no_holder", RELEASED, {"available_at": "NULL"}),
    ("released_has_no_holder", STARTED, {"available_at": NOW}),
    ("released_has_no_holder", COMPLETED, {"available_at": NOW}),
    ("released_has_no_holder", FAILED, {"available_at": NOW}),
    ("completed_has_a_result", COMPLETED, {"result": "NULL"}),
    ("completed_has_a_result", COMPLETED, {"response_code": "NULL"}),
    ("completed_has_a_result", STARTED, {"result": "'null'"}),
    ("completed_has_a_result", RELEASED, {"result": "'null'"}),
    ("completed_has_a_result", FAILED, {"result": "'null'"}),
    ("failed_has_an_error", FAILED, {"error": "NULL"}),
    ("terminal_has_its_times", COMPLETED, {"completed_at": "NULL"}),
    ("terminal_has_its_times", COMPLETED, {"expires_at": "NULL"}),
    ("terminal_has_its_times", FAILED, {"completed_at": "NULL"}),
    ("terminal_has_its_times", FAILED, {"expires_at": "NULL"}),
    ("terminal_has_its_times", STARTED, {"completed_at": NOW}),
    ("terminal_has_its_times", RELEASED, {"expires_at": NOW}),
]
ILLEGAL_OUTBOX = [
    ("outbox_origin_check", OUTBOX, {"origin": "'elsewhere'"}),
    ("outbox_status_check", OUTBOX, {"status": "'sent'"}),
    ("published_has_its_time", OUTBOX, {"status": "'published'"}),
    ("failed_has_an_error", OUTBOX, {"status": "'failed'"}),
]
ILLEGAL_LETTERS = [
    ("dead_letters_source_check", LETTER, {"source": "'elsewhere'"}),
    ("dead_letters_status_check", LETTER, {"status": "'gone'", "closed_at": NOW}),
    ("closed_has_its_time", LETTER, {"status": "'replayed'"}),
    ("closed_has_its_time", LETTER, {"status": "'discarded'"}),
    ("closed_has_its_time", LETTER, {"closed_at": NOW}),
]
ILLEGAL = (
    [("records", *case) for case in ILLEGAL_RECORDS]
    + [("outbox", *case) for case in ILLEGAL_OUTBOX]
    + [("dead_letters", *case) for case in ILLEGAL_LETTERS]
)
LEGAL = [
    *(("records", row) for row in LEGAL_RECORDS.values()),
    ("records", STARTED | {"key": "repeat('k', 255)"}),
    ("records", STARTED | {"attempts": "0", "error": "'{}'", "first_error": "'{}'"}),
    ("records", RELEASED | {"error": "'{}'"}),
    *(("outbox", OUTBOX | {"origin": f"'{origin}'"}) for origin in ("enqueue", "retry", "recover", "resend", "replay")),
    ("outbox", OUTBOX | {"status": "'published'", "published_at": NOW}),
    # sent again: it keeps the time of the publish that was lost
    ("outbox", OUTBOX | {"published_at": NOW}),
    ("outbox", OUTBOX | {"status": "'failed'", "last_error": "'too large'"}),
    *(("dead_letters", LETTER | {"source": f"'{source}'"}) for source in ("operation", "broker", "relay")),
    ("dead_letters", LETTER | {"status": "'replayed'", "closed_at": NOW}),
    ("dead_letters", LETTER | {"status": "'discarded'", "closed_at": NOW}),
]


def insert(connection: Connection, table: str, row: dict[str, str]) -> None:
    connection.execute(text(f"INSERT INTO idempotency.{table} ({', '.join(row)}) VALUES ({', '.join(row.values())})"))


@pytest.mark.parametrize(("table", "row"), LEGAL)
def test_a_legal_row_is_accepted(connection: Connection, table: str, row: dict[str, str]) -> None:
    insert(connection, table, row)


@pytest.mark.parametrize(("table", "constraint", "legal", "change"), ILLEGAL)
def test_an_illegal_state_is_refused_however_it_is_written(
    connection: Connection, table: str, constraint: str, legal: dict[str, str], change: dict[str, str]
) -> None:
    def refused(statement: Any, *arguments: Any) -> None:
        with pytest.raises(IntegrityError) as error, connection.begin_nested():
            statement(*arguments)
        assert error.value.orig.diag.constraint_name == constraint  # type: ignore[union-attr]

    refused(insert, connection, table, legal | change)
    insert(connection, table, legal)
    changes = ", ".join(f"{column} = {value}" for column, value in change.items())
    refused(connection.execute, text(f"UPDATE idempotency.{table} SET {changes}"))


@pytest.mark.parametrize(
    ("table", "row", "column"),
    [("records", STARTED, column) for column in (*KEY, "status", "fence")]
    + [("outbox", OUTBOX, column) for column in (*KEY, "message_id", "origin")]
    + [("dead_letters", LETTER, column) for column in LETTER],
)
def test_what_every_row_needs_may_not_be_null(
    connection: Connection, table: str, row: dict[str, str], column: str
) -> None:
    with pytest.raises(IntegrityError, match="not-null"):
        insert(connection, table, row | {column: "NULL"})


@pytest.mark.parametrize("column", ["tenant", "task", "key"])
def test_one_operation_has_one_record_and_another_has_its_own(connection: Connection, column: str) -> None:
    insert(connection, "records", STARTED)
    with pytest.raises(IntegrityError, match="records_pkey"), connection.begin_nested():
        insert(connection, "records", RELEASED)
    insert(connection, "records", STARTED | {column: "'another'"})


def test_a_message_has_one_outbox_row(connection: Connection) -> None:
    insert(connection, "outbox", OUTBOX)
    insert(connection, "outbox", OUTBOX | {"message_id": "'f'"})
    with pytest.raises(IntegrityError, match="message_id"):
        insert(connection, "outbox", OUTBOX)


LETTER_KEY = {
    "tenant": "'t'", "task": "'o'", "key": "'k'", "generation": "1", "reason": "'r'", "fingerprint": "'f'"
}  # fmt: skip


@pytest.mark.parametrize("column", LETTER_KEY)
def test_one_failure_of_a_generation_has_one_dead_letter(connection: Connection, column: str) -> None:
    row = LETTER | LETTER_KEY
    insert(connection, "dead_letters", row)
    with pytest.raises(IntegrityError, match="duplicate key"), connection.begin_nested():
        insert(connection, "dead_letters", row)
    insert(connection, "dead_letters", row | {column: "2" if column == "generation" else "'another'"})


def test_an_outbox_row_has_one_dead_letter(connection: Connection) -> None:
    insert(connection, "dead_letters", LETTER | {"outbox_id": "1"})
    insert(connection, "dead_letters", LETTER | {"outbox_id": "2"})
    with pytest.raises(IntegrityError, match="outbox_id"):
        insert(connection, "dead_letters", LETTER | {"outbox_id": "1"})


@pytest.mark.parametrize("value", ["1e16", '{"b":1, "a":2}', '"a\\u0000b"', '"\\ud800"', "[1.50]"])
def test_arguments_and_results_are_kept_to_the_byte(connection: Connection, value: str) -> None:
    insert(connection, "records", COMPLETED)
    connection.execute(text("UPDATE idempotency.records SET result = :value, message = :value"), {"value": value})
    row = connection.execute(text("SELECT result, message FROM idempotency.records")).one()
    assert tuple(row) == (value, value)


def test_asking_for_the_revision_leaves_the_applications_log_alone(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), engine.connect() as connection:
        schema.require_compatible(connection)
        connection.execute(text("DROP SCHEMA idempotency CASCADE"))
        assert schema.current_revision(connection) is None
    assert caplog.records == []
