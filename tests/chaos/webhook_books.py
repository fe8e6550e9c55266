"""The books of webhooks, in and out: what the provider has told and what became of it, what the customer got and why."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Engine, text

from idempotency.webhooks.tasks import delivery_id
from sandbox import ledger
from tests.chaos.customer import Posted
from tests.chaos.evidence import Violation, is_forged

FAN_OUT = "webhooks.fan_out"
# What the application has published of each kind, and the member that names what it is about.
ABOUT = {"payment.captured": "payment_id", "payment.refunded": "refund_id"}


class Delivery(NamedTuple):
    """`attempts`: how many are recorded of it."""

    event_type: str
    body: str
    status: str
    because: str | None
    attempts: int


class Told(NamedTuple):
    """A report of the provider, as the application has kept it."""

    event_id: str
    object: str
    object_id: str
    state: str
    is_applied: bool


@dataclass(frozen=True)
class WebhookBooks:
    """Everything that is compared.

    `expected`: the deliveries of the events that were handled. `happened`: what the tables of the application say took
    place, by type and what it is about. `charges`, `refunds`: the provider's. `letters`: dead letters of messages that were
    not signed, with what they say of an operation.
    """

    expected: Collection[str]
    deliveries: Mapping[str, Delivery]
    posted: Sequence[Posted]
    happened: Mapping[str, Collection[str]]
    told: Sequence[Told]
    charges: Collection[str]
    refunds: Collection[str]
    letters: Sequence[tuple[str | None, ...]]


def read_webhooks(engine: Engine, endpoint: str, posted: Sequence[Posted], provider: Path) -> WebhookBooks:
    """Read all books, after everything has stopped."""
    outside = ledger.read(provider)
    with engine.connect() as connection:

        def rows(query: str) -> Sequence[tuple[str, ...]]:
            return [tuple(row) for row in connection.execute(text(query), {"fan_out": FAN_OUT})]

        return WebhookBooks(
            expected={delivery_id(event, endpoint) for (event,) in rows(_FANNED_OUT)},
            deliveries={id: Delivery(*values) for id, *values in rows(_DELIVERIES)},  # type: ignore[arg-type]
            posted=posted,
            happened={type: {id for (id,) in rows(query)} for type, query in _HAPPENED.items()},
            told=[Told(*row) for row in rows(_TOLD)],  # type: ignore[arg-type]
            charges={charge.id for charge in outside.charges},
            refunds={refund.id for refund in outside.refunds},
            letters=rows(_UNSIGNED),
        )


def check_webhooks(books: WebhookBooks) -> Iterator[Violation]:
    """Everything that is wrong."""
    yield from _each_event_is_delivered(books)
    yield from _each_post_is_of_a_delivery(books)
    yield from _each_report_is_applied_once(books)
    yield from _nothing_forged_took_effect(books)


def _each_event_is_delivered(books: WebhookBooks) -> Iterator[Violation]:
    """W1: each event has one delivery, which the customer has accepted, or which was given up where a person sees it."""
    for id in sorted({*books.expected} ^ books.deliveries.keys()):
        yield Violation("W1", id, "an event without its delivery" if id in books.expected else "of no event")
    accepted = {post.id for post in books.posted if post.status is not None and 200 <= post.status < 300}
    for id, delivery in books.deliveries.items():
        match delivery.status:
            case "delivered":
                if id not in accepted:
                    yield Violation("W1", id, "delivered, and the customer has not accepted it")
            case "given_up":
                if not delivery.because or not delivery.attempts:
                    yield Violation("W1", id, f"given up because of {delivery.because}, {delivery.attempts} attempts")
            case _:
                yield Violation("W1", id, f"still {delivery.status}")
    for type, member in ABOUT.items():
        sent = Counter(
            json.loads(each.body)["data"][member] for each in books.deliveries.values() if each.event_type == type
        )
        for about in sorted({*sent} | {*books.happened[type]}):
            if sent[about] != (about in books.happened[type]):
                took_place = "took place" if about in books.happened[type] else "did not take place"
                yield Violation("W1", about, f"{type}: {sent[about]} deliveries of what {took_place}")


def _each_post_is_of_a_delivery(books: WebhookBooks) -> Iterator[Violation]:
    """W2: every POST is signed, has its delivery's id and body, and was recorded before it was made."""
    for post in books.posted:
        delivery = books.deliveries.get(post.id)
        if not post.is_signed:
            yield Violation("W2", post.id, "posted without a valid signature")
        if delivery is None:
            yield Violation("W2", post.id, "posted under an id that no delivery has")
        elif post.body != delivery.body:
            yield Violation("W2", post.id, "posted with another body than its delivery's")
    for id, times in Counter(post.id for post in books.posted).items():
        if id in books.deliveries and times > books.deliveries[id].attempts:
            yield Violation("W2", id, f"posted {times} times, {books.deliveries[id].attempts} attempts are recorded")


def _each_report_is_applied_once(books: WebhookBooks) -> Iterator[Violation]:
    """W3: of each charge and refund the provider has told, and it was applied, once for each thing that it says."""
    for (what, id, state), times in Counter((each.object, each.object_id, each.state) for each in books.told).items():
        if times > 1:
            yield Violation("W3", id, f"{what} {state}: kept {times} times")
    applied = {(each.object, each.object_id) for each in books.told if each.is_applied and each.state == "succeeded"}
    for what, ids in (("charge", books.charges), ("refund", books.refunds)):
        for id in sorted(ids):
            if (what, id) not in applied:
                yield Violation("W3", id, f"no report of this {what} was applied")


def _nothing_forged_took_effect(books: WebhookBooks) -> Iterator[Violation]:
    """W4: what the provider has not signed is kept nowhere, and what we have not signed is about no operation."""
    for each in books.told:
        if is_forged(each.event_id) or is_forged(each.object_id):
            yield Violation("W4", each.event_id, "a report that the provider has not sent was kept")
    for letter in books.letters:
        if any(value is not None for value in letter):
            yield Violation("W4", f"{letter}", "a dead letter of a message that is not signed names an operation")


_FANNED_OUT = "SELECT key FROM idempotency.records WHERE task = :fan_out AND status = 'completed'"
_DELIVERIES = """
SELECT id, event_type, body, status, given_up_because,
    (SELECT count(*) FROM idempotency.webhook_attempts a WHERE a.delivery_id = d.id)
FROM idempotency.webhook_deliveries d
"""
_HAPPENED = {
    "payment.captured": "SELECT id FROM payments WHERE status IN ('captured', 'free')",
    "payment.refunded": "SELECT id FROM refunds WHERE status = 'refunded'",
}
_TOLD = "SELECT event_id, object, object_id, state, is_applied FROM payment_events"
_UNSIGNED = """
SELECT tenant, task, key, message_id FROM idempotency.dead_letters WHERE reason IN ('unsigned', 'altered')
"""
