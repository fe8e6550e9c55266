"""Migrate the business tables: `python -m tasks.migrate`, after `idempotency migrate`.

By Alembic, with a separate version table. The result must match `tasks.models`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, create_engine, text

from idempotency.store.rights import APPLICATION, OPERATOR, READ_ONLY, RELAY
from idempotency.store.roles import protect

from .models import Base

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


def grant(engine: Engine) -> None:
    """Let the roles of `idempotency migrate --roles` use the tables: web servers and workers those of one tenant at a time.

    Safe to call again. A relay and people's commands need them too: they run `on_failed` and undos of what no worker ends.
    """
    with engine.begin() as connection:
        for table in Base.metadata.sorted_tables:
            connection.exec_driver_sql(
                f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table.name} TO {APPLICATION}, {RELAY}, {OPERATOR}"
            )
            connection.exec_driver_sql(f"GRANT SELECT ON {table.name} TO {READ_ONLY}")
            protect(connection, table.name)
        # not for the application: a view has its owner's rights, and so shows all tenants
        connection.exec_driver_sql(f"GRANT SELECT ON ledger_entries TO {OPERATOR}, {READ_ONLY}")
        connection.exec_driver_sql(
            f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {APPLICATION}, {RELAY}, {OPERATOR}"
        )


def main() -> None:
    """Migrate the database given by the environment; with `--roles`, after `idempotency migrate --roles`, also `grant`."""
    from celeryconfig import environment

    engine = create_engine(environment.database_url.get_secret_value(), hide_parameters=True)
    migrate(engine)
    if "--roles" in sys.argv[1:]:
        grant(engine)
    engine.dispose()


if __name__ == "__main__":
    main()
