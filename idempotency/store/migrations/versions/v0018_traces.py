"""The span of an operation's last attempt. Code of 0017 runs beside this, and this code without it."""

from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    op.execute("ALTER TABLE idempotency.records ADD COLUMN trace text")


def downgrade() -> None:
    op.execute("ALTER TABLE idempotency.records DROP COLUMN trace")
