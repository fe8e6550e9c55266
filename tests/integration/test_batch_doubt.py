"""A batch whose claims have no answer, or whose Postgres is away: what waits is renewed, and nothing waits as often as it has messages."""

from __future__ import annotations

import time
from typing import Any

import pytest
from celery import Celery
from celery.app.trace import trace_task_ret
from celery.exceptions import Ignore, Reject
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from idempotency import IdempotentTask
from idempotency.application import runtime_of
from idempotency.store import batches, claims, ends, statements
from idempotency.upkeep import maintenance
from idempotency.worker import waiting
from idempotency.worker.batch import run_batch
from tests.integration.test_batch_each import lose_the_answer, many
from tests.integration.test_batch_neighbours import put, run, states
from tests.support.tasks import make_task

TOGETHER_AND_EACH = pytest.mark.parametrize("commit", ["each", "together"])


@TOGETHER_AND_EACH
def test_claims_whose_answer_was_lost_are_renewed_while_they_wait(
    bank: Celery, engine: Engine, configure: Any, monkeypatch: pytest.MonkeyPatch, commit: str
) -> None:
    configure(lease=1.0, heartbeat=0.25, max_run=600.0)
    entered: list[str] = []

    def body(self: IdempotentTask, account: str) -> None:
        entered.append(account)
        put(self, account)
        if account == "e0":
            time.sleep(1.5)
            assert maintenance.recover(bank) == 0

    task = make_task(bank, body, key="{account}", batch=10, max_attempts=1, batch_commit=commit)
    messages = many(bank, task)
    with monkeypatch.context() as patch:
        lose_the_answer(patch)
        run(bank, task, *messages)
    assert entered == ["e0", "e1", "e2"]
    assert states(engine) == dict.fromkeys(("e0", "e1", "e2"), "completed")
    assert not runtime_of(bank).heartbeat._holdings


@TOGETHER_AND_EACH
def test_claims_that_are_made_some_at_a_time_are_renewed_from_the_first(
    bank: Celery, engine: Engine, configure: Any, monkeypatch: pytest.MonkeyPatch, commit: str
) -> None:
    """As in partitions, where a statement takes a lock for each key. The second one is slower than a lease."""
    configure(lease=1.0, heartbeat=0.25, max_run=600.0)
    entered: list[str] = []
    recovered: list[int] = []
    claiming: list[int] = []

    def body(self: IdempotentTask, account: str) -> None:
        entered.append(account)
        put(self, account)

    def slow(connection: Any, statement: str, parameters: Any = None) -> Any:
        if "INSERT INTO idempotency.records" in statement:
            claiming.append(1)
            if len(claiming) == 2:
                time.sleep(1.3)
                recovered.append(maintenance.recover(bank))
        return statements.execute(connection, statement, parameters)

    monkeypatch.setattr(batches, "most_together", lambda connection, many: 1)
    monkeypatch.setattr(batches, "execute", slow)
    task = make_task(bank, body, key="{account}", batch=10, max_attempts=1, batch_commit=commit)
    run(bank, task, *many(bank, task))
    assert recovered == [0]
    assert entered == ["e0", "e1", "e2"]
    assert states(engine) == dict.fromkeys(("e0", "e1", "e2"), "completed")


def without_postgres(
    bank: Celery, monkeypatch: pytest.MonkeyPatch, limit: float | None, many_messages: int
) -> tuple[list[Any], float]:
    """A batch `each` that Postgres answers no claim of: what is traced, and how long that takes."""

    def away(*args: Any, **kwargs: Any) -> Any:
        raise OperationalError("claim", None, Exception("away"))

    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)

    options = {} if limit is None else {"time_limit": limit}
    task = make_task(bank, body, key="{account}", batch=10, batch_commit="each", **options)
    messages = many(bank, task, many_messages)
    bank.finalize()
    bank.set_current()
    began = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(batches, "claim_new", away)
        patch.setattr(claims, "claim", away)
        traced = run_batch(lambda *call: trace_task_ret(*call, app=bank), task.name, messages, limit)
    return traced, time.monotonic() - began


def test_one_message_of_a_batch_waits_for_postgres_and_the_others_ask_once(
    bank: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "PATIENCE", 2.0)
    traced, took = without_postgres(bank, monkeypatch, None, 8)
    kept = [getattr(each[1].exception, "exc", each[1].exception) for each in traced]
    assert all(isinstance(each, Ignore | Reject) for each in kept)
    assert 2.0 <= took < 8.0


def test_a_batch_waits_for_postgres_within_its_own_limit(
    bank: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 5.0
    _, took = without_postgres(bank, monkeypatch, limit, 8)
    assert took < limit  # at which the pool kills the process


def test_a_worker_that_is_told_to_stop_begins_no_other_message_of_a_batch(bank: Celery, engine: Engine) -> None:
    entered: list[str] = []

    def body(self: IdempotentTask, account: str) -> None:
        entered.append(account)
        put(self, account)
        if account == "e0":
            waiting.note_shutdown()

    task = make_task(bank, body, key="{account}", batch=10, max_attempts=1, batch_commit="each")
    messages = many(bank, task, 5)
    try:
        assert [each is None for each in run(bank, task, *messages)] == [False, True, True, True, True]
    finally:
        waiting.note_start()
    assert states(engine) == {"e0": "completed"} | dict.fromkeys(("e1", "e2", "e3", "e4"), "released")
    run(bank, task, *messages[1:])
    assert states(engine) == dict.fromkeys(("e0", "e1", "e2", "e3", "e4"), "completed")


def test_claims_are_given_back_by_one_statement(bank: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []

    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)
        if account == "e0":
            waiting.note_shutdown()

    def note(connection: Any, statement: str, parameters: Any = None) -> Any:
        sent.append(statement)
        return statements.execute(connection, statement, parameters)

    monkeypatch.setattr(ends, "execute", note)
    task = make_task(bank, body, key="{account}", batch=50, max_attempts=1, batch_commit="each")
    messages = many(bank, task, 50)
    try:
        run(bank, task, *messages)
    finally:
        waiting.note_start()
    assert list(states(engine).values()).count("released") == 49
    assert sum("SET status = 'released'" in statement for statement in sent) == 1
