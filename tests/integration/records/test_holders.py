"""The record's state table: what its holder may do: each transition beside its refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Connection, Engine, text

from idempotency.store import claims, clock, effects, ends
from idempotency.store.answers import Claimed, Renewal, error_text
from idempotency.store.ends import FailedEnd
from idempotency.wire.keys import OperationId
from tests.integration.records.transitions import begin_effect, change_effect, complete, fail, release, renew, step
from tests.support.operations import (
    ERROR,
    FINGERPRINT,
    LEASE,
    MESSAGE,
    age,
    due,
    early,
    expired,
    outbox,
    record,
    seconds_from_now,
    started,
)

# ---------------------------------------------------------------- what only the holder may do


HOLDERS_ONLY = [renew, begin_effect, change_effect, step, complete, fail, release]


def with_a_begun_effect(connection: Connection) -> Claimed:
    held = started(connection)
    assert effects.begin_effect(connection, held, "charge", {"state": "begun"}) is not None
    return held


def altered(held: Claimed, **changes: Any) -> Claimed:
    fields = {name: getattr(held, name) for name in held.__dataclass_fields__}
    return Claimed(**fields | changes)


@pytest.mark.parametrize("transition", HOLDERS_ONLY)
@pytest.mark.parametrize(
    "wrong",
    [
        lambda held: {"fence": held.fence - 1},
        lambda held: {"fence": held.fence + 1},
        lambda held: {"token": uuid4().hex},
        lambda held: {"id": OperationId("another", held.id.task, held.id.key)},
        lambda held: {"id": OperationId(held.id.tenant, "another", held.id.key)},
        lambda held: {"id": OperationId(held.id.tenant, held.id.task, "another")},
    ],
    ids=["older fence", "newer fence", "token", "tenant", "task", "key"],
)
def test_who_is_not_the_holder_changes_nothing(
    connection: Connection,
    transition: Callable[[Connection, Claimed], bool],
    wrong: Callable[[Claimed], dict[str, Any]],
) -> None:
    held = with_a_begun_effect(connection)
    before = record(connection, held.id)
    assert not transition(connection, altered(held, **wrong(held)))
    assert record(connection, held.id) == before
    assert outbox(connection, held.id) == []
    assert transition(connection, held)


def released_now(connection: Connection, held: Claimed) -> None:
    assert ends.release(connection, held, delay=0.0, error=None)


def completed_now(connection: Connection, held: Claimed) -> None:
    assert complete(connection, held)


def failed_now(connection: Connection, held: Claimed) -> None:
    assert fail(connection, held)


def taken_over(connection: Connection, held: Claimed) -> None:
    age(connection, held.id, locked_until=-1)
    started(connection, held.id)


def claimed_again(connection: Connection, held: Claimed) -> None:
    started(connection, held.id, token=held.token)


def purged(connection: Connection, held: Claimed) -> None:
    connection.execute(text("DELETE FROM idempotency.records WHERE key = :key"), {"key": held.id.key})


@pytest.mark.parametrize("transition", HOLDERS_ONLY)
@pytest.mark.parametrize("meanwhile", [released_now, completed_now, failed_now, taken_over, claimed_again, purged])
def test_a_former_holder_changes_nothing(
    connection: Connection,
    transition: Callable[[Connection, Claimed], bool],
    meanwhile: Callable[[Connection, Claimed], None],
) -> None:
    held = with_a_begun_effect(connection)
    meanwhile(connection, held)
    before, rows = record(connection, held.id), outbox(connection, held.id)
    assert not transition(connection, held)
    assert record(connection, held.id) == before
    assert outbox(connection, held.id) == rows


@pytest.mark.parametrize("transition", HOLDERS_ONLY)
def test_a_holder_whose_lease_is_over_but_not_taken_is_still_the_holder(
    connection: Connection, transition: Callable[[Connection, Claimed], bool]
) -> None:
    held = with_a_begun_effect(connection)
    age(connection, held.id, locked_until=-1)
    assert transition(connection, held)


# ---------------------------------------------------------------- complete, fail, release


def test_completing_stores_the_result_and_the_retention(connection: Connection) -> None:
    held = started(connection)
    ends.complete(connection, held, '{"b": 1, "a": 2}', retention=100.0, lease=LEASE)
    row = record(connection, held.id)
    assert row is not None
    assert (row.status, row.result, row.response_code) == ("completed", '{"b": 1, "a": 2}', 200)
    assert row.locked_until is None
    assert (row.expires_at - row.completed_at).total_seconds() == pytest.approx(100, abs=1)


def test_failing_stores_the_error_and_keeps_the_first_one(connection: Connection) -> None:
    held = early(connection)
    age(connection, held.id, available_at=-1)
    again = started(connection, held.id)
    last = error_text("card_declined", "the card was declined")
    ends.fail(connection, again, FailedEnd("card_declined", last), retention=100.0, lease=LEASE)
    row = record(connection, held.id)
    assert row is not None
    assert (row.status, row.error, row.first_error, row.response_code) == ("failed", last, ERROR, 422)
    assert (row.result, row.locked_until) == (None, None)
    assert (row.expires_at - row.completed_at).total_seconds() == pytest.approx(100, abs=1)


@pytest.mark.parametrize("finish", [complete, fail, step])
def test_a_holder_frozen_before_its_commit_is_evicted_within_half_a_lease(
    engine: Engine, finish: Callable[[Connection, Claimed], bool]
) -> None:
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as connection:
        held = started(connection)
        connection.commit()
        usual = connection.execute(text("SHOW idle_in_transaction_session_timeout")).scalar_one()
        assert finish(connection, held)
        limit = connection.execute(text("SHOW idle_in_transaction_session_timeout")).scalar_one()
        assert limit == f"{int(LEASE * 1000 / 2) - 1}ms"
        connection.commit()
        # the limit was of that transaction alone
        assert connection.execute(text("SHOW idle_in_transaction_session_timeout")).scalar_one() == usual


@pytest.mark.parametrize("finish", [complete, fail])
def test_a_finish_that_is_rolled_back_never_was(
    connection: Connection, engine: Engine, finish: Callable[[Connection, Claimed], bool]
) -> None:
    held = started(connection)
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as other:
        assert finish(other, held)
        other.rollback()
    row = record(connection, held.id)
    assert row is not None
    assert row.status == "started"
    assert finish(connection, held)


def test_releasing_writes_the_next_delivery_with_it(connection: Connection) -> None:
    held = started(connection)
    assert ends.release(connection, held, delay=100.0, error=ERROR)
    row = record(connection, held.id)
    assert row is not None
    assert (row.status, row.token, row.locked_until, row.locked_by) == ("released", None, None, None)
    assert (row.attempts, row.error, row.first_error) == (1, ERROR, ERROR)
    assert 90 < seconds_from_now(connection, held.id, "available_at") <= 100
    (delivery,) = outbox(connection, held.id)
    assert (delivery.origin, delivery.status) == ("retry", "pending")
    assert (delivery.fingerprint, delivery.message) == (FINGERPRINT, MESSAGE)
    assert delivery.available_at == row.available_at


def test_a_release_that_is_rolled_back_delivers_nothing(connection: Connection, engine: Engine) -> None:
    held = started(connection)
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as other:
        assert release(other, held)
        other.rollback()
    assert outbox(connection, held.id) == []
    assert complete(connection, held)


def test_a_release_may_give_its_attempt_back(connection: Connection) -> None:
    held = started(connection)
    assert ends.release(connection, held, delay=0.0, error=None, give_back=True)
    row = record(connection, held.id)
    assert row is not None
    assert (row.attempts, row.error) == (0, None)
    assert started(connection, held.id).attempts == 1


def test_an_eager_release_delivers_nothing(connection: Connection) -> None:
    held = started(connection)
    assert ends.release(connection, held, delay=0.0, error=None, deliver=False)
    assert outbox(connection, held.id) == []
    assert started(connection, held.id).attempts == 2


def test_the_last_error_is_the_newest_and_the_first_stays(connection: Connection) -> None:
    held = due(connection)
    again = started(connection, held.id)
    second = error_text("TimeoutError", "no answer")
    assert ends.release(connection, again, delay=0.0, error=second)
    third = started(connection, held.id)
    assert ends.release(connection, third, delay=0.0, error=None)
    row = record(connection, held.id)
    assert row is not None
    assert (row.first_error, row.error) == (ERROR, second)


# ---------------------------------------------------------------- effects and steps


def test_an_effect_is_begun_once_and_changed_while_it_is_open(connection: Connection) -> None:
    held = started(connection)
    begun_at = effects.begin_effect(connection, held, "charge", {"state": "begun", "key": "k1"})
    assert begun_at is not None
    assert 0 <= clock.database_time(connection) - begun_at < 10
    assert effects.begin_effect(connection, held, "charge", {"state": "begun", "key": "k2"}) is None
    assert effects.change_effect(connection, held, "charge", {"ended_at": 1.5})
    assert effects.change_effect(connection, held, "charge", {"state": "done", "result": "1"})
    # a recorded result is never replaced
    assert not effects.change_effect(connection, held, "charge", {"state": "done", "result": "2"})
    assert effects.begin_effect(connection, held, "charge", {"state": "begun"}) is None
    row = record(connection, held.id)
    assert row is not None
    assert row.effects["charge"] == {
        "state": "done", "key": "k1", "ended_at": 1.5, "result": "1", "begun_at": pytest.approx(begun_at)
    }  # fmt: skip


def test_an_effect_that_did_not_happen_may_be_begun_again(connection: Connection) -> None:
    held = started(connection)
    effects.begin_effect(connection, held, "charge", {"state": "begun", "number": 1})
    assert effects.change_effect(connection, held, "charge", {"state": "not_happened"})
    assert not effects.change_effect(connection, held, "charge", {"state": "done", "result": "1"})
    assert effects.begin_effect(connection, held, "charge", {"state": "begun", "number": 2}) is not None
    assert effects.change_effect(connection, held, "charge", {"state": "done", "result": "1"})


def test_an_effect_that_was_never_begun_cannot_change(connection: Connection) -> None:
    held = with_a_begun_effect(connection)
    assert not effects.change_effect(connection, held, "notify", {"state": "done"})
    assert effects.change_effect(connection, held, "charge", {"state": "done"})


def test_a_step_is_recorded_once(connection: Connection) -> None:
    held = started(connection)
    assert step(connection, held)
    assert not step(connection, held)
    row = record(connection, held.id)
    assert row is not None
    assert row.effects["reserve"]["state"] == "done"


@pytest.mark.parametrize("name", ["it's", 'a"b', "a{b}", "0", "é", "a,b"])
def test_any_name_is_one_name(connection: Connection, name: str) -> None:
    held = started(connection)
    assert effects.begin_effect(connection, held, name, {"state": "begun"}) is not None
    assert effects.change_effect(connection, held, name, {"state": "done"})
    row = record(connection, held.id)
    assert row is not None
    assert row.effects[name]["state"] == "done"
    assert list(row.effects) == [name]


def test_effects_come_back_with_the_next_claim(connection: Connection) -> None:
    held = with_a_begun_effect(connection)
    assert effects.change_effect(connection, held, "charge", {"state": "done", "result": '{"b":1,"a":1e16}'})
    assert step(connection, held)
    age(connection, held.id, locked_until=-1)
    taken = started(connection, held.id)
    assert set(taken.effects) == {"charge", "reserve"}
    assert taken.effects["charge"]["result"] == '{"b":1,"a":1e16}'


# ---------------------------------------------------------------- renewing


def test_renewing_moves_the_lease_of_every_held_operation(connection: Connection) -> None:
    held = [started(connection) for _ in range(5)]
    for one in held:
        age(connection, one.id, locked_until=1)
    assert claims.renew(connection, held, LEASE) == {one.token: Renewal.HELD for one in held}
    for one in held:
        assert LEASE - 10 < seconds_from_now(connection, one.id, "locked_until") <= LEASE


def test_what_was_taken_over_is_lost_and_the_rest_is_renewed(connection: Connection) -> None:
    mine, taken = started(connection), expired(connection)
    new = started(connection, taken.id)
    age(connection, new.id, locked_until=5)
    assert claims.renew(connection, [taken, mine], LEASE) == {taken.token: Renewal.LOST, mine.token: Renewal.HELD}
    # a foreign lease is not made longer
    assert seconds_from_now(connection, new.id, "locked_until") < 6


@pytest.mark.parametrize("meanwhile", [released_now, completed_now, failed_now, claimed_again, purged])
def test_what_is_not_started_under_this_fence_is_lost(
    connection: Connection, meanwhile: Callable[[Connection, Claimed], None]
) -> None:
    held = started(connection)
    meanwhile(connection, held)
    assert claims.renew(connection, [held], LEASE) == {held.token: Renewal.LOST}


def test_a_locked_row_is_unknown_and_the_others_are_renewed(connection: Connection, engine: Engine) -> None:
    held = [started(connection) for _ in range(3)]
    locked, others = held[1], [held[0], held[2]]
    for one in held:
        age(connection, one.id, locked_until=1)
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as other:
        other.execute(text("SELECT FROM idempotency.records WHERE key = :key FOR UPDATE"), {"key": locked.id.key})
        verdicts = claims.renew(connection, held, LEASE)
        other.rollback()
    assert verdicts == {locked.token: Renewal.UNKNOWN} | {one.token: Renewal.HELD for one in others}
    assert seconds_from_now(connection, locked.id, "locked_until") < 2
    assert claims.renew(connection, [locked], LEASE) == {locked.token: Renewal.HELD}


def test_its_own_uncommitted_finish_makes_a_lease_unknown_not_lost(connection: Connection, engine: Engine) -> None:
    held = started(connection)
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as other:
        assert complete(other, held)
        assert claims.renew(connection, [held], LEASE) == {held.token: Renewal.UNKNOWN}
        other.commit()
    assert claims.renew(connection, [held], LEASE) == {held.token: Renewal.LOST}
