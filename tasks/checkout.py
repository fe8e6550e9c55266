"""Checkout: one order for each checkout session, however often its button is clicked. What follows, events say."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from idempotency import publish

from . import app
from .models import Checkout
from .once import insert_once, wait_at_most
from .tenants import DEFAULT
from .validation import check_id, check_purchase, check_quantity, new_order_id

# Seconds, for the commit of another caller: those who wait hold a thread and a connection of a server that all share.
LONGEST_WAIT = 0.5


def submit_order(
    session: Session,
    *,
    checkout_session_id: str,
    customer_id: str,
    amount: int,
    currency: str,
    sku: str | None = None,
    quantity: int = 1,
    tenant: str = DEFAULT,
) -> Checkout:
    """Accept the order of a checkout session in the caller's transaction and request its placement; or return it.

    The first of several callers inserts the row; the others wait for its commit and read it back. Without a `sku` the
    order is for nothing that is kept in stock. Raises `ValueError`, which names the field and the limit, `Taken` if the
    session's order is for another customer, amount or article, and `OperationalError` if another caller that is inserting
    it does not commit soon: then the transaction is lost, and can be repeated.
    """
    wanted = {
        **check_purchase(customer_id, amount, currency),
        "sku": None if sku is None else check_id("sku", sku),
        "quantity": check_quantity("quantity", quantity),
    }
    key = {"tenant": tenant, "checkout_session_id": check_id("checkout_session_id", checkout_session_id)}
    taken = "checkout_session_id: has an order already, for another customer, amount or article"
    wait_at_most(session, LONGEST_WAIT)
    generated = {"order_id": new_order_id()}
    is_new = insert_once(session, Checkout, key, wanted, generated=generated, taken=taken)
    checkout = session.get_one(Checkout, key)
    if is_new:
        publish(session, "order.placement_requested", _told(checkout), tenant=tenant, app=app)
    return checkout


def request_cancellation(session: Session, *, checkout_session_id: str, tenant: str = DEFAULT) -> bool:
    """Ask for the order of a checkout session to be cancelled, which is too late once it is PROCESSING.

    Returns whether there is such an order.
    """
    checkout = session.get(Checkout, (tenant, checkout_session_id))
    if checkout is not None:
        publish(session, "order.cancellation_requested", _told(checkout), tenant=tenant, app=app)
    return checkout is not None


def _told(checkout: Checkout) -> dict[str, Any]:
    # the whole order, so that no consumer needs another service's tables
    return {
        "order_id": checkout.order_id,
        "checkout_session_id": checkout.checkout_session_id,
        "customer_id": checkout.customer_id,
        "amount": checkout.amount,
        "currency": checkout.currency,
        "sku": checkout.sku,
        "quantity": checkout.quantity,
    }
