"""The record's state table, row by row: each legal transition, and each refusal beside its accepting twin."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DataError
from sqlalchemy.pool import NullPool

import services
from idempotency.store import records
from idempotency.store.records import Busy, Changed, Claimed, Completed, Failed, Mismatch, Renewal
from idempotency.wire.keys import OperationId
from tests.support.operations import (
    ERROR,
    FINGERPRINT,
    LEASE,
    MESSAGE,
    RETENTION,
    age,
    at_once,
    claim,
    completed,
    due,
    early,
    expired,
    failed,
    new_id,
    outbox,
    record,
    started,
)
from tests.support.processes import eventually

OTHER = "v1:other"


@pytest.fixture(scope="module")
def database_url(servers: services.Services, template: str) -> Iterator[str]:
    """One database for the module: every test works on keys of its own."""
    name = f"records_{uuid4().hex[:8]}"
    admin = create_engine(servers.database_url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template}"))
    yield str(admin.url.set(database=name).render_as_string(hide_password=False))
    servers.drop_database(name)


@pytest.fixture(scope="module")
def engine(database_url: str) -> Iterator[Engine]:
    engine = create_engine(
        database_url,
        isolation_level="AUTOCOMMIT",
        poolclass=NullPool,
        # a statement that waits for a lock it should have skipped fails instead of hanging
        connect_args={"options": "-c lock_timeout=10s"},
    )
    yield engine
    engine.dispose()


def seconds_from_now(connection: Connection, id: OperationId, column: str) -> float:
    value: float = connection.execute(
        text(
            f"SELECT extract(epoch FROM {column} - clock_timestamp())::float8 FROM idempotency.records "
            "WHERE tenant = :tenant AND operation = :operation AND key = :key"
        ),
        {"tenant": id.tenant, "operation": id.operation, "key": id.key},
    ).scalar_one()
    return value


# ---------------------------------------------------------------- claim


def test_a_new_operation_is_claimed(connection: Connection) -> None:
    id = new_id()
    answer = claim(connection, id, token="t1")
    assert isinstance(answer, Claimed)
    assert (answer.id, answer.token, answer.attempts, answer.generation) == (id, "t1", 1, 1)
    assert answer.first_claim
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
    assert not taken.first_claim
    assert taken.age >= 0
    assert seconds_from_now(connection, held.id, "locked_until") > LEASE - 10


def test_the_same_token_claims_again_as_the_same_attempt_under_a_higher_fence(connection: Connection) -> None:
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


def test_a_claim_whose_reading_missed_the_row_is_asked_again(connection: Connection, engine: Engine) -> None:
    id = new_id()
    answers: list[records.Answer] = []
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


def ask_once(engine: Engine, id: OperationId) -> records.Answer:
    with engine.connect() as connection:
        return records.claim(
            connection, id, token="late", fingerprint=FINGERPRINT, message=MESSAGE, holder="h", lease=LEASE
        )


def wait_for_a_blocked_statement(connection: Connection) -> None:
    blocked = text(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )
    eventually(lambda: connection.execute(blocked).scalar_one(), timeout=10, what="a statement that waits for a lock")


def test_a_claim_that_waited_for_a_lock_gets_its_whole_lease(connection: Connection, engine: Engine) -> None:
    # now() would be the time before the wait
    held = expired(connection)
    answers: list[records.Answer] = []
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
    assert records.release(connection, held, delay=0.0, error=None)
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

    def claim(self, ids: list[OperationId]) -> list[list[records.Answer]]:
        """The final answers to every racer, key by key."""

        def race(_: int) -> list[records.Answer]:
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
                    return finished(lambda: records.complete(own, held, "1", retention=RETENTION, lease=LEASE))
                return isinstance(claim(own, held.id), Claimed)

        assert sorted(at_once(2, race)) == [False, True]


# ---------------------------------------------------------------- what only the holder may do


def finished(finish: Callable[[], None]) -> bool:
    """Whether a finishing statement matched; it raises division by zero by itself when it did not."""
    try:
        finish()
    except DataError as error:
        if getattr(error.orig, "sqlstate", None) != "22012":
            raise
        return False
    return True


def step(connection: Connection, held: Claimed) -> bool:
    return finished(lambda: records.record_step(connection, held, "reserve", {"state": "done"}, lease=LEASE))


def complete(connection: Connection, held: Claimed) -> bool:
    return finished(lambda: records.complete(connection, held, "1", retention=RETENTION, lease=LEASE))


def fail(connection: Connection, held: Claimed) -> bool:
    # over the open effect of `with_a_begun_effect`, and where there is none
    end = records.FailedEnd("effect_unknown", ERROR)
    return finished(lambda: records.fail(connection, held, end, retention=RETENTION, lease=LEASE))


def release(connection: Connection, held: Claimed) -> bool:
    return records.release(connection, held, delay=1.0, error=ERROR)


def renew(connection: Connection, held: Claimed) -> bool:
    return records.renew(connection, [held], LEASE)[held.token] is Renewal.HELD


def begin_effect(connection: Connection, held: Claimed) -> bool:
    return records.begin_effect(connection, held, "notify", {"state": "begun"}) is not None


def change_effect(connection: Connection, held: Claimed) -> bool:
    return records.change_effect(connection, held, "charge", {"state": "done"})


HOLDERS_ONLY = [renew, begin_effect, change_effect, step, complete, fail, release]


def with_a_begun_effect(connection: Connection) -> Claimed:
    held = started(connection)
    assert records.begin_effect(connection, held, "charge", {"state": "begun"}) is not None
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
        lambda held: {"id": OperationId("another", held.id.operation, held.id.key)},
        lambda held: {"id": OperationId(held.id.tenant, "another", held.id.key)},
        lambda held: {"id": OperationId(held.id.tenant, held.id.operation, "another")},
    ],
    ids=["older fence", "newer fence", "token", "tenant", "operation", "key"],
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
    assert records.release(connection, held, delay=0.0, error=None)


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
    records.complete(connection, held, '{"b": 1, "a": 2}', retention=100.0, lease=LEASE)
    row = record(connection, held.id)
    assert row is not None
    assert (row.status, row.result, row.response_code) == ("completed", '{"b": 1, "a": 2}', 200)
    assert row.locked_until is None
    assert (row.expires_at - row.completed_at).total_seconds() == pytest.approx(100, abs=1)


def test_failing_stores_the_error_and_keeps_the_first_one(connection: Connection) -> None:
    held = early(connection)
    age(connection, held.id, available_at=-1)
    again = started(connection, held.id)
    last = records.error_text("card_declined", "the card was declined")
    records.fail(connection, again, records.FailedEnd("card_declined", last), retention=100.0, lease=LEASE)
    row = record(connection, held.id)
    assert row is not None
    assert (row.status, row.error, row.first_error, row.response_code) == ("failed", last, ERROR, 422)
    assert (row.result, row.locked_until) == (None, None)
    assert (row.expires_at - row.completed_at).total_seconds() == pytest.approx(100, abs=1)


@pytest.mark.parametrize("finish", [complete, fail, step])
def test_a_holder_that_freezes_before_its_commit_is_evicted_within_half_a_lease(
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
    assert records.release(connection, held, delay=100.0, error=ERROR)
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
    assert records.release(connection, held, delay=0.0, error=None, give_back=True)
    row = record(connection, held.id)
    assert row is not None
    assert (row.attempts, row.error) == (0, None)
    assert started(connection, held.id).attempts == 1


def test_an_eager_release_delivers_nothing(connection: Connection) -> None:
    held = started(connection)
    assert records.release(connection, held, delay=0.0, error=None, deliver=False)
    assert outbox(connection, held.id) == []
    assert started(connection, held.id).attempts == 2


def test_the_last_error_is_the_newest_and_the_first_stays(connection: Connection) -> None:
    held = due(connection)
    again = started(connection, held.id)
    second = records.error_text("TimeoutError", "no answer")
    assert records.release(connection, again, delay=0.0, error=second)
    third = started(connection, held.id)
    assert records.release(connection, third, delay=0.0, error=None)
    row = record(connection, held.id)
    assert row is not None
    assert (row.first_error, row.error) == (ERROR, second)


# ---------------------------------------------------------------- effects and steps


def test_an_effect_is_begun_once_and_changed_while_it_is_open(connection: Connection) -> None:
    held = started(connection)
    begun_at = records.begin_effect(connection, held, "charge", {"state": "begun", "key": "k1"})
    assert begun_at is not None
    assert 0 <= records.database_time(connection) - begun_at < 10
    assert records.begin_effect(connection, held, "charge", {"state": "begun", "key": "k2"}) is None
    assert records.change_effect(connection, held, "charge", {"ended_at": 1.5})
    assert records.change_effect(connection, held, "charge", {"state": "done", "result": "1"})
    # a recorded result is never replaced
    assert not records.change_effect(connection, held, "charge", {"state": "done", "result": "2"})
    assert records.begin_effect(connection, held, "charge", {"state": "begun"}) is None
    row = record(connection, held.id)
    assert row is not None
    assert row.effects["charge"] == {
        "state": "done", "key": "k1", "ended_at": 1.5, "result": "1", "begun_at": pytest.approx(begun_at)
    }  # fmt: skip


def test_an_effect_that_did_not_happen_may_be_begun_again(connection: Connection) -> None:
    held = started(connection)
    records.begin_effect(connection, held, "charge", {"state": "begun", "number": 1})
    assert records.change_effect(connection, held, "charge", {"state": "not_happened"})
    assert not records.change_effect(connection, held, "charge", {"state": "done", "result": "1"})
    assert records.begin_effect(connection, held, "charge", {"state": "begun", "number": 2}) is not None
    assert records.change_effect(connection, held, "charge", {"state": "done", "result": "1"})


def test_an_effect_that_was_never_begun_cannot_change(connection: Connection) -> None:
    held = with_a_begun_effect(connection)
    assert not records.change_effect(connection, held, "notify", {"state": "done"})
    assert records.change_effect(connection, held, "charge", {"state": "done"})


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
    assert records.begin_effect(connection, held, name, {"state": "begun"}) is not None
    assert records.change_effect(connection, held, name, {"state": "done"})
    row = record(connection, held.id)
    assert row is not None
    assert row.effects[name]["state"] == "done"
    assert list(row.effects) == [name]


def test_effects_come_back_with_the_next_claim(connection: Connection) -> None:
    held = with_a_begun_effect(connection)
    assert records.change_effect(connection, held, "charge", {"state": "done", "result": '{"b":1,"a":1e16}'})
    assert step(connection, held)
    age(connection, held.id, locked_until=-1)
    taken = started(connection, held.id)
    assert set(taken.effects) == {"charge", "reserve"}
    assert taken.effects["charge"]["result"] == '{"b":1,"a":1e16}'


# ---------------------------------------------------------------- counting a duplicate


def duplicates(connection: Connection, id: OperationId) -> int:
    row = record(connection, id)
    assert row is not None
    return int(row.duplicates)


def test_a_duplicate_of_a_running_operation_is_counted_and_the_holder_named(connection: Connection) -> None:
    held = started(connection)
    assert records.count_duplicate(connection, held.id, FINGERPRINT) == (True, held.token)
    assert records.count_duplicate(connection, held.id, FINGERPRINT) == (True, held.token)
    assert duplicates(connection, held.id) == 2
    assert complete(connection, held)


def test_a_duplicate_of_an_operation_that_is_not_due_yet_is_counted(connection: Connection) -> None:
    held = early(connection)
    assert records.count_duplicate(connection, held.id, FINGERPRINT) == (True, None)
    assert duplicates(connection, held.id) == 1


@pytest.mark.parametrize("state", [expired, due, completed, failed])
def test_a_duplicate_of_what_may_need_it_or_has_ended_is_not_counted(
    connection: Connection, state: Callable[[Connection], Claimed]
) -> None:
    held = state(connection)
    before = record(connection, held.id)
    assert records.count_duplicate(connection, held.id, FINGERPRINT) == (False, None)
    assert record(connection, held.id) == before


@pytest.mark.parametrize("state", [started, early])
def test_a_duplicate_under_another_fingerprint_tenant_operation_or_key_is_not_counted(
    connection: Connection, state: Callable[[Connection], Claimed]
) -> None:
    id = state(connection).id
    assert records.count_duplicate(connection, id, OTHER) == (False, None)
    for other in (
        OperationId("another", id.operation, id.key),
        OperationId(id.tenant, "another", id.key),
        OperationId(id.tenant, id.operation, "another"),
    ):
        assert records.count_duplicate(connection, other, FINGERPRINT) == (False, None)
    assert duplicates(connection, id) == 0
    assert records.count_duplicate(connection, id, FINGERPRINT)[0]


# ---------------------------------------------------------------- renewing


def test_renewing_moves_the_lease_of_every_held_operation(connection: Connection) -> None:
    held = [started(connection) for _ in range(5)]
    for one in held:
        age(connection, one.id, locked_until=1)
    assert records.renew(connection, held, LEASE) == {one.token: Renewal.HELD for one in held}
    for one in held:
        assert LEASE - 10 < seconds_from_now(connection, one.id, "locked_until") <= LEASE


def test_what_was_taken_over_is_lost_and_the_rest_is_renewed(connection: Connection) -> None:
    mine, taken = started(connection), expired(connection)
    new = started(connection, taken.id)
    age(connection, new.id, locked_until=5)
    assert records.renew(connection, [taken, mine], LEASE) == {taken.token: Renewal.LOST, mine.token: Renewal.HELD}
    # a foreign lease is not made longer
    assert seconds_from_now(connection, new.id, "locked_until") < 6


@pytest.mark.parametrize("meanwhile", [released_now, completed_now, failed_now, claimed_again, purged])
def test_what_is_not_started_under_this_fence_is_lost(
    connection: Connection, meanwhile: Callable[[Connection, Claimed], None]
) -> None:
    held = started(connection)
    meanwhile(connection, held)
    assert records.renew(connection, [held], LEASE) == {held.token: Renewal.LOST}


def test_a_row_that_somebody_has_locked_is_unknown_and_the_others_are_renewed(
    connection: Connection, engine: Engine
) -> None:
    held = [started(connection) for _ in range(3)]
    locked, others = held[1], [held[0], held[2]]
    for one in held:
        age(connection, one.id, locked_until=1)
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as other:
        other.execute(text("SELECT FROM idempotency.records WHERE key = :key FOR UPDATE"), {"key": locked.id.key})
        verdicts = records.renew(connection, held, LEASE)
        other.rollback()
    assert verdicts == {locked.token: Renewal.UNKNOWN} | {one.token: Renewal.HELD for one in others}
    assert seconds_from_now(connection, locked.id, "locked_until") < 2
    assert records.renew(connection, [locked], LEASE) == {locked.token: Renewal.HELD}


def test_its_own_uncommitted_finish_makes_a_lease_unknown_not_lost(connection: Connection, engine: Engine) -> None:
    held = started(connection)
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as other:
        assert complete(other, held)
        assert records.renew(connection, [held], LEASE) == {held.token: Renewal.UNKNOWN}
        other.commit()
    assert records.renew(connection, [held], LEASE) == {held.token: Renewal.LOST}


# ---------------------------------------------------------------- tenants


@pytest.mark.parametrize("state", [started, expired, early, due, completed, failed])
def test_a_tenant_meets_nothing_of_another_one_s(
    connection: Connection, state: Callable[[Connection], Claimed]
) -> None:
    theirs = state(connection)
    before = record(connection, theirs.id)
    mine = OperationId("another", theirs.id.operation, theirs.id.key)
    assert records.lookup(connection, mine) is None
    # the same key with other arguments is no mismatch here
    held = started(connection, mine, fingerprint=OTHER)
    assert (held.attempts, held.effects) == (1, {})
    records.complete(connection, held, '"mine"', retention=RETENTION, lease=LEASE)
    assert claim(connection, mine, fingerprint=OTHER) == Completed('"mine"')
    assert record(connection, theirs.id) == before


def test_operations_of_one_key_are_independent(connection: Connection) -> None:
    one = completed(connection)
    other = OperationId(one.id.tenant, "tests.support.bank.transfer", one.id.key)
    assert started(connection, other, fingerprint=OTHER).first_claim


def test_looking_up_shows_the_record_and_changes_nothing(connection: Connection) -> None:
    held = completed(connection)
    before = record(connection, held.id)
    row = records.lookup(connection, held.id)
    assert row is not None
    assert (row.status, row.result, row.generation, row.attempts) == ("completed", '{"b": 1, "a": 2}', 1, 1)
    assert record(connection, held.id) == before
    assert records.lookup(connection, new_id()) is None
