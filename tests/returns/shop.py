"""The shop of tests/orders, which takes orders back: a test says what carrier and warehouse tell, and makes time pass."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
import requests
from sqlalchemy import text

from idempotency import OperationId
from idempotency.operate.saga import cancel_saga
from sandbox import ledger
from sandbox.process import Sandbox
from tests.orders.shop import TENANT, Sent, Shop
from tests.support.operators import ANN
from tests.support.sandbox import faults

# A retry is due within minutes; what waits longer is a saga that waits for an event.
_SOON = text("""
SELECT message_id FROM idempotency.outbox
WHERE id > :since AND status <> 'settled' AND available_at < clock_timestamp() + interval '1 hour'
""")
_PASS = text("""
WITH waits AS (
    UPDATE idempotency.saga_steps SET due_at = due_at - make_interval(days => :days) WHERE state = 'begun'
), records AS (
    UPDATE idempotency.records SET available_at = available_at - make_interval(days => :days)
    WHERE status = 'released'
)
UPDATE idempotency.outbox SET available_at = available_at - make_interval(days => :days) WHERE status = 'pending'
""")
PICKED_UP, INSPECTED = "carrier.pickup_confirmed", "warehouse.inspected"


class Returns(Shop):
    """A shop with a carrier; `use` says which."""

    sandbox: Sandbox

    def use(self, sandbox: Sandbox, patch: pytest.MonkeyPatch) -> None:
        from tasks import returns, shipping
        from tasks.carrier import Carrier

        self.returns, self.shipping, self.sandbox = returns, shipping, sandbox
        patch.setattr(shipping, "carrier", Carrier(sandbox.url, timeout=20))

    # ------------------------------------------------------------ what callers do

    def bought(self, quantity: int = 2, **changes: Any) -> str:
        """An order that is PROCESSING, of an article of which there were five."""
        sku = changes.pop("sku", f"sku-{uuid4().hex[:8]}")
        if sku is not None:
            self.receive(sku, 5, tenant=changes.get("tenant", TENANT))
        order = self.order(sku, quantity, **changes)
        self.run("observer", "notifications")
        assert self.one("SELECT status FROM orders WHERE id = :id", id=order)[0] == "PROCESSING"
        self.forget()
        return order

    def send_back(self, order: str, return_id: str | None = None, *, tenant: str = TENANT, **changes: Any) -> str:
        """Accept a return; returns its id."""
        return_id = return_id or f"ret-{uuid4().hex[:10]}"
        wanted = {"reason": "too small", "tenant": tenant, **changes}
        with self.transaction(tenant) as session:
            self.returns.submit_return(session, return_id=return_id, order_id=order, **wanted)
        return return_id

    def labelled(self, order: str | None = None, **changes: Any) -> str:
        """A return whose label was sent."""
        return_id = self.send_back(order or self.bought(), **changes)
        self.run()
        assert self.row(return_id).status == "LABELLED"
        return return_id

    def in_transit(self, order: str | None = None, **changes: Any) -> str:
        """A return whose parcel is on its way."""
        return_id = self.labelled(order, **changes)
        self.collect(return_id)
        self.run()
        assert self.row(return_id).status == "IN_TRANSIT"
        return return_id

    def collect(self, return_id: str, *, tenant: str = TENANT) -> None:
        """The driver takes the parcel, and the carrier says so."""
        for label in self.labels(return_id):
            if label.kind == "return":
                requests.post(f"{self.sandbox.url}/v1/labels/{label.id}/collect", timeout=20).raise_for_status()
        self.confirm(return_id, tenant=tenant)

    def confirm(self, return_id: str, *, tenant: str = TENANT) -> bool:
        with self.transaction(tenant) as session:
            return bool(self.shipping.confirm_pickup(session, return_id=return_id, tenant=tenant))

    def inspect(self, return_id: str, verdict: str, *, tenant: str = TENANT) -> bool:
        with self.transaction(tenant) as session:
            wanted = {"return_id": return_id, "verdict": verdict, "tenant": tenant}
            return bool(self.warehouse.record_inspection(session, **wanted))

    def cancel_return(self, return_id: str) -> None:
        """A person cancels the saga."""
        with self.operating():
            cancel_saga(self.app, OperationId(TENANT, self.returns.process_return.name, return_id), ANN)

    def refuses_label(self, return_id: str, kind: str = "return") -> None:
        faults(self.sandbox, next=["label_refused"], only={"reference": return_id, "kind": kind})

    # ------------------------------------------------------------ time

    def waiting(self) -> list[Sent]:
        with self.books.connect() as connection:
            soon = set(connection.execute(_SOON, {"since": self._since}).scalars())
        return [sent for sent in super().waiting() if sent.row.message_id in soon]

    def pass_days(self, days: int) -> None:
        with self.books.connect() as connection, connection.begin():
            connection.execute(_PASS, {"days": days})

    # ------------------------------------------------------------ rows

    def row(self, return_id: str) -> Any:
        return self.one("SELECT * FROM returns WHERE id = :id", id=return_id)

    def all(self, query: str, **values: Any) -> list[Any]:
        with self.books.connect() as connection:
            return list(connection.execute(text(query), values))

    def write(self, statement: str, **values: Any) -> None:
        """What nobody may do: change the books by hand."""
        with self.books.connect() as connection, connection.begin():
            assert connection.execute(text(statement), values).rowcount == 1

    def cases(self, return_id: str) -> set[str]:
        with self.books.connect() as connection:
            found = connection.execute(text("SELECT code FROM return_cases WHERE return_id = :id"), {"id": return_id})
            return set(found.scalars())

    def labels(self, return_id: str) -> list[ledger.Label]:
        """As the carrier has them."""
        return [label for label in ledger.read_labels(self.sandbox.data) if label.reference == return_id]

    def told_of(self, return_id: str) -> list[str]:
        """The events about a return that the application has published, in order."""
        found = {
            sent.event["id"]: sent.event["type"]
            for sent in self.outbox()
            if sent.event is not None and sent.event["data"].get("return_id") == return_id
        }
        return list(found.values())

    def saga(self, return_id: str) -> Any:
        return self.one(
            "SELECT * FROM idempotency.saga_instances WHERE (saga_type, entity_id) = (:saga, :id)",
            saga=self.returns.process_return.name,
            id=return_id,
        )
