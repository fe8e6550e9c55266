"""A batch that commits together, of which some have to run alone: their claims are renewed until they do, or given back."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from celery.app.trace import trace_task_ret
from sqlalchemy import Engine, text

from idempotency import IdempotentTask
from idempotency.application import runtime_of
from idempotency.upkeep import maintenance
from tests.support.batches import OTHER, accounts, many, put, run, states
from tests.support.tasks import make_task


@pytest.mark.long
def test_claims_of_those_that_were_to_run_alone_are_given_back(bank: Celery, engine: Engine) -> None:
    """Three bodies that have a step, so each has to run alone; after the first of them nine tenths of the limit are over."""

    def body(self: IdempotentTask, account: str) -> None:
        self.step("alone", lambda session: None)
        put(self, account)

    def slow(*call: Any) -> Any:
        traced = trace_task_ret(*call, app=bank)
        time.sleep(3.0)
        return traced

    task = make_task(bank, body, key="{account}", batch=10, max_attempts=1)
    messages = many(bank, task)
    # a busy machine needs some seconds until the first body
    traced = run(bank, task, *messages, limit=3.0, trace=slow)
    assert [each is None for each in traced] == [False, True, True]
    assert states(engine) == {"e0": "completed", "e1": "released", "e2": "released"}
    with engine.connect() as connection:
        attempts = "SELECT attempts FROM idempotency.records WHERE status = 'released'"
        assert connection.execute(text(attempts)).scalars().all() == [0, 0]
    run(bank, task, *messages[1:])
    assert states(engine) == dict.fromkeys(("e0", "e1", "e2"), "completed")
    assert accounts(engine) == {"e0": [1], "e1": [1], "e2": [1]}


@pytest.mark.long
def test_claims_of_those_that_wait_to_run_alone_are_renewed(bank: Celery, engine: Engine, configure: Any) -> None:
    """Else the relay takes them for those of a dead process: with one attempt, they fail without having run."""
    configure(lease=1.0, heartbeat=0.25, max_run=600.0)

    def body(self: IdempotentTask, account: str) -> None:
        self.step("alone", lambda session: None)
        put(self, account)
        if account == "e0":
            time.sleep(1.5)
            assert maintenance.recover(bank) == 0

    task = make_task(bank, body, key="{account}", batch=10, max_attempts=1)
    run(bank, task, *many(bank, task))
    assert states(engine) == dict.fromkeys(("e0", "e1", "e2"), "completed")
    assert not runtime_of(bank).heartbeat._holdings


@pytest.fixture
def limited() -> Iterator[None]:
    """As billiard's pool does: a signal whose handler raises."""

    def raised(*_: Any) -> None:
        raise SoftTimeLimitExceeded

    before = signal.signal(signal.SIGUSR1, raised)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.few(1)
@pytest.mark.parametrize("commit", ["together", "each"])
def test_claims_that_are_being_made_as_the_limit_comes_are_not_made(
    bank: Celery, engine: Engine, limited: None, commit: str
) -> None:
    """They wait for another transaction. Left to itself, Postgres would make them after the look that found none."""

    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)

    task = make_task(bank, body, key="{account}", batch=10, max_attempts=1, batch_commit=commit)
    messages = many(bank, task)
    with psycopg.connect(engine.url.set(drivername="postgresql").render_as_string(hide_password=False)) as other:
        other.execute(OTHER, (task.name,))
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        traced = run(bank, task, *messages, limit=1.0)
        assert traced == [None, None, None]
        other.rollback()
    time.sleep(0.5)
    assert states(engine) == {}
    for each in messages:
        run(bank, task, each)
    assert states(engine) == dict.fromkeys(("e0", "e1", "e2"), "completed")
    assert accounts(engine) == {"e0": [1], "e1": [1], "e2": [1]}
