"""Payments, refunds, notifications, support cases and the ledger."""

from alembic import op

revision = "0001"
down_revision = None

TABLES = """
CREATE TABLE payments (
    id          varchar     PRIMARY KEY,
    customer_id varchar     NOT NULL,
    amount      bigint      NOT NULL,
    currency    varchar     NOT NULL,
    status      varchar     NOT NULL,
    charge_id   varchar,
    refunded    bigint      NOT NULL,
    failure     varchar,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT amount_not_negative CHECK (amount >= 0),
    CONSTRAINT refunded_within_amount CHECK (refunded BETWEEN 0 AND amount),
    CONSTRAINT status_known CHECK (status IN ('pending', 'captured', 'free', 'failed', 'unknown')),
    CONSTRAINT captured_has_a_charge CHECK ((status = 'captured') = (charge_id IS NOT NULL))
);

CREATE TABLE refunds (
    id                 varchar     PRIMARY KEY,
    payment_id         varchar     NOT NULL,
    amount             bigint      NOT NULL,
    reason             varchar     NOT NULL,
    status             varchar     NOT NULL,
    provider_refund_id varchar,
    failure            varchar,
    created_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT amount_positive CHECK (amount > 0),
    CONSTRAINT status_known CHECK (status IN ('pending', 'reserved', 'refunded', 'refused', 'unknown')),
    CONSTRAINT refunded_has_an_id CHECK ((status = 'refunded') = (provider_refund_id IS NOT NULL))
);
CREATE INDEX ix_refunds_payment_id ON refunds (payment_id);

CREATE TABLE notifications (
    about      varchar PRIMARY KEY,
    event_id   varchar NOT NULL,
    status     varchar NOT NULL,
    message_id varchar,
    failure    varchar
);

CREATE TABLE support_cases (
    payment_id varchar     PRIMARY KEY REFERENCES payments (id),
    code       varchar     NOT NULL,
    opened_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE ledger (
    id         bigserial PRIMARY KEY,
    kind       varchar   NOT NULL,
    reference  varchar   NOT NULL,
    payment_id varchar   NOT NULL REFERENCES payments (id),
    debit      varchar   NOT NULL,
    credit     varchar   NOT NULL,
    amount     bigint    NOT NULL,
    currency   varchar   NOT NULL,
    CONSTRAINT posted_once UNIQUE (kind, reference),
    CONSTRAINT amount_positive CHECK (amount > 0),
    CONSTRAINT two_accounts CHECK (debit <> credit)
);

-- A posting has debit and credit in one row; this view has its two entries.
CREATE VIEW ledger_entries AS
SELECT id, kind, reference, debit AS account, currency, amount FROM ledger
UNION ALL
SELECT id, kind, reference, credit, currency, -amount FROM ledger;
"""


def upgrade() -> None:
    op.execute(TABLES)


def downgrade() -> None:
    op.execute("DROP VIEW ledger_entries")
    op.execute("DROP TABLE ledger, support_cases, notifications, refunds, payments")
