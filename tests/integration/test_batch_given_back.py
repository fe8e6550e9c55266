"""A batch that commits together, of which some have to run alone, and whose limit is near before all of them did."""

from __future__ import annotations

import time
from typing import Any

from celery import Celery
from celery.app.trace import trace_task_ret
from sqlalchemy import Engine, text

from idempotency import IdempotentTask
from idempotency.worker.batch import run_batch
from tests.integration.test_batch_each import many
from tests.integration.test_batch_neighbours import accounts, put, run, states
from tests.support.tasks import make_task


def test_claims_of_those_that_were_to_run_alone_are_given_back(bank: Celery, engine: Engine) -> None:
    """Three bodies that have a step, so each has to run alone; after the first of them nine tenths of the limit are over."""

    def body(self: IdempotentTask, account: str) -> None:
        self.step("alone", lambda session: None)
        put(self, account)

    def slow(*call: Any) -> Any:
        traced = trace_task_ret(*call, app=bank)
        time.sleep(1.0)
        return traced

    task = make_task(bank, body, key="{account}", batch=10, max_attempts=1)
    messages = many(bank, task)
    bank.finalize()
    bank.set_current()
    traced = run_batch(slow, task.name, messages, 1.0)
    assert [each is None for each in traced] == [False, True, True]
    assert states(engine) == {"e0": "completed", "e1": "released", "e2": "released"}
    with engine.connect() as connection:
        attempts = "SELECT attempts FROM idempotency.records WHERE status = 'released'"
        assert connection.execute(text(attempts)).scalars().all() == [0, 0]
    run(bank, task, *messages[1:])
    assert states(engine) == dict.fromkeys(("e0", "e1", "e2"), "completed")
    assert accounts(engine) == {"e0": [1], "e1": [1], "e2": [1]}
