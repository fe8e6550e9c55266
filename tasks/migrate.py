"""Migrate the business tables: `python -m tasks.migrate`, after `idempotency migrate`.

By Alembic, with a separate version table. The result must match `tasks.models`.
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, create_engine, text

VERSION_TABLE = "tasks_version"
# Concurrent callers wait for each other. Any constant not used elsewhere.
MIGRATION_LOCK = 0x7A5C5


def migrate(engine: Engine) -> None:
    """Migrate the business tables in one transaction. Safe to call concurrently."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": MIGRATION_LOCK})
        # Everything that needs a table queues behind a migration that waits for its lock.
        connection.execute(text("SET LOCAL lock_timeout = '2s'"))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def main() -> None:
    """Migrate the database given by the environment."""
    from celeryconfig import environment

    engine = create_engine(environment.database_url.get_secret_value(), hide_parameters=True)
    migrate(engine)
    engine.dispose()


if __name__ == "__main__":
    main()
