"""A batch that is not full beside other work of the same worker: it has its turn like any message."""

from __future__ import annotations

import time
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine, text

from idempotency import IdempotentTask
from tests.support import batched
from tests.support.processes import Processes, eventually

app = batched.app
OPTIONS: Any = {"base": IdempotentTask, "bind": True, "key": "{account}"}
IN_BATCHES: Any = {**OPTIONS, "batch": 5, "batch_wait": 0.05, "batch_commit": "each"}
MANY = 120


def takes_a_while(self: IdempotentTask, account: str) -> Any:
    time.sleep(0.05)
    return batched.post(self, account, "")


busy = app.task(name="line.busy", **OPTIONS)(takes_a_while)
busy_in_batches = app.task(name="line.busy_in_batches", **IN_BATCHES)(takes_a_while)


@app.task(name="line.rare", **IN_BATCHES)
def rare(self: IdempotentTask, account: str) -> Any:
    return batched.post(self, account, "")


@pytest.mark.few(1)
@pytest.mark.parametrize("others", [busy, busy_in_batches])
def test_one_message_does_not_wait_for_all_others_of_its_worker(
    bank: Celery, engine: Engine, processes: Processes, others: Any
) -> None:
    for number in range(5):
        others.delay(f"s{number}")
    rare.delay("e0")
    for number in range(5, MANY):
        others.delay(f"s{number}")
    worker = processes.worker("--concurrency", "1", "--prefetch-multiplier", "1", app=__name__)

    def rows() -> list[str]:
        with engine.connect() as connection:
            return list(connection.execute(text("SELECT account FROM entries ORDER BY id")).scalars())

    eventually(lambda: len(rows()) == MANY + 1, timeout=120, what=worker.log[-2000:])
    # what the worker fetches at once is before it: ten messages of a task and of each that has batches
    assert rows().index("e0") < MANY / 2
