"""Returns: what is sent back, its labels and inspections, its support cases, and stock that was returned.

Orders from before there was a warehouse can be returned, too. Payments of those that 0003 has cancelled are told so.

Code of 0003 works on it: it neither returns nor quarantines anything.
"""

from alembic import op

revision = "0004"
down_revision = "0003"

RETURNS = """
CREATE TABLE returns (
    tenant       varchar     NOT NULL DEFAULT 'default',
    id           varchar     NOT NULL,
    order_id     varchar     NOT NULL,
    customer_id  varchar     NOT NULL,
    reason       varchar     NOT NULL,
    reship       boolean     NOT NULL,
    status       varchar     NOT NULL DEFAULT 'REQUESTED',
    verdict      varchar,
    refund_id    varchar,
    problem      varchar,
    is_collected boolean     NOT NULL DEFAULT false,
    is_inspected boolean     NOT NULL DEFAULT false,
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, id),
    CONSTRAINT status_known CHECK (status IN ('REQUESTED', 'LABELLED', 'IN_TRANSIT', 'INSPECTED',
        'REFUNDED', 'REJECTED', 'ESCALATED', 'ABORTED', 'CANCELLED')),
    CONSTRAINT verdict_known CHECK (verdict IN ('APPROVED', 'DAMAGED', 'REJECTED')),
    CONSTRAINT ended_with_a_problem CHECK (
        (status IN ('ESCALATED', 'ABORTED', 'CANCELLED')) = (problem IS NOT NULL)
    )
);
CREATE UNIQUE INDEX returns_of_order ON returns (tenant, order_id)
    WHERE status NOT IN ('REJECTED', 'ABORTED', 'CANCELLED');

CREATE TABLE return_cases (
    tenant    varchar     NOT NULL DEFAULT 'default',
    return_id varchar     NOT NULL,
    code      varchar     NOT NULL,
    opened_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, return_id, code),
    FOREIGN KEY (tenant, return_id) REFERENCES returns (tenant, id)
);
"""

SHIPPING = """
CREATE TABLE labels (
    tenant     varchar     NOT NULL DEFAULT 'default',
    id         varchar     NOT NULL,
    return_id  varchar     NOT NULL,
    kind       varchar     NOT NULL,
    status     varchar     NOT NULL DEFAULT 'CREATED',
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, id),
    CONSTRAINT kind_known CHECK (kind IN ('return', 'reship')),
    CONSTRAINT status_known CHECK (status IN ('CREATED', 'COLLECTED', 'VOIDED'))
);
CREATE INDEX labels_return_id ON labels (tenant, return_id);
"""

WAREHOUSE = """
CREATE TABLE inspections (
    tenant       varchar     NOT NULL DEFAULT 'default',
    return_id    varchar     NOT NULL,
    verdict      varchar     NOT NULL,
    inspected_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, return_id),
    CONSTRAINT verdict_known CHECK (verdict IN ('APPROVED', 'DAMAGED', 'REJECTED'))
);
ALTER TABLE stock ADD quarantined bigint NOT NULL DEFAULT 0,
    ADD CONSTRAINT quarantined_not_negative CHECK (quarantined >= 0);
ALTER TABLE reservations DROP CONSTRAINT status_known, ADD CONSTRAINT status_known CHECK (
    status IN ('STOCK_CONFIRMED', 'STOCK_RESERVED', 'STOCK_RELEASED', 'STOCK_RETURNED', 'OUT_OF_STOCK')
);
ALTER TABLE stock_movements DROP CONSTRAINT kind_known, ADD CONSTRAINT kind_known CHECK (
    kind IN ('received', 'reserved', 'released', 'returned', 'quarantined')
);
"""

# 0003 has given the orders from before it no reservation, and their payments the mark `placed`, also those of cancelled ones.
# What was captured since, when a person replayed it, was not given back.
OF_BEFORE = """
INSERT INTO support_cases (tenant, payment_id, code)
SELECT p.tenant, p.id, 'refund_failed' FROM payments p JOIN orders o ON (o.tenant, o.id) = (p.tenant, p.order_id)
WHERE o.status = 'CANCELLED' AND p.order_status = 'placed' AND p.status = 'captured' AND p.refunded < p.amount
  AND NOT EXISTS (SELECT FROM reservations r WHERE (r.tenant, r.order_id) = (o.tenant, o.id))
ON CONFLICT (tenant, payment_id) DO UPDATE SET code = excluded.code;
UPDATE payments p SET order_status = 'cancelled' FROM orders o
WHERE (o.tenant, o.id) = (p.tenant, p.order_id) AND o.status = 'CANCELLED' AND p.order_status = 'placed'
  AND p.status IN ('failed', 'unknown', 'captured')
  AND NOT EXISTS (SELECT FROM reservations r WHERE (r.tenant, r.order_id) = (o.tenant, o.id));
INSERT INTO reservations (tenant, order_id, sku, quantity, status)
SELECT tenant, id, sku, 0, 'STOCK_RESERVED' FROM orders WHERE status = 'PROCESSING' ON CONFLICT DO NOTHING;
"""

# Code of 0003 would leave a return where it is, and not count what came back: its tables must be empty.
WITHOUT_RETURNS = """
DO $$ BEGIN
    IF EXISTS (SELECT FROM returns) THEN
        RAISE EXCEPTION 'there are returns, which code of 0003 does not know';
    END IF;
END $$;
DROP TABLE return_cases, returns, labels, inspections;
ALTER TABLE stock DROP quarantined;
ALTER TABLE reservations DROP CONSTRAINT status_known, ADD CONSTRAINT status_known CHECK (
    status IN ('STOCK_CONFIRMED', 'STOCK_RESERVED', 'STOCK_RELEASED', 'OUT_OF_STOCK')
);
ALTER TABLE stock_movements DROP CONSTRAINT kind_known, ADD CONSTRAINT kind_known CHECK (
    kind IN ('received', 'reserved', 'released')
);
"""


def upgrade() -> None:
    op.execute(RETURNS)
    op.execute(SHIPPING)
    op.execute(WAREHOUSE)
    op.execute(OF_BEFORE)


def downgrade() -> None:
    op.execute(WITHOUT_RETURNS)
