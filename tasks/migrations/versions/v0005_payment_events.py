"""What payment providers report: their events, disputes, and refunds that fail after they were made.

Code of 0004 works on it: it neither reads the new tables nor reverses a refund.
"""

from alembic import op

revision = "0005"
down_revision = "0004"

EVENTS = """
CREATE TABLE payment_events (
    tenant      varchar     NOT NULL DEFAULT 'default',
    gateway     varchar     NOT NULL,
    event_id    varchar     NOT NULL,
    type        varchar     NOT NULL,
    object      varchar     NOT NULL,
    object_id   varchar     NOT NULL,
    state       varchar     NOT NULL,
    charge_id   varchar     NOT NULL,
    payment_id  varchar,
    refund_id   varchar,
    effect_key  varchar,
    amount      bigint      NOT NULL,
    currency    varchar     NOT NULL,
    code        varchar,
    occurred_at timestamptz NOT NULL,
    is_applied  boolean     NOT NULL DEFAULT false,
    received_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, gateway, event_id),
    CONSTRAINT object_known CHECK (object IN ('charge', 'refund', 'dispute'))
);
CREATE UNIQUE INDEX reported_once ON payment_events (tenant, gateway, object, object_id, state) WHERE object <> 'dispute';
-- a dispute may come back to a state, and changes within one
CREATE UNIQUE INDEX dispute_reported_once ON payment_events (tenant, gateway, object_id, state, occurred_at)
    WHERE object = 'dispute';
CREATE INDEX payment_events_waiting ON payment_events (tenant, charge_id) WHERE NOT is_applied;

CREATE TABLE disputes (
    tenant      varchar     NOT NULL DEFAULT 'default',
    gateway     varchar     NOT NULL,
    id          varchar     NOT NULL,
    payment_id  varchar     NOT NULL,
    amount      bigint      NOT NULL,
    currency    varchar     NOT NULL,
    status      varchar     NOT NULL,
    reason      varchar,
    reported_at timestamptz NOT NULL,
    PRIMARY KEY (tenant, gateway, id),
    FOREIGN KEY (tenant, payment_id) REFERENCES payments (tenant, id)
);
CREATE INDEX payments_of_charge ON payments (tenant, charge_id) WHERE charge_id IS NOT NULL;
"""

# A reversed refund was made, and keeps its id.
REFUNDS = """
ALTER TABLE refunds ADD COLUMN is_at_site boolean NOT NULL DEFAULT false;
ALTER TABLE refunds DROP CONSTRAINT status_known, DROP CONSTRAINT refunded_has_an_id;
ALTER TABLE refunds
    ADD CONSTRAINT status_known CHECK (
        status IN ('pending', 'reserved', 'refunded', 'refused', 'unknown', 'reversed')
    ),
    ADD CONSTRAINT refunded_has_an_id CHECK ((status IN ('refunded', 'reversed')) = (provider_refund_id IS NOT NULL));
"""

# Fails if a refund was reversed.
WITHOUT = """
ALTER TABLE refunds DROP CONSTRAINT status_known, DROP CONSTRAINT refunded_has_an_id;
ALTER TABLE refunds
    ADD CONSTRAINT status_known CHECK (status IN ('pending', 'reserved', 'refunded', 'refused', 'unknown')),
    ADD CONSTRAINT refunded_has_an_id CHECK ((status = 'refunded') = (provider_refund_id IS NOT NULL)),
    DROP COLUMN is_at_site;
DROP INDEX payments_of_charge;
DROP TABLE disputes;
DROP TABLE payment_events;
"""


def upgrade() -> None:
    op.execute(EVENTS)
    op.execute(REFUNDS)


def downgrade() -> None:
    op.execute(WITHOUT)
