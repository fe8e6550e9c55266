"""Support: a case for every payment that failed or whose outcome is unknown, for what is not given back of a cancelled order,
for a refund whose money has come back, and for what people have to see to in a return."""

from __future__ import annotations

from typing import Any

from idempotency import IdempotentTask, subscribe

from . import app
from .models import Payment, ReturnCase, SupportCase
from .once import insert_unless_there
from .refunds import has_refund, is_owed, is_owed_again

REFUND_FAILED = "refund_failed"
# Short, and many at a time after an incident. Each locks its payment, so each commits by itself.
BATCHED: dict[str, Any] = {"batch": 20, "batch_commit": "each"}


@subscribe(
    "payment.failed",
    "payment.unknown",
    "payment.recovered",
    "payment.refund_failed",
    consumer="support",
    app=app,
    **BATCHED,
)
def open_case(self: IdempotentTask, event: dict[str, Any]) -> None:
    """Open or update the support case of a payment."""
    _look(self, event)


@subscribe("payment.refunded", consumer="support", app=app, **BATCHED)
def look_again(self: IdempotentTask, event: dict[str, Any]) -> None:
    """Update the support case of a payment, if there is one: what was not given back may be by now."""
    if self.session.get(SupportCase, (self.tenant, event["data"]["payment_id"])) is not None:
        _look(self, event)


def _look(self: IdempotentTask, event: dict[str, Any]) -> None:
    # from the rows, because events of one payment may be handled in either order
    payment = self.session.get_one(Payment, (self.tenant, event["data"]["payment_id"]), with_for_update=True)
    is_kept = is_owed_again(self.session, payment) or (
        payment.order_status == "cancelled" and is_owed(self.session, payment)
    )
    if not is_kept and payment.order_status == "cancelled" and has_refund(self.session, payment, "reserved"):
        # until it is known to be made
        case = self.session.get(SupportCase, (self.tenant, payment.id))
        is_kept = case is not None and case.code == REFUND_FAILED
    code = payment.failure or (REFUND_FAILED if is_kept else "recovered")
    self.session.merge(SupportCase(tenant=self.tenant, payment_id=payment.id, code=code))


@subscribe("return.escalated", "return.late", consumer="support", app=app, **BATCHED)
def open_return_case(self: IdempotentTask, event: dict[str, Any]) -> None:
    """Open a case for each problem of a return."""
    for code in event["data"]["problems"]:
        case = {"tenant": self.tenant, "return_id": event["data"]["return_id"], "code": code}
        insert_unless_there(self.session, ReturnCase, case)
