"""Support: one case for every payment that failed or whose outcome is unknown."""

from __future__ import annotations

from typing import Any

from idempotency import IdempotentTask, subscribe

from . import app
from .models import Payment, SupportCase


@subscribe("payment.failed", "payment.unknown", "payment.recovered", consumer="support", app=app)
def open_case(self: IdempotentTask, event: dict[str, Any]) -> None:
    """Open or update the support case of a payment."""
    # from the payment's row, because events of one payment may be handled in either order
    payment = self.session.get_one(Payment, (self.tenant, event["data"]["payment_id"]))
    self.session.merge(SupportCase(tenant=self.tenant, payment_id=payment.id, code=payment.failure or "recovered"))
