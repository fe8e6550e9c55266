"""Alembic's environment: the connection is handed in by `idempotency.schema`; nothing is read from files."""

from alembic import context

from idempotency.store.schema import SCHEMA, VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"],
    version_table=VERSION_TABLE,
    version_table_schema=SCHEMA,
    transaction_per_migration=True,
)
with context.begin_transaction():
    context.run_migrations()
