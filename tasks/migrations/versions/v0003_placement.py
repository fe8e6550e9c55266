"""Order placement by events: checkouts, stock and its reservations, the status of an order, the order of a payment.

Code of 0002 works on it: a payment that names no order gets its own id as its order's, by a trigger. The orders that
such code accepts meanwhile are paid as before, and stay PENDING_PAYMENT.
"""

from alembic import op

revision = "0003"
down_revision = "0002"

PAYMENTS = """
ALTER TABLE payments ADD order_id varchar, ADD order_status varchar, DROP CONSTRAINT status_known;
UPDATE payments SET order_id = id;
UPDATE payments p SET order_status = 'placed' FROM orders o WHERE (o.tenant, o.id) = (p.tenant, p.id);
ALTER TABLE payments ALTER order_id SET NOT NULL,
    ADD CONSTRAINT payments_order_id UNIQUE (tenant, order_id),
    ADD CONSTRAINT status_known CHECK (
        status IN ('PAYMENT_INITIATED', 'pending', 'captured', 'free', 'failed', 'unknown', 'cancelled')
    ),
    ADD CONSTRAINT order_status_known CHECK (order_status IN ('placed', 'cancelled'));

CREATE FUNCTION payment_without_order() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.order_id := coalesce(NEW.order_id, NEW.id);
    RETURN NEW;
END $$;
CREATE TRIGGER payment_without_order BEFORE INSERT ON payments
    FOR EACH ROW EXECUTE FUNCTION payment_without_order();
"""

ORDERS = """
CREATE TABLE checkouts (
    tenant              varchar     NOT NULL DEFAULT 'default',
    checkout_session_id varchar     NOT NULL,
    order_id            varchar     NOT NULL,
    customer_id         varchar     NOT NULL,
    amount              bigint      NOT NULL,
    currency            varchar     NOT NULL,
    sku                 varchar,
    quantity            bigint      NOT NULL,
    created_at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, checkout_session_id),
    CONSTRAINT checkouts_order_id UNIQUE (tenant, order_id)
);
INSERT INTO checkouts (tenant, checkout_session_id, order_id, customer_id, amount, currency, quantity, created_at)
SELECT tenant, checkout_session_id, id, customer_id, amount, currency, 1, created_at FROM orders;

ALTER TABLE orders ADD sku varchar, ADD quantity bigint NOT NULL DEFAULT 1,
    ADD status varchar NOT NULL DEFAULT 'PENDING_PAYMENT', ADD reason varchar,
    ADD payment_requested boolean NOT NULL DEFAULT false;
UPDATE orders o SET payment_requested = true, reason = CASE WHEN p.status = 'failed' THEN coalesce(p.failure, 'payment_failed') END,
    status = CASE
        WHEN p.status IN ('captured', 'free') THEN 'PROCESSING'
        WHEN p.status = 'failed' THEN 'CANCELLED'
        ELSE 'PENDING_PAYMENT'
    END
FROM payments p WHERE (p.tenant, p.id) = (o.tenant, o.id);
ALTER TABLE orders ADD CONSTRAINT quantity_positive CHECK (quantity > 0),
    ADD CONSTRAINT status_known CHECK (status IN ('PENDING_PAYMENT', 'PAID', 'PROCESSING', 'CANCELLED')),
    ADD CONSTRAINT cancelled_for_a_reason CHECK ((status = 'CANCELLED') = (reason IS NOT NULL));
"""

STOCK = """
CREATE TABLE stock (
    tenant    varchar NOT NULL DEFAULT 'default',
    sku       varchar NOT NULL,
    available bigint  NOT NULL,
    reserved  bigint  NOT NULL,
    PRIMARY KEY (tenant, sku),
    CONSTRAINT available_not_negative CHECK (available >= 0),
    CONSTRAINT reserved_not_negative CHECK (reserved >= 0)
);

CREATE TABLE reservations (
    tenant     varchar     NOT NULL DEFAULT 'default',
    order_id   varchar     NOT NULL,
    sku        varchar,
    quantity   bigint      NOT NULL,
    status     varchar     NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, order_id),
    CONSTRAINT quantity_not_negative CHECK (quantity >= 0),
    CONSTRAINT status_known CHECK (
        status IN ('STOCK_CONFIRMED', 'STOCK_RESERVED', 'STOCK_RELEASED', 'OUT_OF_STOCK')
    )
);

CREATE TABLE stock_movements (
    tenant    varchar     NOT NULL DEFAULT 'default',
    kind      varchar     NOT NULL,
    reference varchar     NOT NULL,
    sku       varchar     NOT NULL,
    quantity  bigint      NOT NULL,
    moved_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, kind, reference),
    FOREIGN KEY (tenant, sku) REFERENCES stock (tenant, sku),
    CONSTRAINT quantity_positive CHECK (quantity > 0),
    CONSTRAINT kind_known CHECK (kind IN ('received', 'reserved', 'released'))
);
"""

OBSERVER = """
CREATE TABLE placements (
    tenant   varchar   NOT NULL DEFAULT 'default',
    order_id varchar   NOT NULL,
    seen     varchar[] NOT NULL,
    PRIMARY KEY (tenant, order_id)
);
"""

# Fails if an order's payment is waiting or cancelled, which code of 0002 does not know.
WITHOUT_PLACEMENT = """
DROP TABLE placements, stock_movements, reservations, stock, checkouts;
ALTER TABLE orders DROP sku, DROP quantity, DROP status, DROP reason, DROP payment_requested;
DROP TRIGGER payment_without_order ON payments;
DROP FUNCTION payment_without_order();
ALTER TABLE payments DROP order_id, DROP order_status, DROP CONSTRAINT status_known,
    ADD CONSTRAINT status_known CHECK (status IN ('pending', 'captured', 'free', 'failed', 'unknown'));
"""


def upgrade() -> None:
    op.execute(PAYMENTS)
    op.execute(ORDERS)
    op.execute(STOCK)
    op.execute(OBSERVER)


def downgrade() -> None:
    op.execute(WITHOUT_PLACEMENT)
