"""A batch whose claims have no answer, or whose Postgres is away: what waits is renewed, and nothing waits as often as it has messages."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore
from psycopg.errors import AdminShutdown
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError

from idempotency import IdempotentTask
from idempotency.application import runtime_of
from idempotency.errors import Unanswered
from idempotency.store import batches, claims, ends, statements
from idempotency.upkeep import maintenance
from idempotency.wire.keys import OperationId
from idempotency.worker import waiting
from tests.support.batches import lose_the_answer, many, message, put, put_one, run, states
from tests.support.tasks import make_task

TOGETHER_AND_EACH = pytest.mark.parametrize("commit", ["each", "together"])


@pytest.mark.few(1)
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


@pytest.mark.long
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


@pytest.mark.parametrize(
    ("error", "level", "at"),
    [
        (TypeError("ours"), "ERROR", 'at="test_batch_doubt.py:'),
        (OperationalError("", None, Exception()), "WARNING", ""),
    ],
)
def test_a_batch_that_a_defect_keeps_from_its_commit_says_where_it_is(
    bank: Celery,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    level: str,
    at: str,
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(batches, "complete", fail)
    task = make_task(bank, put_one, key="{account}", batch=10, batch_commit="together")
    run(bank, task, *many(bank, task))
    assert states(engine) == dict.fromkeys(("e0", "e1", "e2"), "completed")
    (line,) = (each for each in caplog.records if "event=batch_not_committed" in each.getMessage())
    assert line.levelname == level
    assert (at or "Exception") in line.getMessage()
    assert "Traceback" not in line.getMessage()


class Asked:
    """A batch `each` whose claims Postgres does not answer: what is traced, which keys were asked for, and how long that takes."""

    def __init__(
        self,
        bank: Celery,
        monkeypatch: pytest.MonkeyPatch,
        *,
        limit: float | None = None,
        pause: float = 0.0,
        back_for: str | None = None,
    ) -> None:
        self.keys: list[str] = []
        claim = claims.claim

        def away(connection: Any, id: OperationId, **options: Any) -> Any:
            self.keys.append(id.key)
            if id.key == back_for:
                return claim(connection, id, **options)
            raise OperationalError("claim", None, Exception("away"))

        def away_at_once(*args: Any, **options: Any) -> Any:
            time.sleep(pause)
            raise OperationalError("claim", None, Exception("away"))

        def body(self: IdempotentTask, account: str) -> None:
            put(self, account)

        task = make_task(bank, body, key="{account}", batch=10, batch_commit="each")
        messages = many(bank, task, 8)
        bank.finalize()
        bank.set_current()
        began = time.monotonic()
        with monkeypatch.context() as patch:
            patch.setattr(batches, "claim_new", away_at_once)
            patch.setattr(batches, "claimed", away_at_once)
            patch.setattr(claims, "claim", away)
            traced = run(bank, task, *messages, limit=limit)
        self.took = time.monotonic() - began
        self.told = [None if each is None else getattr(each[1], "exception", each[1]) for each in traced]
        self.told = [getattr(each, "exc", each) for each in self.told]


WAITING_ROWS = text("SELECT count(*) FROM idempotency.outbox WHERE status = 'pending'")


@pytest.mark.long
def test_one_message_of_a_batch_waits_for_postgres_and_the_others_ask_once(
    bank: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "PATIENCE", 2.0)
    asked = Asked(bank, monkeypatch)
    assert asked.keys.count("e0") > 1
    assert [key for key in asked.keys if key != "e0"] == [f"e{n}" for n in range(1, 8)]
    assert all(isinstance(each, Ignore) for each in asked.told)
    with engine.connect() as connection:
        assert connection.execute(WAITING_ROWS).scalar_one() == 8


@pytest.mark.long
def test_a_message_waits_again_once_another_one_had_an_answer(
    bank: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "PATIENCE", 1.5)
    asked = Asked(bank, monkeypatch, back_for="e3")
    assert [asked.keys.count(f"e{n}") > 1 for n in range(8)] == [True, False, False, False, True, False, False, False]
    assert states(engine) == {"e3": "completed"}


# A trigger of the application's.
REFUSE = """
CREATE FUNCTION refuse_bad() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'not this one'; END$$;
CREATE TRIGGER refuse_bad BEFORE INSERT ON idempotency.records FOR EACH ROW
WHEN (NEW.key LIKE 'bad%') EXECUTE FUNCTION refuse_bad();
"""


@pytest.mark.long
def test_rows_that_postgres_refuses_do_not_each_hold_up_their_batch(
    bank: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two of them another message is answered, each time."""
    monkeypatch.setattr(waiting, "PATIENCE", 2.0)
    with engine.connect() as connection:
        connection.execute(text(REFUSE))
    task = make_task(bank, put_one, key="{account}", batch=10, batch_commit="each")
    keys = [f"{kind}{n}" for n in range(6) for kind in ("bad", "good")]
    began = time.monotonic()
    run(bank, task, *(message(bank, task, key) for key in keys))
    assert time.monotonic() - began < 6 * waiting.PATIENCE
    assert states(engine) == dict.fromkeys((f"good{n}" for n in range(6)), "completed")


def test_a_batch_waits_for_postgres_within_its_own_limit(
    bank: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claims of all have taken a good part of it. The pool kills the process at the limit."""
    asked = Asked(bank, monkeypatch, limit=6.0, pause=2.0)
    assert asked.keys.count("e0") > 1
    assert asked.took < 6.0


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
    with engine.connect() as connection:
        assert connection.execute(NOT_COUNTED).all() == [(0, 1, 49)]


# Attempts of a released operation, its next deliveries, and how many operations have so many.
NOT_COUNTED = text("""
SELECT attempts, deliveries, count(*) FROM idempotency.records r CROSS JOIN LATERAL (
    SELECT count(*) AS deliveries FROM idempotency.outbox o WHERE o.key = r.key AND o.origin = 'retry'
) o WHERE status = 'released' GROUP BY 1, 2""")


def test_claims_are_given_back_over_another_connection_if_theirs_has_been_closed(bank: Celery, engine: Engine) -> None:
    """As a pooler closes one that is idle while the first body runs."""
    runtime = runtime_of(bank)

    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)
        waiting.note_shutdown()
        with engine.connect() as other:
            other.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pids[0]})

    task = make_task(bank, body, key="{account}", batch=10, max_attempts=1, batch_commit="each")
    messages = many(bank, task, 4)
    with runtime.autocommit() as connection:
        pids = [connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()]
    try:
        run(bank, task, *messages)
    finally:
        waiting.note_start()
    assert states(engine) == {"e0": "completed"} | dict.fromkeys(("e1", "e2", "e3"), "released")


def test_a_postgres_that_is_away_is_not_asked_for_each_claim(
    bank: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)
        waiting.note_shutdown()

    def away(connection: Any, ids: Any, tokens: Any) -> Any:
        tried.append("all")
        raise OperationalError("give back", None, AdminShutdown("terminating connection"))

    def alone(*args: Any, **options: Any) -> Any:
        tried.append("one")
        return True

    task = make_task(bank, body, key="{account}", batch=10, max_attempts=1, batch_commit="each")
    messages = many(bank, task, 4)
    monkeypatch.setattr(ends, "give_back", away)
    monkeypatch.setattr(ends, "release", alone)
    try:
        run(bank, task, *messages)
    finally:
        waiting.note_start()
    assert tried == ["all"]
    assert not runtime_of(bank).heartbeat._holdings


@TOGETHER_AND_EACH
def test_a_worker_that_has_been_told_to_stop_begins_no_batch(bank: Celery, engine: Engine, commit: str) -> None:
    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)

    task = make_task(bank, body, key="{account}", batch=10, max_attempts=1, batch_commit=commit)
    messages = many(bank, task, 4)
    waiting.note_shutdown()
    try:
        assert run(bank, task, *messages) == [None] * 4
    finally:
        waiting.note_start()
    assert states(engine) == {}


@pytest.mark.long
def test_a_delivery_waits_within_the_time_limit_that_its_worker_was_started_with() -> None:
    def away() -> None:
        raise OperationalError("claim", None, Exception("away"))

    # as `celery worker --time-limit 2` does; a worker made here would tell Celery that this process is one of its pool
    waiting.note_start(SimpleNamespace(time_limit=2.0))
    began = time.monotonic()
    try:
        with pytest.raises(Unanswered):
            waiting.Waiting("a task").answer(away)
    finally:
        waiting.note_start()
    assert time.monotonic() - began < 2.0
