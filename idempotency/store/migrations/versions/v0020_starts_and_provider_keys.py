"""How a process was started, and where; operations by the key that a provider was given. Code of 0019 runs beside this."""

from alembic import op

from idempotency.store.migrations.indexes import create_index

revision = "0020"
down_revision = "0019"

# Of those that have ended: what runs or waits is looked through. A step has no key, and is left out.
KEYS = """CREATE INDEX CONCURRENTLY records_provider_keys ON idempotency.records USING gin
    (jsonb_path_query_array(effects, '$.*.key')) WHERE completed_at IS NOT NULL AND effects <> '{}'"""
# Of sagas, each call is a row.
SAGA_KEYS = """CREATE INDEX CONCURRENTLY saga_steps_provider_keys ON idempotency.saga_steps ((entry ->> 'key'))
    WHERE kind = 'effect'"""


def upgrade() -> None:
    # NULL: not known, of a process whose code is older
    op.execute("ALTER TABLE idempotency.processes ADD COLUMN IF NOT EXISTS command text[]")
    op.execute("ALTER TABLE idempotency.processes ADD COLUMN IF NOT EXISTS directory text")
    create_index(KEYS)  # last, because they commit
    create_index(SAGA_KEYS)


def downgrade() -> None:
    op.execute("DROP INDEX IF EXISTS idempotency.records_provider_keys, idempotency.saga_steps_provider_keys")
    op.execute("ALTER TABLE idempotency.processes DROP COLUMN command, DROP COLUMN directory")
