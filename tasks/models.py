"""The business tables, as `tasks.migrate` creates them. Amounts are integers in the currency's minor unit, never floats."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from sqlalchemy import BigInteger, CheckConstraint, DateTime, ForeignKeyConstraint, Index, UniqueConstraint, func
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
        CheckConstraint("status IN ('pending', 'captured', 'free', 'failed', 'unknown')", name="status_known"),
        CheckConstraint("(status = 'captured') = (charge_id IS NOT NULL)", name="captured_has_a_charge"),
    )

    tenant: Mapped[Tenant]
    id: Mapped[str] = mapped_column(primary_key=True)
    customer_id: Mapped[str]
    amount: Mapped[int]
    currency: Mapped[str]
    status: Mapped[str] = mapped_column(default="pending")
    charge_id: Mapped[str | None]
    # refunded, or reserved for a refund in progress
    refunded: Mapped[int] = mapped_column(default=0)
    failure: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class Order(Base):
    """One order of a checkout session, however often its button was clicked. Its id is also its payment's."""

    __tablename__ = "orders"
    __table_args__ = (UniqueConstraint("tenant", "id", name="orders_id"),)

    tenant: Mapped[Tenant]
    checkout_session_id: Mapped[str] = mapped_column(primary_key=True)
    id: Mapped[str]
    customer_id: Mapped[str]
    amount: Mapped[int]
    currency: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class Refund(Base):
    """One refund request. `payment_id` is as requested: there may be no such payment."""

    __tablename__ = "refunds"
    __table_args__ = (
        CheckConstraint("amount > 0", name="amount_positive"),
        CheckConstraint(
            "status IN ('pending', 'reserved', 'refunded', 'refused', 'unknown')",
            name="status_known",
        ),
        CheckConstraint("(status = 'refunded') = (provider_refund_id IS NOT NULL)", name="refunded_has_an_id"),
        Index("ix_refunds_payment_id", "tenant", "payment_id"),
    )

    tenant: Mapped[Tenant]
    id: Mapped[str] = mapped_column(primary_key=True)
    payment_id: Mapped[str]
    amount: Mapped[int]
    reason: Mapped[str]
    status: Mapped[str] = mapped_column(default="pending")
    provider_refund_id: Mapped[str | None]
    failure: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


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
    kind: Mapped[str]  # capture or refund
    reference: Mapped[str]  # the payment's or the refund's id
    payment_id: Mapped[str]
    debit: Mapped[str]
    credit: Mapped[str]
    amount: Mapped[int]
    currency: Mapped[str]


# For writes without ORM objects: a statement is cheaper than a flush.
payments, ledger = (Base.metadata.tables[name] for name in ("payments", "ledger"))
