"""A worker that loses its broker, or is told to end at once, with a batch at hand: each message is given back, and nothing is counted.

Celery cancels each message of its own, by a signal to its process, which is the same one for all of a batch.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text

from idempotency import IdempotentTask
from idempotency.upkeep import maintenance
from tests.support import batched, crashing
from tests.support.bank import record_failure
from tests.support.batches import queued
from tests.support.processes import Processes, Worker, eventually
from tests.support.proxy import Proxy

app = batched.app
NAME = "tests.integration.test_batch_cancelled"
MANY = 6
RECORDS = text("SELECT key, status, attempts FROM idempotency.records")
ONCE: Any = {"base": IdempotentTask, "bind": True, "key": "{account}", "on_failed": record_failure, "max_attempts": 1,
             "batch": batched.BATCH, "batch_wait": 1.0}  # fmt: skip


@app.task(name="cancelled.post_each", batch_commit="each", **ONCE)
def post_each(self: IdempotentTask, account: str, how: str = "") -> Any:
    return batched.post(self, account, how)


@app.task(name="cancelled.post_together", **ONCE)
def post_together(self: IdempotentTask, account: str, how: str = "") -> Any:
    return batched.post(self, account, how)


@app.task(name="cancelled.post_often", batch_commit="each", **{**ONCE, "max_attempts": None})
def post_often(self: IdempotentTask, account: str, how: str = "") -> Any:
    return batched.post(self, account, how)


def lose_broker(worker: Worker, proxy: Proxy, processes: Processes) -> None:
    proxy.reset()


def end_at_once(worker: Worker, proxy: Proxy, processes: Processes) -> None:
    os.kill(worker.process.pid, signal.SIGQUIT)
    worker.process.wait(60)
    processes.worker("--concurrency", "1", app=NAME, LEASE="4")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("task", "cancel"), [(post_each, lose_broker), (post_together, lose_broker), (post_each, end_at_once)]
)
def test_a_batch_that_is_cancelled_keeps_its_attempts(
    bank: Celery,
    engine: Engine,
    processes: Processes,
    environment: dict[str, str],
    relay: Any,
    task: Any,
    cancel: Any,
) -> None:
    crashing.plan(environment["CRASH_DIRECTORY"], "working", crashing.HOLD)
    held = Path(environment["CRASH_DIRECTORY"]) / "working.held"
    for number in range(MANY):
        task.delay(f"e{number}", "works" if number == 0 else "")
    proxy, through = Proxy.before(environment["BROKER_URL"])
    with proxy:
        worker = processes.worker("--concurrency", "1", app=NAME, BROKER_URL=through, LEASE="4")
        eventually(held.exists, what="the first body runs")
        cancel(worker, proxy, processes)

        def found() -> dict[str, tuple[str, int]]:
            with engine.connect() as connection:
                return {row.key: (row.status, row.attempts) for row in connection.execute(RECORDS)}

        def have_ended() -> bool:
            return len(found()) == MANY and all(status in ("completed", "failed") for status, _ in found().values())

        eventually(have_ended, timeout=90, what="each has ended")
    assert found() == {f"e{number}": ("completed", 1) for number in range(MANY)}


@pytest.mark.long
def test_a_later_attempt_of_what_kills_its_process_takes_no_others_with_it(
    bank: Celery, engine: Engine, connection: Connection, processes: Processes, relays: Any
) -> None:
    """The relay sends it as a new message, which the broker does not mark as redelivered."""

    def found() -> dict[str, tuple[str, int]]:
        with engine.connect() as connection:
            return {row.key: (row.status, row.attempts) for row in connection.execute(RECORDS)}

    post_often.delay("killer", "kill")
    worker = processes.worker("--concurrency", "1", app=NAME)
    eventually(lambda: "batch_lost" in worker.log, what="its first delivery has killed the process")
    assert "error=WorkerLostError" in worker.log.partition("event=batch_lost")[2].partition("\n")[0]
    # the broker brings it again at once; while its lease lasts, that is a duplicate
    counted = text("SELECT duplicates FROM idempotency.records WHERE key = 'killer'")
    eventually(
        lambda: connection.execute(counted).scalar_one() > 0 and queued(bank) == 0, what="the redelivery is gone"
    )
    worker.terminate()
    worker.process.wait(30)
    eventually(lambda: maintenance.recover(bank) or found()["killer"][0] == "released", what="released")
    assert relays().run_once().published == 1
    others = {f"e{number}" for number in range(5)}
    for account in others:
        post_often.delay(account)
    second = processes.worker("--concurrency", "1", app=NAME)
    eventually(lambda: others <= {key for key, row in found().items() if row == ("completed", 1)}, what="done at once")
    assert "many=6" not in second.log
