"""The tables: how a database gets them, and what they refuse to hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, inspect, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.pool import NullPool

import idempotency
import services
from idempotency import schema
from idempotency.errors import SettingsError
from tests.operations import at_once

TABLES = {"records", "outbox", "dead_letters", "relay_sleep", "audit", "discards", "operators", "alerts"} | {
    "lanes",
    "markers",
    "settled",
}


@pytest.fixture
def empty(servers: services.Services) -> Iterator[Engine]:
    """A database without any table of ours."""
    name = f"empty_{uuid4().hex[:8]}"
    engine = create_engine(servers.create_database(name), poolclass=NullPool)
    yield engine
    servers.drop_database(name)


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


def test_four_callers_at_once_migrate_once(empty: Engine) -> None:
    revisions = at_once(4, lambda _: schema.migrate(empty))
    assert len(set(revisions)) == 1
    assert set(inspect(empty).get_table_names(schema.SCHEMA)) == TABLES | {schema.VERSION_TABLE}


def test_an_empty_database_is_not_current_and_a_migrated_one_is(empty: Engine) -> None:
    with empty.connect() as connection, pytest.raises(SettingsError, match=r"at none, need .*idempotency migrate"):
        schema.require_current(connection)
    schema.migrate(empty)
    with empty.connect() as connection:
        schema.require_current(connection)


def test_a_database_of_another_version_is_refused_with_both(empty: Engine) -> None:
    revision = schema.migrate(empty)
    with empty.begin() as connection:
        connection.execute(text("UPDATE idempotency.schema_version SET version_num = 'later'"))
        with pytest.raises(SettingsError, match=f"at later, need {revision}"):
            schema.require_current(connection)


def test_nothing_is_put_outside_our_schema(empty: Engine) -> None:
    before = set(inspect(empty).get_table_names("public"))
    schema.migrate(empty)
    assert set(inspect(empty).get_table_names("public")) == before


def test_a_downgrade_takes_everything_away_and_can_be_undone(empty: Engine) -> None:
    schema.migrate(empty)
    config = Config()
    config.set_main_option("script_location", str(Path(idempotency.__file__).parent / "migrations"))
    with empty.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
    assert not TABLES & set(inspect(empty).get_table_names(schema.SCHEMA))
    with empty.connect() as connection, pytest.raises(SettingsError):
        schema.require_current(connection)
    schema.migrate(empty)
    with empty.connect() as connection:
        schema.require_current(connection)


# ---------------------------------------------------------------- what the tables refuse

NOW = "clock_timestamp()"
KEY = {"tenant": "'t'", "operation": "'o'", "key": "'k'", "fingerprint": "'v1:f'", "message": "'{}'"}

STARTED = KEY | {"status": "'started'", "fence": "1", "token": "'x'", "locked_until": NOW, "locked_by": "'h'"}
RELEASED = KEY | {"status": "'released'", "fence": "1", "available_at": NOW}
TERMINAL = {"token": "'x'", "locked_by": "'h'", "completed_at": NOW, "expires_at": NOW}
COMPLETED = KEY | TERMINAL | {"status": "'completed'", "fence": "1", "result": "'null'", "response_code": "200"}
FAILED = KEY | TERMINAL | {"status": "'failed'", "fence": "1", "error": "'{}'", "response_code": "422"}
LEGAL_RECORDS = {"started": STARTED, "released": RELEASED, "completed": COMPLETED, "failed": FAILED}

OUTBOX = KEY | {"event_id": "'e'", "origin": "'enqueue'"}
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
    ("dead_letters_status_check", LETTER, {"status": "'gone'", "settled_at": NOW}),
    ("settled_has_its_time", LETTER, {"status": "'replayed'"}),
    ("settled_has_its_time", LETTER, {"status": "'discarded'"}),
    ("settled_has_its_time", LETTER, {"settled_at": NOW}),
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
    *(
        ("outbox", OUTBOX | {"origin": f"'{origin}'"})
        for origin in ("enqueue", "retry", "recover", "reconcile", "replay")
    ),
    ("outbox", OUTBOX | {"status": "'published'", "published_at": NOW}),
    # sent again: it keeps the time of the publish that was lost
    ("outbox", OUTBOX | {"published_at": NOW}),
    ("outbox", OUTBOX | {"status": "'failed'", "last_error": "'too large'"}),
    *(("dead_letters", LETTER | {"source": f"'{source}'"}) for source in ("operation", "broker", "relay")),
    ("dead_letters", LETTER | {"status": "'replayed'", "settled_at": NOW}),
    ("dead_letters", LETTER | {"status": "'discarded'", "settled_at": NOW}),
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
    + [("outbox", OUTBOX, column) for column in (*KEY, "event_id", "origin")]
    + [("dead_letters", LETTER, column) for column in LETTER],
)
def test_what_every_row_needs_may_not_be_null(
    connection: Connection, table: str, row: dict[str, str], column: str
) -> None:
    with pytest.raises(IntegrityError, match="not-null"):
        insert(connection, table, row | {column: "NULL"})


@pytest.mark.parametrize("column", ["tenant", "operation", "key"])
def test_one_operation_has_one_record_and_another_has_its_own(connection: Connection, column: str) -> None:
    insert(connection, "records", STARTED)
    with pytest.raises(IntegrityError, match="records_pkey"), connection.begin_nested():
        insert(connection, "records", RELEASED)
    insert(connection, "records", STARTED | {column: "'another'"})


def test_an_event_has_one_outbox_row(connection: Connection) -> None:
    insert(connection, "outbox", OUTBOX)
    insert(connection, "outbox", OUTBOX | {"event_id": "'f'"})
    with pytest.raises(IntegrityError, match="event_id"):
        insert(connection, "outbox", OUTBOX)


LETTER_KEY = {
    "tenant": "'t'", "operation": "'o'", "key": "'k'", "generation": "1", "reason": "'r'", "fingerprint": "'f'"
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
