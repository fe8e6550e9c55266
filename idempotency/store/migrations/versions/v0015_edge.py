"""The edge: what is new for webhooks and for the audit. Code of 0014 runs beside this: it takes no notice of a wake."""

from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    # somebody has told a running operation that what it waits for is known
    op.execute("ALTER TABLE idempotency.records ADD COLUMN woken boolean NOT NULL DEFAULT false")


def downgrade() -> None:
    op.execute("ALTER TABLE idempotency.records DROP COLUMN woken")
