"""Support: every payment that failed becomes a case."""

from __future__ import annotations

from typing import Any

from idempotency import IdempotentTask, subscribe

from . import app
from .models import SupportCase


@subscribe("payment.failed", consumer="support", app=app)
def open_case(self: IdempotentTask, event: dict[str, Any]) -> None:
    """Open the case of a failed payment."""
    self.session.add(SupportCase(payment_id=event["data"]["payment_id"], code=event["data"]["code"]))
