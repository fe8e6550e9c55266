"""Double-entry bookkeeping: every amount moves from one account to another."""

from __future__ import annotations

from typing import Literal

from sqlalchemy.orm import Session

from .models import ledger

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
