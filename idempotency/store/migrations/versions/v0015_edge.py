"""The edge: what is new for webhooks and for the audit. Code of 0014 runs beside this."""

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    """Nothing yet."""


def downgrade() -> None:
    """Nothing yet."""
