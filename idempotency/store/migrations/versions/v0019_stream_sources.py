"""What a stream's position is of: a topic, a stream or a super stream may have one name. Code of 0018 runs beside this."""

from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    # NULL: of before, or where a person has moved it; what is read there next says it
    op.execute("ALTER TABLE idempotency.stream_positions ADD COLUMN IF NOT EXISTS source text")


def downgrade() -> None:
    op.execute("ALTER TABLE idempotency.stream_positions DROP COLUMN source")
