"""Proofs of defects: each test passes while its bug exists."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from celery.app.trace import trace_task_ret
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError

from idempotency import IdempotentTask
from idempotency.application import runtime_of
from idempotency.relay.relay import Relay
from idempotency.store import batches
from idempotency.worker import batch
from idempotency.worker.batch import run_batch
from tests.integration.test_batch_each import each, many, put_one
from tests.integration.test_batch_neighbours import accounts, put, states
from tests.support import bank as b
from tests.support import queues
from tests.support.processes import Processes, eventually
from tests.support.tasks import transactional



@pytest.mark.parametrize("way", ["delay", "enqueue"])
def test_a_message_with_a_callers_header_named_attempt_is_acknowledged_and_never_run(
    bank: Celery, engine: Engine, relay: Relay, processes: Processes, entries: Callable[[str], int], way: str
) -> None:
    """`apply_async(headers={"attempt": …})`: the worker takes the delivery for a call inside a body, whose attempt is a text."""
    if way == "enqueue":
        with transactional(engine).begin() as caller:
            b.deposit.enqueue(caller, "mine", headers={"attempt": "2"})
        relay.run_once()
    else:
        b.deposit.apply_async(("mine",), headers={"attempt": "2"})
    b.deposit.delay("behind it")
    worker = processes.worker("--concurrency", "1")
    eventually(lambda: entries("behind it") == 1, what=worker.log)
    time.sleep(2)
    assert "'str' object has no attribute 'ends_as'" in str(worker.log)
    assert entries("mine") == 0
    with engine.connect() as connection:
        assert connection.execute(text("SELECT key FROM idempotency.records")).scalars().all() == ["behind it"]
        assert connection.execute(text("SELECT count(*) FROM idempotency.dead_letters")).scalar_one() == 0
    assert queues.drained(bank) == []  # nor does the broker have it


def test_a_soft_limit_that_comes_while_claims_are_given_back_keeps_the_others_held(
    bank: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first body ends just before the limit; the pool's signal comes while the claims of the rest are given back."""

    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)
        time.sleep(0.95)

    def interrupted(*given: Any) -> None:
        if len(calls) == 1:
            signal.setitimer(signal.ITIMER_REAL, 0.0005)
            time.sleep(0.1)  # as Postgres may
        calls.append(given)
        give_back(*given)

    def raise_(*_: Any) -> None:  # as billiard's handler of SIGUSR1
        raise SoftTimeLimitExceeded

    calls: list[Any] = []
    give_back = batch.give_back
    monkeypatch.setattr(batch, "give_back", interrupted)
    task = each(bank, body, max_attempts=1)
    bank.finalize()
    bank.set_current()
    messages = many(bank, task, 6)
    before = signal.signal(signal.SIGALRM, raise_)
    try:
        with pytest.raises(SoftTimeLimitExceeded):
            run_batch(lambda *call: trace_task_ret(*call, app=bank), task.name, messages, 1.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    left = [key for key, status in states(engine).items() if status == "started"]
    heartbeat = runtime_of(bank).heartbeat
    assert left and {each.claim.id.key for each in heartbeat._holdings.values()} == set(left)  # of bodies never entered
    until = text("SELECT min(locked_until) FROM idempotency.records WHERE status = 'started'")
    with engine.connect() as connection:
        before_it = connection.execute(until).scalar_one()
    time.sleep(0.1)
    heartbeat.run_once()  # as it goes on to do while the process lives, up to max_run
    with engine.begin() as connection:
        assert connection.execute(until).scalar_one() > before_it
        # ... and once that is over
        connection.execute(text("UPDATE idempotency.records SET locked_until = now() - interval '1 s' WHERE status = 'started'"))
    heartbeat._holdings.clear()
    again = next(each for each in messages if json.loads(each[2])[0] == [left[0]])
    again[1]["delivery_info"]["redelivered"] = True
    run_batch(lambda *call: trace_task_ret(*call, app=bank), task.name, [again], None)
    assert states(engine)[left[0]] == "failed"  # its one attempt is used up
    assert left[0] not in accounts(engine)


def test_a_claim_whose_answer_was_lost_is_not_given_back_at_the_end_of_its_batch(
    bank: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks once the claims are made; then the process exits, or nine tenths of the limit are over."""
    claim_new = batches.claim_new

    def lost(*given: Any, **options: Any) -> Any:
        claim_new(*given, **options)
        monkeypatch.undo()
        raise OperationalError("claim", {}, Exception("the connection is lost"))

    monkeypatch.setattr(batches, "claim_new", lost)
    task = each(bank, put_one, max_attempts=1)
    messages = many(bank, task)
    bank.finalize()
    bank.set_current()

    def slow(*call: Any) -> Any:
        traced = trace_task_ret(*call, app=bank)
        time.sleep(1.0)
        return traced

    results = run_batch(slow, task.name, messages, 1.0)
    assert [each is None for each in results] == [False, True, True]
    assert states(engine) == {"e0": "completed", "e1": "started", "e2": "started"}  # not given back
    with engine.begin() as connection:
        connection.execute(text("UPDATE idempotency.records SET locked_until = now() - interval '1 s' WHERE status = 'started'"))
    for each_ in messages[1:]:
        each_[1]["delivery_info"]["redelivered"] = True
        run_batch(lambda *call: trace_task_ret(*call, app=bank), task.name, [each_], None)
    assert states(engine) == {"e0": "completed", "e1": "failed", "e2": "failed"}  # never entered
    assert accounts(engine) == {"e0": [1]}
