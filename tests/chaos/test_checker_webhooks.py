"""The rules about webhooks in and out: each broken once is reported, and the right thing is not."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from tests.chaos.customer import Posted
from tests.chaos.webhook_books import Delivery, Told, WebhookBooks, check_webhooks


def body(type: str, **data: str) -> str:
    return json.dumps({"type": type, "timestamp": "2026-03-01T12:00:00Z", "data": data})


CAPTURED, REFUNDED = body("payment.captured", payment_id="p1"), body("payment.refunded", refund_id="r1")
RIGHT = WebhookBooks(
    expected={"msg_1", "msg_2"},
    deliveries={
        "msg_1": Delivery("payment.captured", CAPTURED, "delivered", None, 2),
        "msg_2": Delivery("payment.refunded", REFUNDED, "given_up", "exhausted", 4),
    },
    # one answer was lost, and one POST never arrived
    posted=[
        Posted("msg_1", CAPTURED, True, None),
        Posted("msg_1", CAPTURED, True, 204),
        *[Posted("msg_2", REFUNDED, True, 500)] * 3,
    ],
    happened={"payment.captured": {"p1"}, "payment.refunded": {"r1"}},
    told=[
        Told("evt_1", "charge", "pi_1", "processing", True),
        Told("evt_2", "charge", "pi_1", "succeeded", True),
        Told("evt_3", "refund", "re_1", "succeeded", True),
        Told("evt_4", "charge", "pi_0", "failed", False),
    ],
    charges={"pi_1"},
    refunds={"re_1"},
    letters=[(None, None, None, None)],
)
FIRST, SECOND = RIGHT.deliveries.values()


def delivery(id: str, **changes: Any) -> dict[str, Any]:
    return {"deliveries": {**RIGHT.deliveries, id: RIGHT.deliveries[id]._replace(**changes)}}


def posted(*more: Posted, without: str = "") -> dict[str, Any]:
    return {"posted": [*(each for each in RIGHT.posted if each.id != without), *more]}


def told(*more: Told, without: str = "") -> dict[str, Any]:
    return {"told": [*(each for each in RIGHT.told if each.event_id != without), *more]}


def test_books_that_agree_are_right() -> None:
    assert list(check_webhooks(RIGHT)) == []


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "an event without its delivery": ({"expected": {"msg_1", "msg_2", "msg_3"}}, "W1", "without its delivery"),
    "a delivery of no event": ({"expected": {"msg_1"}}, "W1", "of no event"),
    "one that still waits": (delivery("msg_1", status="waiting"), "W1", "still waiting"),
    "one that was not accepted": (posted(without="msg_1"), "W1", "the customer has not accepted it"),
    "one that was refused": (
        posted(Posted("msg_1", CAPTURED, True, 500), without="msg_1"),
        "W1",
        "the customer has not accepted it",
    ),
    "given up for no reason": (delivery("msg_2", because=None), "W1", "given up because of None"),
    "given up before it was tried": (delivery("msg_2", attempts=0), "W1", "0 attempts"),
    "a capture that no webhook tells": (
        {"happened": {**RIGHT.happened, "payment.captured": {"p1", "p2"}}},
        "W1",
        "payment.captured: 0 deliveries of what took place",
    ),
    "a refund that did not take place": (
        {"happened": {**RIGHT.happened, "payment.refunded": set()}},
        "W1",
        "payment.refunded: 1 deliveries of what did not take place",
    ),
    "a capture told twice": (
        {
            "deliveries": {**RIGHT.deliveries, "msg_3": FIRST},
            "expected": {"msg_1", "msg_2", "msg_3"},
        },
        "W1",
        "payment.captured: 2 deliveries",
    ),
    "a POST without a signature": (
        posted(Posted("msg_1", CAPTURED, False, 204), without="msg_1"),
        "W2",
        "without a valid signature",
    ),
    "another id in the next attempt": (posted(Posted("msg_9", CAPTURED, True, 204)), "W2", "that no delivery has"),
    "another body in the next attempt": (posted(Posted("msg_2", CAPTURED, True, 500)), "W2", "with another body"),
    "a POST that is not recorded": (delivery("msg_1", attempts=1), "W2", "posted 2 times, 1 attempts"),
    "a report that is kept twice": (
        told(Told("evt_9", "charge", "pi_1", "succeeded", False)),
        "W3",
        "charge succeeded: kept 2 times",
    ),
    "a charge that was not told": (told(without="evt_2"), "W3", "no report of this charge"),
    "a refund that was not told": (told(without="evt_3"), "W3", "no report of this refund"),
    "a report that was not applied": (
        told(Told("evt_2", "charge", "pi_1", "succeeded", False), without="evt_2"),
        "W3",
        "no report of this charge",
    ),
    "a forged report": (
        told(Told("evt_forged_1", "charge", "pi_7", "succeeded", False)),
        "W4",
        "that the provider has not sent",
    ),
    "a forged charge": (
        told(Told("evt_7", "charge", "pi_forged_7", "succeeded", True)),
        "W4",
        "that the provider has not sent",
    ),
    "a letter that names an operation": (
        {"letters": [("default", "payments.capture_payment", "p1", None)]},
        "W4",
        "names an operation",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_the_checker_sees(what: str) -> None:
    changes, invariant, said = WRONG[what]
    found = list(check_webhooks(dataclasses.replace(RIGHT, **changes)))
    assert invariant in {each.invariant for each in found if said in each.what}, [str(each) for each in found]
