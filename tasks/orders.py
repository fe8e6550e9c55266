"""Orders: one per checkout session, and one payment for it, however often its button is clicked."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from sqlalchemy.orm import Session

from .models import Order
from .once import insert_once, wait_at_most
from .payments import submit_payment
from .tenants import DEFAULT
from .validation import check_id

# Seconds, for the commit of another caller: those who wait hold a thread and a connection of a server that all share.
LONGEST_WAIT = 0.5


def submit_order(
    session: Session,
    *,
    checkout_session_id: str,
    customer_id: str,
    amount: int,
    currency: str,
    tenant: str = DEFAULT,
) -> Order:
    """Accept the order of a checkout session and start its payment, in the caller's transaction; or return it.

    The first of several callers inserts the row; the others wait for its commit and read it back. The payment's id is
    the order's. Raises `ValueError`, which names the field and the limit, `Taken` if the session's order is for another
    customer or amount, and `OperationalError` if another caller that is inserting it does not commit soon: then the
    transaction is lost, and can be repeated.
    """
    wanted: dict[str, Any] = {"customer_id": customer_id, "amount": amount, "currency": currency}
    key = {"tenant": tenant, "checkout_session_id": check_id("checkout_session_id", checkout_session_id)}
    new, taken = f"order-{uuid4().hex}", "checkout_session_id: has an order already, for another customer or amount"
    wait_at_most(session, LONGEST_WAIT)
    if insert_once(session, Order, key, wanted, generated={"id": new}, taken=taken):
        submit_payment(session, payment_id=new, tenant=tenant, **wanted)
    return session.get_one(Order, key)
