"""Payments and refunds are found by the provider's id, of whichever tenant they are: for the reconciliation.

Code of 0005 works on it.
"""

from alembic import op

revision = "0006"
down_revision = "0005"

INDEXES = """
CREATE INDEX payments_at_provider ON payments (charge_id) WHERE charge_id IS NOT NULL;
CREATE INDEX refunds_at_provider ON refunds (provider_refund_id) WHERE provider_refund_id IS NOT NULL;
"""


def upgrade() -> None:
    op.execute(INDEXES)


def downgrade() -> None:
    op.execute("DROP INDEX payments_at_provider; DROP INDEX refunds_at_provider;")
