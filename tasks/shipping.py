"""Shipping: labels of a carrier. One is made under a key, and voided again unless the driver was faster."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from idempotency import IdempotentTask, publish
from idempotency.providers import ProviderContract

from . import app
from .carrier import CarrierLabel
from .models import Label
from .outside import carrier
from .tenants import DEFAULT, named
from .validation import check_id

CREATED, COLLECTED, VOIDED = "CREATED", "COLLECTED", "VOIDED"
# for the buyer's parcel, and for the way back of goods that were rejected
RETURN, RESHIP = "return", "reship"
CARRIER = ProviderContract("the carrier", 24 * 3600.0, keeps_refusals=True, compares_body=True)


def confirm_pickup(session: Session, *, return_id: str, tenant: str = DEFAULT) -> bool:
    """The carrier says that it has collected the parcel of a return. Returns False if it has said so before.

    Raises `ValueError`, which names the field, if the return has no label (yet): the carrier has to say it again.
    """
    query = select(Label).filter_by(tenant=tenant, return_id=check_id("return_id", return_id), kind=RETURN)
    label = session.scalars(query.order_by(Label.created_at.desc()).with_for_update()).first()
    if label is None:
        raise ValueError("return_id: has no label")
    return _collected(session, label)


def is_collected(session: Session, return_id: str, *, tenant: str = DEFAULT) -> bool:
    """Whether the carrier has the parcel of a return."""
    query = select(Label.id).filter_by(tenant=tenant, return_id=return_id, kind=RETURN, status=COLLECTED)
    return session.scalars(query.limit(1)).first() is not None


def is_void(session: Session, return_id: str, kind: str, *, tenant: str = DEFAULT) -> bool:
    """Whether a label of this kind was made and cannot be used any more."""
    query = select(Label.id).filter_by(tenant=tenant, return_id=return_id, kind=kind, status=VOIDED)
    return session.scalars(query.limit(1)).first() is not None


def note_void(session: Session, return_id: str, *, tenant: str = DEFAULT) -> None:
    """The labels of a return are void, unless they were used: by their undo, or because a person has seen to it."""
    left = update(Label).where(Label.tenant == tenant, Label.return_id == return_id, Label.status == CREATED)
    session.execute(left.values(status=VOIDED))


@app.task(
    base=IdempotentTask,
    bind=True,
    name="shipping.create_label",
    provider=CARRIER,
    effect_types={"label": CarrierLabel},
    moves_money=True,
)
def create_label(self: IdempotentTask, return_id: str, kind: str = RETURN) -> dict[str, Any]:
    """Have a label made. A refusal by the carrier is final."""
    about = {"return_id": return_id, "kind": kind, **named(self.tenant)}
    made = self.effect("label", carrier.create_label, reconcile=carrier.find_label, **about)
    self.session.add(Label(tenant=self.tenant, id=made["id"], return_id=return_id, kind=kind))
    return {"label_id": made["id"]}


@app.task(base=IdempotentTask, bind=True, name="shipping.void_label", provider=CARRIER, moves_money=True)
def void_label(self: IdempotentTask, return_id: str, kind: str = RETURN, *, result: dict[str, Any]) -> dict[str, Any]:
    """Undo `create_label`, whose result it gets. A label whose parcel was collected stays, and its pick-up is told."""
    label = self.session.get_one(Label, (self.tenant, result["label_id"]))
    status = label.status
    self.session.rollback()  # no open transaction during an external call
    if status == CREATED:
        answer = self.effect("void", carrier.void_label, label_id=result["label_id"])
        label = self.session.get_one(Label, (self.tenant, result["label_id"]), with_for_update=True)
        if answer["status"] == "collected":
            _collected(self.session, label)
        elif label.status == CREATED:
            label.status = VOIDED
        status = label.status
    return {"label_id": result["label_id"], "status": status}


def _collected(session: Session, label: Label) -> bool:
    if label.status == COLLECTED:
        return False
    label.status = COLLECTED
    if label.kind == RETURN:
        told = {"return_id": label.return_id, "label_id": label.id}
        publish(session, "carrier.pickup_confirmed", told, tenant=label.tenant, app=app)
    return True
