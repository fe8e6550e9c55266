"""Payments: a payment is inserted as pending together with its outbox row; the task captures it.

That of an order is PAYMENT_INITIATED until its charge begins, and follows the events of its order from then on: once
that is cancelled nothing is charged, or what was charged is refunded, whichever of the two came first.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from idempotency import (
    DidNotHappen,
    EffectInDoubt,
    EffectUnknown,
    Handle,
    Happened,
    IdempotentTask,
    Operation,
    OperationId,
    PermanentError,
    StoredRefusal,
    Unfinished,
    publish,
    subscribe,
)
from idempotency.providers import STRIPE as STRIPES_CONTRACT

from . import app, ledger
from .gateway import Outcome, Result
from .models import Payment
from .once import check_not_carried_out, insert_once, insert_unless_there
from .outside import gateway
from .refunds import INITIATED, refund_payment, request_rest, tell_of_doubts
from .reported import reported_charge, reported_charges, reported_refusal, settle_later
from .reports import STRIPE, SUCCEEDED
from .tenants import DEFAULT, named, owned
from .validation import check_purchase, check_purchase_id

CANCELLED = "cancelled"
CAPTURE = "capture"
# What a statement returns replaces what the session has read before.
AS_WRITTEN = {"populate_existing": True, "synchronize_session": False}


def submit_payment(
    session: Session, *, payment_id: str, customer_id: str, amount: int, currency: str, tenant: str = DEFAULT
) -> Handle:
    """Accept a purchase: write its pending row and its message in the caller's transaction.

    `amount` is in the minor unit; 0 is a free purchase. The same purchase again changes nothing. Raises `ValueError`,
    which names the field and the limit, and `Taken` if another purchase or an order has the id.
    """
    purchase = check_purchase(customer_id, amount, currency)
    id = {"tenant": tenant, "id": check_purchase_id(payment_id)}
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
    if payment is not None:
        mark_failed(session, payment, error.code, is_unknown=isinstance(error, EffectUnknown | Unfinished))


def mark_failed(session: Session, payment: Payment, code: str, *, is_unknown: bool = False) -> bool:
    """Note that a locked payment has failed, by its task or by the provider's report. False: it had ended otherwise before."""
    status = "unknown" if is_unknown else "failed"
    if payment.status in ("captured", "free", CANCELLED, status):
        return False
    payment.status, payment.failure = status, code
    told = {"payment_id": payment.id, "code": code, **payment.of_order}
    became = "payment.unknown" if is_unknown else "payment.failed"
    publish(session, became, told, tenant=payment.tenant, app=app)
    return True


def begin_charge(session: Session, payment_id: str, *, tenant: str = DEFAULT) -> bool:
    """Whether an order's payment may be charged: from here on, its cancellation is a refund."""
    payment = session.get_one(Payment, (tenant, payment_id), with_for_update=True)
    if payment.status == INITIATED:
        payment.status = "pending"
    return payment.status != CANCELLED


@app.task(
    base=IdempotentTask,
    bind=True,
    name="payments.capture_payment",
    moves_money=True,
    key="{payment_id}",
    on_failed=payment_failed,
    provider=STRIPES_CONTRACT,
    effect_types={CAPTURE: Result},
)
def capture_payment(
    self: IdempotentTask, payment_id: str, owner: str = DEFAULT, order_id: str | None = None
) -> dict[str, Any]:
    """Charge the customer once. `owner`: see `owned`; the operation's own tenant decides.

    `order_id` is unknown to code that would not tell the order of its payment, and leaves the message to this one.
    """
    payment = self.session.get(Payment, (self.tenant, payment_id))
    if payment is None:
        raise PermanentError(f"payment {payment_id}: unknown", "payment_unknown")
    is_captured = payment.status in ("captured", "free")
    if is_captured and not self.may_have_happened(CAPTURE):  # by a call under another key
        return {"status": payment.status, "charge": payment.charge_id}
    has_begun = payment.status not in (INITIATED, CANCELLED)
    request: dict[str, Any] = {
        "payment_id": payment.id,
        "customer_id": payment.customer_id,
        "amount": payment.amount,
        "currency": payment.currency,
        **named(self.tenant),
    }
    self.session.rollback()  # no open transaction during an external call

    if not (has_begun or self.step("begin", begin_charge, payment_id, **named(self.tenant))):
        return {"status": CANCELLED, "charge": None}
    charge = None
    if request["amount"] > 0:
        charge = self.effect(CAPTURE, gateway.capture, reconcile=find_capture, **request)

    charge_id = None if charge is None else charge["id"]
    if charge_id is not None and (other := _other_payment(self.session, payment_id, charge_id, tenant=self.tenant)):
        # a person has taken it for this one
        raise PermanentError(f"payment {payment_id}: {charge_id} is of the payment {other}", "charge_of_another")
    is_new = mark_captured(self.session, payment_id, charge_id, tenant=self.tenant)
    noted = self.session.get_one(Payment, (self.tenant, payment_id), populate_existing=not is_new)
    if is_new:
        settle_later(self.session, noted)
    elif noted.charge_id != charge_id:  # under another key, at the same time
        raise PermanentError(f"payment {payment_id}: charged twice, also as {noted.charge_id}", "charged_twice")
    return {"status": "free" if charge_id is None else "captured", "charge": charge_id}


def find_capture(
    *,
    payment_id: str,
    customer_id: str,
    amount: int,
    currency: str,
    doubt: EffectInDoubt,
    tenant: str = DEFAULT,
) -> Outcome:
    """What became of a charge: what the provider has reported of it, or what it answers.

    Reported first: its search may not show for a while what it has reported, and not finding it means to charge again. So the
    provider is also asked about each charge that it has told us of, whatever became of that, and whichever call made it.
    """
    charge_id = reported_charge(payment_id, doubt.idempotency_key, tenant=tenant)
    if charge_id is not None:
        return Happened({"id": charge_id, "amount": amount, "currency": currency, "status": SUCCEEDED})
    code = reported_refusal(payment_id, doubt.idempotency_key, tenant=tenant)
    if code is not None:  # the customer was told so
        return DidNotHappen(StoredRefusal(f"the charge was refused: {code}", code))
    return gateway.find_capture(
        payment_id=payment_id,
        customer_id=customer_id,
        amount=amount,
        currency=currency,
        doubt=doubt,
        tenant=tenant,
        reported=reported_charges(payment_id, tenant=tenant),
    )


def _other_payment(session: Session, payment_id: str, charge_id: str, *, tenant: str) -> str | None:
    """Another payment that this charge is of. Of another tenant's, the unique index says so."""
    others = select(Payment.id).filter_by(tenant=tenant, gateway=STRIPE, charge_id=charge_id)
    others = others.where(Payment.id != payment_id)
    return session.scalars(others.limit(1)).first()


def mark_captured(
    session: Session, payment_id: str, charge_id: str | None, *, by: str = STRIPE, tenant: str = DEFAULT
) -> bool:
    """Note that a payment is captured by a provider, as its task or a report says, whichever comes first; None: it is free.

    Returns False if it was noted before.
    """
    status = "free" if charge_id is None else "captured"
    open_one = select(Payment.tenant, Payment.id, Payment.failure).filter_by(tenant=tenant, id=payment_id)
    before = open_one.where(Payment.status.not_in(("captured", "free"))).with_for_update().cte("before")
    noted = update(Payment).where(Payment.tenant == before.c.tenant, Payment.id == before.c.id)
    noted = noted.values(status=status, gateway=by, charge_id=charge_id, failure=None).returning(
        Payment, before.c.failure
    )
    found = session.execute(noted, execution_options=AS_WRITTEN).one_or_none()
    if found is None:
        return False
    payment, had_failed = found[0], found[1] is not None
    about = {"payment_id": payment_id, **payment.of_order}
    if had_failed:
        publish(session, "payment.recovered", {**about, "code": "recovered"}, tenant=tenant, app=app)
    if charge_id is not None:
        ledger.post(session, "capture", payment_id, payment_id, payment.amount, payment.currency, tenant=tenant)
    told = {"customer_id": payment.customer_id, "amount": payment.amount, "currency": payment.currency, **named(tenant)}
    publish(session, "payment.captured", {**about, **told}, tenant=tenant, app=app)
    if payment.order_status == "cancelled":
        _refund_cancelled(session, payment)
    return True


# ---------------------------------------------------------------- the payments of orders


@subscribe("order.placement_requested", consumer="payments", app=app)
def initiate_payment(self: IdempotentTask, event: dict[str, Any]) -> None:
    """The payment is there, and waits until the order asks for it."""
    _of_order(self.session, event["data"], tenant=self.tenant)


@subscribe("order.pending_payment", consumer="payments", moves_money=True, app=app)
def charge_order(self: IdempotentTask, event: dict[str, Any]) -> None:
    """Charge it, unless the order was cancelled first."""
    payment = _of_order(self.session, event["data"], tenant=self.tenant)
    if payment.status == INITIATED:
        _enqueue(self.session, payment)


@subscribe("order.cancelled", consumer="payments", moves_money=True, app=app)
def cancel_payment(self: IdempotentTask, event: dict[str, Any]) -> None:
    """Charge nothing any more; what is charged all the same, or was before, is refunded."""
    payment = _of_order(self.session, event["data"], tenant=self.tenant)
    if payment.order_status == "cancelled":
        return
    payment.order_status = "cancelled"
    if payment.status == INITIATED:
        payment.status = CANCELLED
        _enqueue(self.session, payment)  # charges nothing; but the buyer was told of an operation, which has to end
    elif payment.status == "captured":
        _refund_cancelled(self.session, payment)
    # otherwise its charge is under way, in doubt or refused: should it be captured yet, that commit sees the mark


def _of_order(session: Session, data: dict[str, Any], *, tenant: str) -> Payment:
    """The payment of an order, locked, and inserted if this is the first event that tells of the order."""
    id = {"tenant": tenant, "id": data["order_id"]}
    wanted = {name: data[name] for name in ("customer_id", "amount", "currency")}
    state = {"status": INITIATED, "refunded": 0, "order_id": data["order_id"], "order_status": "placed"}
    insert_unless_there(session, Payment, {**id, **wanted, **state})
    payment = session.get_one(Payment, id, with_for_update=True)
    if payment.order_status is None:
        raise PermanentError(f"payment {payment.id}: is not the order's, which has the same id", "payment_taken")
    return payment


def _enqueue(session: Session, payment: Payment) -> None:
    about = {"payment_id": payment.id, "order_id": payment.order_id}
    capture_payment.enqueue(session, **about, tenant=payment.tenant, **owned(payment.tenant))


def _refund_cancelled(session: Session, payment: Payment) -> None:
    """Give back what is left of a captured payment whose order is cancelled; once, in the commit that finds out.

    Support is told of the refunds that are in doubt by then: nothing else will return their money.
    """
    # an id that cannot have been used before: this must not fail
    refund_id, tenant = f"cancelled-{uuid4().hex}", payment.tenant
    if request_rest(session, payment, refund_id=refund_id, reason="order cancelled") > 0:
        refund_payment.enqueue(session, refund_id=refund_id, is_reserved=True, tenant=tenant, **owned(tenant))
    tell_of_doubts(session, payment)
