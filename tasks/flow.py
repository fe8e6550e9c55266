"""The map of events: who publishes each, who listens to it, and what undoes it. `python -m tasks.flow` draws it.

No service knows another, so no other module says what follows from what; only returns, a saga, calls others. Tests
compare the map with the code, both ways, and docs/order-placement.md and docs/returns.md with the map.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """`published_by` modules of this package; `heard_by` tasks, by name. `undone_by`: the event of what reverts it.

    `awaited_by`: the saga that waits for it.
    """

    published_by: tuple[str, ...]
    heard_by: tuple[str, ...]
    undone_by: str | None = None
    awaited_by: str | None = None


# Listens to everything, for people.
WATCH = "observer.watch"
# Posts to customers what they have registered for.
POST = "webhooks.fan_out"

PLACEMENT: dict[str, Event] = {
    # placing an order
    "order.placement_requested": Event(
        ("checkout",),
        ("orders.place_order", "payments.initiate_payment", "warehouse.confirm_stock", WATCH),
        undone_by="order.cancelled",
    ),
    "stock.confirmed": Event(("warehouse",), ("orders.request_payment", WATCH), undone_by="stock.released"),
    "order.pending_payment": Event(("orders",), ("payments.charge_order", WATCH), undone_by="order.cancelled"),
    "payment.captured": Event(
        ("payments",),
        ("orders.mark_paid", "notifications.send_notification", POST, WATCH),
        undone_by="payment.refunded",
    ),
    "order.paid": Event(("orders",), ("warehouse.reserve_stock", POST, WATCH), undone_by="order.cancelled"),
    "stock.reserved": Event(("warehouse",), ("orders.process_order", WATCH), undone_by="stock.released"),
    # why there is none
    "stock.unavailable": Event(("warehouse",), ("orders.cancel_out_of_stock", WATCH)),
    "payment.failed": Event(("payments",), ("orders.cancel_unpaid", "support.open_case", WATCH)),
    "order.cancellation_requested": Event(("checkout",), ("orders.cancel_on_request", WATCH)),
    # undoing it
    "order.cancelled": Event(("orders",), ("payments.cancel_payment", "warehouse.release_stock", POST, WATCH)),
    "stock.released": Event(("warehouse",), (WATCH,)),
    "payment.refunded": Event(("refunds",), ("notifications.send_notification", "support.look_again", POST, WATCH)),
    # payments in doubt
    "payment.unknown": Event(("payments",), ("support.open_case", WATCH)),
    "payment.recovered": Event(("payments",), ("support.open_case", WATCH)),
    "payment.refund_failed": Event(("refunds",), ("support.open_case", WATCH)),
}

SAGA = "returns.process_return"
MAIL = "notifications.send_notification"
RETURNS: dict[str, Event] = {
    "return.labelled": Event(("returns",), (MAIL,), undone_by="return.cancelled"),
    "carrier.pickup_confirmed": Event(("shipping",), ("returns.note",), awaited_by=SAGA),
    "warehouse.inspected": Event(("warehouse",), ("returns.note",), awaited_by=SAGA),
    # how a return ends
    "return.refunded": Event(("returns",), (MAIL,)),
    "return.rejected": Event(("returns",), (MAIL,)),
    "return.aborted": Event(("returns",), (MAIL,)),
    "return.cancelled": Event(("returns",), (MAIL,)),
    "return.escalated": Event(("returns",), (MAIL, "support.open_return_case")),
    # what came after its end
    "return.late": Event(("returns",), ("support.open_return_case",)),
}

EVENTS = PLACEMENT | RETURNS


def diagram(events: Mapping[str, Event]) -> str:
    """A map as a Mermaid flowchart, without the observer: services, their events, and dotted what undoes what."""
    services = {service: None for event in events.values() for service in (*event.published_by, *_listeners(event))}
    return "\n".join(["flowchart LR", *(f"  {name}[{name}]" for name in services), *_arrows(events)])


def table(events: Mapping[str, Event]) -> str:
    """A map as a table of Markdown, without the observer."""
    rows = ["| event | published by | heard by | undone by |", "|---|---|---|---|"]
    for name, event in events.items():
        undone_by = f"`{event.undone_by}`" if event.undone_by else ""
        heard_by = ", ".join(f"`{task}`" for task in (*_awaiting(event), *event.heard_by) if task != WATCH)
        rows.append(f"| `{name}` | {', '.join(event.published_by)} | {heard_by} | {undone_by} |")
    return "\n".join(rows)


def _listeners(event: Event) -> list[str]:
    heard_by = (*_awaiting(event), *event.heard_by)
    return list(dict.fromkeys(task.partition(".")[0] for task in heard_by if task != WATCH))


def _awaiting(event: Event) -> tuple[str, ...]:
    return () if event.awaited_by is None else (event.awaited_by,)


def _arrows(events: Mapping[str, Event]) -> Iterator[str]:
    for name, event in events.items():
        yield f'  {_node(name)}(["{name}"])'
        for publisher in event.published_by:
            yield f"  {publisher} --> {_node(name)}"
        for listener in _listeners(event):
            yield f"  {_node(name)} --> {listener}"
        if event.undone_by is not None:
            yield f"  {_node(event.undone_by)} -. undoes .-> {_node(name)}"


def _node(event: str) -> str:
    return event.replace(".", "_")


if __name__ == "__main__":
    for each in (PLACEMENT, RETURNS):
        print(f"```mermaid\n{diagram(each)}\n```\n\n{table(each)}\n")  # noqa: T201
