"""The schema and its migrations, by Alembic with its own version table."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.exc import OperationalError

from ..errors import SettingsError
from ..extras import extra
from ..framework import framework
from .statements import sqlstate

if TYPE_CHECKING:
    from alembic.config import Config

Changed = TypeVar("Changed")

# A separate schema, so that our tables cannot collide with the application's.
SCHEMA = "idempotency"
VERSION_TABLE = "schema_version"
MIGRATIONS = Path(__file__).parent / "migrations"
# Several services may migrate at once during a deploy; one waits for the other. Any constant not used elsewhere.
MIGRATION_LOCK = 0x1DE4907E
# The oldest revision of the schema that this code can run on.
OLDEST_SCHEMA = "0015"
# Seconds. A migration does not wait longer for a lock, since everything else that needs the table queues behind it.
LOCK_TIMEOUT = 2.0
# Seconds between two tries, in which the others go on.
LOCK_PAUSE = 1.0
# Seconds to keep trying. A transaction that blocks the migration for longer needs a person.
MIGRATION_TIMEOUT = 600.0
# lock_not_available
NO_LOCK = "55P03"
# And deadlock_detected: a migration may lock several tables; serialization_failure: of a record that was moved.
TRY_AGAIN = (NO_LOCK, "40P01", "40001")

# What is about operations and messages; the other tables are about people, processes and the schema.
WORK = (
    *(
        "records",
        "outbox",
        "lanes",
        "markers",
        "dead_letters",
        "discards",
        "letter_edits",
        "former_fingerprints",
        "dead_letter_tries",
        "alerts",
        "set_aside",
    ),
    *("waiters", "sagas", "saga_steps", "saga_events", "webhook_deliveries", "webhook_attempts"),
    *("stream_positions", "stream_members"),
)


def migrate(engine: Engine, revision: str = "head") -> str:
    """Migrate the schema to this version. Safe to call concurrently. Returns the revision reached.

    Each migration is a transaction that waits at most `LOCK_TIMEOUT` seconds for a lock, so that nothing queues behind
    it for longer, and is retried for `MIGRATION_TIMEOUT` seconds. Then raises the last `OperationalError`; finished
    migrations stay, and the next call continues. A newer schema is left unchanged; raises `SettingsError` if this code
    cannot run on it, and `MissingExtra` without Alembic.
    """
    with extra("cli"):
        from alembic import command

    def upgrade(connection: Connection) -> str:
        connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
        connection.commit()
        config = _config()
        config.attributes["connection"] = connection
        if _is_known(current_revision(connection)):
            connection.commit()
            command.upgrade(config, revision)
        else:  # migrated by newer code
            require_compatible(connection)
        return current_revision(connection) or ""

    return exclusively(engine, upgrade)


def exclusively(engine: Engine, change: Callable[[Connection], Changed]) -> Changed:
    """Change the schema while no other migration runs; what cannot get a lock in time is tried again, from its beginning.

    As `migrate` does, and with its errors. `change` may commit.
    """
    deadline = time.monotonic() + MIGRATION_TIMEOUT
    with engine.connect() as locking, engine.connect() as connection:
        while not _try_migration_lock(locking):
            if time.monotonic() > deadline:
                raise SettingsError(f"database schema: another migration has been running for {MIGRATION_TIMEOUT:g} s")
            time.sleep(LOCK_PAUSE)
        event.listen(connection, "begin", _limit)
        while True:
            try:
                return change(connection)
            except OperationalError as error:
                if sqlstate(error) not in TRY_AGAIN or time.monotonic() > deadline:
                    raise
                connection.rollback()
                time.sleep(LOCK_PAUSE)


def _try_migration_lock(locking: Connection) -> bool:
    """Take the lock until the end of this connection's transaction, which is never the session's behind a pooler."""
    # CREATE INDEX CONCURRENTLY waits for all transactions with a snapshot. One that waits for a lock has one, so this
    # does not wait; nor has it parameters, with which the statement's snapshot would stay until the next one.
    locking.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
    granted: bool = locking.exec_driver_sql(f"SELECT pg_try_advisory_xact_lock({MIGRATION_LOCK})").scalar_one()
    if not granted:
        locking.rollback()
    return granted


def _limit(connection: Connection) -> None:
    """Wait for no lock for long, and run no function that others have made in another schema."""
    # By this function, since SET LOCAL warns where there is no transaction: while an index is built.
    connection.exec_driver_sql(
        f"SELECT pg_catalog.set_config('lock_timeout', '{int(LOCK_TIMEOUT * 1000)}', true), "
        "pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true)"
    )


def current_revision(connection: Connection) -> str | None:
    """The schema's revision; None before the first migration."""
    # Not by Alembic's MigrationContext, which would log two lines at each start of a relay or beat.
    table = f"{SCHEMA}.{VERSION_TABLE}"
    if connection.execute(text("SELECT to_regclass(:name)"), {"name": table}).scalar_one() is None:
        return None
    revision: str | None = connection.execute(text(f"SELECT version_num FROM {table}")).scalar_one_or_none()
    return revision


def newest_revision() -> str:
    """The newest revision that this code knows."""
    return _known()[0]


def require_compatible(connection: Connection) -> None:
    """Raise `SettingsError` unless this code can run on the database's schema.

    The schema must be at `OLDEST_SCHEMA` or later. It may be newer than this code if the newer migrations left
    `compatible_from` at a revision that this code knows.
    """
    known = _known()
    found = current_revision(connection)
    if found in known:
        if known.index(found) > known.index(OLDEST_SCHEMA):
            raise SettingsError(
                f"database schema: at {found}, need {OLDEST_SCHEMA}; run `{framework().command} migrate`"
            )
        return
    oldest_code = None if found is None else _compatible_from(connection)
    if oldest_code is None:
        raise SettingsError(
            f"database schema: at {found or 'none'}, need {known[0]}; run `{framework().command} migrate`"
        )
    if oldest_code not in known:
        raise SettingsError(
            f"database schema: at {found}, needs code of revision {oldest_code}, this is {known[0]}; deploy newer code"
        )


def exists(cursor: Any) -> bool:
    """Whether the database of a DB-API cursor has our tables."""
    cursor.execute("SELECT to_regclass('idempotency.records') IS NOT NULL")
    return bool(cursor.fetchone()[0])


def empty(cursor: Any) -> None:
    """Delete all operations, messages and dead letters, in the transaction of a DB-API cursor. The audit stays."""
    if exists(cursor):
        cursor.execute("TRUNCATE " + ", ".join(f"{SCHEMA}.{table}" for table in WORK))


def _known() -> list[str]:
    """The revisions that this code knows, newest first."""
    # From the names of their files: a worker checks this at its start, and has no need of Alembic.
    names = (re.fullmatch(r"v(\d{4})_\w+", path.stem) for path in (MIGRATIONS / "versions").glob("v*.py"))
    return sorted((name[1] for name in names if name is not None), reverse=True)


def _is_known(revision: str | None) -> bool:
    return revision is None or revision in _known()


def _compatible_from(connection: Connection) -> str | None:
    if connection.execute(text("SELECT to_regclass('idempotency.compatibility')")).scalar_one() is None:
        return None
    oldest: str = connection.execute(text("SELECT compatible_from FROM idempotency.compatibility")).scalar_one()
    return oldest


def _config() -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    return config
