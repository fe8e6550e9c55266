"""The tables, and how a database gets them: Alembic, with a version table of our own beside the application's."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, text

from .errors import SettingsError

# Everything of ours is in a schema of its own, so that no table of the application can collide with it.
SCHEMA = "idempotency"
VERSION_TABLE = "schema_version"
# Two services may start at once after a deploy; the second waits for the first. Any constant not used elsewhere.
MIGRATION_LOCK = 0x1DE4907E


def migrate(engine: Engine, revision: str = "head") -> str:
    """Bring a database's tables to this version; any number of callers at once. Returns the revision reached."""
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": MIGRATION_LOCK})
        connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
        config = _config()
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
        return current_revision(connection) or ""


def current_revision(connection: Connection) -> str | None:
    """The revision a database is at; None before the first migration."""
    options = {"version_table": VERSION_TABLE, "version_table_schema": SCHEMA}
    return MigrationContext.configure(connection, opts=options).get_current_revision()


def require_current(connection: Connection) -> None:
    """Raise `SettingsError` unless the tables are of this version."""
    found, wanted = current_revision(connection), ScriptDirectory.from_config(_config()).get_current_head()
    if found != wanted:
        raise SettingsError(f"database schema: at {found or 'none'}, need {wanted}; run `idempotency migrate`")


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return config
