"""The observer: how far the placement of each order has come, for people.

It listens to every event of an order and decides nothing; no service reads what it writes.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

from idempotency import IdempotentTask, subscribe
from idempotency.sagas import observe

from . import app

SAGA = "order_placement"
# What was charged, and what was given back: perhaps in parts, so their amounts are kept.
MONEY = {"payment.captured": 1, "payment.refunded": -1}
# A refund that was made, and whose money has come back.
REVERSED = "reversed"
# Locks the row, so that of two events handled at once, one sees the other.
_SEE = text("""
INSERT INTO placements (tenant, order_id, seen) VALUES (:tenant, :order_id, ARRAY[:event])
ON CONFLICT (tenant, order_id) DO UPDATE SET seen =
    CASE WHEN :event = ANY (placements.seen) THEN placements.seen ELSE placements.seen || excluded.seen END
RETURNING seen
""")


@subscribe("order.*", "stock.*", "payment.*", consumer="observer", having=("order_id",), app=app)
def watch(self: IdempotentTask, event: dict[str, Any]) -> None:
    """Note what has happened to an order, in `saga_instances`."""
    seen = _see(self.session, event, tenant=self.tenant)
    order_id, step = event["data"]["order_id"], event["type"]
    observe(self.session, SAGA, order_id, step, event["data"], status=status(seen), tenant=self.tenant, app=app)


def _see(session: Session, event: dict[str, Any], *, tenant: str) -> list[str]:
    """Add the event to those that were seen of this order, and return them all."""
    data, seen_as = event["data"], event["type"]
    if seen_as in MONEY:
        seen_as = f"{seen_as} {data['amount']} {data.get('refund_id', '')}"
    elif data.get("was_made"):
        seen_as = f"{REVERSED} {data['refund_id']}"
    about = {"tenant": tenant, "order_id": data["order_id"], "event": seen_as}
    seen: list[str] = session.execute(_SEE, about).scalar_one()
    return seen


def status(seen: Collection[str]) -> str:
    """What the events that were seen amount to, in whatever order they have come."""
    if "order.cancelled" not in seen:
        return "COMPLETED" if "stock.reserved" in seen else "RUNNING"
    return "FAILED" if "stock.released" in seen and _kept(seen) <= 0 else "COMPENSATING"


def _kept(seen: Collection[str]) -> int:
    """How much was charged and not given back. Of what was seen before amounts were kept, a refund is one of all."""
    kept = 0
    for each in seen:
        event, _, rest = each.partition(" ")
        amount, _, refund_id = rest.partition(" ")
        if not refund_id or f"{REVERSED} {refund_id}" not in seen:
            kept += MONEY.get(event, 0) * int(amount or 1 if event in MONEY else 0)
    return kept
