"""Celery's revoke, at a real worker: an accepted operation ends as a dead letter, and nothing delivers it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from sqlalchemy import Engine, Row, text

from idempotency.application import runtime_of
from idempotency.store import dead_letters
from tests.support import bank as b
from tests.support import crashing
from tests.support.bank import failures
from tests.support.processes import Processes, Worker, eventually


@pytest.fixture
def letters(engine: Engine) -> Callable[[], Sequence[Row[Any]]]:
    def read() -> Sequence[Row[Any]]:
        with engine.connect() as connection:
            return connection.execute(text("SELECT * FROM idempotency.dead_letters ORDER BY id")).all()

    return read


def revoke(app: Celery, task_id: str, *, terminate: bool = False) -> None:
    """Tell every worker, and wait until one has answered."""
    assert app.control.revoke(task_id, terminate=terminate, reply=True, timeout=10, limit=1)


def status(record: Any, key: str) -> str | None:
    row = record(key)
    return None if row is None else str(row.status)


@pytest.mark.long
def test_a_task_revoked_before_it_starts_ends_as_a_letter_to_replay(
    bank: Celery, worker: Worker, relay: Any, entries: Any, record: Any, letters: Any, engine: Engine
) -> None:
    id = str(uuid4())
    revoke(bank, id)
    b.deposit.apply_async(("a", 5), task_id=id)
    eventually(lambda: status(record, "a") == "failed")
    (letter,) = letters()
    assert (letter.reason, letter.status, letter.key) == ("revoked", "open", "a")
    assert (entries("a"), failures(engine)) == (0, [("a", "revoked")])

    # the worker remembers the task id for hours, but a person has asked since
    with runtime_of(bank).engine.begin() as connection:
        dead_letters.replay(connection, letter.id)
    eventually(lambda: status(record, "a") == "completed")
    assert entries("a") == 1


@pytest.mark.long
def test_an_operation_between_two_attempts_is_revoked_at_the_next_one(
    bank: Celery, worker: Worker, relay: Any, engine: Engine, record: Any, letters: Any
) -> None:
    id = str(uuid4())
    with runtime_of(bank).engine.begin() as connection:
        b.failing.enqueue(connection, "a", "defer long", task_id=id)
    eventually(lambda: status(record, "a") == "released")
    revoke(bank, id)
    with engine.connect() as connection:
        for table in ("records", "outbox"):
            connection.execute(text(f"UPDATE idempotency.{table} SET available_at = clock_timestamp()"
                                    f" WHERE status IN ('released', 'pending')"))  # fmt: skip
    eventually(lambda: status(record, "a") == "failed")
    assert [letter.reason for letter in letters()] == ["revoked"]


def test_a_terminated_task_is_not_brought_back_by_any_worker(
    bank: Celery, worker: Worker, processes: Processes, entries: Any, record: Any, letters: Any, engine: Engine,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    id = str(uuid4())
    b.slow_deposit.apply_async(("a", 60.0), task_id=id)
    eventually(lambda: status(record, "a") == "started")
    revoke(bank, id, terminate=True)
    eventually(lambda: record("a").revoked_generation == 1)
    # this worker's memory of the task id goes with it; recovery and a new worker have only the record
    worker.kill()
    processes.worker("--concurrency", "1")
    request.getfixturevalue("relay")
    eventually(lambda: status(record, "a") == "failed")
    assert [letter.reason for letter in letters()] == ["revoked"]
    assert (entries("a"), failures(engine)) == (0, [("a", "revoked")])


@pytest.mark.long
def test_a_task_terminated_before_its_claim_ends_as_a_dead_letter(
    bank: Celery, worker: Worker, relay: Any, environment: dict[str, str], entries: Any, record: Any, letters: Any
) -> None:
    directory = Path(environment["CRASH_DIRECTORY"])
    crashing.plan(directory, "hint.left", crashing.HOLD)
    id = str(uuid4())
    b.deposit.apply_async(("a",), task_id=id)
    eventually((directory / "hint.left.held").exists)
    assert record("a") is None
    revoke(bank, id, terminate=True)
    eventually(lambda: status(record, "a") == "failed")
    assert [letter.reason for letter in letters()] == ["revoked"]
    assert entries("a") == 0


@pytest.mark.long
def test_a_terminated_task_that_could_not_be_marked_is_not_acknowledged(
    bank: Celery, worker: Worker, relay: Any, engine: Engine, entries: Any, record: Any, letters: Any
) -> None:
    id = str(uuid4())
    b.slow_deposit.apply_async(("a", 60.0), task_id=id)
    eventually(lambda: status(record, "a") == "started")
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as connection, connection.begin():
        connection.execute(text("SELECT FROM idempotency.records FOR UPDATE"))
        revoke(bank, id, terminate=True)
        eventually(lambda: "revoke_failed" in worker.log)
    eventually(lambda: status(record, "a") == "failed")
    assert [letter.reason for letter in letters()] == ["revoked"]
    assert entries("a") == 0


@pytest.mark.long
@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_a_task_is_revoked_in_pools_without_processes_too(
    bank: Celery, processes: Processes, pool: str, entries: Any, record: Any, letters: Any
) -> None:
    processes.worker("--pool", pool)
    id = str(uuid4())
    revoke(bank, id)
    b.deposit.apply_async(("a",), task_id=id)
    eventually(lambda: status(record, "a") == "failed")
    assert ([letter.reason for letter in letters()], entries("a")) == (["revoked"], 0)


@pytest.mark.long
def test_an_operation_that_has_ended_stays_as_it_is(
    bank: Celery, worker: Worker, entries: Any, record: Any, letters: Any
) -> None:
    id = str(uuid4())
    b.deposit.apply_async(("a", 5), task_id=id)
    eventually(lambda: status(record, "a") == "completed")
    before = record("a")
    revoke(bank, id)
    b.deposit.apply_async(("a", 5), task_id=id)  # its duplicate finds the result
    b.deposit.apply_async(("b", 5), task_id=str(uuid4()))
    eventually(lambda: status(record, "b") == "completed")
    assert (record("a"), entries("a"), list(letters())) == (before, 1, [])
