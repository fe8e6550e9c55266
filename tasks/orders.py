"""Orders: PENDING_PAYMENT, PAID, PROCESSING; or CANCELLED. What an order becomes next is decided here, and nowhere else.

Events may arrive in any order, late, and more than once. An order moves only from a status to a later one, under the
lock of its row, and an event is published in the commit of its move. So one that comes again finds nothing to do.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from idempotency import Defer, IdempotentTask, publish, subscribe

from . import app
from .models import Order
from .once import insert_unless_there

PENDING_PAYMENT, PAID, PROCESSING, CANCELLED = "PENDING_PAYMENT", "PAID", "PROCESSING", "CANCELLED"

# Seconds until an event that has come too early is looked at again.
PAUSE = 2.0

Event = dict[str, Any]


@subscribe("order.placement_requested", consumer="orders", app=app)
def place_order(self: IdempotentTask, event: Event) -> None:
    """The order is PENDING_PAYMENT."""
    _order(self.session, event["data"], tenant=self.tenant)


@subscribe("stock.confirmed", consumer="orders", app=app)
def request_payment(self: IdempotentTask, event: Event) -> None:
    """Its goods are set aside, so it may be charged: no one pays for what is out of stock."""
    order = _order(self.session, event["data"], tenant=self.tenant)
    if order is not None and order.status == PENDING_PAYMENT and not order.payment_requested:
        order.payment_requested = True
        publish(self.session, "order.pending_payment", _told(order), tenant=self.tenant, app=app)


@subscribe("payment.captured", consumer="orders", having=("order_id",), app=app)
def mark_paid(self: IdempotentTask, event: Event) -> None:
    """PAID. If it was cancelled meanwhile, it stays cancelled, and payments gives the money back."""
    pay(self.session, _known(self.session, event["data"], tenant=self.tenant))


@subscribe("stock.reserved", consumer="orders", app=app)
def process_order(self: IdempotentTask, event: Event) -> None:
    """PROCESSING: paid and reserved."""
    order = _known(self.session, event["data"], tenant=self.tenant)
    if order.status == PENDING_PAYMENT:
        raise Defer(PAUSE, f"order {order.id}: reserved, and not known to be paid yet")
    if order.status == PAID:
        order.status = PROCESSING


@subscribe("payment.failed", consumer="orders", having=("order_id",), app=app)
def cancel_unpaid(self: IdempotentTask, event: Event) -> None:
    """Nothing was charged. If it is PAID, this failure is older than the payment that has succeeded since."""
    cancel_for(self.session, _known(self.session, event["data"], tenant=self.tenant), event["data"]["code"])


@subscribe("stock.unavailable", consumer="orders", app=app)
def cancel_out_of_stock(self: IdempotentTask, event: Event) -> None:
    """There are too few pieces. If it is paid all the same, payments gives the money back."""
    order = _order(self.session, event["data"], tenant=self.tenant)
    if order is not None and order.status in (PENDING_PAYMENT, PAID):
        _cancel(self.session, order, "out_of_stock")


@subscribe("order.cancellation_requested", consumer="orders", app=app)
def cancel_on_request(self: IdempotentTask, event: Event) -> None:
    """The buyer does not want it any more. Once it is PROCESSING, only a return helps."""
    order = _order(self.session, event["data"], tenant=self.tenant)
    if order is not None and order.status in (PENDING_PAYMENT, PAID):
        _cancel(self.session, order, "on_request")


def find(session: Session, order_id: str, tenant: str) -> Order | None:
    """The order with this id, locked; None if no event has told of it yet."""
    return session.execute(select(Order).filter_by(tenant=tenant, id=order_id).with_for_update()).scalar_one_or_none()


def pay(session: Session, order: Order) -> None:
    """Its payment is captured: PAID, unless it has ended or was paid before."""
    if order.status == PENDING_PAYMENT:
        order.status = PAID
        publish(session, "order.paid", _told(order), tenant=order.tenant, app=app)


def cancel_for(session: Session, order: Order, code: str) -> None:
    """Its payment has failed: CANCELLED. If it is PAID, the failure is older than the payment that has succeeded since."""
    if order.status == PENDING_PAYMENT:
        _cancel(session, order, code)


def _order(session: Session, data: Event, *, tenant: str) -> Order | None:
    """The order of an event that tells all of it, locked, and inserted if this event is the first.

    None: its checkout session has another order, and this one is cancelled.
    """
    columns = {
        name: data[name] for name in ("checkout_session_id", "customer_id", "amount", "currency", "sku", "quantity")
    }
    insert_unless_there(session, Order, {"tenant": tenant, "id": data["order_id"], **columns})
    order = find(session, data["order_id"], tenant)
    if order is None:
        publish(session, "order.cancelled", {**data, "reason": "ordered_before"}, tenant=tenant, app=app)
    return order


def _known(session: Session, data: Event, *, tenant: str) -> Order:
    """The order of an event that follows from what was decided here, locked. `Defer`: the event is older than its order."""
    order = find(session, data["order_id"], tenant)
    if order is None:
        raise Defer(PAUSE, f"order {data['order_id']}: unknown yet")
    return order


def _cancel(session: Session, order: Order, reason: str) -> None:
    order.status, order.reason = CANCELLED, reason
    publish(session, "order.cancelled", {**_told(order), "reason": reason}, tenant=order.tenant, app=app)


def _told(order: Order) -> Event:
    return {
        "order_id": order.id,
        "checkout_session_id": order.checkout_session_id,
        "customer_id": order.customer_id,
        "amount": order.amount,
        "currency": order.currency,
        "sku": order.sku,
        "quantity": order.quantity,
    }
