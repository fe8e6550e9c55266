"""An outbox row has one open dead letter: one that was settled must not swallow the next failure of the same row."""

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.execute("ALTER TABLE idempotency.dead_letters DROP CONSTRAINT dead_letters_outbox_id_key")
    op.execute("CREATE UNIQUE INDEX dead_letters_one_row ON idempotency.dead_letters (outbox_id) WHERE status = 'open'")
    # which rows have no letter at all is asked by the alerts
    op.execute("CREATE INDEX dead_letters_row ON idempotency.dead_letters (outbox_id) WHERE outbox_id IS NOT NULL")


def downgrade() -> None:
    op.execute("DROP INDEX idempotency.dead_letters_one_row, idempotency.dead_letters_row")
    # as before: of all letters of a row the newest names it
    op.execute("""
        UPDATE idempotency.dead_letters d SET outbox_id = NULL
        WHERE EXISTS (SELECT FROM idempotency.dead_letters newer
                      WHERE newer.outbox_id = d.outbox_id AND newer.id > d.id)
    """)
    op.execute("ALTER TABLE idempotency.dead_letters ADD CONSTRAINT dead_letters_outbox_id_key UNIQUE (outbox_id)")
