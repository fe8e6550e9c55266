"""What counts as accepted: every unsettled row, since a message that came back has no record yet either."""

from alembic import op

from idempotency.store.migrations.indexes import create_index

revision = "0010"
down_revision = "0009"

WAITING = "CREATE INDEX CONCURRENTLY outbox_waiting ON idempotency.outbox (queue, id) WHERE settled_at IS NULL"


def upgrade() -> None:
    create_index(WAITING)


def downgrade() -> None:
    op.execute("DROP INDEX idempotency.outbox_waiting")
    op.execute(
        "CREATE INDEX outbox_waiting ON idempotency.outbox (queue, id) "
        "WHERE settled_at IS NULL AND origin IN ('enqueue', 'reconcile')"
    )
