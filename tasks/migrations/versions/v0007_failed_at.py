"""Since when a refund no longer counts: its money came back, or it was another refund.

Code of 0006 works on it: what it reverses has no time, and counts as failed from its beginning.
"""

from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.execute("ALTER TABLE refunds ADD COLUMN failed_at timestamptz")


def downgrade() -> None:
    op.execute("ALTER TABLE refunds DROP COLUMN failed_at")
