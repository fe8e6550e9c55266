"""Dead letters that come from the broker, their discard by two people, and what has been said about them."""

from alembic import op

revision = "0003"
down_revision = "0002"

TABLES = r"""
ALTER TABLE idempotency.dead_letters
    ADD COLUMN digest text,
    ADD COLUMN alerted_at timestamptz;

-- Among open letters only: one that was settled must not swallow the next failure of the same kind.
DO $$
BEGIN
    EXECUTE (SELECT format('ALTER TABLE idempotency.dead_letters DROP CONSTRAINT %I', conname)
             FROM pg_constraint
             WHERE conrelid = 'idempotency.dead_letters'::regclass AND contype = 'u' AND array_length(conkey, 1) = 6);
END $$;
CREATE UNIQUE INDEX dead_letters_one_open ON idempotency.dead_letters
    (tenant, operation, key, generation, reason, fingerprint) WHERE status = 'open';
CREATE UNIQUE INDEX dead_letters_one_message ON idempotency.dead_letters (digest) WHERE status = 'open';

CREATE INDEX dead_letters_operation ON idempotency.dead_letters (tenant, operation, key) WHERE status = 'open';
CREATE INDEX dead_letters_unalerted ON idempotency.dead_letters (id) WHERE alerted_at IS NULL;
CREATE INDEX dead_letters_settled ON idempotency.dead_letters (settled_at) WHERE status <> 'open';

ALTER TABLE idempotency.outbox ADD COLUMN alerted_at timestamptz;
CREATE INDEX outbox_failed_unalerted ON idempotency.outbox (id) WHERE status = 'failed' AND alerted_at IS NULL;

CREATE TABLE idempotency.operators (
    name       text        PRIMARY KEY CHECK (char_length(name) BETWEEN 1 AND 255),
    role       text        NOT NULL CHECK (role IN ('operator', 'admin')),
    token_hash text        NOT NULL UNIQUE CHECK (token_hash ~ '^[0-9a-f]{64}$'),
    expires_at timestamptz NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE idempotency.discards (
    letter       bigint      PRIMARY KEY REFERENCES idempotency.dead_letters ON DELETE CASCADE,
    requested_by text        NOT NULL,
    requested_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    reason       text        NOT NULL CHECK (btrim(reason) <> '' AND char_length(reason) <= 500),
    approved_by  text,
    approved_at  timestamptz,
    CONSTRAINT another_person_approves CHECK (approved_by <> requested_by),
    CONSTRAINT approval_is_whole CHECK ((approved_by IS NULL) = (approved_at IS NULL))
);

-- When each kind of alert was last sent: any number of alerting processes keep to one rate together.
CREATE TABLE idempotency.alerts (
    kind    text        PRIMARY KEY,
    sent_at timestamptz NOT NULL
);
"""


def upgrade() -> None:
    op.execute(TABLES)


def downgrade() -> None:
    op.execute("DROP TABLE idempotency.discards, idempotency.operators, idempotency.alerts")
    op.execute("ALTER TABLE idempotency.outbox DROP COLUMN alerted_at")
    op.execute(
        "DROP INDEX idempotency.dead_letters_one_open, idempotency.dead_letters_operation, "
        "idempotency.dead_letters_settled"
    )
    # as before: among all letters, of which the newest is kept
    op.execute("""
        DELETE FROM idempotency.dead_letters d USING idempotency.dead_letters newer
        WHERE newer.id > d.id
          AND (newer.tenant, newer.operation, newer.key, newer.generation, newer.reason, newer.fingerprint)
            = (d.tenant, d.operation, d.key, d.generation, d.reason, d.fingerprint)
    """)
    op.execute(
        "ALTER TABLE idempotency.dead_letters DROP COLUMN digest, DROP COLUMN alerted_at, "
        "ADD UNIQUE (tenant, operation, key, generation, reason, fingerprint)"
    )
