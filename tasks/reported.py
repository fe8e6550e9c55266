"""What providers have reported, for those who ask: of a charge in doubt, and what could not be applied when it came."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from idempotency.application import runtime_of

from . import app
from .models import Payment, PaymentEvent, Refund
from .reports import FAILED, GATEWAYS, REFUND_FAILED, SUCCEEDED, Kind

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


def reported_charge(payment_id: str, effect_key: str, *, tenant: str) -> str | None:
    """The charge that a provider has reported as made by a call under this key, and that we have noted for this payment."""
    reported = select(Payment.charge_id).join(
        PaymentEvent, (PaymentEvent.tenant == Payment.tenant) & (PaymentEvent.object_id == Payment.charge_id)
    )
    reported = reported.where(
        Payment.tenant == tenant,
        Payment.id == payment_id,
        *_applied("charge"),
        PaymentEvent.state == SUCCEEDED,
        # a provider that is not told the key does not say which call it was
        func.coalesce(PaymentEvent.effect_key, effect_key) == effect_key,
    )
    row = _first(reported, tenant)
    return None if row is None else row[0]


def reported_refusal(payment_id: str, effect_key: str, *, tenant: str) -> str | None:
    """Why the charge of a call under this key has failed, as a provider has reported and we have noted for this payment.

    Only of a report that names the key: otherwise another call may have failed, and this one charged.
    """
    code = func.coalesce(func.nullif(PaymentEvent.code, ""), FAILED)
    reported = select(code).join(
        Payment, (Payment.tenant == PaymentEvent.tenant) & (Payment.id == PaymentEvent.payment_id)
    )
    reported = reported.where(
        Payment.tenant == tenant,
        Payment.id == payment_id,
        Payment.status.not_in(("captured", "free")),  # by a call under another key
        *_applied("charge"),
        PaymentEvent.state == FAILED,
        PaymentEvent.effect_key == effect_key,
    )
    row = _first(reported, tenant)
    return None if row is None else row[0]


def reported_refund(refund_id: str, effect_key: str, *, tenant: str) -> Any:
    """The refund (`id`, `currency`) that a provider has reported as made by a call under this key, and that we have noted; or None."""
    reported = select(Refund.provider_refund_id.label("id"), PaymentEvent.currency).join(
        PaymentEvent, (PaymentEvent.tenant == Refund.tenant) & (PaymentEvent.object_id == Refund.provider_refund_id)
    )
    reported = reported.where(
        Refund.tenant == tenant,
        Refund.id == refund_id,
        *_applied("refund"),
        PaymentEvent.state == SUCCEEDED,
        func.coalesce(PaymentEvent.effect_key, effect_key) == effect_key,
    )
    return _first(reported, tenant)


def reported_refund_failure(refund_id: str, effect_key: str, *, tenant: str) -> str | None:
    """Why the refund of a call under this key has failed, as a provider has reported: only of a report that names the key."""
    reported = select(func.coalesce(func.nullif(PaymentEvent.code, ""), PaymentEvent.state)).where(
        PaymentEvent.tenant == tenant,
        PaymentEvent.refund_id == refund_id,
        *_applied("refund"),
        PaymentEvent.state.in_(REFUND_FAILED),
        PaymentEvent.effect_key == effect_key,
    )
    row = _first(reported, tenant)
    return None if row is None else row[0]


def _applied(kind: Kind) -> tuple[Any, ...]:
    """What holds of a report about such an object that is in our books."""
    return PaymentEvent.gateway.in_(GATEWAYS), PaymentEvent.object == kind, PaymentEvent.is_applied


def _first(reported: Any, tenant: str) -> Any:
    """The first row, read in its own transaction: the body of an effect has none."""
    with runtime_of(app).transaction(tenant) as connection:
        return connection.execute(reported.limit(1)).first()
