"""Orders: one per checkout session, whoever clicks how often, and one payment for it."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from .models import Order, orders
from .payments import submit_payment
from .tenants import DEFAULT
from .validation import Taken, check_id


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
    the order's. Raises `ValueError`, which names the field and the limit, and `Taken` if the session's order is for
    another customer or amount.
    """
    wanted: dict[str, Any] = {"customer_id": customer_id, "amount": amount, "currency": currency}
    session_id = check_id("checkout_session_id", checkout_session_id)
    row = {"tenant": tenant, "checkout_session_id": session_id, "id": f"order-{uuid4().hex}", **wanted}
    inserted = session.execute(insert(orders).values(row).on_conflict_do_nothing().returning(orders.c.id)).one_or_none()
    order = session.get_one(Order, (tenant, session_id))
    if inserted is not None:
        submit_payment(session, payment_id=order.id, tenant=tenant, **wanted)
    elif any(getattr(order, name) != value for name, value in wanted.items()):
        raise Taken("checkout_session_id: has an order already, for another customer or amount")
    return order
