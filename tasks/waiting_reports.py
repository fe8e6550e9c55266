"""What providers have reported and could not be applied when it came: it is looked at again once it may be."""

from __future__ import annotations

from uuid import uuid4

from sqlalchemy import select
from sqlalchemy.orm import Session

from . import app
from .models import Payment, PaymentEvent

# In `settlement`, which imports what calls this.
SETTLE_WAITING = "payments.settle_waiting"


def settle_later(session: Session, payment: Payment) -> None:
    """Look again, after this commit, at what was reported of a locked payment's charge and waits."""
    waiting = select(PaymentEvent.gateway).filter_by(
        tenant=payment.tenant, charge_id=payment.charge_id, is_applied=False
    )
    gateway = session.scalars(waiting.limit(1)).first()
    if gateway is not None:
        about = {"gateway": gateway, "charge_id": payment.charge_id}
        app.tasks[SETTLE_WAITING].enqueue(session, **about, tenant=payment.tenant, idempotency_key=str(uuid4()))
