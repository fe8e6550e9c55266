"""The business tables, brought to this version: `python -m tasks.migrate`, after `idempotency migrate`.

Alembic, with a version table of the application's own; `tasks.models` is what they have to agree with.
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, create_engine, text

VERSION_TABLE = "tasks_version"
# Two callers at once: the second waits for the first. Any constant that nothing else uses.
MIGRATION_LOCK = 0x7A5C5


def migrate(engine: Engine) -> None:
    """Bring the business tables to this version, in one transaction; any number of callers at once."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": MIGRATION_LOCK})
        # Whatever needs a table queues behind a migration that waits for its lock.
        connection.execute(text("SET LOCAL lock_timeout = '2s'"))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def main() -> None:
    """Migrate the database that the environment names."""
    from celeryconfig import environment

    engine = create_engine(environment.database_url.get_secret_value(), hide_parameters=True)
    migrate(engine)
    engine.dispose()


if __name__ == "__main__":
    main()
