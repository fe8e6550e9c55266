"""Alembic's environment. `store/schema.py` passes the connection; nothing is read from files."""

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
