"""Ordering keys that cost nothing while blocked, and the markers by which a queue's loss is known."""

from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.execute("SELECT 1")


def downgrade() -> None:
    op.execute("SELECT 1")
