"""Which code has failed, as its deploy calls it, on dead letters and signs of life; the span of an operation's last attempt.

Code of 0017 runs beside this, and what makes spans runs without it.
"""

from alembic import op

from idempotency.store.migrations.indexes import create_index

revision = "0018"
down_revision = "0017"

# The setting of the session that writes the row: so no statement names the column, and older code writes rows without it. Rows
# from before have none. In two steps: a default that is given with the column would be computed for those as well.
COLUMN = "ALTER TABLE idempotency.{} ADD COLUMN IF NOT EXISTS code_version text"
DEFAULT = """ALTER TABLE idempotency.{} ALTER COLUMN code_version
    SET DEFAULT nullif(pg_catalog.current_setting('idempotency.code_version', true), '')"""
TABLES = ("dead_letters", "processes")
# Open letters in order, and all that they are counted by, so that counting reads no letter itself. Not by reason: it would be taken
# for the alerts, too, which then read all that were told long ago.
GROUPS = """CREATE INDEX CONCURRENTLY dead_letters_groups ON idempotency.dead_letters (consumer_service, id)
    INCLUDE (reason, task, header_task, code_version, tenant, failed_at) WHERE status = 'open'"""


def upgrade() -> None:
    op.execute("ALTER TABLE idempotency.records ADD COLUMN IF NOT EXISTS trace text")
    for table in TABLES:
        op.execute(COLUMN.format(table))
        op.execute(DEFAULT.format(table))
    create_index(GROUPS)  # last, because it commits


def downgrade() -> None:
    op.execute("DROP INDEX IF EXISTS idempotency.dead_letters_groups")
    for table in TABLES:
        op.execute(f"ALTER TABLE idempotency.{table} DROP COLUMN code_version")
    op.execute("ALTER TABLE idempotency.records DROP COLUMN trace")
