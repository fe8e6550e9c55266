"""The tables, and how a database gets them: Alembic, with a version table of our own beside the application's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, Row, text
from sqlalchemy.exc import OperationalError

from ..errors import SettingsError

# Everything of ours is in a schema of its own, so that no table of the application can collide with it.
SCHEMA = "idempotency"
VERSION_TABLE = "schema_version"
# Two services may start at once after a deploy; the second waits for the first. Any constant not used elsewhere.
MIGRATION_LOCK = 0x1DE4907E
# The oldest tables that this code can run on: what it reads and writes is all there from this revision on.
OLDEST_SCHEMA = "0011"
# Seconds. Whatever needs a table queues behind a migration that waits for its lock, so a migration does not wait long.
LOCK_TIMEOUT = 2.0
# Between two tries the others have their turn.
LOCK_PAUSE = 1.0
# Seconds until a transaction that stays open is for a person to look at.
MIGRATION_PATIENCE = 600.0
LOCK_NOT_AVAILABLE = "55P03"

# Only commands that people give read and write these; a worker's role may well have no right to them.
FOR_PEOPLE = ("audit", "operators", "discards")
# What the roles of workers, relays and beats need. The history is only added to; a table's own sequence is its owner's.
_RIGHTS = text("""
WITH needed(oid, name, privilege) AS (
    SELECT c.oid, 'table ' || c.relname, unnest(CASE c.relname
               WHEN :version THEN ARRAY['SELECT'] WHEN 'audit' THEN ARRAY['SELECT', 'INSERT']
               ELSE ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE'] END)
    FROM pg_class c WHERE c.relnamespace = to_regnamespace(:schema) AND c.relkind IN ('r', 'p')
    UNION ALL
    SELECT c.oid, 'sequence ' || c.relname, 'USAGE'
    FROM pg_class c WHERE c.relnamespace = to_regnamespace(:schema) AND c.relkind = 'S'
      AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = c.oid AND d.deptype = 'i')
    UNION ALL
    SELECT n.oid, 'schema ' || n.nspname, 'USAGE' FROM pg_namespace n WHERE n.nspname = :schema
)
SELECT name, string_agg(privilege, ', ') AS missing, split_part(name, ' ', 2) = ANY (:for_people) AS for_people
FROM needed
WHERE NOT CASE split_part(name, ' ', 1)
    WHEN 'table' THEN has_table_privilege(oid, privilege)
    WHEN 'sequence' THEN has_sequence_privilege(oid, privilege)
    ELSE has_schema_privilege(oid, privilege) END
GROUP BY name ORDER BY name
""")


def migrate(engine: Engine, revision: str = "head") -> str:
    """Bring a database's tables to this version; any number of callers at once. Returns the revision reached.

    Each migration is a transaction that waits for a lock for at most `LOCK_TIMEOUT` seconds, so that nothing queues
    behind it for longer, and is tried again for `MIGRATION_PATIENCE` seconds. Raises the last `OperationalError` then;
    what was reached stays, and the next call goes on from there. A database of newer code is left as it is; raises
    `SettingsError` if this code cannot run on it.
    """
    deadline = time.monotonic() + MIGRATION_PATIENCE
    with engine.connect() as connection:
        try:
            while not _is_ours(connection):
                if time.monotonic() > deadline:
                    raise SettingsError(
                        f"database schema: another migration has been running for {MIGRATION_PATIENCE:g} s"
                    )
                time.sleep(LOCK_PAUSE)
            while True:
                try:
                    connection.execute(text(f"SET lock_timeout = '{int(LOCK_TIMEOUT * 1000)}ms'"))
                    connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
                    connection.commit()
                    config = _config()
                    config.attributes["connection"] = connection
                    if _is_known(current_revision(connection)):
                        connection.commit()
                        command.upgrade(config, revision)
                    else:  # newer code has been here
                        require_compatible(connection)
                    return current_revision(connection) or ""
                except OperationalError as error:
                    if getattr(error.orig, "sqlstate", None) != LOCK_NOT_AVAILABLE or time.monotonic() > deadline:
                        raise
                    connection.rollback()
                    time.sleep(LOCK_PAUSE)
        finally:
            connection.invalidate()  # its lock and its settings end with it


def _is_ours(connection: Connection) -> bool:
    # Tried, not waited for: CREATE INDEX CONCURRENTLY would wait for a session that waits for the lock its own has.
    granted: bool = connection.execute(
        text("SELECT pg_try_advisory_lock(:lock)"), {"lock": MIGRATION_LOCK}
    ).scalar_one()
    connection.commit()
    return granted


def current_revision(connection: Connection) -> str | None:
    """The revision a database is at; None before the first migration."""
    options = {"version_table": VERSION_TABLE, "version_table_schema": SCHEMA}
    return MigrationContext.configure(connection, opts=options).get_current_revision()


def require_compatible(connection: Connection) -> None:
    """Raise `SettingsError` unless this code can run on the database's tables.

    They may be as old as `OLDEST_SCHEMA`. They may be newer than this code if every migration that it does not know
    left `compatible_from` at a revision that it does know.
    """
    known = _known()
    found = current_revision(connection)
    if found in known:
        if known.index(found) > known.index(OLDEST_SCHEMA):
            raise SettingsError(f"database schema: at {found}, need {OLDEST_SCHEMA}; run `idempotency migrate`")
        return
    oldest_code = None if found is None else _compatible_from(connection)
    if oldest_code is None:
        raise SettingsError(f"database schema: at {found or 'none'}, need {known[0]}; run `idempotency migrate`")
    if oldest_code not in known:
        raise SettingsError(
            f"database schema: at {found}, needs code of revision {oldest_code}, this is {known[0]}; deploy newer code"
        )


def missing_rights(connection: Connection) -> Sequence[Row[Any]]:
    """What this role may not do with which table, sequence or schema of ours; `for_people`: only operators need it."""
    names = {"schema": SCHEMA, "version": VERSION_TABLE, "for_people": list(FOR_PEOPLE)}
    return connection.execute(_RIGHTS, names).all()


def _known() -> list[str]:
    """The revisions of this code, the newest first."""
    return [script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()]


def _is_known(revision: str | None) -> bool:
    return revision is None or revision in _known()


def _compatible_from(connection: Connection) -> str | None:
    if connection.execute(text("SELECT to_regclass('idempotency.compatibility')")).scalar_one() is None:
        return None
    oldest: str = connection.execute(text("SELECT compatible_from FROM idempotency.compatibility")).scalar_one()
    return oldest


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return config
