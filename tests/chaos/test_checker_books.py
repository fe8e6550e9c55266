"""The rules about ends and books: each broken once is reported, and the right thing beside it is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sqlalchemy.engine import Engine

from tests.chaos.checker import Id, Step
from tests.chaos.hand import (
    CLAIM,
    COMPLETE,
    COMPLETE_BRIEFLY,
    DEPOSIT,
    ENQUEUE,
    FAIL,
    FAILURE,
    LETTER,
    NEXT,
    OPERATION,
    OVER,
    PUBLISH,
    PURGE,
    RELEASE,
    REOPEN,
    REPLAY,
    REPLAYED,
    Hand,
    deposited,
    findings,
    reported,
)

pytestmark = pytest.mark.long

EFFECTS = "UPDATE idempotency.records SET effects = cast(:effects AS jsonb) WHERE :row"
# What is only known when it is undone: a step's row, and its reversal.
RESERVE = "INSERT INTO entries (account, amount) VALUES ('a/reserved', 1)"
TAG = "INSERT INTO entries (account, amount) VALUES ('a/tag', 1)"
UNRESERVE = "INSERT INTO reversals (account, amount) VALUES ('a/reserved', 1)"
REFUND = "INSERT INTO reversals (account, amount) VALUES ('a/reserved/call', 1)"
UNTAG = "INSERT INTO reversals (account, amount) VALUES ('a/tag', 1)"
AUDIT = """INSERT INTO idempotency.audit (actor, action, tenant, task, key, fence_before, reason)
    VALUES ('ann', :action, :tenant, :task, :key, 7, 'ticket 1')"""
DISCARD = "UPDATE idempotency.dead_letters SET status = 'discarded', closed_at = clock_timestamp() WHERE :row"
CANCEL = FAIL.replace(
    "status = 'failed'", "status = 'failed', available_at = NULL, fence = nextval('idempotency.fence')"
)
CAUSED = """UPDATE idempotency.records SET error = cast(:error AS text),
    error_code = cast(cast(:error AS text) AS json) ->> 'code' WHERE :row"""
REVOKED = "UPDATE idempotency.records SET revoked_generation = generation WHERE :row"
KEEP = "UPDATE idempotency.records SET kept_until = clock_timestamp() + interval '1 hour' WHERE :row"
BY_THE_BROKER = LETTER.replace("'operation', tenant", "'broker', tenant")
STEPS = (Step("reserve", "a/reserved", 1), Step("tag", "a/tag", 1))
RESERVED = {"reserve": {"kind": "step", "state": "done", "position": 1, "undo": "t:unreserve", "begun_at": 1.0}}
TAGGED = RESERVED | {"tag": {"kind": "step", "state": "done", "position": 2, "undo": "t:untag", "begun_at": 2.0}}


def call(state: str, key: str = "g1", **more: Any) -> dict[str, Any]:
    entry = {"kind": "effect", "state": state, "key": key, "number": 1, "position": 3, "begun_at": 3.0}
    return {"call": entry | more}


def ended_as(code: str, *more: str) -> tuple[str, ...]:
    """The statements of a failing transaction with this code."""
    swapped = [each.replace("no_account", code) for each in (FAILURE, LETTER, FAIL)]
    return (*more, *swapped)


def failing(**more: Any) -> Any:
    return deposited(**({"rows": None, "result": None, "failure": "no_account"} | more))


def begun(hand: Any, effects: dict[str, Any], *rows: str) -> None:
    hand.sql(CLAIM)
    hand.sql(*rows, EFFECTS, effects=json.dumps(effects))


# ---------------------------------------------------------------- ends over an effect


@pytest.mark.parametrize("state", ["begun", "done"])
def test_a_plain_failure_over_an_effect_is_reported(engine: Engine, hand: Hand, state: str) -> None:
    begun(hand, call(state))
    hand.sql(*ended_as("no_account"))
    assert reported(engine, failing(), acts={"g1": 1}) == {"I27"}


def test_an_open_effect_ends_as_unknown_whatever_was_expected(engine: Engine, hand: Hand) -> None:
    begun(hand, call("begun"))
    hand.sql(*ended_as("effect_unknown"))
    for acts in ({}, {"g1": 1}):
        assert reported(engine, failing(), acts=acts) == set()


def test_an_effect_that_happened_ends_as_unfinished_and_is_named(engine: Engine, hand: Hand) -> None:
    begun(hand, call("done"))
    hand.sql(*(each.replace('"m"', '"after call happened"') for each in ended_as("unfinished")))
    assert reported(engine, failing(), acts={"g1": 1}) == set()


def test_an_unfinished_end_that_names_no_effect_is_reported(engine: Engine, hand: Hand) -> None:
    begun(hand, call("done"))
    hand.sql(*ended_as("unfinished"))
    assert reported(engine, failing(), acts={"g1": 1}) == {"I27"}


@pytest.mark.parametrize("code", ["effect_unknown", "unfinished"])
def test_an_open_end_without_its_effect_is_reported(engine: Engine, hand: Hand, code: str) -> None:
    begun(hand, call("not_happened"))
    hand.sql(*ended_as(code))
    assert reported(engine, failing()) == {"I6", "I27"}


def test_a_plain_failure_after_an_effect_did_not_happen_is_right(engine: Engine, hand: Hand) -> None:
    begun(hand, call("not_happened"))
    hand.sql(*ended_as("no_account"))
    assert reported(engine, failing()) == set()


def test_a_completion_over_an_open_effect_is_reported(engine: Engine, hand: Hand) -> None:
    begun(hand, call("begun"))
    hand.sql(DEPOSIT, COMPLETE)
    assert reported(engine, deposited(), acts={"g1": 1}) == {"I27"}


# ---------------------------------------------------------------- the ledgers


def test_an_effect_recorded_as_not_happened_but_done_is_reported(engine: Engine, hand: Hand) -> None:
    begun(hand, call("not_happened"))
    hand.sql(*ended_as("no_account"))
    assert reported(engine, failing(), acts={"g1": 1}) == {"I27"}


def test_an_effect_recorded_as_done_that_the_provider_has_not_is_reported(engine: Engine, hand: Hand) -> None:
    begun(hand, call("done"))
    hand.sql(DEPOSIT, COMPLETE)
    assert reported(engine, deposited()) == {"I27"}
    assert reported(engine, deposited(), acts={"g1": 1}) == set()


def test_an_act_under_a_key_that_was_left_open_is_reported(engine: Engine, hand: Hand) -> None:
    begun(hand, call("begun"))
    hand.sql(EFFECTS, effects=json.dumps(call("done", "g2")))
    hand.sql(DEPOSIT, COMPLETE)
    assert "I27" in reported(engine, deposited(), acts={"g1": 1, "g2": 1})
    assert reported(engine, deposited(), acts={"g2": 1}) == set()


def test_another_amount_at_the_provider_is_reported(engine: Engine, hand: Hand) -> None:
    begun(hand, call("done"))
    hand.sql(DEPOSIT, COMPLETE)
    assert reported(engine, deposited(amount=1), acts={"g1": 1}, amounts={"g1": 2}) == {"I27"}
    assert reported(engine, deposited(amount=1), acts={"g1": 1}, amounts={"g1": 1}) == set()


def test_a_business_row_with_another_code_than_the_record_is_reported(engine: Engine, hand: Hand) -> None:
    begun(hand, call("begun"))
    hand.sql(FAILURE, *ended_as("effect_unknown")[1:])
    assert reported(engine, failing()) == {"I3"}


def test_an_open_end_need_not_be_told_to_the_business(engine: Engine, hand: Hand) -> None:
    begun(hand, call("begun"))
    hand.sql(*ended_as("effect_unknown")[1:])
    assert reported(engine, failing()) == set()


def test_a_broken_on_failed_leaves_no_row_and_its_letter_says_so(engine: Engine, hand: Hand) -> None:
    hand.sql(CLAIM)
    hand.sql(LETTER.replace("no_account", "on_failed_error"), FAIL)
    assert reported(engine, failing()) == set()


# ---------------------------------------------------------------- steps and their undo


def test_undone_steps_that_a_replay_does_again_are_right(engine: Engine, hand: Hand) -> None:
    begun(hand, TAGGED, RESERVE, TAG)
    hand.sql(UNTAG, UNRESERVE, *ended_as("no_account", EFFECTS), effects="{}")
    hand.sql(REPLAYED, REOPEN, REPLAY)
    hand.sql(PUBLISH)
    begun(hand, TAGGED, RESERVE, TAG)
    hand.sql(DEPOSIT, COMPLETE)
    rows = (("a", 1), ("a/reserved", 1), ("a/tag", 1))
    assert reported(engine, deposited(rows=rows, steps=STEPS, may_fail=frozenset({"no_account"}))) == set()


def test_a_step_that_was_undone_and_is_still_recorded_is_reported(engine: Engine, hand: Hand) -> None:
    begun(hand, RESERVED, RESERVE)
    hand.sql(UNRESERVE, *ended_as("no_account"))
    assert "I31" in reported(engine, failing(steps=STEPS[:1]))


def test_a_step_that_was_forgotten_and_not_undone_is_reported(engine: Engine, hand: Hand) -> None:
    begun(hand, RESERVED, RESERVE)
    hand.sql(*ended_as("no_account", EFFECTS), effects="{}")
    assert reported(engine, failing(steps=STEPS[:1])) == {"I31"}


def test_a_permanent_end_that_undoes_nothing_is_reported(engine: Engine, hand: Hand) -> None:
    begun(hand, RESERVED, RESERVE)
    hand.sql(*ended_as("no_account"))
    assert reported(engine, failing(steps=STEPS[:1])) == {"I31"}


def test_undos_in_the_steps_own_order_are_reported(engine: Engine, hand: Hand) -> None:
    begun(hand, TAGGED, RESERVE, TAG)
    hand.sql(UNRESERVE, UNTAG, *ended_as("no_account", EFFECTS), effects="{}")
    assert reported(engine, failing(steps=STEPS)) == {"I31"}


def test_an_undo_while_an_effect_is_unknown_is_reported(engine: Engine, hand: Hand) -> None:
    begun(hand, RESERVED | call("begun"), RESERVE)
    hand.sql(UNRESERVE, *ended_as("effect_unknown", EFFECTS), effects=json.dumps(call("begun")))
    assert reported(engine, failing(steps=STEPS[:1])) == {"I31"}


def test_a_step_kept_while_an_effect_is_unknown_is_right(engine: Engine, hand: Hand) -> None:
    begun(hand, RESERVED | call("begun"), RESERVE)
    hand.sql(*ended_as("effect_unknown"))
    assert reported(engine, failing(steps=STEPS[:1])) == set()


def test_an_undo_before_an_effect_that_happened_is_reported(engine: Engine, hand: Hand) -> None:
    begun(hand, RESERVED | call("done"), RESERVE)
    unfinished = (each.replace('"m"', '"call happened"') for each in ended_as("unfinished", EFFECTS))
    hand.sql(UNRESERVE, *unfinished, effects=json.dumps(call("done")))
    assert reported(engine, failing(steps=STEPS[:1]), acts={"g1": 1}) == {"I31"}


def test_an_undo_of_a_step_after_the_effect_that_happened_is_right(engine: Engine, hand: Hand) -> None:
    booked = {"reserve": RESERVED["reserve"] | {"position": 4, "begun_at": 4.0}}
    begun(hand, call("done") | booked, RESERVE)
    unfinished = (each.replace('"m"', '"call happened"') for each in ended_as("unfinished", EFFECTS))
    hand.sql(UNRESERVE, *unfinished, effects=json.dumps(call("done")))
    assert reported(engine, failing(steps=STEPS[:1]), acts={"g1": 1}) == set()


def test_an_effect_that_an_undo_has_answered_for_may_act_again(engine: Engine, hand: Hand) -> None:
    refunded = failing(steps=STEPS[:1], refunds=(Step("call", "a/reserved/call", 1),))
    for number, key in enumerate(("g1", "g2"), start=1):
        begun(hand, RESERVED | call("done", key), RESERVE)
        hand.sql(UNRESERVE, REFUND, *ended_as("no_account", EFFECTS), effects=json.dumps(call("compensated", key)))
        assert reported(engine, refunded, acts={f"g{n}": 1 for n in range(1, number + 1)}) == set()
        if number == 1:
            hand.sql(REPLAYED, REOPEN, REPLAY)
            hand.sql(PUBLISH)
    assert reported(engine, refunded, acts={"g1": 1}) == {"I27"}


def test_a_compensated_effect_without_its_refund_is_reported(engine: Engine, hand: Hand) -> None:
    refunded = failing(steps=STEPS[:1], refunds=(Step("call", "a/reserved/call", 1),))
    begun(hand, RESERVED | call("done"), RESERVE)
    hand.sql(UNRESERVE, *ended_as("no_account", EFFECTS), effects=json.dumps(call("compensated")))
    assert reported(engine, refunded, acts={"g1": 1}) == {"I31"}


# ---------------------------------------------------------------- people, copies and eager calls


def test_a_failure_whose_letter_is_closed_without_a_person_is_reported(engine: Engine, hand: Hand) -> None:
    hand.sql(CLAIM)
    hand.sql(*ended_as("no_account"))
    hand.sql(REPLAYED)
    assert reported(engine, failing()) == {"I13"}


def test_a_failure_that_a_person_has_discarded_is_right(engine: Engine, hand: Hand) -> None:
    hand.sql(CLAIM)
    hand.sql(*ended_as("no_account"))
    hand.sql(DISCARD)
    assert reported(engine, failing()) == set()


def test_a_cancelled_operation_may_have_been_to_complete(engine: Engine, hand: Hand) -> None:
    hand.sql(CLAIM)
    hand.sql(RELEASE, NEXT)
    hand.sql(*(each.replace("no_account", "cancelled") for each in (LETTER, CANCEL)), AUDIT, action="cancel")
    hand.sql(PUBLISH)
    assert reported(engine, deposited()) == set()


def test_an_operation_cancelled_without_a_command_is_reported(engine: Engine, hand: Hand) -> None:
    hand.sql(CLAIM)
    hand.sql(*ended_as("cancelled"))
    assert reported(engine, deposited()) == {"I6"}


def test_an_operation_that_ended_as_revoked_without_a_revoke_is_reported(engine: Engine, hand: Hand) -> None:
    hand.sql(CLAIM)
    hand.sql(*ended_as("revoked"))
    assert reported(engine, deposited()) == {"I6"}
    assert reported(engine, deposited(), revoked=frozenset({Id("shop", OPERATION, "a")})) == set()


def test_a_revoke_that_takes_the_record_from_a_living_holder_is_reported(engine: Engine, hand: Hand) -> None:
    taken = [REVOKED, RELEASE, NEXT]
    hand.sql(CLAIM)
    hand.sql(OVER)
    hand.sql(*taken)  # of a holder whose lease is over
    hand.sql(PUBLISH)
    hand.sql(CLAIM)
    hand.sql(DEPOSIT, COMPLETE)
    assert reported(engine, deposited()) == set()
    hand.sql(CLAIM, key="b")
    hand.sql(*taken, key="b")
    assert "I20" in reported(engine, deposited(), deposited("b"), drained=False)


def test_a_command_that_took_place_twice_is_reported(engine: Engine, hand: Hand) -> None:
    hand.sql(CLAIM)
    hand.sql(AUDIT, action="resolve")
    hand.sql(AUDIT, action="refused")
    hand.sql(AUDIT, action="refused")
    hand.sql(DEPOSIT, COMPLETE)
    assert reported(engine, deposited()) == set()
    hand.sql(AUDIT, action="resolve")
    assert reported(engine, deposited()) == {"I14"}


def unknown(hand: Any, cause: str = "no_account") -> None:
    """Ended over an open effect, after a step with an undo."""
    begun(hand, RESERVED | call("begun"), RESERVE)
    error = {"code": "effect_unknown", "message": "m", "cause": {"code": cause}}
    hand.sql(*ended_as("effect_unknown"), CAUSED, error=json.dumps(error))


def conclude(hand: Any, code: str, effects: dict[str, Any], *rows: str) -> None:
    error = {"code": code, "message": "call happened", "cause": {"code": "no_account"}}
    values = {"effects": json.dumps(effects), "error": json.dumps(error), "action": "resolve"}
    hand.sql(*rows, EFFECTS, CAUSED, FAILURE.replace("no_account", code), AUDIT, **values)


def test_an_end_by_a_persons_word_that_undoes_and_tells_the_cause_is_right(engine: Engine, hand: Hand) -> None:
    unknown(hand)
    conclude(hand, "no_account", call("not_happened"), UNRESERVE)
    assert reported(engine, failing(steps=STEPS[:1])) == set()


def test_an_end_by_a_persons_word_that_undoes_nothing_is_reported(engine: Engine, hand: Hand) -> None:
    unknown(hand)
    conclude(hand, "no_account", RESERVED | call("not_happened"))
    assert reported(engine, failing(steps=STEPS[:1])) == {"I31"}


def test_a_plain_end_by_a_persons_word_that_it_happened_is_reported(engine: Engine, hand: Hand) -> None:
    unknown(hand)
    conclude(hand, "no_account", call("done"), UNRESERVE)
    assert reported(engine, failing(steps=STEPS[:1]), acts={"g1": 1}) == {"I27", "I31"}


def test_an_end_by_a_persons_word_as_unknown_is_reported(engine: Engine, hand: Hand) -> None:
    unknown(hand)
    conclude(hand, "effect_unknown", call("not_happened"), UNRESERVE)
    assert reported(engine, failing(steps=STEPS[:1])) == {"I6", "I27", "I31"}


def test_a_cause_that_could_not_be_is_reported(engine: Engine, hand: Hand) -> None:
    unknown(hand, "out_of_the_blue")
    assert reported(engine, failing()) == {"I6"}
    assert reported(engine, failing(may_stop=frozenset({"out_of_the_blue"}))) == set()


def test_what_the_purge_puts_off_is_no_change_of_an_end(engine: Engine, hand: Hand) -> None:
    hand.sql(CLAIM)
    hand.sql(*ended_as("no_account"))
    hand.sql(KEEP)
    assert reported(engine, failing()) == set()
    hand.sql(KEEP.replace("SET", "SET queue = 'other',").replace("hour", "day"))
    assert reported(engine, failing()) == {"I5"}


def test_a_purge_of_what_was_put_off_is_reported(engine: Engine, hand: Hand) -> None:
    hand.sql(CLAIM)
    hand.sql(DEPOSIT, COMPLETE_BRIEFLY)
    hand.sql(KEEP)
    hand.sql(PURGE)
    assert reported(engine, deposited()) == {"I21"}


def test_a_copy_that_ends_what_the_outbox_will_deliver_is_reported(engine: Engine, hand: Hand) -> None:
    hand.sql(CLAIM)
    hand.sql(RELEASE, NEXT)
    hand.sql(FAILURE, CANCEL, BY_THE_BROKER)
    hand.sql(PUBLISH)
    assert reported(engine, failing()) == {"I29"}


def test_a_message_that_ends_what_nothing_else_will_deliver_is_right(engine: Engine, hand: Hand) -> None:
    hand.sql(CLAIM)
    hand.sql(RELEASE, NEXT)
    hand.sql(PUBLISH)
    named = BY_THE_BROKER.replace("attempts, headers, payload)", "attempts, headers, payload, outbox_id)")
    named = named.replace("'{}', '{}' FROM", "'{}', '{}', (SELECT max(id) FROM idempotency.outbox) FROM")
    hand.sql(FAILURE, CANCEL, named)
    assert reported(engine, failing()) == set()


def test_attempts_exhausted_before_they_were_used_are_reported(engine: Engine, hand: Hand) -> None:
    hand.sql(CLAIM)
    hand.sql(*ended_as("attempts_exhausted"))
    assert reported(engine, failing(max_attempts=3)) == {"I13"}
    assert reported(engine, failing(max_attempts=1)) == set()


def test_an_eager_attempt_that_is_released_without_a_delivery_is_reported(engine: Engine, hand: Hand) -> None:
    hand.sql(ENQUEUE)
    hand.sql(PUBLISH)
    hand.sql(CLAIM)
    hand.sql(RELEASE)
    hand.sql(CLAIM)
    hand.sql(DEPOSIT, COMPLETE)
    assert reported(engine, deposited()) == {"I22"}


def test_what_was_only_called_eagerly_ends_too_once_it_is_claimed(engine: Engine, hand: Hand) -> None:
    hand.sql(CLAIM)
    hand.sql(OVER)
    assert reported(engine, deposited(once_claimed=True)) == {"I2", "I20"}


def test_what_was_only_sent_and_never_claimed_was_never_accepted(engine: Engine, hand: Hand) -> None:
    assert findings(engine, deposited(once_claimed=True)).counts.accepted == 0
