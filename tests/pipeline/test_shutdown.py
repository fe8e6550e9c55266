"""Time limits and shutdowns in the middle of an attempt: nothing is lost and nothing is doubled."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import text
from sqlalchemy.engine import Engine

from idempotency.relay.relay import Relay
from tests.support import bank as app_module
from tests.support import crashing
from tests.support.deliveries import Deliveries
from tests.support.operations import Entries, Record
from tests.support.processes import Processes, Worker, eventually
from tests.support.tasks import make_task

PATIENCE = 20.0

# the commit of a row of this account takes two seconds
SLOW_COMMIT = """
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(2); RETURN NULL; END';
CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON entries DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (NEW.account = 'slow') EXECUTE FUNCTION slow();
"""


@pytest.fixture
def directory(environment: dict[str, str]) -> Path:
    return Path(environment["CRASH_DIRECTORY"])


@pytest.fixture
def completed(record: Record) -> Callable[..., Any]:
    def wait(account: str) -> Any:
        return eventually(lambda: (row := record(account)) and row.status == "completed" and row, timeout=PATIENCE)

    return wait


# ---------------------------------------------------------------- time limits


@pytest.mark.few(1)
@pytest.mark.parametrize("point", ["body.entered", "finish.written"])
def test_a_soft_limit_in_an_attempt_is_another_attempt(
    point: str,
    bank: Celery,
    worker: Worker,
    relay: Relay,
    directory: Path,
    completed: Callable[..., Any],
    entries: Entries,
) -> None:
    crashing.plan(directory, point, crashing.HOLD)
    app_module.deposit.apply_async(("a",), soft_time_limit=1)

    row = completed("a")
    assert (entries("a"), row.attempts) == (1, 2)
    assert "SoftTimeLimitExceeded" in row.first_error


@pytest.mark.long
def test_a_soft_limit_during_the_commit_is_a_doubt_the_record_resolves(
    bank: Celery, worker: Worker, relay: Relay, completed: Callable[..., Any], entries: Entries, engine: Engine
) -> None:
    with engine.connect() as connection:
        connection.execute(text(SLOW_COMMIT))
    result = app_module.deposit.apply_async(("slow",), soft_time_limit=1)

    row = completed("slow")
    assert (entries("slow"), row.attempts) == (1, 1)
    eventually(lambda: f"Task tests.support.bank.deposit[{result.id}] succeeded" in worker.log)
    assert "commit_in_doubt" in worker.log


@pytest.mark.long
def test_after_a_hard_limit_another_child_finishes_the_operation(
    bank: Celery,
    worker: Worker,
    relay: Relay,
    directory: Path,
    completed: Callable[..., Any],
    entries: Entries,
    record: Record,
) -> None:
    """And no errback is sent: the operation goes on."""
    crashing.plan(directory, "finish.written", crashing.HOLD)
    undo = app_module.returning.si("undo").set(idempotency_key="undo")
    app_module.deposit.apply_async(("a",), time_limit=1, link_error=undo)

    completed("a")
    assert entries("a") == 1
    assert "Hard time limit" in worker.log
    app_module.deposit.delay("behind")
    completed("behind")
    assert record("undo") is None


def test_a_hard_limit_while_postgres_does_not_answer_loses_no_message(
    bank: Celery, worker: Worker, relay: Relay, completed: Callable[..., Any], entries: Entries, engine: Engine
) -> None:
    with engine.connect() as connection, connection.execution_options(isolation_level="READ COMMITTED").begin():
        connection.execute(text("LOCK TABLE idempotency.records IN ACCESS EXCLUSIVE MODE"))
        app_module.deposit.apply_async(("a",), time_limit=1)
        eventually(lambda: "Hard time limit" in worker.log)
    completed("a")
    assert entries("a") == 1


@pytest.mark.parametrize(("age", "attempts"), [(599, 0), (601, 1)])
def test_a_body_that_is_stopped_for_longer_than_max_run_uses_attempts(
    age: int, attempts: int, bank: Celery, deliveries: Deliveries, record: Record, engine: Engine
) -> None:
    # a hard limit begins with the SIGTERM of a shutdown: if that cost no attempt, a body that hangs would run for ever
    task = make_task(bank, lambda self: sys.exit())
    for _ in range(2):
        with pytest.raises(SystemExit):
            deliveries.deliver(task, key="k")
        with engine.connect() as connection:
            connection.execute(
                text("UPDATE idempotency.records SET opened_at = clock_timestamp() - make_interval(secs => :age)"),
                {"age": age},
            )
    assert (record("k").status, record("k").attempts) == ("released", attempts)


# ---------------------------------------------------------------- shutdowns


@pytest.mark.few(1)
@pytest.mark.parametrize("point", ["body.entered", "finish.written"])
def test_a_warm_shutdown_finishes_what_it_has_begun(
    point: str, bank: Celery, processes: Processes, relay: Relay, directory: Path, record: Record, entries: Entries
) -> None:
    worker = processes.worker()
    crashing.plan(directory, point, crashing.HOLD)
    app_module.deposit.delay("a")
    eventually((directory / f"{point}.held").exists)
    worker.terminate()
    eventually(lambda: "Warm shutdown" in worker.log)
    (directory / f"{point}.go").touch()

    assert worker.process.wait(PATIENCE) == 0
    assert (entries("a"), record("a").status, record("a").attempts) == (1, "completed", 1)


@pytest.mark.parametrize(
    ("how", "point"),
    [
        pytest.param("cold", "body.entered", marks=pytest.mark.long),
        pytest.param("soft", "finish.written", marks=pytest.mark.long),
        pytest.param("cold", "finish.written", marks=pytest.mark.long),
        pytest.param("soft", "body.entered", marks=pytest.mark.long),
    ],
)
def test_a_shutdown_that_interrupts_gives_the_attempt_back(
    how: str,
    point: str,
    bank: Celery,
    processes: Processes,
    relay: Relay,
    directory: Path,
    completed: Callable[..., Any],
    entries: Entries,
) -> None:
    if how == "soft":
        # SIGTERM waits for as long as this, and then interrupts
        worker = processes.worker("--concurrency", "2", "--", "worker.soft_shutdown_timeout=1", REMAP_SIGTERM="SIGQUIT")
    else:
        worker = processes.worker()
    crashing.plan(directory, point, crashing.HOLD)
    app_module.deposit.delay("a")
    eventually((directory / f"{point}.held").exists)
    worker.process.send_signal(signal.SIGTERM if how == "soft" else signal.SIGQUIT)
    worker.process.wait(PATIENCE)
    processes.worker()

    row = completed("a")
    assert entries("a") == 1
    assert row.attempts == 1
