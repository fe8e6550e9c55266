"""A person terminates a message of a batch whose operation has ended, while another one of it runs."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery, signals
from sqlalchemy import Engine, text

from idempotency import IdempotentTask
from tests.support import batched, crashing
from tests.support.batches import queued, states
from tests.support.processes import Processes, eventually
from tests.support.tasks import transactional

app = batched.app


@app.task(
    base=IdempotentTask,
    name="revoked.post",
    bind=True,
    key="{account}",
    batch=10,
    batch_wait=1.0,
    batch_commit="each",
    ignore_result=False,
)
def post(self: IdempotentTask, account: str, how: str = "") -> Any:
    return batched.post(self, account, how)


if "REVOKED_BACKEND" in os.environ:
    app.conf.result_backend = os.environ["REVOKED_BACKEND"]

    @signals.task_revoked.connect
    def _announce(request: Any = None, **_: Any) -> None:
        logging.getLogger("revoked").error("announced as revoked: %s", request.id)


@pytest.mark.long
def test_what_is_completed_is_not_said_to_be_revoked(
    bank: Celery, engine: Engine, processes: Processes, environment: dict[str, str]
) -> None:
    crashing.plan(environment["CRASH_DIRECTORY"], "working", crashing.HOLD)
    held = Path(environment["CRASH_DIRECTORY"]) / "working.held"
    for number in range(4):
        post.apply_async((f"e{number}", "works" if number == 1 else ""), task_id=f"revoked-{number}")
    worker = processes.worker("--concurrency", "1", app=__name__, REVOKED_BACKEND=environment["REDIS_URL"])
    eventually(held.exists, what="the second body runs")
    assert states(engine)["e0"] == "completed"
    bank.control.revoke("revoked-0", terminate=True, reply=True, timeout=5)
    eventually(lambda: states(engine) == dict.fromkeys(("e0", "e1", "e2", "e3"), "completed"), timeout=60)
    with redis.Redis.from_url(environment["REDIS_URL"], decode_responses=True) as backend:
        stored = str(backend.get("celery-task-meta-revoked-0"))
    assert '"SUCCESS"' in stored
    assert "announced as revoked" not in worker.log
    # its message came back, and was acknowledged then: nothing comes back from a worker that ends
    worker.terminate()
    assert worker.process.wait(60) == 0
    assert queued(bank) == 0


@pytest.mark.long
def test_a_whole_batch_is_terminated_and_one_of_it_waits_for_postgres(
    bank: Celery, engine: Engine, processes: Processes, environment: dict[str, str]
) -> None:
    """All of them wait in the worker's main process, one after the other, and every other task behind them."""
    crashing.plan(environment["CRASH_DIRECTORY"], "working", crashing.HOLD)
    held = Path(environment["CRASH_DIRECTORY"]) / "working.held"
    for number in range(4):
        post.apply_async((f"e{number}", "works" if number == 1 else ""), task_id=f"revoked-{number}")
    worker = processes.worker("--concurrency", "1", app=__name__, REVOKED_BACKEND=environment["REDIS_URL"])
    eventually(held.exists, what="the second body runs")
    with transactional(engine).begin() as connection:
        connection.execute(text("SELECT FROM idempotency.records FOR UPDATE"))
        bank.control.revoke([f"revoked-{number}" for number in range(4)], terminate=True)
        eventually(lambda: worker.log.count("revoke_failed") == 4, timeout=60, what="none of them is marked")
    assert worker.log.count("not asked") == 3
    ended = {"e0": "completed"} | dict.fromkeys(("e1", "e2", "e3"), "failed")
    eventually(lambda: states(engine) == ended, timeout=60)
    eventually(lambda: worker.log.count("announced as revoked") == 3, timeout=60)
    assert "announced as revoked: revoked-0" not in worker.log
