"""The warehouse: integers of stock, and one reservation for each order.

Pieces are set aside when an order is placed (STOCK_CONFIRMED), belong to it once it is paid (STOCK_RESERVED), and go
back when it is cancelled (STOCK_RELEASED). Every change of stock has its movement in the same commit. A reservation is
inserted by whichever event comes first, also by the order's cancellation: then the later ones find that nothing is to
be set aside any more. What a buyer sends back is inspected, and can be ordered again or is quarantined (STOCK_RETURNED).
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import literal, select, update
from sqlalchemy.orm import Session

from idempotency import IdempotentTask, PermanentError, publish, subscribe

from . import app
from .models import Inspection, Movement, Reservation, Stock
from .once import insert_once, insert_unless_there
from .tenants import DEFAULT
from .validation import check_id, check_quantity, check_verdict

CONFIRMED, RESERVED, RELEASED = "STOCK_CONFIRMED", "STOCK_RESERVED", "STOCK_RELEASED"
RETURNED, OUT_OF_STOCK = "STOCK_RETURNED", "OUT_OF_STOCK"

Event = dict[str, Any]


def receive_stock(session: Session, *, delivery_id: str, sku: str, quantity: int, tenant: str = DEFAULT) -> bool:
    """Add the pieces of a delivery in the caller's transaction. Returns False if it was added before.

    Raises `ValueError`, which names the field and the limit, and `Taken` if the delivery was of something else.
    """
    pieces = {"sku": check_id("sku", sku), "quantity": check_quantity("quantity", quantity)}
    key = {"tenant": tenant, "kind": "received", "reference": check_id("delivery_id", delivery_id)}
    insert_unless_there(session, Stock, {"tenant": tenant, "sku": sku, "available": 0, "reserved": 0})
    if not insert_once(session, Movement, key, pieces, taken="delivery_id: was used before, for another delivery"):
        return False
    stock = session.get_one(Stock, (tenant, sku), with_for_update=True)
    stock.available += quantity
    return True


def record_inspection(session: Session, *, return_id: str, verdict: str, tenant: str = DEFAULT) -> bool:
    """Say what has come back, in the caller's transaction. Returns False if it was said before.

    Raises `ValueError`, which names the field and the values, and `Taken` if the verdict was another.
    """
    key = {"tenant": tenant, "return_id": check_id("return_id", return_id)}
    found = {"verdict": check_verdict("verdict", verdict)}
    is_new = insert_once(session, Inspection, key, found, taken="return_id: was inspected before, with another verdict")
    if is_new:
        publish(session, "warehouse.inspected", {"return_id": return_id, "verdict": verdict}, tenant=tenant, app=app)
    return is_new


def verdict_of(session: Session, return_id: str, *, tenant: str = DEFAULT) -> str | None:
    """What was found in the parcel of a return; None: nothing was recorded yet."""
    query = select(Inspection.verdict).filter_by(tenant=tenant, return_id=return_id)
    return session.scalars(query).one_or_none()


def is_taken_back(session: Session, order_id: str, *, tenant: str = DEFAULT) -> bool:
    """Whether the pieces of an order were booked as returned."""
    query = select(Reservation.status).filter_by(tenant=tenant, order_id=order_id)
    return session.scalars(query).one_or_none() == RETURNED


@app.task(base=IdempotentTask, bind=True, name="warehouse.restock")
def restock(self: IdempotentTask, return_id: str, order_id: str) -> dict[str, int]:
    """The pieces of an order have come back and can be ordered again."""
    return _take_back(self.session, "returned", return_id, order_id, tenant=self.tenant)


@app.task(base=IdempotentTask, bind=True, name="warehouse.quarantine")
def quarantine(self: IdempotentTask, return_id: str, order_id: str) -> dict[str, int]:
    """The pieces of an order have come back damaged: they cannot be ordered."""
    return _take_back(self.session, "quarantined", return_id, order_id, tenant=self.tenant)


@subscribe("order.placement_requested", consumer="warehouse", app=app)
def confirm_stock(self: IdempotentTask, event: Event) -> None:
    """Set the pieces aside, so that two orders cannot both be paid for the last one."""
    reservation, is_new = _reservation(self.session, event["data"], tenant=self.tenant)
    if is_new:
        is_there = _set_aside(self.session, reservation, event["data"])
        answer = "stock.confirmed" if is_there else "stock.unavailable"
        publish(self.session, answer, event["data"], tenant=self.tenant, app=app)


@subscribe("order.paid", consumer="warehouse", app=app)
def reserve_stock(self: IdempotentTask, event: Event) -> None:
    """The pieces are the order's. If nothing was set aside for it yet, that is tried now."""
    reservation, is_new = _reservation(self.session, event["data"], tenant=self.tenant)
    if is_new and not _set_aside(self.session, reservation, event["data"]):
        publish(self.session, "stock.unavailable", event["data"], tenant=self.tenant, app=app)
    if reservation.status == CONFIRMED:
        reservation.status = RESERVED
        told = {**event["data"], "pieces": reservation.quantity}
        publish(self.session, "stock.reserved", told, tenant=self.tenant, app=app)


@subscribe("order.cancelled", consumer="warehouse", app=app)
def release_stock(self: IdempotentTask, event: Event) -> None:
    """Put back what was set aside; from now on nothing is set aside for this order."""
    reservation, _ = _reservation(self.session, event["data"], tenant=self.tenant)
    if reservation.status not in (RELEASED, RETURNED):
        reservation.status = RELEASED
        _put_back(self.session, reservation)
        told = {**event["data"], "pieces": reservation.quantity}
        publish(self.session, "stock.released", told, tenant=self.tenant, app=app)


def _reservation(session: Session, data: Event, *, tenant: str) -> tuple[Reservation, bool]:
    """The reservation of an order, locked, and whether this event is the first to ask for it."""
    key = {"tenant": tenant, "order_id": data["order_id"]}
    nothing = {"sku": data["sku"], "quantity": 0, "status": OUT_OF_STOCK}
    is_new = insert_unless_there(session, Reservation, {**key, **nothing})
    return session.get_one(Reservation, key, with_for_update=True), is_new


def _set_aside(session: Session, reservation: Reservation, data: Event) -> bool:
    """Move what the order wants from `available` to `reserved`. False, and nothing is moved, if there is less."""
    if reservation.sku is not None:
        quantity = data["quantity"]
        taken = (
            update(Stock)
            .where(Stock.tenant == reservation.tenant, Stock.sku == reservation.sku, Stock.available >= quantity)
            .values(available=Stock.available - quantity, reserved=Stock.reserved + quantity)
            .returning(literal(1))
        )
        if session.execute(taken).one_or_none() is None:
            return False
        reservation.quantity = quantity
        session.add(_movement("reserved", reservation))
    reservation.status = CONFIRMED
    return True


def _put_back(session: Session, reservation: Reservation) -> None:
    """The mirror image of `_set_aside`."""
    if reservation.quantity > 0:
        stock = session.get_one(Stock, (reservation.tenant, reservation.sku), with_for_update=True)
        stock.available += reservation.quantity
        stock.reserved -= reservation.quantity
        session.add(_movement("released", reservation))


def _take_back(session: Session, kind: str, return_id: str, order_id: str, *, tenant: str) -> dict[str, int]:
    """Move what an order has from `reserved` to where `kind` says. Raises `PermanentError` if it has nothing (any more)."""
    reservation = session.get(Reservation, (tenant, order_id), with_for_update=True)
    if reservation is None or reservation.status != RESERVED:
        raise PermanentError(f"order {order_id}: no pieces are its own", "not_reserved")
    reservation.status = RETURNED
    if reservation.quantity > 0:
        stock = session.get_one(Stock, (tenant, reservation.sku), with_for_update=True)
        stock.reserved -= reservation.quantity
        if kind == "returned":
            stock.available += reservation.quantity
        else:
            stock.quarantined += reservation.quantity
        session.add(_movement(kind, reservation, reference=return_id))
    return {"pieces": reservation.quantity}


def _movement(kind: str, reservation: Reservation, *, reference: str | None = None) -> Movement:
    return Movement(
        tenant=reservation.tenant,
        kind=kind,
        reference=reference or reservation.order_id,
        sku=reservation.sku,
        quantity=reservation.quantity,
    )
