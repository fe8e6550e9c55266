"""A tenant in every key, and orders.

Code of 0001 works on it, for the default tenant.
"""

from alembic import op

revision = "0002"
down_revision = "0001"

TENANTS = """
ALTER TABLE support_cases DROP CONSTRAINT support_cases_payment_id_fkey, DROP CONSTRAINT support_cases_pkey;
ALTER TABLE ledger DROP CONSTRAINT ledger_payment_id_fkey, DROP CONSTRAINT posted_once;

ALTER TABLE payments ADD tenant varchar NOT NULL DEFAULT 'default',
    DROP CONSTRAINT payments_pkey, ADD PRIMARY KEY (tenant, id);
ALTER TABLE refunds ADD tenant varchar NOT NULL DEFAULT 'default',
    DROP CONSTRAINT refunds_pkey, ADD PRIMARY KEY (tenant, id);
ALTER TABLE notifications ADD tenant varchar NOT NULL DEFAULT 'default',
    DROP CONSTRAINT notifications_pkey, ADD PRIMARY KEY (tenant, about);
ALTER TABLE support_cases ADD tenant varchar NOT NULL DEFAULT 'default',
    ADD PRIMARY KEY (tenant, payment_id), ADD FOREIGN KEY (tenant, payment_id) REFERENCES payments (tenant, id);
ALTER TABLE ledger ADD tenant varchar NOT NULL DEFAULT 'default',
    ADD FOREIGN KEY (tenant, payment_id) REFERENCES payments (tenant, id),
    ADD CONSTRAINT posted_once UNIQUE (tenant, kind, reference);

DROP INDEX ix_refunds_payment_id;
CREATE INDEX ix_refunds_payment_id ON refunds (tenant, payment_id);
"""

ORDERS = """
CREATE TABLE orders (
    tenant              varchar     NOT NULL DEFAULT 'default',
    checkout_session_id varchar     NOT NULL,
    id                  varchar     NOT NULL,
    customer_id         varchar     NOT NULL,
    amount              bigint      NOT NULL,
    currency            varchar     NOT NULL,
    created_at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, checkout_session_id),
    CONSTRAINT orders_id UNIQUE (tenant, id)
);
"""

# Fails if two tenants have used the same id.
WITHOUT_TENANTS = """
DROP TABLE orders;
ALTER TABLE support_cases DROP CONSTRAINT support_cases_tenant_payment_id_fkey, DROP CONSTRAINT support_cases_pkey;
ALTER TABLE ledger DROP CONSTRAINT ledger_tenant_payment_id_fkey, DROP CONSTRAINT posted_once;
DROP INDEX ix_refunds_payment_id;

ALTER TABLE payments DROP CONSTRAINT payments_pkey, DROP tenant, ADD PRIMARY KEY (id);
ALTER TABLE refunds DROP CONSTRAINT refunds_pkey, DROP tenant, ADD PRIMARY KEY (id);
ALTER TABLE notifications DROP CONSTRAINT notifications_pkey, DROP tenant, ADD PRIMARY KEY (about);
ALTER TABLE support_cases DROP tenant, ADD PRIMARY KEY (payment_id), ADD FOREIGN KEY (payment_id) REFERENCES payments;
ALTER TABLE ledger DROP tenant, ADD FOREIGN KEY (payment_id) REFERENCES payments,
    ADD CONSTRAINT posted_once UNIQUE (kind, reference);
CREATE INDEX ix_refunds_payment_id ON refunds (payment_id);
"""


def upgrade() -> None:
    op.execute(TENANTS)
    op.execute(ORDERS)


def downgrade() -> None:
    op.execute(WITHOUT_TENANTS)
