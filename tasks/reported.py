"""What providers have reported, for those who ask: of a charge in doubt, and what could not be applied when it came."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from idempotency.application import runtime_of

from . import app
from .models import Payment, PaymentEvent, Refund
from .once import insert_unless_there
from .reports import FAILED, GATEWAYS, REFUND_FAILED, STRIPE, SUCCEEDED, Kind

# In `settlement`, which imports what calls this.
SETTLE_WAITING = "payments.settle_waiting"
# Of one payment that are asked about by their ids. A payment has one, or a few if calls were given up.
MOST_CHARGES = 20


def settle_later(session: Session, payment: Payment) -> None:
    """Look again, after this commit, at what was reported of a locked payment's charge and waits, by whichever provider."""
    waiting = select(PaymentEvent.gateway).filter_by(
        tenant=payment.tenant, charge_id=payment.charge_id, is_applied=False
    )
    for gateway in session.scalars(waiting.distinct()).all():
        about = {"gateway": gateway, "charge_id": payment.charge_id}
        app.tasks[SETTLE_WAITING].enqueue(session, **about, tenant=payment.tenant, idempotency_key=str(uuid4()))


def reported_charge(payment_id: str, effect_key: str, *, tenant: str) -> str | None:
    """The charge that a provider has reported as made by a call under this key, and that we have noted for this payment."""
    reported = select(Payment.charge_id).join(
        PaymentEvent, (PaymentEvent.tenant == Payment.tenant) & (PaymentEvent.charge_id == Payment.charge_id)
    )
    reported = reported.where(
        Payment.tenant == tenant,
        Payment.id == payment_id,
        # another provider may have a charge of this id
        func.coalesce(PaymentEvent.payment_id, Payment.id) == Payment.id,
        PaymentEvent.amount == Payment.amount,
        *_applied("charge"),
        PaymentEvent.state == SUCCEEDED,
        # a provider that is not told the key does not say which call it was
        func.coalesce(PaymentEvent.effect_key, effect_key) == effect_key,
    )
    row = _first(reported, tenant)
    return None if row is None else row[0]


def reported_charges(payment_id: str, *, tenant: str) -> list[str]:
    """The ids of Stripe's charges of a payment that have been reported and have not failed, the last ones first."""
    failed = select(PaymentEvent.object_id).filter_by(tenant=tenant, gateway=STRIPE, object="charge", state=FAILED)
    noted = select(Payment.charge_id).filter_by(tenant=tenant, id=payment_id).scalar_subquery()
    told = select(PaymentEvent.object_id).filter_by(tenant=tenant, gateway=STRIPE, object="charge")
    told = told.where(
        (PaymentEvent.payment_id == payment_id) | (PaymentEvent.object_id == noted),
        PaymentEvent.object_id.not_in(failed),
    ).group_by(PaymentEvent.object_id)
    told = told.order_by(func.max(PaymentEvent.received_at).desc()).limit(MOST_CHARGES)
    with runtime_of(app).transaction(tenant) as connection:
        return list(connection.execute(told).scalars())


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
    reported = _of_made_refund(tenant, refund_id, Refund.provider_refund_id.label("id"), PaymentEvent.currency).where(
        *_applied("refund"),
        PaymentEvent.state == SUCCEEDED,
        func.coalesce(PaymentEvent.effect_key, effect_key) == effect_key,
    )
    return _first(reported, tenant)


def is_made_by_another_call(session: Session, refund: Refund, effect_key: str) -> bool:
    """Whether a provider has reported that a refund of ours was made by a call under another key than this one."""
    made = _of_made_refund(refund.tenant, refund.id, PaymentEvent.event_id)
    made = made.where(PaymentEvent.state == SUCCEEDED, PaymentEvent.effect_key != effect_key)
    return session.execute(made.limit(1)).first() is not None


def _of_made_refund(tenant: str, refund_id: str, *columns: Any) -> Any:
    """Of the reports about a refund that was made, by its provider."""
    is_named = PaymentEvent.refund_id == Refund.id
    is_alike = (PaymentEvent.charge_id == Payment.charge_id) & (PaymentEvent.amount == Refund.amount)
    return (
        select(*columns)
        .select_from(Refund)
        .join(Payment, (Payment.tenant == Refund.tenant) & (Payment.id == Refund.payment_id))
        .join(PaymentEvent, PaymentEvent.tenant == Refund.tenant)
        .where(
            Refund.tenant == tenant,
            Refund.id == refund_id,
            PaymentEvent.object == "refund",
            PaymentEvent.object_id == Refund.provider_refund_id,
            is_named | (PaymentEvent.refund_id.is_(None) & is_alike),
        )
    )


def failure_of(session: Session, charge_id: str | None, provider_refund_id: str, *, tenant: str) -> Any:
    """Why a refund of a charge has failed, and when (`code`, `occurred_at`), as its provider has reported or answered, whatever
    it calls it; None: it has not.
    """
    failed = select(_code_of_refund().label("code"), PaymentEvent.occurred_at).where(
        PaymentEvent.tenant == tenant,
        PaymentEvent.object == "refund",
        PaymentEvent.object_id == provider_refund_id,
        PaymentEvent.charge_id == charge_id,
        PaymentEvent.state.in_(REFUND_FAILED),
    )
    failed = failed.order_by(PaymentEvent.occurred_at)
    return session.execute(failed.limit(1)).first()


def note_failure(
    session: Session, refund: Refund, payment: Payment, provider_refund_id: str, code: str, effect_key: str
) -> None:
    """Keep what the provider has answered about a refund that was made and has failed: like a report, it holds for later ones."""
    if not provider_refund_id:
        return
    answered = {
        "tenant": refund.tenant,
        "gateway": payment.gateway,
        "event_id": f"answer-{provider_refund_id}",
        "type": "answer",
        "object": "refund",
        "object_id": provider_refund_id,
        "state": FAILED,
        "charge_id": payment.charge_id,
        "payment_id": payment.id,
        "refund_id": refund.id,
        "effect_key": effect_key or None,
        "amount": refund.amount,
        "currency": payment.currency.upper(),
        "code": code,
        "occurred_at": datetime.now(UTC),
        "is_applied": True,
    }
    insert_unless_there(session, PaymentEvent, answered)


def reported_refund_failure(refund_id: str, effect_key: str, *, tenant: str) -> Any:
    """The refund (`id`, `code`) of a call under this key that has failed, as a provider has reported; or None.

    Only of a report that names the key.
    """
    reported = select(PaymentEvent.object_id.label("id"), _code_of_refund().label("code")).where(
        PaymentEvent.tenant == tenant,
        PaymentEvent.refund_id == refund_id,
        *_applied("refund"),
        PaymentEvent.state.in_(REFUND_FAILED),
        PaymentEvent.effect_key == effect_key,
    )
    return _first(reported, tenant)


def _code_of_refund() -> Any:
    return func.coalesce(func.nullif(PaymentEvent.code, ""), PaymentEvent.state)


def _applied(kind: Kind) -> tuple[Any, ...]:
    """What holds of a report about such an object that is in our books."""
    return PaymentEvent.gateway.in_(GATEWAYS), PaymentEvent.object == kind, PaymentEvent.is_applied


def _first(reported: Any, tenant: str) -> Any:
    """The first row, read in its own transaction: the body of an effect has none."""
    with runtime_of(app).transaction(tenant) as connection:
        return connection.execute(reported.limit(1)).first()
