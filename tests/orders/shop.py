"""The shop in this process: its messages are delivered one by one, in the order that a test chooses, and more than once."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from uuid import uuid4

from celery import Celery
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from idempotency import OperationId, events, publish, subscribe
from idempotency.application import close_runtime
from idempotency.operate.replay import replay
from idempotency.store import testing as stored
from idempotency.store.rights import OPERATOR
from idempotency.wire.message import Message
from tests.orders.outside import Provider
from tests.support.deliveries import Deliveries, Outcome, deliver_row
from tests.support.operators import ANN
from tests.support.roles import url_of

# The consumer of every event, whose messages are read and not delivered.
WITNESS = "witness"
ORDER: dict[str, Any] = {"customer_id": "c1", "amount": 1000, "currency": "EUR"}
TENANT = "default"


class Sent(NamedTuple):
    """A message, and the event in it if it is one."""

    row: Any
    event: dict[str, Any] | None

    @property
    def what(self) -> str:
        """The event's type and its consumer, or the task."""
        return self.row.task if self.event is None else f"{self.event['type']} > {self.row.task}"


@contextmanager
def every_event_is_kept(app: Celery) -> Iterator[None]:
    """While the block lasts, every event has a row in the outbox, also if no service listens to it."""

    def see(self: Any, event: Any) -> None: ...

    task = subscribe("*", consumer=WITNESS, app=app)(see)
    yield
    events._subscriptions[app] = [each for each in events._subscriptions[app] if each.consumer != WITNESS]
    app.tasks.pop(task.name)


class Shop:
    """The application's processes have the rights of their role: a transaction is about one tenant. `books` shows all.

    What is seen of it is what was accepted since the last `forget`. `log`: the deliveries; `told`: the test's own events.
    """

    def __init__(self, engine: Engine, books: Engine, provider: Provider) -> None:
        import tasks
        from tasks import checkout, refunds, warehouse

        self.app, self.checkout, self.refunds, self.warehouse = tasks.app, checkout, refunds, warehouse
        self.engine, self.books, self.provider = engine, books, provider
        self.deliveries = Deliveries(tasks.app)
        self._seen: dict[str, Sent] = {}
        self._delivered: set[str] = set()
        self._since = 0
        self.log: list[str] = []
        self.told: Counter[str] = Counter()
        self._lock = threading.Lock()

    # ------------------------------------------------------------ what callers do

    @contextmanager
    def transaction(self, tenant: str = TENANT) -> Iterator[Session]:
        """A transaction of the application, about one tenant."""
        with Session(self.engine) as session, session.begin():
            session.execute(text("SELECT idempotency.about(:tenant)"), {"tenant": tenant})
            yield session

    def receive(self, sku: str, quantity: int, *, tenant: str = TENANT) -> None:
        delivery_id = f"d-{uuid4().hex}"
        with self.transaction(tenant) as session:
            self.warehouse.receive_stock(session, delivery_id=delivery_id, sku=sku, quantity=quantity, tenant=tenant)

    def order(self, sku: str | None = None, quantity: int = 1, **changes: Any) -> str:
        """Click; returns the order's id."""
        with self.transaction(changes.get("tenant", TENANT)) as session:
            session_id = changes.pop("checkout_session_id", f"cs-{uuid4().hex}")
            placed = self.checkout.submit_order(
                session, checkout_session_id=session_id, sku=sku, quantity=quantity, **ORDER | changes
            )
            return placed.order_id

    def cancel(self, order_id: str) -> None:
        """The buyer asks for it."""
        session_id = self.one("SELECT checkout_session_id FROM checkouts WHERE order_id = :id", id=order_id)[0]
        with self.transaction() as session:
            assert self.checkout.request_cancellation(session, checkout_session_id=session_id)

    def replay(self, order_id: str) -> None:
        """A person says that the payment is to be tried again."""
        letter = self.one("SELECT id FROM idempotency.dead_letters WHERE key = :id AND status = 'open'", id=order_id)[0]
        with self.operating():
            replay(self.app, letter, ANN)

    @contextmanager
    def operating(self, role: str = OPERATOR) -> Iterator[None]:
        """With the rights of an operator, or of another role."""
        url = self.app.conf.idempotency_database_url
        self._connect(url_of(role, url))
        try:
            yield
        finally:
            self._connect(url)

    def _connect(self, url: str) -> None:
        close_runtime(self.app)
        self.app.conf.update(idempotency_database_url=url)

    def publish_again(self, event: dict[str, Any]) -> None:
        """The same once more, as another event."""
        self.tell(event["type"], event["data"])

    def tell(self, event_type: str, data: dict[str, Any]) -> None:
        self.told[event_type] += 1
        with self.transaction() as session:
            publish(session, event_type, data, app=self.app)

    # ------------------------------------------------------------ messages

    def forget(self) -> None:
        """Look at what is accepted from now on only."""
        self.outbox()
        self._since = self.one("SELECT coalesce(max(id), 0) FROM idempotency.outbox")[0]
        self._seen.clear()
        self._delivered.clear()
        self.log.clear()
        self.told.clear()

    def outbox(self) -> list[Sent]:
        query = text("SELECT * FROM idempotency.outbox WHERE id > :since AND message_id <> ALL(:seen)")
        with self.books.connect() as connection, self._lock:
            for row in connection.execute(query, {"since": self._since, "seen": list(self._seen)}):
                self._seen[row.message_id] = Sent(row, _event_in(row.message))
            return sorted(self._seen.values(), key=lambda sent: sent.row.id)

    def waiting(self) -> list[Sent]:
        """Messages that were not delivered yet."""
        return [sent for sent in self._to_be_delivered() if sent.row.message_id not in self._delivered]

    def _to_be_delivered(self) -> list[Sent]:
        return [sent for sent in self.outbox() if not sent.row.task.startswith(WITNESS)]

    def deliver(self, sent: Sent) -> Outcome:
        row = sent.row
        with self._lock:
            self._delivered.add(row.message_id)
            self.log.append(sent.what)
        with self.books.connect() as connection, connection.begin():
            stored.ripen(connection, OperationId(row.tenant, row.task, row.key))
        return deliver_row(self.deliveries, self.app.tasks[row.task], row)

    def run(self, *held_back: str) -> None:
        """Deliver what waits, in the order in which it was accepted; what is held back, by parts of its name, stays."""
        while ready := [sent for sent in self.waiting() if not any(part in sent.what for part in held_back)]:
            self.deliver(ready[0])

    def run_in_any_order(self, chance: random.Random, *, repeats: int) -> None:
        """Deliver everything in an order drawn from `chance`; so many times, a message or an event comes again."""
        late = {sent.what for sent in self._to_be_delivered() if chance.random() < 0.3}
        while waiting := self.waiting():
            if repeats and chance.random() < 0.3:
                repeats -= 1
                again = chance.choice(self._to_be_delivered())
                if again.event is not None and chance.random() < 0.5:
                    self.publish_again(again.event)
                elif again.row.message_id in self._delivered:
                    self.deliver(again)
                continue
            if chance.random() < 0.1:
                late.add(chance.choice(waiting).what)
            self.deliver(chance.choice([sent for sent in waiting if sent.what not in late] or waiting))

    def events(self, event_type: str, order_id: str) -> list[dict[str, Any]]:
        """The events of this type about an order, one for each id."""
        found = {
            sent.event["id"]: sent.event
            for sent in self.outbox()
            if sent.event is not None
            and sent.event["type"] == event_type
            and sent.event["data"].get("order_id") == order_id
        }
        return list(found.values())

    # ------------------------------------------------------------ rows

    def one(self, query: str, **values: Any) -> Any:
        with self.books.connect() as connection:
            return connection.execute(text(query), values).one()

    def status(self, order_id: str) -> tuple[str, str, str]:
        """Of the order, its payment and its reservation."""
        return tuple(
            self.one(f"SELECT status FROM {table} WHERE {column} = :id", id=order_id)[0]
            for table, column in (("orders", "id"), ("payments", "order_id"), ("reservations", "order_id"))
        )

    def observed(self, order_id: str) -> Any:
        """What the observer shows to people."""
        query = "SELECT * FROM idempotency.saga_instances WHERE (saga_type, entity_id) = ('order_placement', :id)"
        return self.one(query, id=order_id)

    def stock(self, sku: str) -> tuple[int, int]:
        """Available, and reserved."""
        return tuple(self.one("SELECT available, reserved FROM stock WHERE sku = :sku", sku=sku))


def _event_in(message: str) -> dict[str, Any] | None:
    args, kwargs = json.loads(Message.from_text(message).body)[:2]
    event = args[0] if args else kwargs.get("event")
    return event if isinstance(event, dict) and "specversion" in event else None
