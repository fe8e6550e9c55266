"""Batches whose messages commit each by itself: one statement claims them, and then each is an attempt like any other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError

from benchmarks.round_trips import counted
from idempotency import IdempotentTask
from idempotency.application import runtime_of
from idempotency.attempt.runtime import Runtime
from idempotency.store import batches
from tests.support.batches import (
    TRANSACTIONS,
    accounts,
    each,
    lose_the_answer,
    many,
    message,
    put,
    put_one,
    run,
    states,
)

TAKE_OVER = text(
    "UPDATE idempotency.records SET fence = nextval('idempotency.fence'), token = 'other' WHERE key = 'e1'"
)


@pytest.fixture
def trips(bank: Celery) -> Callable[[], Any]:
    """Count round trips to Postgres."""
    runtime = runtime_of(bank)
    return lambda: counted([runtime.engine.connect, runtime.autocommit])


def test_each_has_its_own_transaction_and_all_are_claimed_by_one_statement(
    bank: Celery, engine: Engine, trips: Callable[[], Any]
) -> None:
    task = each(bank, put_one)
    for warm in range(8):  # psycopg prepares a statement at its fifth execution
        run(bank, task, *(message(bank, task, f"w{warm}{n}") for n in range(3)))
    with engine.connect() as connection:
        connection.execute(text("TRUNCATE entries"))
    with trips() as counts:
        run(bank, task, *many(bank, task))
    assert counts == {"statement": 1 + 3 + 3, "BEGIN": 3, "COMMIT": 3}
    with engine.connect() as connection:
        assert connection.execute(TRANSACTIONS).scalar_one() == 3
        assert set(connection.execute(text("SELECT attempts FROM idempotency.records")).scalars()) == {1}


def test_a_failure_an_effect_and_a_setting_leave_the_other_bodies_unchanged(bank: Celery, engine: Engine) -> None:
    """An error, an effect, a setting: each is entered once, and in its own way."""
    entered = []

    def body(self: IdempotentTask, account: str) -> None:
        entered.append(account)
        match account:
            case "e0":
                raise ValueError("bad")
            case "e1":
                self.effect("call", lambda *, idempotency_key: 1)
            case "e2":
                self.session.execute(text("SET LOCAL search_path = pg_catalog, public"))
        put(self, account)

    task = each(bank, body, max_attempts=1)
    run(bank, task, *many(bank, task, 4))
    assert entered == ["e0", "e1", "e2", "e3"]
    assert accounts(engine) == {"e1": [1], "e2": [1], "e3": [1]}
    assert states(engine) == {"e0": "failed", "e1": "completed", "e2": "completed", "e3": "completed"}


def test_what_is_completed_is_answered_for_all_by_one_statement(
    bank: Celery, engine: Engine, trips: Callable[[], Any]
) -> None:
    task = each(bank, put_one)
    for _ in range(8):
        run(bank, task, *many(bank, task))
    with trips() as counts:
        traced = run(bank, task, *many(bank, task))
    assert counts == {"statement": 2}
    assert [answer[0] for answer in traced] == [0, 0, 0]  # not an error
    assert accounts(engine) == {"e0": [1], "e1": [1], "e2": [1]}


def test_a_completed_key_with_other_arguments_is_refused_as_a_mismatch(bank: Celery, engine: Engine) -> None:
    def body(self: IdempotentTask, account: str, amount: int) -> int:
        put(self, account, amount)
        return amount

    task = each(bank, body)
    run(bank, task, message(bank, task, "e0", 1))
    run(bank, task, message(bank, task, "e0", 2))
    assert accounts(engine) == {"e0": [1]}
    with engine.connect() as connection:
        letters = connection.execute(text("SELECT reason FROM idempotency.dead_letters")).scalars().all()
    assert letters == ["fingerprint_mismatch"]


def test_those_after_a_soft_time_limit_come_again_and_are_not_counted(bank: Celery, engine: Engine) -> None:
    entered = []

    def body(self: IdempotentTask, account: str) -> None:
        entered.append(account)
        put(self, account)
        if account == "e1":
            time.sleep(3.1)

    task = each(bank, body, soft_time_limit=3.0)
    results = run(bank, task, *many(bank, task, 4))
    assert [result is None for result in results] == [False, False, True, True]
    assert entered == ["e0", "e1"]
    assert states(engine) == {"e0": "completed", "e1": "completed", "e2": "released", "e3": "released"}
    assert not runtime_of(bank).heartbeat._holdings
    run(bank, task, *many(bank, task, 4))
    assert entered == ["e0", "e1", "e2", "e3"]
    with engine.connect() as connection:
        assert set(connection.execute(text("SELECT attempts FROM idempotency.records")).scalars()) == {1}


def test_what_waits_in_a_batch_is_renewed(bank: Celery, engine: Engine) -> None:
    runtime = runtime_of(bank)
    until = text("SELECT locked_until FROM idempotency.records WHERE key = 'e1'")
    seen = []

    def body(self: IdempotentTask, account: str) -> None:
        with engine.connect() as connection:
            if account == "e0":
                seen.append(connection.execute(until).scalar_one())
                runtime.heartbeat.run_once()
            seen.append(connection.execute(until).scalar_one())
        put(self, account)

    task = each(bank, body)
    run(bank, task, *many(bank, task, 2))
    first, renewed, _ = seen
    assert renewed > first
    assert accounts(engine) == {"e0": [1], "e1": [1]}
    runtime.hints.flush()
    assert not runtime.heartbeat._holdings


def test_one_that_is_taken_over_while_it_waits_commits_nothing(bank: Celery, engine: Engine) -> None:
    def body(self: IdempotentTask, account: str) -> None:
        if account == "e0":
            with engine.connect() as connection:
                connection.execute(TAKE_OVER)
        put(self, account)

    task = each(bank, body)
    run(bank, task, *many(bank, task))
    assert accounts(engine) == {"e0": [1], "e2": [1]}
    assert states(engine) == {"e0": "completed", "e1": "started", "e2": "completed"}


def by_a_heartbeat(runtime: Runtime) -> None:
    runtime.heartbeat.run_once()


def by_the_clock(runtime: Runtime) -> None:
    """A process that was paused goes on before its heartbeat does."""
    for holding in runtime.heartbeat._holdings.values():
        holding.renewed_at -= runtime.settings.lease


@pytest.mark.parametrize("lose", [by_a_heartbeat, by_the_clock])
def test_one_that_is_known_to_be_lost_asks_before_it_runs(
    bank: Celery, engine: Engine, lose: Callable[[Runtime], None]
) -> None:
    entered = []

    def body(self: IdempotentTask, account: str) -> None:
        entered.append(account)
        if account == "e0":
            with engine.connect() as connection:
                connection.execute(TAKE_OVER)
            lose(runtime_of(bank))
        put(self, account)

    task = each(bank, body)
    run(bank, task, *many(bank, task))
    assert entered == ["e0", "e2"]
    assert accounts(engine) == {"e0": [1], "e2": [1]}


def test_without_an_answer_to_the_claims_each_claims_alone(
    bank: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if they were committed, and cannot be looked up: under the same tokens they are claimed again, as the same attempts."""
    lose_the_answer(monkeypatch)

    def away(*args: Any, **options: Any) -> Any:
        raise OperationalError("SELECT", {}, ConnectionError("away"))

    monkeypatch.setattr(batches, "claimed", away)
    task = each(bank, put_one)
    run(bank, task, *many(bank, task))
    assert accounts(engine) == {"e0": [1], "e1": [1], "e2": [1]}
    with engine.connect() as connection:
        assert set(connection.execute(text("SELECT attempts FROM idempotency.records")).scalars()) == {1}


def test_those_after_an_exit_come_again_and_are_not_counted(bank: Celery, engine: Engine) -> None:
    def body(self: IdempotentTask, account: str) -> None:
        if account == "e1":
            raise SystemExit(0)

    task = each(bank, body)
    with pytest.raises(SystemExit):
        run(bank, task, *many(bank, task, 4))
    assert states(engine) == {"e0": "completed"} | dict.fromkeys(("e1", "e2", "e3"), "released")
    with engine.connect() as connection:
        counted = connection.execute(text("SELECT attempts FROM idempotency.records ORDER BY key")).scalars().all()
    assert counted == [1, 0, 0, 0]
    assert not runtime_of(bank).heartbeat._holdings


# As a trigger of the application's own may.
NOT_RENEWED = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN IF NEW.key = 'e2' AND NEW.locked_until > OLD.locked_until THEN RAISE EXCEPTION 'not this one'; END IF;
    RETURN NEW; END $$;
CREATE TRIGGER refuse BEFORE UPDATE ON idempotency.records FOR EACH ROW EXECUTE FUNCTION refuse()
"""


def test_a_record_that_cannot_be_renewed_costs_no_other_its_lease(bank: Celery, engine: Engine) -> None:
    until, seen = text("SELECT key, locked_until FROM idempotency.records"), list[dict[str, Any]]()

    def body(self: IdempotentTask, account: str) -> None:
        if account == "e0":
            with engine.connect() as connection:
                seen.append(dict(list(connection.execute(until))))
                runtime_of(bank).heartbeat.run_once()
                seen.append(dict(list(connection.execute(until))))
        put(self, account)

    with engine.connect() as connection:
        connection.exec_driver_sql(NOT_RENEWED)
    run(bank, each(bank, body), *many(bank, each(bank, body), 4))
    before, after = seen
    assert {key for key in after if after[key] > before[key]} == {"e0", "e1", "e3"}
