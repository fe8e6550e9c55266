"""The last sign of life of workers, relays and beats, the alarms that are on, and what counting the backlog reads."""

from alembic import op

from idempotency.store.migrations.indexes import create_index

revision = "0008"
down_revision = "0007"

TABLES = """
-- One small row per process, written every few seconds: nothing that changes is in an index.
CREATE TABLE IF NOT EXISTS idempotency.processes (
    kind       text        NOT NULL CHECK (kind IN ('worker', 'relay', 'beat')),
    name       text        NOT NULL,
    host       text        NOT NULL,
    pid        int         NOT NULL,
    service    text        NOT NULL,
    version    text        NOT NULL,
    queues     text[]      NOT NULL DEFAULT '{}',
    started_at timestamptz NOT NULL,
    seen_at    timestamptz NOT NULL,
    PRIMARY KEY (kind, name, host, pid)
);

-- An alarm that is on: since when, and when it was last sent. Any number of alerting processes share it.
CREATE TABLE IF NOT EXISTS idempotency.alarms (
    service text        NOT NULL,
    name    text        NOT NULL,
    since     timestamptz NOT NULL,
    logged_at timestamptz,
    sent_at   timestamptz,
    PRIMARY KEY (service, name)
);

-- Whether the last claim took a started record from another holder: RETURNING shows no old values before Postgres 18.
ALTER TABLE idempotency.records ADD COLUMN IF NOT EXISTS taken_over boolean NOT NULL DEFAULT false;
"""

INDEXES = (
    # What may not have begun yet, by queue, the oldest first. Rows of other origins have a record.
    "CREATE INDEX CONCURRENTLY outbox_waiting ON idempotency.outbox (queue, id) "
    "WHERE settled_at IS NULL AND origin IN ('enqueue', 'reconcile')",
    "CREATE INDEX CONCURRENTLY outbox_failed ON idempotency.outbox (id) WHERE status = 'failed'",
    # Not "WHERE status = 'released'", which means the same: see records_held.
    "CREATE INDEX CONCURRENTLY records_released ON idempotency.records (queue, available_at) "
    "WHERE available_at IS NOT NULL",
)


def upgrade() -> None:
    op.execute(TABLES)
    for index in INDEXES:
        create_index(index)


def downgrade() -> None:
    op.execute("ALTER TABLE idempotency.records DROP COLUMN taken_over")
    op.execute("DROP INDEX idempotency.records_released, idempotency.outbox_failed, idempotency.outbox_waiting")
    op.execute("DROP TABLE idempotency.alarms, idempotency.processes")
