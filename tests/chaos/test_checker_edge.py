"""The rules about requests: each broken once is reported, and the right thing beside it is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sqlalchemy.engine import Engine

from tests.chaos.books import Books
from tests.chaos.evidence import EDGE, Accepted, Answer, Evidence, Id
from tests.chaos.expected import UNLIMITED
from tests.chaos.hand import (
    CLAIM,
    COMPLETE,
    DEPOSIT,
    ENQUEUE,
    FAIL,
    LETTER,
    NEXT,
    OVER,
    RELEASE,
    Hand,
    reported,
)

pytestmark = pytest.mark.long

# Nothing brings a request but its client.
ASK = CLAIM.replace("'{\"m\": 1}'", "''")
ANSWER = COMPLETE.replace("'{\"ok\": 1}'", "cast(:stored AS text)").replace(
    "response_code = 200", "response_code = :status"
)
MESSAGE = ENQUEUE.replace(":task", "'chaos.deposit'")
COUNTED = "UPDATE idempotency.records SET duplicates = 1 WHERE :row"
ID = Id("shop", EDGE, "a")
DONE = Answer(201, "application/json", b'{"account":"a","attempt":"1"}')
REFUSED = Answer(422, "application/json", b'{"detail":"no such account"}')
ENDED = Answer(500, "application/problem+json", b'{"type":"urn:p:operation_failed","code":"cancelled"}')


def asked(hand: Hand, *statements: str, answer: Answer = DONE) -> None:
    """Write as the edge does, in one transaction."""
    hand.sql(*statements, task=EDGE, stored=answer.stored, status=answer.status)


def request(answer: Answer = DONE, **more: Any) -> Any:
    """What is to come of the request, by the answer that its kind gets."""
    rows = (("a", 1),) if answer.status < 400 else ()
    known = {"rows": rows, "status": answer.status, "failure_row": False, "max_attempts": UNLIMITED}
    return Accepted(*ID, **(known | more))


def told(*answers: Answer) -> Any:
    return {ID: answers}


# ---------------------------------------------------------------- nothing to report


def test_a_request_that_was_answered_once_and_replayed_is_right(engine: Engine, hand: Hand) -> None:
    asked(hand, ASK)
    asked(hand, DEPOSIT, ANSWER)
    assert reported(engine, request(), answers=told(DONE, DONE)) == set()


def test_a_refused_request_that_has_left_nothing_is_right(engine: Engine, hand: Hand) -> None:
    asked(hand, ASK)
    asked(hand, ANSWER, answer=REFUSED)
    assert reported(engine, request(REFUSED), answers=told(REFUSED)) == set()


def test_a_request_is_released_without_a_delivery_as_often_as_its_client_asks(engine: Engine, hand: Hand) -> None:
    for _ in range(20):  # every task's limit is long past
        asked(hand, ASK)
        asked(hand, RELEASE)
    asked(hand, ASK)
    asked(hand, DEPOSIT, ANSWER)
    assert reported(engine, request(), answers=told(DONE)) == set()


def test_the_holders_own_release_of_a_request_is_told_from_recoverys(engine: Engine, hand: Hand) -> None:
    asked(hand, "SET application_name = 'pid 7'")
    asked(hand, ASK)  # held by process 7
    asked(hand, RELEASE)
    asked(hand, ASK)
    asked(hand, OVER)
    asked(hand, "SET application_name = 'pid 8'")
    asked(hand, RELEASE)
    events = Books(Evidence(engine, [])).events[ID]
    assert [event.verb for event in events] == ["claim", "release", "claim", "renew", "recover"]


def test_a_request_that_a_person_has_ended_is_answered_with_that_end(engine: Engine, hand: Hand) -> None:
    asked(hand, ASK)
    failing = [each.replace("no_account", "cancelled") for each in (LETTER, FAIL)]
    asked(hand, *failing)
    # beside the answer: nobody has cancelled it here
    assert reported(engine, request(), answers=told(ENDED)) == {"I6"}
    assert reported(engine, request(may_fail=frozenset({"cancelled"})), answers=told(ENDED)) == set()
    other = Answer(500, ENDED.media_type, ENDED.body.replace(b"cancelled", b"revoked"))
    assert reported(engine, request(may_fail=frozenset({"cancelled"})), answers=told(other)) == {"I6"}
    assert "I6" in reported(engine, request(may_fail=frozenset({"cancelled"})), answers=told(DONE))


# ---------------------------------------------------------------- each rule, broken once

CHANGED = Answer(201, "application/json", b'{"account":"a","attempt":"2"}')
OTHER_TYPE = DONE._replace(media_type="text/plain")
BROKEN: dict[str, tuple[str, list[tuple[str, ...]], Answer, tuple[Answer, ...]]] = {
    "two clients told different things": ("I6", [(ASK,), (DEPOSIT, ANSWER)], DONE, (DONE, CHANGED)),
    "all clients told what is not stored": ("I6", [(ASK,), (DEPOSIT, ANSWER)], DONE, (CHANGED,)),
    "another media type than is stored": ("I6", [(ASK,), (DEPOSIT, ANSWER)], DONE, (OTHER_TYPE,)),
    "another status than is stored": (
        "I6",
        [(ASK,), (DEPOSIT, ANSWER.replace(":status", "200"))],
        DONE,
        (DONE,),
    ),
    "an answer before the end": ("I6", [(ASK,), (RELEASE,)], DONE, (DONE,)),
    "an answer without a record": ("I15", [], DONE, (DONE,)),
    "carried out without its row": ("I3", [(ASK,), (ANSWER,)], DONE, (DONE,)),
    "carried out twice": ("I3", [(ASK,), (DEPOSIT, DEPOSIT, ANSWER)], DONE, (DONE,)),
    "refused with its row": ("I3", [(ASK,), (DEPOSIT, ANSWER)], REFUSED, (REFUSED,)),
    "refused with a message": ("I3", [(ASK,), (MESSAGE, ANSWER)], REFUSED, (REFUSED,)),
    "released with a message of its work": (
        "I3",
        [(ASK,), (MESSAGE, RELEASE), (ASK,), (DEPOSIT, ANSWER)],
        DONE,
        (DONE,),
    ),
    "sent again by a release": ("I22", [(ASK,), (RELEASE, NEXT), (ASK,), (DEPOSIT, ANSWER)], DONE, (DONE,)),
    "counted as a message's duplicate": ("I7", [(ASK,), (COUNTED,), (DEPOSIT, ANSWER)], DONE, (DONE,)),
    "never asked for again": ("I2", [(ASK,), (RELEASE,)], DONE, ()),
    "never sent by a client": ("I9", [(ASK,), (DEPOSIT, ANSWER)], DONE, ()),
    "taken from a living holder": ("I20", [(ASK,), (ASK,), (DEPOSIT, ANSWER)], DONE, (DONE,)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_reported(engine: Engine, hand: Hand, name: Any) -> None:
    invariant, transactions, answer, answers = BROKEN[name]
    for statements in transactions:
        asked(hand, *statements, answer=answer)
    accepted = [] if name == "never sent by a client" else [request(answer)]
    assert invariant in reported(engine, *accepted, answers=told(*answers) if answers else {})


def test_a_request_that_is_answered_as_another_kind_is_reported(engine: Engine, hand: Hand) -> None:
    asked(hand, ASK)
    asked(hand, ANSWER, answer=REFUSED)
    assert reported(engine, request(rows=()), answers=told(REFUSED)) == {"I6"}


@pytest.mark.parametrize("code", ["attempts_exhausted", "delivery_limit"])
def test_a_request_that_ends_as_only_a_task_may_is_reported(engine: Engine, hand: Hand, code: str) -> None:
    asked(hand, ASK)
    asked(hand, *(each.replace("no_account", code) for each in (LETTER, FAIL)))
    answer = ENDED._replace(body=json.dumps({"code": code}).encode())
    assert "I6" in reported(engine, request(), answers=told(answer))


def test_a_deposit_of_one_tenant_in_anothers_name_is_reported(engine: Engine, hand: Hand) -> None:
    asked(hand, ASK)
    asked(hand, DEPOSIT.replace(":key", "'theirs'"), ANSWER)
    theirs = Accepted("other", EDGE, "a", rows=(("theirs", 1),))
    assert "I23" in reported(engine, request(), theirs, answers=told(DONE), drained=False)
