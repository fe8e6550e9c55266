"""The business tables, as `tasks.migrate` creates them. Amounts are integers in the currency's minor unit, never floats."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from sqlalchemy import (
    ARRAY,
    BigInteger,
    CheckConstraint,
    DateTime,
    FetchedValue,
    ForeignKeyConstraint,
    Index,
    String,
    UniqueConstraint,
    false,
    func,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from .tenants import DEFAULT

# The first column of every primary key.
Tenant = Annotated[str, mapped_column(primary_key=True, server_default=DEFAULT)]


class Base(DeclarativeBase):
    type_annotation_map = {int: BigInteger, datetime: DateTime(timezone=True)}


class Payment(Base):
    """One purchase to be paid. Its primary key is a second safeguard behind the idempotency record."""

    __tablename__ = "payments"
    __table_args__ = (
        CheckConstraint("amount >= 0", name="amount_not_negative"),
        CheckConstraint("refunded BETWEEN 0 AND amount", name="refunded_within_amount"),
        CheckConstraint(
            "status IN ('PAYMENT_INITIATED', 'pending', 'captured', 'free', 'failed', 'unknown', 'cancelled')",
            name="status_known",
        ),
        CheckConstraint("(status = 'captured') = (charge_id IS NOT NULL)", name="captured_has_a_charge"),
        CheckConstraint("order_status IN ('placed', 'cancelled')", name="order_status_known"),
        UniqueConstraint("tenant", "order_id", name="payments_order_id"),
        Index("payments_of_charge", "tenant", "charge_id", postgresql_where=text("charge_id IS NOT NULL")),
        Index(
            "payments_at_stripe",
            "charge_id",
            unique=True,
            postgresql_where=text("gateway = 'stripe' AND charge_id IS NOT NULL"),
        ),
    )

    tenant: Mapped[Tenant]
    id: Mapped[str] = mapped_column(primary_key=True)
    customer_id: Mapped[str]
    amount: Mapped[int]
    currency: Mapped[str]
    status: Mapped[str] = mapped_column(default="pending")
    # the provider that has charged it, and the charge's id there
    gateway: Mapped[str] = mapped_column(server_default="stripe")
    charge_id: Mapped[str | None]
    # the sum of its refunds that were made, are in progress or in doubt
    refunded: Mapped[int] = mapped_column(default=0)
    failure: Mapped[str | None]
    # of a payment without an order: its own id, which a trigger sets
    order_id: Mapped[str] = mapped_column(server_default=FetchedValue())
    # what is known here of the order; None without one
    order_status: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())

    @property
    def of_order(self) -> dict[str, str]:
        """What an event about this payment says of its order, for those who listen to an order's events only."""
        return {} if self.order_status is None else {"order_id": self.order_id}


class Checkout(Base):
    """One checkout session and the order that was placed from it, however often its button was clicked."""

    __tablename__ = "checkouts"
    __table_args__ = (UniqueConstraint("tenant", "order_id", name="checkouts_order_id"),)

    tenant: Mapped[Tenant]
    checkout_session_id: Mapped[str] = mapped_column(primary_key=True)
    order_id: Mapped[str]
    customer_id: Mapped[str]
    amount: Mapped[int]
    currency: Mapped[str]
    # None: nothing that is kept in stock
    sku: Mapped[str | None]
    quantity: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class Order(Base):
    """One order, and what has become of it. Its id is also its payment's. `reason`: why it was cancelled."""

    __tablename__ = "orders"
    __table_args__ = (
        UniqueConstraint("tenant", "id", name="orders_id"),
        CheckConstraint("quantity > 0", name="quantity_positive"),
        CheckConstraint("status IN ('PENDING_PAYMENT', 'PAID', 'PROCESSING', 'CANCELLED')", name="status_known"),
        CheckConstraint("(status = 'CANCELLED') = (reason IS NOT NULL)", name="cancelled_for_a_reason"),
    )

    tenant: Mapped[Tenant]
    # the primary key is a second safeguard behind the checkout's
    checkout_session_id: Mapped[str] = mapped_column(primary_key=True)
    id: Mapped[str]
    customer_id: Mapped[str]
    amount: Mapped[int]
    currency: Mapped[str]
    sku: Mapped[str | None]
    quantity: Mapped[int] = mapped_column(server_default=text("1"))
    status: Mapped[str] = mapped_column(server_default="PENDING_PAYMENT")
    reason: Mapped[str | None]
    payment_requested: Mapped[bool] = mapped_column(server_default=false())
    created_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class Stock(Base):
    """How many pieces there are: those that can be ordered, those set aside for orders, and those returned damaged."""

    __tablename__ = "stock"
    __table_args__ = (
        CheckConstraint("available >= 0", name="available_not_negative"),
        CheckConstraint("reserved >= 0", name="reserved_not_negative"),
        CheckConstraint("quarantined >= 0", name="quarantined_not_negative"),
    )

    tenant: Mapped[Tenant]
    sku: Mapped[str] = mapped_column(primary_key=True)
    available: Mapped[int]
    reserved: Mapped[int]
    quarantined: Mapped[int] = mapped_column(server_default=text("0"))


class Reservation(Base):
    """What was set aside for one order: `quantity` pieces, 0 if there were too few or none were wanted."""

    __tablename__ = "reservations"
    __table_args__ = (
        CheckConstraint("quantity >= 0", name="quantity_not_negative"),
        CheckConstraint(
            "status IN ('STOCK_CONFIRMED', 'STOCK_RESERVED', 'STOCK_RELEASED', 'STOCK_RETURNED', 'OUT_OF_STOCK')",
            name="status_known",
        ),
    )

    tenant: Mapped[Tenant]
    order_id: Mapped[str] = mapped_column(primary_key=True)
    sku: Mapped[str | None]
    quantity: Mapped[int]
    status: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class Movement(Base):
    """A movement of stock, from which `stock` can be computed again.

    `reference`: the delivery that was received, the order, or the return.
    """

    __tablename__ = "stock_movements"
    __table_args__ = (
        ForeignKeyConstraint(["tenant", "sku"], ["stock.tenant", "stock.sku"]),
        CheckConstraint("quantity > 0", name="quantity_positive"),
        CheckConstraint("kind IN ('received', 'reserved', 'released', 'returned', 'quarantined')", name="kind_known"),
    )

    tenant: Mapped[Tenant]
    kind: Mapped[str] = mapped_column(primary_key=True)
    reference: Mapped[str] = mapped_column(primary_key=True)
    sku: Mapped[str]
    quantity: Mapped[int]
    moved_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class Placement(Base):
    """The events that the observer has seen of an order. No service reads it."""

    __tablename__ = "placements"

    tenant: Mapped[Tenant]
    order_id: Mapped[str] = mapped_column(primary_key=True)
    seen: Mapped[list[str]] = mapped_column(ARRAY(String))


class Return(Base):
    """One order that is sent back. `problem`: why it was aborted or cancelled, or what a person has to see to."""

    __tablename__ = "returns"
    __table_args__ = (
        CheckConstraint(
            "status IN ('REQUESTED', 'LABELLED', 'IN_TRANSIT', 'INSPECTED', "
            "'REFUNDED', 'REJECTED', 'ESCALATED', 'ABORTED', 'CANCELLED')",
            name="status_known",
        ),
        CheckConstraint("verdict IN ('APPROVED', 'DAMAGED', 'REJECTED')", name="verdict_known"),
        CheckConstraint(
            "(status IN ('ESCALATED', 'ABORTED', 'CANCELLED')) = (problem IS NOT NULL)", name="ended_with_a_problem"
        ),
        # an order whose return came to nothing may be returned again
        Index(
            "returns_of_order",
            "tenant",
            "order_id",
            unique=True,
            postgresql_where=text("status NOT IN ('REJECTED', 'ABORTED', 'CANCELLED')"),
        ),
    )

    tenant: Mapped[Tenant]
    id: Mapped[str] = mapped_column(primary_key=True)
    order_id: Mapped[str]
    customer_id: Mapped[str]
    reason: Mapped[str]
    # whether the buyer wants the goods back if they are rejected
    reship: Mapped[bool]
    status: Mapped[str] = mapped_column(server_default="REQUESTED")
    verdict: Mapped[str | None]
    refund_id: Mapped[str | None]
    problem: Mapped[str | None]
    # what has been heard, whether or not the saga has used it
    is_collected: Mapped[bool] = mapped_column(server_default=false())
    is_inspected: Mapped[bool] = mapped_column(server_default=false())
    created_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class Label(Base):
    """A label that the carrier has made: for the buyer's parcel (`return`), or for the goods' way back (`reship`)."""

    __tablename__ = "labels"
    __table_args__ = (
        CheckConstraint("kind IN ('return', 'reship')", name="kind_known"),
        CheckConstraint("status IN ('CREATED', 'COLLECTED', 'VOIDED')", name="status_known"),
        Index("labels_return_id", "tenant", "return_id"),
    )

    tenant: Mapped[Tenant]
    # the carrier's
    id: Mapped[str] = mapped_column(primary_key=True)
    return_id: Mapped[str]
    kind: Mapped[str]
    status: Mapped[str] = mapped_column(server_default="CREATED")
    created_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class Inspection(Base):
    """What the warehouse has found in a parcel that came back."""

    __tablename__ = "inspections"
    __table_args__ = (CheckConstraint("verdict IN ('APPROVED', 'DAMAGED', 'REJECTED')", name="verdict_known"),)

    tenant: Mapped[Tenant]
    return_id: Mapped[str] = mapped_column(primary_key=True)
    verdict: Mapped[str]
    inspected_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class ReturnCase(Base):
    """Something about a return that a person has to see to; `code` says what."""

    __tablename__ = "return_cases"
    __table_args__ = (ForeignKeyConstraint(["tenant", "return_id"], ["returns.tenant", "returns.id"]),)

    tenant: Mapped[Tenant]
    return_id: Mapped[str] = mapped_column(primary_key=True)
    code: Mapped[str] = mapped_column(primary_key=True)
    opened_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class Refund(Base):
    """One refund request, or one that was made at the provider's site. `payment_id` is as requested: there may be no such payment."""

    __tablename__ = "refunds"
    __table_args__ = (
        CheckConstraint("amount > 0", name="amount_positive"),
        CheckConstraint(
            "status IN ('pending', 'reserved', 'refunded', 'refused', 'unknown', 'reversed')",
            name="status_known",
        ),
        CheckConstraint(
            "(status IN ('refunded', 'reversed')) = (provider_refund_id IS NOT NULL)", name="refunded_has_an_id"
        ),
        Index("ix_refunds_payment_id", "tenant", "payment_id"),
        Index(
            "refunds_at_stripe",
            "provider_refund_id",
            unique=True,
            postgresql_where=text("gateway = 'stripe' AND provider_refund_id IS NOT NULL"),
        ),
    )

    tenant: Mapped[Tenant]
    id: Mapped[str] = mapped_column(primary_key=True)
    payment_id: Mapped[str]
    amount: Mapped[int]
    reason: Mapped[str]
    # made at the provider's site: no task of ours carries it out
    is_at_site: Mapped[bool] = mapped_column(server_default=false())
    status: Mapped[str] = mapped_column(default="pending")
    # the provider, and the refund's id there
    gateway: Mapped[str] = mapped_column(server_default="stripe")
    provider_refund_id: Mapped[str | None]
    failure: Mapped[str | None]
    # when its money has come back, or it was found to be another refund
    failed_at: Mapped[datetime | None]
    # of one that was made at the provider's site, when it was
    created_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class PaymentEvent(Base):
    """What a provider has reported about a charge, a refund or a dispute. `charge_id`: the transaction that it is about.

    The same event again, and another one about the same object in the same state, is no second row.
    """

    __tablename__ = "payment_events"
    __table_args__ = (
        Index(
            "reported_once",
            "tenant",
            "gateway",
            "object",
            "object_id",
            "state",
            unique=True,
            postgresql_where=text("object <> 'dispute'"),
        ),
        # a dispute may come back to a state, and changes within one
        Index(
            "dispute_reported_once",
            "tenant",
            "gateway",
            "object_id",
            "state",
            "occurred_at",
            unique=True,
            postgresql_where=text("object = 'dispute'"),
        ),
        CheckConstraint("object IN ('charge', 'refund', 'dispute')", name="object_known"),
        Index(
            "payment_events_waiting",
            "tenant",
            "charge_id",
            postgresql_where=text("NOT is_applied"),
        ),
    )

    tenant: Mapped[Tenant]
    gateway: Mapped[str] = mapped_column(primary_key=True)
    event_id: Mapped[str] = mapped_column(primary_key=True)
    type: Mapped[str]
    object: Mapped[str]
    object_id: Mapped[str]
    state: Mapped[str]
    charge_id: Mapped[str]
    payment_id: Mapped[str | None]
    refund_id: Mapped[str | None]
    # of the call that made it, if the provider was told
    effect_key: Mapped[str | None]
    amount: Mapped[int]
    currency: Mapped[str]
    code: Mapped[str | None]
    occurred_at: Mapped[datetime]
    # False: it says something of a payment that we do not know, or not yet
    is_applied: Mapped[bool] = mapped_column(server_default=false())
    received_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class Dispute(Base):
    """A charge that the customer disputes, as the provider has reported it last."""

    __tablename__ = "disputes"
    __table_args__ = (ForeignKeyConstraint(["tenant", "payment_id"], ["payments.tenant", "payments.id"]),)

    tenant: Mapped[Tenant]
    gateway: Mapped[str] = mapped_column(primary_key=True)
    # the provider's
    id: Mapped[str] = mapped_column(primary_key=True)
    payment_id: Mapped[str]
    amount: Mapped[int]
    currency: Mapped[str]
    status: Mapped[str]
    reason: Mapped[str | None]
    reported_at: Mapped[datetime]


class Notification(Base):
    """The e-mail about one event. Its primary key says what it is about: `payment.captured:<id>`."""

    __tablename__ = "notifications"

    tenant: Mapped[Tenant]
    about: Mapped[str] = mapped_column(primary_key=True)
    event_id: Mapped[str]
    status: Mapped[str]
    message_id: Mapped[str | None]
    failure: Mapped[str | None]


class SupportCase(Base):
    """A payment that failed or whose outcome is unknown, for support; `code` says why, or that it recovered."""

    __tablename__ = "support_cases"
    __table_args__ = (ForeignKeyConstraint(["tenant", "payment_id"], ["payments.tenant", "payments.id"]),)

    tenant: Mapped[Tenant]
    payment_id: Mapped[str] = mapped_column(primary_key=True)
    code: Mapped[str]
    opened_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class Posting(Base):
    """A posting in the double-entry ledger: one amount from one account to another.

    Debit and credit are in one row, so the sum over all accounts is always zero. The view `ledger_entries` has the two
    entries of each posting.
    """

    __tablename__ = "ledger"
    __table_args__ = (
        ForeignKeyConstraint(["tenant", "payment_id"], ["payments.tenant", "payments.id"]),
        UniqueConstraint("tenant", "kind", "reference", name="posted_once"),
        CheckConstraint("amount > 0", name="amount_positive"),
        CheckConstraint("debit <> credit", name="two_accounts"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    tenant: Mapped[str] = mapped_column(server_default=DEFAULT)
    kind: Mapped[str]  # capture, refund, or the reversal of one
    reference: Mapped[str]  # the payment's or the refund's id
    payment_id: Mapped[str]
    debit: Mapped[str]
    credit: Mapped[str]
    amount: Mapped[int]
    currency: Mapped[str]


# For writes without ORM objects: a statement is cheaper than a flush.
ledger = Base.metadata.tables["ledger"]
