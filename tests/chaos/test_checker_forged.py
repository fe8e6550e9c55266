"""The rules about forged messages: each broken once is reported, and a letter that says nothing is not."""

from __future__ import annotations

import pytest
from sqlalchemy.engine import Engine

from tests.chaos.evidence import AMOUNT
from tests.chaos.hand import CLAIM, COMPLETE, DEPOSIT, ENQUEUE, FAIL, Hand, deposited, enqueued_and_done, findings

REFUSED = """INSERT INTO idempotency.dead_letters (source, tenant, task, key, message_id, reason, first_error, last_error,
    attempts, headers, payload, queue) VALUES ('broker', :named, :operation, :about, :sent, :reason, 'e', 'e', 0, '{}', '{}', 'q')"""
NOTHING = {"named": None, "operation": None, "about": None, "sent": None, "reason": "unsigned"}


def said(engine: Engine, invariant: str, **evidence: object) -> list[str]:
    found = findings(engine, deposited(), **evidence)
    return [each.what for each in found.violations if each.invariant == invariant]


def test_a_refused_message_that_says_nothing_is_right(engine: Engine, hand: Hand) -> None:
    enqueued_and_done(hand)
    hand.sql(REFUSED, **NOTHING)
    assert [str(each) for each in findings(engine, deposited()).violations] == []


def test_what_a_forged_message_has_done_is_seen(engine: Engine, hand: Hand) -> None:
    hand.sql(CLAIM, key="forged-1")
    hand.sql(DEPOSIT, COMPLETE, key="forged-1")
    hand.sql(CLAIM)
    hand.sql("INSERT INTO entries (account, amount) VALUES ('a', :amount)", COMPLETE, amount=AMOUNT)
    hand.sql(ENQUEUE, tenant="forged-tenant")
    found = said(engine, "I32", amounts={"g1": AMOUNT})
    assert len([each for each in found if "has written into entries" in each]) == 2
    assert len([each for each in found if "has a record, or an outbox row" in each]) == 2
    assert f"a forged message has paid {AMOUNT}" in found


@pytest.mark.parametrize("name", ["named", "operation", "about", "sent"])
def test_a_letter_that_names_an_operation_is_seen(engine: Engine, hand: Hand, name: str) -> None:
    enqueued_and_done(hand)
    hand.sql(REFUSED, **NOTHING | {name: "a", "reason": "altered"})
    assert any("altered, has a" in each for each in said(engine, "I33"))


def test_a_letter_that_was_replayed_is_seen(engine: Engine, hand: Hand) -> None:
    enqueued_and_done(hand)
    hand.sql(REFUSED, **NOTHING)
    hand.sql("UPDATE idempotency.dead_letters SET status = 'replayed', closed_at = clock_timestamp()")
    assert any("was replayed" in each for each in said(engine, "I33"))


def test_an_operation_that_a_forged_message_has_ended_is_seen(engine: Engine, hand: Hand) -> None:
    hand.sql(CLAIM)
    hand.sql(FAIL.replace("no_account", "altered"))
    assert any("ended as altered" in each for each in said(engine, "I33"))
