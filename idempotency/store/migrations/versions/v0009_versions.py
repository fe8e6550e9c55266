"""Versions: which generation a row delivers, how often a message came back, and which code may run on this schema."""

from alembic import op

revision = "0009"
down_revision = "0008"

# Constant defaults: no row is rewritten.
TABLES = """
ALTER TABLE idempotency.outbox
    ADD COLUMN generation       int NOT NULL DEFAULT 1,
    ADD COLUMN refusals         int NOT NULL DEFAULT 0,
    ADD COLUMN first_refused_at timestamptz;

-- The attempt that first found the attempts used up: later ones are counted from it.
ALTER TABLE idempotency.records ADD COLUMN spent_at int;

-- How often on_failed was tried for a message of the dead-letter queue that is not stored yet.
CREATE TABLE idempotency.dead_letter_tries (
    digest text PRIMARY KEY,
    tries  int  NOT NULL
);

-- The oldest revision whose code may run on this schema. A migration that older code cannot live with sets it to its own.
CREATE TABLE idempotency.compatibility (
    one_row         boolean PRIMARY KEY DEFAULT true CHECK (one_row),
    compatible_from text    NOT NULL
);
INSERT INTO idempotency.compatibility (compatible_from) VALUES ('0009');
"""


def upgrade() -> None:
    op.execute(TABLES)


def downgrade() -> None:
    op.execute("ALTER TABLE idempotency.records DROP COLUMN spent_at")
    op.execute("DROP TABLE idempotency.dead_letter_tries, idempotency.compatibility")
    op.execute(
        "ALTER TABLE idempotency.outbox DROP COLUMN generation, DROP COLUMN refusals, DROP COLUMN first_refused_at"
    )
