"""By which provider a payment was charged and a refund made. Stripe's account is one for all tenants, and each of its objects
is in our books once.

Code of 0005 works on it: what it writes counts as Stripe's. Fails if one object is there twice, which has to be mended first.
"""

from alembic import op

revision = "0006"
down_revision = "0005"

GATEWAYS = """
ALTER TABLE payments ADD COLUMN gateway varchar NOT NULL DEFAULT 'stripe';
ALTER TABLE refunds ADD COLUMN gateway varchar NOT NULL DEFAULT 'stripe';
UPDATE payments p SET gateway = e.gateway FROM payment_events e
WHERE e.gateway <> 'stripe' AND e.is_applied AND e.object = 'charge' AND e.state = 'succeeded'
  AND (e.tenant, e.charge_id) = (p.tenant, p.charge_id) AND coalesce(e.payment_id, p.id) = p.id;
UPDATE refunds r SET gateway = p.gateway FROM payments p
WHERE p.gateway <> 'stripe' AND (p.tenant, p.id) = (r.tenant, r.payment_id);
CREATE UNIQUE INDEX payments_at_stripe ON payments (charge_id) WHERE gateway = 'stripe' AND charge_id IS NOT NULL;
CREATE UNIQUE INDEX refunds_at_stripe ON refunds (provider_refund_id)
    WHERE gateway = 'stripe' AND provider_refund_id IS NOT NULL;
"""


def upgrade() -> None:
    op.execute(GATEWAYS)


def downgrade() -> None:
    op.execute("ALTER TABLE payments DROP COLUMN gateway; ALTER TABLE refunds DROP COLUMN gateway;")
