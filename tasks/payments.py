"""Payments: a payment is inserted as pending together with its outbox row; the task captures it."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from idempotency import (
    EffectUnknown,
    Handle,
    IdempotentTask,
    Operation,
    OperationId,
    PermanentError,
    Unfinished,
    publish,
)
from idempotency.providers import STRIPE

from . import app, ledger
from .gateway import Result
from .models import Payment, payments
from .once import check_not_carried_out, insert_once
from .outside import gateway
from .tenants import DEFAULT, named, owned
from .validation import check_amount, check_currency, check_id, check_local_part, check_minor_unit


def submit_payment(
    session: Session, *, payment_id: str, customer_id: str, amount: int, currency: str, tenant: str = DEFAULT
) -> Handle:
    """Accept a purchase: write its pending row and its message in the caller's transaction.

    `amount` is in the minor unit; 0 is a free purchase. The same purchase again changes nothing. Raises `ValueError`,
    which names the field and the limit, and `Taken` if another purchase has the id.
    """
    purchase = {
        "customer_id": check_local_part("customer_id", customer_id),
        "amount": check_amount("amount_cents", amount, at_least=0),
        "currency": check_currency("currency", currency),
    }
    check_minor_unit("amount_cents", amount, currency)
    id = {"tenant": tenant, "id": check_id("purchase_id", payment_id)}
    operation = OperationId(tenant, capture_payment.name, payment_id)
    if not insert_once(session, Payment, id, purchase, taken="purchase_id: was used before, for another purchase"):
        return Handle(app, operation)  # its message was part of the commit that accepted it
    check_not_carried_out(session, operation, "purchase_id: its task was called before there was a purchase")
    handle: Handle = capture_payment.enqueue(session, payment_id=payment_id, tenant=tenant, **owned(tenant))
    return handle


def payment_failed(session: Session, operation: Operation, error: PermanentError) -> None:
    """Record the failure and publish an event, in the transaction that fails the operation.

    `failed` means that nothing was charged. If something was or may have been charged, it is `unknown` until a person
    resolves it.
    """
    payment = session.get(Payment, (operation.tenant, operation.arguments["payment_id"]), with_for_update=True)
    if payment is not None and payment.status not in ("captured", "free"):
        payment.status = "unknown" if isinstance(error, EffectUnknown | Unfinished) else "failed"
        payment.failure = error.code
        told = {"payment_id": payment.id, "code": error.code}
        publish(session, f"payment.{payment.status}", told, tenant=operation.tenant, app=app)


@app.task(
    base=IdempotentTask,
    bind=True,
    name="payments.capture_payment",
    key="{payment_id}",
    on_failed=payment_failed,
    provider=STRIPE,
    effect_types={"capture": Result},
)
def capture_payment(self: IdempotentTask, payment_id: str, owner: str = DEFAULT) -> dict[str, Any]:
    """Charge the customer once. `owner`: see `owned`; the operation's own tenant decides."""
    payment = self.session.get(Payment, (self.tenant, payment_id))
    if payment is None:
        raise PermanentError(f"payment {payment_id}: unknown", "payment_unknown")
    if payment.status in ("captured", "free"):  # by a call under another key
        return {"status": payment.status, "charge": payment.charge_id}
    had_failed = payment.failure is not None
    request: dict[str, Any] = {
        "payment_id": payment.id,
        "customer_id": payment.customer_id,
        "amount": payment.amount,
        "currency": payment.currency,
        **named(self.tenant),
    }
    self.session.rollback()  # no open transaction during an external call

    charge = None
    if request["amount"] > 0:
        charge = self.effect("capture", gateway.capture, reconcile=gateway.find_capture, **request)

    status, charge_id = ("free", None) if charge is None else ("captured", charge["id"])
    ended = payments.update().where(payments.c.tenant == self.tenant, payments.c.id == payment_id)
    self.session.execute(ended.values(status=status, charge_id=charge_id, failure=None))
    if had_failed:
        told = {"payment_id": payment_id, "code": "recovered"}
        publish(self.session, "payment.recovered", told, tenant=self.tenant, app=app)
    if charge is not None:
        amount, currency = request["amount"], request["currency"]
        ledger.post(self.session, "capture", payment_id, payment_id, amount, currency, tenant=self.tenant)
    publish(self.session, "payment.captured", request, tenant=self.tenant, app=app)
    return {"status": status, "charge": charge_id}
