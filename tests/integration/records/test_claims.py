"""The record's state table: who may claim, who has to wait, and that tenants are separate."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable

import pytest
from sqlalchemy import Connection, Engine, text

from idempotency.store import claims, ends, operations
from idempotency.store.answers import Answer, Busy, Changed, Claimed, Completed, Failed, Mismatch
from idempotency.wire.keys import OperationId
from tests.integration.records.transitions import complete, finished
from tests.support.operations import (
    FINGERPRINT,
    LEASE,
    MESSAGE,
    RETENTION,
    SERVICE,
    age,
    at_once,
    claim,
    completed,
    due,
    early,
    expired,
    failed,
    new_id,
    record,
    seconds_from_now,
    started,
)
from tests.support.processes import eventually

OTHER = "v1:other"


# ---------------------------------------------------------------- claim


def test_a_new_operation_is_claimed(connection: Connection) -> None:
    id = new_id()
    answer = claim(connection, id, token="t1")
    assert isinstance(answer, Claimed)
    assert (answer.id, answer.token, answer.attempts, answer.generation) == (id, "t1", 1, 1)
    assert answer.effects == {}
    assert 0 <= answer.age < 10
    row = record(connection, id)
    assert row is not None
    assert (row.status, row.fence, row.token, row.attempts) == ("started", answer.fence, "t1", 1)
    assert (row.fingerprint, row.message) == (FINGERPRINT, MESSAGE)
    assert LEASE - 10 < seconds_from_now(connection, id, "locked_until") <= LEASE


def test_an_operation_that_is_held_is_busy(connection: Connection) -> None:
    held = started(connection)
    before = record(connection, held.id)
    assert claim(connection, held.id) == Busy()
    assert record(connection, held.id) == before


def test_a_lease_that_is_over_is_taken_over_with_a_new_fence_and_token(connection: Connection) -> None:
    held = expired(connection)
    taken = started(connection, held.id)
    assert taken.fence > held.fence
    assert taken.token != held.token
    assert taken.attempts == 2
    assert 0 <= taken.age < 10
    assert seconds_from_now(connection, held.id, "locked_until") > LEASE - 10


def test_the_same_token_claims_the_same_attempt_under_a_higher_fence(connection: Connection) -> None:
    held = started(connection, token="t1")
    again = started(connection, held.id, token="t1")
    assert (again.attempts, again.token) == (1, "t1")
    assert again.fence > held.fence
    age(connection, held.id, locked_until=-1)
    assert started(connection, held.id, token="t1").attempts == 1
    assert claim(connection, held.id, token="t2") == Busy()


def test_a_token_that_was_taken_over_does_not_claim_again(connection: Connection) -> None:
    held = expired(connection, token="t1")
    started(connection, held.id, token="t2")
    assert claim(connection, held.id, token="t1") == Busy()
    age(connection, held.id, locked_until=-1)
    assert started(connection, held.id, token="t1").attempts == 3


def test_a_released_operation_waits_until_it_is_due(connection: Connection) -> None:
    held = early(connection)
    before = record(connection, held.id)
    assert claim(connection, held.id) == Busy()
    assert claim(connection, held.id, token=held.token) == Busy()
    assert record(connection, held.id) == before
    age(connection, held.id, available_at=-0.001)
    claimed = started(connection, held.id)
    assert claimed.attempts == 2
    assert claimed.fence > held.fence
    row = record(connection, held.id)
    assert row is not None
    assert row.available_at is None


@pytest.mark.parametrize("result", ["null", "0", '""', "[]", "false", "1e16", '"a\\u0000b"', '{"b": 1, "a": 2}'])
def test_a_completed_operation_answers_with_the_stored_text(connection: Connection, result: str) -> None:
    held = completed(connection, result=result)
    before = record(connection, held.id)
    answer = claim(connection, held.id)
    assert answer == Completed(result)
    assert isinstance(answer, Completed)
    assert answer.value() == json.loads(result)
    assert claim(connection, held.id, token=held.token) == answer
    assert record(connection, held.id) == before


def test_a_failed_operation_answers_with_its_error(connection: Connection) -> None:
    held = failed(connection)
    before = record(connection, held.id)
    assert claim(connection, held.id) == Failed("no_account", "no such account")
    assert claim(connection, held.id, token=held.token) == Failed("no_account", "no such account")
    assert record(connection, held.id) == before


@pytest.mark.parametrize("state", [started, expired, early, due, completed, failed])
def test_other_arguments_are_refused_in_every_state_and_touch_nothing(
    connection: Connection, state: Callable[[Connection], Claimed]
) -> None:
    held = state(connection)
    before = record(connection, held.id)
    assert claim(connection, held.id, fingerprint=OTHER) == Mismatch(1)
    assert claim(connection, held.id, fingerprint=OTHER, token=held.token) == Mismatch(1)
    assert record(connection, held.id) == before
    assert not isinstance(claim(connection, held.id), Mismatch)


@pytest.mark.plain  # in partitions, a second statement reads
def test_a_claim_whose_reading_missed_the_row_is_asked_again(connection: Connection, engine: Engine) -> None:
    id = new_id()
    answers: list[Answer] = []
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as winner:
        started(winner, id)
        # this claim begins before the winner commits, waits for it, and does not see its row
        waiting = threading.Thread(target=lambda: answers.append(ask_once(engine, id)))
        waiting.start()
        wait_for_a_blocked_statement(connection)
        winner.commit()
        waiting.join(10)
    assert answers == [Changed()]
    assert claim(connection, id) == Busy()


def ask_once(engine: Engine, id: OperationId) -> Answer:
    with engine.connect() as connection:
        return claims.claim(
            connection,
            id,
            service=SERVICE,
            token="late",
            fingerprint=FINGERPRINT,
            message=MESSAGE,
            holder="h",
            lease=LEASE,
        )


def wait_for_a_blocked_statement(connection: Connection) -> None:
    blocked = text(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )
    eventually(lambda: connection.execute(blocked).scalar_one(), timeout=10, what="a statement that waits for a lock")


@pytest.mark.plain  # in partitions, a takeover's lease counts from when it asked, as its holder counts it
def test_a_claim_that_waited_for_a_lock_gets_its_whole_lease(connection: Connection, engine: Engine) -> None:
    # now() would be the time before the wait
    held = expired(connection)
    answers: list[Answer] = []
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as other:
        other.execute(text("SELECT FROM idempotency.records WHERE key = :key FOR UPDATE"), {"key": held.id.key})
        waiting = threading.Thread(target=lambda: answers.append(ask_once(engine, held.id)))
        waiting.start()
        wait_for_a_blocked_statement(connection)
        locked_since = connection.execute(text("SELECT clock_timestamp()")).scalar_one()
        other.commit()
        waiting.join(10)
    assert isinstance(answers[0], Claimed)
    row = record(connection, held.id)
    assert row is not None
    assert (row.locked_until - locked_since).total_seconds() >= LEASE


def test_the_fence_only_grows(connection: Connection) -> None:
    id = new_id()
    fences = [started(connection, id, token="t1").fence, started(connection, id, token="t1").fence]
    for _ in range(3):
        age(connection, id, locked_until=-1)
        held = started(connection, id)
        fences.append(held.fence)
    assert ends.release(connection, held, delay=0.0, error=None)
    fences.append(started(connection, id).fence)
    # also for a key that is used again after its record was purged
    connection.execute(text("DELETE FROM idempotency.records WHERE key = :key"), {"key": id.key})
    fences.append(started(connection, id).fence)
    assert fences == sorted(set(fences))


# ---------------------------------------------------------------- races


class Racers:
    """Threads with a connection each, set off together for one key after the other."""

    def __init__(self, engine: Engine, number: int) -> None:
        self._engine = engine
        self._number = number
        self._barrier = threading.Barrier(number, timeout=60)

    def claim(self, ids: list[OperationId]) -> list[list[Answer]]:
        """The final answers to every racer, key by key."""

        def race(_: int) -> list[Answer]:
            with self._engine.connect() as connection:
                answers = []
                for id in ids:
                    self._barrier.wait()
                    answers.append(claim(connection, id))
                return answers

        return [list(answers) for answers in zip(*at_once(self._number, race), strict=True)]


def test_of_sixteen_that_claim_a_new_operation_at_once_one_gets_it(connection: Connection, engine: Engine) -> None:
    ids = [new_id() for _ in range(20)]
    for id, answers in zip(ids, Racers(engine, 16).claim(ids), strict=True):
        assert Counter(map(type, answers)) == {Claimed: 1, Busy: 15}
        (winner,) = (answer for answer in answers if isinstance(answer, Claimed))
        row = record(connection, id)
        assert row is not None
        assert (row.token, row.fence, row.attempts) == (winner.token, winner.fence, 1)


@pytest.mark.parametrize("state", [expired, due])
def test_of_eight_that_take_over_at_once_one_gets_it(
    connection: Connection, engine: Engine, state: Callable[[Connection], Claimed]
) -> None:
    held = [state(connection) for _ in range(20)]
    races = Racers(engine, 8).claim([former.id for former in held])
    for former, answers in zip(held, races, strict=True):
        assert Counter(map(type, answers)) == {Claimed: 1, Busy: 7}
        (winner,) = (answer for answer in answers if isinstance(answer, Claimed))
        assert winner.attempts == 2
        assert winner.fence > former.fence


def test_a_finish_and_a_takeover_at_once_give_one_winner(engine: Engine, connection: Connection) -> None:
    for _ in range(20):
        held = expired(connection)

        def race(index: int, held: Claimed = held) -> bool:
            with engine.connect() as own:
                if index == 0:
                    return finished(lambda: ends.complete(own, held, "1", retention=RETENTION, lease=LEASE))
                return isinstance(claim(own, held.id), Claimed)

        assert sorted(at_once(2, race)) == [False, True]


# ---------------------------------------------------------------- counting a duplicate


def duplicates(connection: Connection, id: OperationId) -> int:
    row = record(connection, id)
    assert row is not None
    return int(row.duplicates)


def test_a_duplicate_of_a_running_operation_is_counted_naming_the_holder(connection: Connection) -> None:
    held = started(connection)
    assert claims.count_duplicate(connection, held.id, FINGERPRINT, service=SERVICE) == (True, held.token)
    assert claims.count_duplicate(connection, held.id, FINGERPRINT, service=SERVICE) == (True, held.token)
    assert duplicates(connection, held.id) == 2
    assert complete(connection, held)


def test_a_duplicate_of_an_operation_that_is_not_due_yet_is_counted(connection: Connection) -> None:
    held = early(connection)
    assert claims.count_duplicate(connection, held.id, FINGERPRINT, service=SERVICE) == (True, None)
    assert duplicates(connection, held.id) == 1


@pytest.mark.parametrize("state", [expired, due, completed, failed])
def test_a_duplicate_of_what_may_need_it_or_has_ended_is_not_counted(
    connection: Connection, state: Callable[[Connection], Claimed]
) -> None:
    held = state(connection)
    before = record(connection, held.id)
    assert claims.count_duplicate(connection, held.id, FINGERPRINT, service=SERVICE) == (False, None)
    assert record(connection, held.id) == before


@pytest.mark.parametrize("state", [started, early])
def test_a_duplicate_that_differs_in_any_part_is_not_counted(
    connection: Connection, state: Callable[[Connection], Claimed]
) -> None:
    id = state(connection).id
    assert claims.count_duplicate(connection, id, OTHER, service=SERVICE) == (False, None)
    for other in (
        OperationId("another", id.task, id.key),
        OperationId(id.tenant, "another", id.key),
        OperationId(id.tenant, id.task, "another"),
    ):
        assert claims.count_duplicate(connection, other, FINGERPRINT, service=SERVICE) == (False, None)
    assert duplicates(connection, id) == 0
    assert claims.count_duplicate(connection, id, FINGERPRINT, service=SERVICE)[0]


# ---------------------------------------------------------------- tenants


@pytest.mark.parametrize("state", [started, expired, early, due, completed, failed])
def test_a_tenant_meets_nothing_of_another_one_s(
    connection: Connection, state: Callable[[Connection], Claimed]
) -> None:
    theirs = state(connection)
    before = record(connection, theirs.id)
    mine = OperationId("another", theirs.id.task, theirs.id.key)
    assert operations.lookup(connection, mine, SERVICE) is None
    # the same key with other arguments is no mismatch here
    held = started(connection, mine, fingerprint=OTHER)
    assert (held.attempts, held.effects) == (1, {})
    ends.complete(connection, held, '"mine"', retention=RETENTION, lease=LEASE)
    assert claim(connection, mine, fingerprint=OTHER) == Completed('"mine"')
    assert record(connection, theirs.id) == before


def test_operations_of_one_key_are_independent(connection: Connection) -> None:
    one = completed(connection)
    other = OperationId(one.id.tenant, "tests.support.bank.transfer", one.id.key)
    assert started(connection, other, fingerprint=OTHER).attempts == 1


def test_looking_up_shows_the_record_and_changes_nothing(connection: Connection) -> None:
    held = completed(connection)
    before = record(connection, held.id)
    row = operations.lookup(connection, held.id, SERVICE)
    assert row is not None
    assert (row.status, row.result, row.generation, row.attempts) == ("completed", '{"b": 1, "a": 2}', 1, 1)
    assert record(connection, held.id) == before
    assert operations.lookup(connection, new_id(), SERVICE) is None
