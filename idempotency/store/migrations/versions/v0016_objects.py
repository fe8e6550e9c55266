"""Indexes of the results that are kept elsewhere. Code of 0015 runs beside this."""

from alembic import op

from idempotency.store.migrations.indexes import create_index

revision = "0016"
down_revision = "0015"

# A reference's beginning and name: 7 and 35 characters (`wire/references.py`).
OF_RECORDS = """CREATE INDEX CONCURRENTLY records_objects ON idempotency.records (left(result, 42))
    WHERE starts_with(result, 'object:')"""
# A saga keeps the results of what it has called, also when that has been purged.
OF_STEPS = """CREATE INDEX CONCURRENTLY saga_steps_objects ON idempotency.saga_steps (left(result, 42))
    WHERE starts_with(result, 'object:')"""


def upgrade() -> None:
    create_index(OF_RECORDS)
    create_index(OF_STEPS)


def downgrade() -> None:
    op.execute("DROP INDEX idempotency.records_objects, idempotency.saga_steps_objects")
