"""Alembic's environment. `tasks.migrate` passes the connection; nothing is read from files."""

from alembic import context

from tasks.migrate import VERSION_TABLE
from tasks.models import Base

context.configure(
    connection=context.config.attributes["connection"], target_metadata=Base.metadata, version_table=VERSION_TABLE
)
with context.begin_transaction():
    context.run_migrations()
