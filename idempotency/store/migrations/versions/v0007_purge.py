"""What the purge needs to find: settled rows that have no record; and the rows that a sweep has set aside."""

from alembic import op

from idempotency.store.migrations.indexes import create_index

revision = "0007"
down_revision = "0006"

UP = (
    # Until when, and when last, the purge has found a reason to keep what is past its time: so no pass reads what stays.
    "ALTER TABLE idempotency.records ADD COLUMN IF NOT EXISTS kept_until timestamptz",
    "ALTER TABLE idempotency.outbox ADD COLUMN IF NOT EXISTS kept_at timestamptz",
    # What a sweep could not handle and tries again at `until`. The id is an outbox row's or a letter's, or a digest of a
    # record's key, which may be longer than an index takes.
    """CREATE TABLE IF NOT EXISTS idempotency.set_aside (
        sweep     text        NOT NULL,
        id        text        NOT NULL,
        tenant    text,
        operation text,
        key       text,
        error     text        NOT NULL,
        times     int         NOT NULL DEFAULT 1,
        until     timestamptz NOT NULL,
        PRIMARY KEY (sweep, id)
    )""",
    "CREATE INDEX IF NOT EXISTS set_aside_until ON idempotency.set_aside (until)",
)
INDEXES = (
    "CREATE INDEX CONCURRENTLY records_purgeable ON idempotency.records (greatest(expires_at, kept_until)) "
    "WHERE status IN ('completed', 'failed')",
    "CREATE INDEX CONCURRENTLY outbox_settled ON idempotency.outbox (status, greatest(settled_at, kept_at)) "
    "WHERE settled_at IS NOT NULL",
    "CREATE INDEX CONCURRENTLY alerts_sent ON idempotency.alerts (sent_at)",
)
DOWN = (
    "DROP TABLE IF EXISTS idempotency.set_aside",
    "DROP INDEX IF EXISTS idempotency.alerts_sent, idempotency.outbox_settled",
    "DROP INDEX IF EXISTS idempotency.records_purgeable",
    "ALTER TABLE idempotency.outbox DROP COLUMN IF EXISTS kept_at",
    "ALTER TABLE idempotency.records DROP COLUMN IF EXISTS kept_until",
)


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)
    for index in INDEXES:
        create_index(index)
    op.execute("DROP INDEX IF EXISTS idempotency.records_expiring")


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement)
    create_index(
        "CREATE INDEX CONCURRENTLY records_expiring ON idempotency.records (expires_at) "
        "WHERE status IN ('completed', 'failed')"
    )
