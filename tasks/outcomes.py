"""What became of payments, refunds and returns by their rows, which stay when the records of their operations are purged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from idempotency import OperationId

from .models import Checkout, Payment, Refund, Return
from .payments import capture_payment
from .refunds import refund_payment
from .returns import OPEN, PROBLEMS, process_return


@dataclass(frozen=True, slots=True)
class Outcome:
    """`status` as that of an operation; `result` is what its task has returned, `code` why it failed."""

    status: str
    result: dict[str, Any] | None = None
    code: str | None = None


def outcome(connection: Connection, id: OperationId) -> Outcome | None:
    """The outcome that the row of this operation shows; None if it has no row."""
    if id.task == capture_payment.name:
        payment = connection.execute(
            select(Payment.status, Payment.charge_id, Payment.failure).filter_by(tenant=id.tenant, id=id.key)
        ).one_or_none()
        if payment is None:
            return _not_yet(connection, id)
        if payment.status in ("captured", "free", "cancelled"):
            return Outcome("completed", {"status": payment.status, "charge": payment.charge_id})
        return _unsuccessful(payment.failure)
    if id.task == refund_payment.name:
        refund = connection.execute(
            select(Refund.status, Refund.provider_refund_id, Refund.failure).filter_by(tenant=id.tenant, id=id.key)
        ).one_or_none()
        if refund is None:
            return None
        if refund.status == "refunded":
            return Outcome("completed", {"status": refund.status, "refund": refund.provider_refund_id})
        return _unsuccessful(refund.failure)
    if id.task == process_return.name:
        return _of_return(connection, id)
    return None


def _of_return(connection: Connection, id: OperationId) -> Outcome | None:
    query = select(Return.status, Return.problem).filter_by(tenant=id.tenant, id=id.key)
    found = connection.execute(query).one_or_none()
    if found is None:
        return None
    if found.status in OPEN:
        return Outcome("accepted")
    was_undone = found.status == "CANCELLED" or (
        found.status == "ESCALATED" and not set(found.problem.split(", ")) <= set(PROBLEMS)
    )
    if was_undone:
        return Outcome("failed", code=found.problem)
    return Outcome("completed", {"status": found.status, "problem": found.problem})


def _not_yet(connection: Connection, id: OperationId) -> Outcome | None:
    """The payment of an order that was accepted, and of which payments has not heard yet; None if there is no such order."""
    placed = connection.execute(select(Checkout.order_id).filter_by(tenant=id.tenant, order_id=id.key)).one_or_none()
    return None if placed is None else Outcome("accepted")


def _unsuccessful(failure: str | None) -> Outcome:
    return Outcome("accepted") if failure is None else Outcome("failed", code=failure)
