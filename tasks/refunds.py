"""Refunds: reserve the amount under the payment's row lock, refund, post. Never more than was captured, even in a race."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from idempotency import (
    Defer,
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
    Undecided,
    Unfinished,
    publish,
)
from idempotency.providers import STRIPE as STRIPES_CONTRACT

from . import app, ledger
from .gateway import GatewayError, Outcome, Result
from .models import Payment, Refund
from .once import check_not_carried_out, insert_once
from .outside import gateway
from .reported import (
    failure_of,
    is_made_by_another_call,
    note_failure,
    reported_refund,
    reported_refund_failure,
    settle_later,
)
from .reports import STRIPE, SUCCEEDED
from .tenants import DEFAULT, named, owned
from .validation import check_amount, check_id, check_minor_unit, check_text

# The status of an order's payment until its charge begins.
INITIATED = "PAYMENT_INITIATED"
# Why a refund is reversed whose failure no webhook has told.
REFUSED_AFTERWARDS = "refused_afterwards"
# Of a request whose answer is another refund, which is in our books: that one counts, and is told.
OF_ANOTHER = "refund_of_another"
# Of a refund that was made, whether or not its money has come back.
MADE = ("refunded", "reversed")
# Of a refund whose money has moved, will move or may have moved: `payments.refunded` is the sum of their amounts.
COUNTED = ("reserved", "unknown", "refunded")
# Of a refund that may have been made, and of which it is not known yet.
MAY_BE_MADE = ("pending", "reserved", "unknown")
# Seconds. A pending payment usually ends within seconds; asking more often would only load the queues.
PENDING_PAUSE = 2.0


class RefundFailed(StoredRefusal):
    """The provider has accepted the refund of a call under `effect_key`, and it has failed afterwards.

    `id`: the provider's, if it has told that.
    """

    def __init__(self, message: str, code: str | None = None, effect_key: str = "", id: str = "") -> None:
        super().__init__(message, code)
        self.effect_key = effect_key
        self.id = id


def submit_refund(
    session: Session, *, refund_id: str, payment_id: str, amount: int, reason: str, tenant: str = DEFAULT
) -> Handle:
    """Accept a refund request: write its row and its message in the caller's transaction.

    `amount` is in the minor unit, at least 1. The same request again changes nothing. Raises `ValueError`, which names
    the field and the limit, and `Taken` if another request has the id.
    """
    request = {
        "payment_id": check_id("purchase_id", payment_id),
        "amount": check_amount("amount_cents", amount, at_least=1),
        "reason": check_text("reason", reason),
    }
    id = {"tenant": tenant, "id": check_id("refund_id", refund_id)}
    operation = OperationId(tenant, refund_payment.name, refund_id)
    if not insert_once(session, Refund, id, request, taken="refund_id: was used before, for another refund"):
        return Handle(app, operation)  # its message was part of the commit that accepted it
    check_not_carried_out(session, operation, "refund_id: its task was called before there was a request")
    handle: Handle = refund_payment.enqueue(session, refund_id=refund_id, tenant=tenant, **owned(tenant))
    return handle


def request_rest(session: Session, payment: Payment, *, refund_id: str, reason: str) -> int:
    """Reserve all that is left of a locked payment for a refund, and write its row; the caller calls `refund_payment`.

    Returns the amount. 0: nothing is left, and there is no such refund. Reserved at once, because another refund that was
    requested before would otherwise take a part, and this one be refused.
    """
    left = payment.amount - payment.refunded if payment.status == "captured" else 0
    if left > 0:
        about = {"tenant": payment.tenant, "id": refund_id, "payment_id": payment.id}
        refund = Refund(**about, amount=left, reason=reason, status="pending")
        session.add(refund)
        move(refund, payment, "reserved")
    return left


def withdraw(session: Session, refund_id: str, code: str, *, tenant: str = DEFAULT) -> str:
    """Free what `request_rest` has reserved, if `refund_payment` was not called and will not be.

    Returns what has become of the refund.
    """
    refund, payment = locked(session, refund_id, tenant=tenant)
    assert refund is not None
    if refund.status == "reserved":
        refuse(session, refund, payment, code)
    return refund.status


def locked(session: Session, refund_id: str, *, tenant: str) -> tuple[Refund | None, Payment | None]:
    """A refund and its payment, locked: the payment first, as by everything that changes both."""
    payment_id = session.scalar(select(Refund.payment_id).filter_by(tenant=tenant, id=refund_id))
    payment = None if payment_id is None else session.get(Payment, (tenant, payment_id), with_for_update=True)
    return session.get(Refund, (tenant, refund_id), with_for_update=True), payment


def fits(refund: Refund, payment: Payment) -> bool:
    """Whether enough is left of a locked payment for a refund to be counted, if it is not counted already."""
    return refund.status in COUNTED or refund.amount <= payment.amount - payment.refunded


def move(refund: Refund, payment: Payment, status: str) -> None:
    """Give a locked refund another status, and the locked payment what that changes of its `refunded`."""
    payment.refunded += refund.amount * ((status in COUNTED) - (refund.status in COUNTED))
    refund.status = status


def refund_failed(session: Session, operation: Operation, error: PermanentError) -> None:
    """Record the failure. If refused, nothing is reserved; if unknown, it is reserved, since it may have been paid out.

    What was refused, and has happened after all, stays refused if its amount is refunded otherwise by now: its dead letter
    says `unfinished`.

    If the order is cancelled, and money is left that no refund will return, support is told.
    """
    refund, payment = locked(session, operation.arguments["refund_id"], tenant=operation.tenant)
    if refund is None:
        return
    failed = _refund_failed(error)
    if failed is not None and payment is not None:
        note_failure(session, refund, payment, failed.id, failed.code, failed.effect_key)
        taken = _other_refund(session, refund, failed.id)  # by a person, or by a report without our name
        if taken is not None and taken.payment_id == payment.id:
            fail(session, taken, payment, failed.code, at=_known_failure(session, taken, payment, failed.id))
    if refund.status in MADE:
        # Reported as made, and the provider itself says by now that it has failed. A person's word does not undo its report,
        # nor does what became of another call.
        if refund.status == "refunded" and failed is not None and _is_of_call(session, refund, failed):
            assert payment is not None
            at = _known_failure(session, refund, payment, refund.provider_refund_id)
            fail(session, refund, payment, REFUSED_AFTERWARDS, at=at)
        return
    is_another = _is_answered_by_another(session, refund, operation)
    if isinstance(error, EffectUnknown | Unfinished) and not is_another:
        if payment is not None and fits(refund, payment):
            move(refund, payment, "unknown")
        refund.failure = error.code
    else:
        refuse(session, refund, payment, OF_ANOTHER if is_another else error.code)
    if payment is not None:
        tell_if_owed(session, refund, payment, error.code)


def fail(session: Session, refund: Refund, payment: Payment, code: str, *, at: datetime | None) -> None:
    """Note that a locked refund which the provider has accepted has failed, at this time; None: now.

    Of what was written down as made at its site and was not decided, nothing is reserved any more: no task carries it out.
    """
    if refund.status == "refunded":
        reverse(session, refund, code, at=at)
    elif refund.is_at_site and refund.status in MAY_BE_MADE:
        refuse(session, refund, payment, code)
        tell_if_owed(session, refund, payment, code)


def _known_failure(session: Session, refund: Refund, payment: Payment, id: str | None) -> datetime | None:
    """When a refund has failed by the provider's report, if it has told that."""
    known = failure_of(session, payment.charge_id, id or "", tenant=refund.tenant)
    return None if known is None else known.occurred_at


def _is_answered_by_another(session: Session, refund: Refund, operation: Operation) -> bool:
    """Whether what the provider has answered is another refund in our books, however the operation has come to its end."""
    answer = operation.effects.get("refund")
    # of a person who has typed it without the task, it may be anything
    id = answer.result.get("id") if answer is not None and isinstance(answer.result, dict) else None
    return isinstance(id, str) and _other_refund(session, refund, id) is not None


def _refund_failed(error: BaseException | None) -> RefundFailed | None:
    """What the provider has answered, also in a last look, whose end has another name."""
    while error is not None and not isinstance(error, RefundFailed):
        error = error.__cause__
    return error


def _is_of_call(session: Session, refund: Refund, error: RefundFailed) -> bool:
    """Whether what has failed is what is in our books as made."""
    if error.id:
        return refund.provider_refund_id == error.id
    return not is_made_by_another_call(session, refund, error.effect_key)


def tell_if_owed(session: Session, refund: Refund, payment: Payment, code: str) -> None:
    """After a refund has failed: tell support, if the order is cancelled and money is left that no refund will return."""
    if payment.order_status == "cancelled" and is_owed(session, payment):
        _tell_support(session, refund, payment, code)


def tell_of_doubts(session: Session, payment: Payment) -> None:
    """Tell support of the refunds in doubt of a locked payment whose order is cancelled."""
    doubtful = select(Refund).filter_by(tenant=payment.tenant, payment_id=payment.id, status="unknown")
    for refund in session.scalars(doubtful.order_by(Refund.id)).all():
        _tell_support(session, refund, payment, refund.failure or "unknown")


def is_owed(session: Session, payment: Payment) -> bool:
    """Whether there is money of a payment that was not given back, and for which no refund is under way."""
    return payment.status == "captured" and (
        payment.refunded < payment.amount or has_refund(session, payment, "unknown")
    )


def is_owed_again(session: Session, payment: Payment) -> bool:
    """Whether more of a payment came back than has been given back since."""
    of_payment = select(Refund).filter_by(tenant=payment.tenant, payment_id=payment.id)
    made = session.scalars(of_payment.where(Refund.status.in_(MADE))).all()
    if sum(refund.amount for refund in made if refund.status == "refunded") >= payment.amount:
        return False  # also what was requested before, and is made since
    # Of one moment, as the provider's seconds are: what has failed at once, what has come back, what was given. Two that
    # fail in the second in which they were made count as two parts, though they may be two attempts at one: a case too
    # many is seen to and closed, one too few is money that nobody gives back.
    changes: list[tuple[datetime, int, int]] = []
    for refund in made:
        came_back = refund.status == "reversed"
        failed_at = max(refund.failed_at or refund.created_at, refund.created_at)
        is_at_once = came_back and failed_at == refund.created_at
        changes.append((refund.created_at, 0 if is_at_once else 2, -refund.amount))
        if came_back:
            changes.append((failed_at, 1, refund.amount))
    owed = 0
    for _, _, change in sorted(changes):
        owed = max(0, owed + change)
    return owed > 0


def has_refund(session: Session, payment: Payment, status: str) -> bool:
    """Whether the payment has a refund of this status."""
    of_payment = select(Refund.id).filter_by(tenant=payment.tenant, payment_id=payment.id, status=status)
    return session.scalars(of_payment.limit(1)).first() is not None


def refuse(session: Session, refund: Refund, payment: Payment | None, code: str) -> None:
    """Note that a locked refund is not made, and that its amount, if it was reserved, can be refunded otherwise."""
    refund.failure = code
    if payment is None:
        refund.status = "refused"
    else:
        move(refund, payment, "refused")
        settle_later(session, payment)


def reserve(session: Session, refund_id: str, *, tenant: str = DEFAULT) -> dict[str, Any]:
    """Reserve the amount on the payment. Raises `PermanentError` if there can be no refund, `Defer` if it is too early."""
    refund, payment = locked(session, refund_id, tenant=tenant)
    if refund is None:
        raise PermanentError(f"refund {refund_id}: unknown", "refund_unknown")
    if payment is None:
        raise PermanentError("the payment does not exist", "payment_unknown")
    # the provider has told it at this moment, or a person has found it: there is nothing to reserve
    if refund.status in MADE:
        return _request(refund, payment, tenant)
    if payment.status in (INITIATED, "pending", "unknown"):
        # it may still be charged, or turn out to be
        raise Defer(PENDING_PAUSE, f"payment {payment.id}: still {payment.status}")
    if payment.status != "captured":
        raise PermanentError(f"payment {payment.id}: {payment.status}, nothing to refund", f"payment_{payment.status}")
    try:
        check_minor_unit("amount", refund.amount, payment.currency)  # the request does not name it
    except ValueError as error:
        raise PermanentError(str(error), "minor_unit") from None
    if not fits(refund, payment):
        left = payment.amount - payment.refunded
        raise PermanentError(f"amount: at most {left} left to refund, got {refund.amount}", "exceeds_captured")
    move(refund, payment, "reserved")
    return _request(refund, payment, tenant)


def _request(refund: Refund, payment: Payment, tenant: str) -> dict[str, Any]:
    return {
        "refund_id": refund.id,
        "payment_id": payment.id,
        "charge_id": payment.charge_id,
        "amount": refund.amount,
        **named(tenant),
    }


def free(session: Session, reserved: dict[str, Any]) -> None:
    """Undo `reserve`: the amount can be refunded again. Records name it, so it cannot be renamed or moved.

    Not that of a refund which the provider has reported as made: see `refund_failed`.
    """
    refund, payment = locked(session, reserved["refund_id"], tenant=reserved.get("tenant", DEFAULT))
    assert refund is not None
    assert payment is not None
    if refund.status in ("reserved", "unknown"):
        move(refund, payment, "pending")


@app.task(
    base=IdempotentTask,
    bind=True,
    name="refunds.refund_payment",
    moves_money=True,
    key="{refund_id}",
    on_failed=refund_failed,
    provider=STRIPES_CONTRACT,
    effect_types={"refund": Result},
)
def refund_payment(
    self: IdempotentTask, refund_id: str, owner: str = DEFAULT, is_reserved: bool = False
) -> dict[str, Any]:
    """Refund the customer once. `owner`: see `owned`; the operation's own tenant decides.

    `is_reserved`: by `request_rest`. Code to which that is unknown would refuse it, and leaves the message to this one.
    """
    if (made := _reported_as_made(self, refund_id)) is not None:
        return made
    request = self.step("reserve", reserve, refund_id, undo=free, **named(self.tenant))
    if (made := _reported_as_made(self, refund_id)) is not None:
        return made

    refunded = self.effect("refund", gateway.refund, reconcile=find_refund, **request)

    refund, _ = locked(self.session, refund_id, tenant=self.tenant)
    assert refund is not None
    if (other := _other_refund(self.session, refund, refunded["id"])) is not None:
        raise PermanentError(f"refund {refund_id}: {refunded['id']} is the refund {other.id}", OF_ANOTHER)
    if refund.provider_refund_id not in (None, refunded["id"]):  # under another key, which a person took for not made
        raise PermanentError(f"refund {refund_id}: made twice, also as {refund.provider_refund_id}", "refunded_twice")
    payment = self.session.get_one(Payment, (self.tenant, refund.payment_id))
    mark_refunded(self.session, refund, refunded["id"], by=payment.gateway)
    return {"status": refund.status, "refund": refunded["id"]}


def find_refund(
    *,
    refund_id: str,
    payment_id: str,
    charge_id: str,
    amount: int,
    doubt: EffectInDoubt,
    tenant: str = DEFAULT,
) -> Outcome:
    """What became of a refund: what the provider answers, or, if that decides nothing, what it has reported.

    Asked first, unlike about a charge: a refund that was made may fail afterwards, and its answer is the later one.
    """
    reported = partial(_reported, refund_id, amount, doubt.idempotency_key, tenant=tenant)
    asked: dict[str, Any] = {"refund_id": refund_id, "payment_id": payment_id, "charge_id": charge_id, "amount": amount}
    try:
        answer = gateway.find_refund(**asked, doubt=doubt, tenant=tenant)
    except (GatewayError, Defer, Undecided):
        if (known := reported()) is None:
            raise
        return known
    if isinstance(answer, DidNotHappen) and (why := answer.refusal) is not None:
        return DidNotHappen(RefundFailed(str(why), why.code, doubt.idempotency_key, getattr(why, "id", "")))
    return answer if isinstance(answer, Happened) else reported() or answer


def _reported(refund_id: str, amount: int, effect_key: str, *, tenant: str) -> Outcome | None:
    made = reported_refund(refund_id, effect_key, tenant=tenant)
    if made is not None:
        return Happened({"id": made.id, "amount": amount, "currency": made.currency, "status": SUCCEEDED})
    failed = reported_refund_failure(refund_id, effect_key, tenant=tenant)
    if failed is None:
        return None
    return DidNotHappen(RefundFailed(f"the refund has failed: {failed.code}", failed.code, effect_key, failed.id))


def _reported_as_made(task: IdempotentTask, refund_id: str) -> dict[str, Any] | None:
    """The result of a refund that the provider has told us of, unless our own call may have made it, or it is known to have failed.

    Raises `PermanentError` if its money has come back: that is another refund, with another posting.
    """
    noted = task.session.get(Refund, (task.tenant, refund_id), populate_existing=True)
    if noted is not None and noted.status in MADE and not task.may_have_happened("refund"):
        if noted.status == "reversed":
            raise PermanentError(
                f"refund {refund_id}: its money has come back; request another refund", "refund_reversed"
            )
        if not isinstance(task.refusal_of("refund"), RefundFailed):
            return {"status": noted.status, "refund": noted.provider_refund_id}
    task.session.rollback()  # no open transaction during a step or a call
    return None


def _other_refund(session: Session, refund: Refund, provider_refund_id: str) -> Refund | None:
    """Another refund of the payment's provider that has this id there, ours or one that was written down as the site's.

    Not locked: of the same payment it is by that, and another payment's is not changed.
    """
    if not provider_refund_id:
        return None
    payment = session.get_one(Payment, (refund.tenant, refund.payment_id))
    others = select(Refund).where(
        Refund.tenant == refund.tenant,
        Refund.id != refund.id,
        # of one payment whatever the row says: code of before has written none
        ((Refund.gateway == payment.gateway) | (Refund.payment_id == payment.id)),
        (Refund.provider_refund_id == provider_refund_id)
        | (Refund.is_at_site & (Refund.id == at_site(payment.gateway, provider_refund_id))),
        Refund.status != "refused",  # it has come to nothing, or is another one
    )
    return session.scalars(others.limit(1), execution_options={"populate_existing": True}).first()


def at_site(gateway: str, provider_refund_id: str) -> str:
    """Our id of a refund that no request of ours has asked for."""
    return f"{gateway}-{provider_refund_id}"


def mark_refunded(session: Session, refund: Refund, provider_refund_id: str, *, by: str = STRIPE) -> None:
    """Note that a locked refund was made by a provider, as its task or a report says, whichever comes first.

    If the provider has reported meanwhile that it failed after all, that is noted, too, and nobody is told that it was made.
    What was reported and may have been this one, or another of the same amount, is looked at again.
    """
    if refund.status in MADE:
        return
    payment = session.get_one(Payment, (refund.tenant, refund.payment_id))
    refund.gateway, refund.provider_refund_id, refund.failure = by, provider_refund_id, None
    move(refund, payment, "refunded")
    ledger.post(session, "refund", refund.id, payment.id, refund.amount, payment.currency, tenant=refund.tenant)
    session.flush()
    failure = failure_of(session, payment.charge_id, provider_refund_id, tenant=refund.tenant)
    if failure is not None:
        reverse(session, refund, failure.code, at=failure.occurred_at)
        return
    publish(session, "payment.refunded", _told(refund, payment), tenant=refund.tenant, app=app)
    settle_later(session, payment)


def reverse(session: Session, refund: Refund, code: str, *, at: datetime | None = None) -> None:
    """Note that the money of a locked refund, which was made, has come back: it is owed again, and support is told.

    `at`: when it has, by the provider's report; None: now.
    """
    payment = session.get_one(Payment, (refund.tenant, refund.payment_id), with_for_update=True)
    refund.failure, refund.failed_at = code, at or datetime.now(UTC)
    move(refund, payment, "reversed")
    ledger.post(session, "reversal", refund.id, payment.id, refund.amount, payment.currency, tenant=refund.tenant)
    _tell_support(session, refund, payment, code, was_made=True)
    settle_later(session, payment)


def _tell_support(session: Session, refund: Refund, payment: Payment, code: str, *, was_made: bool = False) -> None:
    told = {"refund_id": refund.id, "payment_id": payment.id, "code": code, "was_made": was_made, **payment.of_order}
    publish(session, "payment.refund_failed", told, tenant=refund.tenant, app=app)


def _told(refund: Refund, payment: Payment) -> dict[str, Any]:
    return {
        "refund_id": refund.id,
        "payment_id": payment.id,
        "customer_id": payment.customer_id,
        "amount": refund.amount,
        "currency": payment.currency,
        **payment.of_order,
    }
