"""Support: every payment that failed, or whose outcome is unknown, becomes a case."""

from __future__ import annotations

from typing import Any

from idempotency import IdempotentTask, subscribe

from . import app
from .models import SupportCase


@subscribe("payment.failed", "payment.unknown", consumer="support", app=app)
def open_case(self: IdempotentTask, event: dict[str, Any]) -> None:
    """Open the case of a payment, or say in its case what has become of it."""
    self.session.merge(SupportCase(payment_id=event["data"]["payment_id"], code=event["data"]["code"]))
