"""Double-entry bookkeeping: every amount moves from one account to another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from idempotency.web.business import BusinessRow, Described

from .models import Payment, Refund, ledger

PROVIDER = "provider"  # what the provider holds for us
REVENUE = "revenue"


def post(
    session: Session,
    kind: Literal["capture", "refund", "reversal"],
    reference: str,
    payment_id: str,
    amount: int,
    currency: str,
    *,
    tenant: str,
) -> None:
    """Post a capture or a refund of a payment, or the reversal of one. A reference can be posted only once per kind."""
    debit, credit = (REVENUE, PROVIDER) if kind == "refund" else (PROVIDER, REVENUE)
    posting = {
        "tenant": tenant,
        "kind": kind,
        "reference": reference,
        "payment_id": payment_id,
        "debit": debit,
        "credit": credit,
        "amount": amount,
        "currency": currency,
    }
    session.execute(ledger.insert(), posting)


# What the page shows of a row besides its time: of each, the values only to who reveals the operation.
_OF_A_PAYMENT = ("status", "amount", "refunded", "currency", "charge_id", "customer_id", "order_id")
_OF_A_REFUND = ("status", "amount", "payment_id", "provider_refund_id")
_OF_A_POSTING = ("debit", "credit", "amount", "currency")


def rows_of(session: Session, operation: Described) -> Iterator[BusinessRow]:
    """The payment or the refund that an operation is about, and what was posted for it: for the page of `idempotency web`."""
    names = (operation.tenant, operation.key)
    if (payment := session.get(Payment, names)) is not None:
        yield BusinessRow("payment", _fields(payment, _OF_A_PAYMENT), payment.created_at)
    if (refund := session.get(Refund, names)) is not None:
        yield BusinessRow("refund", _fields(refund, _OF_A_REFUND), refund.created_at)
    # by its index: there may be many
    postings = select(ledger).where(
        ledger.c.tenant == operation.tenant,
        ledger.c.kind.in_(("capture", "refund", "reversal")),
        ledger.c.reference == operation.key,
    )
    for posting in session.execute(postings.order_by(ledger.c.id)):
        yield BusinessRow(f"ledger: {posting.kind}", _fields(posting, _OF_A_POSTING))


def _fields(row: Any, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names}
