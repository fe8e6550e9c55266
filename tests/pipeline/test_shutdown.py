"""Time limits and shutdowns in the middle of an attempt: nothing is lost and nothing is doubled."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from sqlalchemy import text

from tests.support import bank as app_module
from tests.support import crashing
from tests.support.processes import eventually
from tests.support.tasks import make_task

PATIENCE = 20.0

# the commit of a row of this account takes two seconds
SLOW_COMMIT = """
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(2); RETURN NULL; END';
CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON entries DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (NEW.account = 'slow') EXECUTE FUNCTION slow();
"""


@pytest.fixture
def directory(environment) -> Path:
    return Path(environment["CRASH_DIRECTORY"])


@pytest.fixture
def completed(record):
    def wait(account: str):
        return eventually(lambda: (row := record(account)) and row.status == "completed" and row, timeout=PATIENCE)

    return wait


# ---------------------------------------------------------------- time limits


@pytest.mark.parametrize("point", ["body.entered", "finish.written"])
def test_a_soft_limit_in_an_attempt_is_another_attempt(point, bank, worker, relay, directory, completed, entries):
    crashing.plan(directory, point, crashing.HOLD)
    app_module.deposit.apply_async(("a",), soft_time_limit=1)

    row = completed("a")
    assert (entries("a"), row.attempts) == (1, 2)
    assert "SoftTimeLimitExceeded" in row.first_error


def test_a_soft_limit_during_the_commit_is_a_doubt_that_the_record_resolves(
    bank, worker, relay, completed, entries, engine
):
    with engine.connect() as connection:
        connection.execute(text(SLOW_COMMIT))
    result = app_module.deposit.apply_async(("slow",), soft_time_limit=1)

    row = completed("slow")
    assert (entries("slow"), row.attempts) == (1, 1)
    eventually(lambda: f"Task tests.support.bank.deposit[{result.id}] succeeded" in worker.log)
    assert "commit_in_doubt" in worker.log


def test_a_hard_limit_ends_the_child_and_another_one_finishes_the_operation(
    bank, worker, relay, directory, completed, entries
):
    crashing.plan(directory, "finish.written", crashing.HOLD)
    app_module.deposit.apply_async(("a",), time_limit=1)

    completed("a")
    assert entries("a") == 1
    assert "Hard time limit" in worker.log


def test_a_hard_limit_while_postgres_does_not_answer_loses_no_message(bank, worker, relay, completed, entries, engine):
    with engine.connect() as connection, connection.execution_options(isolation_level="READ COMMITTED").begin():
        connection.execute(text("LOCK TABLE idempotency.records IN ACCESS EXCLUSIVE MODE"))
        app_module.deposit.apply_async(("a",), time_limit=1)
        eventually(lambda: "Hard time limit" in worker.log)
    completed("a")
    assert entries("a") == 1


@pytest.mark.parametrize(("age", "attempts"), [(599, 0), (601, 1)])
def test_a_body_that_is_stopped_for_longer_than_max_run_uses_attempts(age, attempts, bank, deliveries, record, engine):
    # a hard limit begins with the SIGTERM of a shutdown: for free, a body that hangs would run for ever
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


@pytest.mark.parametrize("point", ["body.entered", "finish.written"])
def test_a_warm_shutdown_finishes_what_it_has_begun(point, bank, processes, relay, directory, record, entries):
    worker = processes.worker()
    crashing.plan(directory, point, crashing.HOLD)
    app_module.deposit.delay("a")
    eventually((directory / f"{point}.held").exists)
    worker.terminate()
    eventually(lambda: "Warm shutdown" in worker.log)
    (directory / f"{point}.go").touch()

    assert worker.process.wait(PATIENCE) == 0
    assert (entries("a"), record("a").status, record("a").attempts) == (1, "completed", 1)


@pytest.mark.parametrize("how", ["cold", "soft"])
@pytest.mark.parametrize("point", ["body.entered", "finish.written"])
def test_a_shutdown_that_interrupts_gives_the_attempt_back(
    how, point, bank, processes, relay, directory, completed, entries
):
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
