"""Proofs of defects: each test passes while its bug exists."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from celery.app.trace import trace_task_ret
from sqlalchemy import Connection, Engine, text

from idempotency import IdempotentTask
from idempotency.application import runtime_of
from idempotency.relay.relay import Relay
from idempotency.worker.batch import run_batch
from tests.integration.test_batch_each import each, many
from tests.integration.test_batch_neighbours import accounts, put, states
from tests.support import bank as b
from tests.support import operations as op
from tests.support.processes import Processes, eventually
from tests.support.tasks import transactional

NAMES = ["attempt", "prepared", "asked", "get", "update", "children", "_children", "_protected", "state", "utc", "args"]


@pytest.mark.parametrize("name", NAMES)
def test_a_callers_header_that_is_an_attribute_of_the_request(
    bank: Celery, engine: Engine, relay: Relay, processes: Processes, connection: Connection,
    entries: Callable[[str], int], name: str,
) -> None:
    with transactional(engine).begin() as caller:
        b.deposit.enqueue(caller, "mine", headers={name: "2"})
    worker = processes.worker()
    relay.run_once()
    time.sleep(6)
    with engine.connect() as c:
        rows = c.execute(text("SELECT status, settled_at FROM idempotency.outbox")).all()
        records = c.execute(text("SELECT status FROM idempotency.records")).all()
        dead = c.execute(text("SELECT reason, last_error FROM idempotency.dead_letters")).all()
    print(name, rows, records, dead)
    print(worker.log()[-2500:])
    assert not records and not dead and entries("mine") == 0


@pytest.mark.parametrize("late", ["timer"])
def test_a_soft_limit_that_comes_while_claims_are_given_back_keeps_the_others_held(
    bank: Celery, engine: Engine, late: str
) -> None:
    """The first body ends just before the limit; the pool's signal comes while the claims of the rest are given back."""

    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)
        time.sleep(0.95)
        signal.setitimer(signal.ITIMER_REAL, 0.05)  # the limit of a second, which counts from the job's beginning

    def raise_(*_: Any) -> None:
        raise SoftTimeLimitExceeded

    task = each(bank, body, max_attempts=1)
    bank.finalize()
    bank.set_current()
    messages = many(bank, task, 60)
    before = signal.signal(signal.SIGALRM, raise_)
    try:
        with pytest.raises(SoftTimeLimitExceeded):
            run_batch(lambda *call: trace_task_ret(*call, app=bank), task.name, messages, 1.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    left = [key for key, status in states(engine).items() if status == "started"]
    holdings = runtime_of(bank).heartbeat._holdings
    print(len(left), len(holdings), accounts(engine))
    assert left and len(holdings) >= len(left)  # never entered, claimed, and renewed by the heartbeat
    runtime_of(bank).heartbeat._holdings.clear()
