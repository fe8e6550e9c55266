"""A batch that is ended before all its bodies were entered: by a limit, an exit, a person. What was not entered comes again, uncounted."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import gevent  # type: ignore[import-untyped]
import pytest
from billiard.common import _shutdown_cleanup, clear_terminate_handler_fired
from billiard.exceptions import SoftTimeLimitExceeded
from billiard.pool import soft_timeout_sighandler
from celery import Celery
from celery.app.task import Context
from celery.app.trace import trace_task_ret
from celery.concurrency.gevent import TaskPool
from gevent import GreenletExit
from sqlalchemy import Engine, text

from idempotency import IdempotentTask
from idempotency.application import runtime_of
from idempotency.attempt.batch import BatchAnswer
from idempotency.attempt.giving_back import give_back
from idempotency.attempt.policy import Policy
from idempotency.attempt.runtime import Runtime
from idempotency.store import batches
from idempotency.wire.delivery import Delivery
from idempotency.wire.headers import ORIGIN_HEADER
from idempotency.worker import batch
from idempotency.worker.batching import _Job
from idempotency.worker.revocation import revoke_terminated
from tests.support.bank import app
from tests.support.batches import Request, accounts, each, lose_the_answer, many, message, put, put_one, run, states
from tests.support.processes import Processes, eventually
from tests.support.tasks import make_task

COUNTS = text("SELECT attempts FROM idempotency.records")
REFUSE_E3 = text("""
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'not this one'; END$$;
CREATE TRIGGER refuse BEFORE UPDATE ON idempotency.records FOR EACH ROW
WHEN (NEW.key = 'e3' AND NEW.status = 'released') EXECUTE FUNCTION refuse();
""")
# Seconds of a batch: a machine with other work needs some of them until the first body.
LIMIT = 3.0

__all__ = ["app"]


@pytest.fixture
def in_the_pool() -> Iterator[None]:
    """With the handlers of signals that a process of Celery's pool has."""
    before = {number: signal.getsignal(number) for number in batch.ENDING}
    for number in batch.ENDING:
        signal.signal(number, _shutdown_cleanup)
    signal.signal(signal.SIGUSR1, soft_timeout_sighandler)
    yield
    clear_terminate_handler_fired()
    for number, handler in before.items():
        signal.signal(number, handler)


@app.task(base=IdempotentTask, bind=True, key="{account}", batch=20, batch_wait=1.0, batch_commit="each")
def slow_each(self: IdempotentTask, account: str, seconds: float) -> Any:
    began = time.monotonic()
    try:
        time.sleep(seconds)
        how = "ended by itself"
    except SoftTimeLimitExceeded:
        how = "limited"
    put(self, f"{account} {how}", round((time.monotonic() - began) * 10))
    return how


@app.task(base=IdempotentTask, bind=True, key="{account}", batch=20, batch_wait=1.0)
def slow_together(self: IdempotentTask, account: str, seconds: float) -> Any:
    return slow_each.run.__func__(self, account, seconds)


@pytest.mark.long
@pytest.mark.parametrize("task", [slow_each, slow_together])
def test_the_workers_soft_time_limit_ends_one_body_and_the_next_runs_by_itself(
    bank: Celery, engine: Engine, processes: Processes, task: Any
) -> None:
    """`celery worker --soft-time-limit 1`, or `task_soft_time_limit`."""
    for name in ("e0", "e1"):
        task.delay(name, 4.0)
    worker = processes.worker("--concurrency", "1", "--soft-time-limit", "1", app="tests.integration.test_batch_limits")
    eventually(lambda: len(accounts(engine)) == 2, what=worker.log)
    assert sorted(accounts(engine)) == ["e0 limited", "e1 limited"]
    eventually(lambda: set(states(engine).values()) == {"completed"}, what=worker.log)


def test_after_a_soft_time_limit_of_a_batch_all_come_again_uncounted(bank: Celery, engine: Engine) -> None:
    entered = []

    def body(self: IdempotentTask, account: str) -> None:
        entered.append(account)
        put(self, account)
        if account == "e1" and len(entered) == 2:
            raise SoftTimeLimitExceeded  # as the pool raises it, once for a job

    task = make_task(bank, body, key="{account}", batch=10, max_attempts=1)
    messages = [message(bank, task, f"e{n}") for n in range(3)]
    assert run(bank, task, *messages) == [None, None, None]  # all come again, each by itself
    assert accounts(engine) == {}
    assert states(engine) == dict.fromkeys(("e0", "e1", "e2"), "released")
    assert not runtime_of(bank).heartbeat._holdings
    run(bank, task, *messages)
    assert entered == ["e0", "e1", "e0", "e1", "e2"]
    assert accounts(engine) == {"e0": [1], "e1": [1], "e2": [1]}
    with engine.connect() as connection:
        assert set(connection.execute(COUNTS).scalars()) == {1}


def test_what_is_next_when_a_process_exits_is_given_back(bank: Celery, engine: Engine) -> None:
    """Between two messages, before a body."""
    task = each(bank, put_one, max_attempts=1)

    def trace(*call: Any) -> Any:
        raise SystemExit(0)

    with pytest.raises(SystemExit):
        run(bank, task, *many(bank, task), trace=trace)
    assert states(engine) == dict.fromkeys(("e0", "e1", "e2"), "released")
    run(bank, task, *many(bank, task))
    assert accounts(engine) == {"e0": [1], "e1": [1], "e2": [1]}


@pytest.mark.parametrize("origin", ["", "resend"])
def test_what_is_terminated_among_greenlets_ends_and_the_others_come_again(
    bank: Celery, engine: Engine, origin: str
) -> None:
    """`revoke(e1, terminate=True)` while e0 runs: gevent.kill raises GreenletExit in e0's body, and e1's record is marked.

    Also if e0 is a message that a relay has sent again, which is claimed by itself.
    """
    entered: list[str] = []
    messages: list[Any] = []

    def body(self: IdempotentTask, account: str) -> None:
        entered.append(account)
        if account == "e0" and len(entered) == 1:
            _, request, *_ = messages[1]
            # as the worker's main greenlet does, once it has killed the job's (Request._announce_revoked)
            revoke_terminated(task, Context(request, args=["e1"], kwargs={}))
            raise GreenletExit
        put(self, account)

    task = each(bank, body)
    messages += many(bank, task)
    if origin:
        messages[0][1][ORIGIN_HEADER] = origin
    assert [result is None for result in run(bank, task, *messages)] == [False, True, True]
    assert states(engine) == dict.fromkeys(("e0", "e1", "e2"), "released")
    run(bank, task, *messages[1:])
    assert entered == ["e0", "e2"]
    assert states(engine) == {"e0": "released", "e1": "failed", "e2": "completed"}


@pytest.mark.parametrize("left", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_signal_that_raises_nothing_is_left_as_it_is(bank: Celery, in_the_pool: None, left: Any) -> None:
    """As after a first SIGTERM, or an event loop that has handled it: the next one has to end the process."""
    found: list[Any] = []

    def body(self: IdempotentTask, account: str) -> None:
        found.append(signal.getsignal(signal.SIGTERM))

    signal.signal(signal.SIGTERM, left)
    task = each(bank, body)
    run(bank, task, *many(bank, task, 2))
    assert [*found, signal.getsignal(signal.SIGTERM)] == [left] * 3
    assert signal.getsignal(signal.SIGUSR1) is soft_timeout_sighandler


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("commit", ["each", "together"])
def test_what_is_terminated_behind_a_body_that_handles_that_ends_and_the_others_come_again(
    bank: Celery, engine: Engine, in_the_pool: None, commit: str, number: int
) -> None:
    """`revoke(e1, terminate=True)` while e0 runs: the signal raises in e0's body, once, and e1's record is marked."""
    entered: list[str] = []
    messages: list[Any] = []

    def body(self: IdempotentTask, account: str) -> None:
        entered.append(account)
        if entered == ["e0"]:
            _, request, *_ = messages[1]
            revoke_terminated(task, Context(request, args=["e1"], kwargs={}))
            with suppress(BaseException):
                os.kill(os.getpid(), number)
        put(self, account)

    task = make_task(bank, body, key="{account}", batch=10, batch_commit=commit)
    messages += many(bank, task)
    results = run(bank, task, *messages)
    assert [result is None for result in results] == [commit == "together", True, True]
    run(bank, task, *(each for each, result in zip(messages, results, strict=True) if result is None))
    assert "e1" not in entered
    assert states(engine) == {"e0": "completed", "e1": "failed", "e2": "completed"}
    assert accounts(engine) == {"e0": [1], "e2": [1]}


def test_a_body_behind_others_has_the_whole_max_run(bank: Celery, engine: Engine) -> None:
    """It counts from the end of what was before, and not from when its claim was made or last renewed."""
    ended: list[float] = []

    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)
        if ended:
            assert self.request.attempt._holding.run_started_at > ended[-1]
        ended.append(time.monotonic())

    task = each(bank, body, max_attempts=1)
    run(bank, task, *many(bank, task))
    assert states(engine) == dict.fromkeys(("e0", "e1", "e2"), "completed")


@pytest.mark.long
def test_a_limit_that_comes_while_claims_are_given_back_leaves_none_held(
    bank: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first body ends just before the limit; the pool's signal comes while the claims of the rest are given back."""
    given_back: list[list[str]] = []

    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)
        time.sleep(0.95 * LIMIT)

    def interrupted(runtime: Runtime, waiting: Sequence[tuple[Delivery, BatchAnswer]], policy: Policy) -> None:
        given_back.append([delivery.id.key for delivery, _ in waiting])
        if len(given_back) == 1:
            raise SoftTimeLimitExceeded  # as the pool raises it
        give_back(runtime, waiting, policy)

    monkeypatch.setattr(batch, "give_back", interrupted)
    with engine.begin() as connection:
        connection.execute(REFUSE_E3)
    task = each(bank, body, max_attempts=1)
    traced = run(bank, task, *many(bank, task, 6), limit=LIMIT)
    assert [result is None for result in traced] == [False, *[True] * 5]
    assert given_back == [["e1", "e2", "e3", "e4", "e5"]] * 2
    assert states(engine) == {"e0": "completed", "e3": "started"} | dict.fromkeys(("e1", "e2", "e4", "e5"), "released")
    assert not runtime_of(bank).heartbeat._holdings  # what could not be given back is renewed no more


@pytest.mark.long
def test_a_claim_whose_answer_was_lost_is_given_back_at_the_end_of_its_batch(
    bank: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks once the claims are made; then nine tenths of the limit are over."""

    def slow(*call: Any) -> Any:
        traced = trace_task_ret(*call, app=bank)
        time.sleep(LIMIT)
        return traced

    task = each(bank, put_one, max_attempts=1)
    messages = many(bank, task)
    with monkeypatch.context() as patch:
        lose_the_answer(patch)
        assert [each is None for each in run(bank, task, *messages, limit=LIMIT, trace=slow)] == [False, True, True]
    assert states(engine) == {"e0": "completed", "e1": "released", "e2": "released"}
    run(bank, task, *messages[1:])
    assert states(engine) == dict.fromkeys(("e0", "e1", "e2"), "completed")
    assert accounts(engine) == {"e0": [1], "e1": [1], "e2": [1]}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("commit", "answers"),
    [("together", ["requeued", "requeued", "requeued"]), ("each", ["answered", "requeued", "requeued"])],
)
def test_a_hard_time_limit_among_greenlets_puts_back_what_has_not_ended(
    bank: Celery, engine: Engine, commit: str, answers: list[str]
) -> None:
    entered: list[str] = []

    def body(self: IdempotentTask, account: str) -> None:
        entered.append(account)
        put(self, account)
        gevent.sleep(4)

    task = make_task(bank, body, key="{account}", batch=10, batch_commit=commit, time_limit=3)
    bank.finalize()
    bank.set_current()
    requests = [Request(message(bank, task, f"e{n}")) for n in range(3)]
    pool = TaskPool(2, app=bank)
    pool.start()
    _Job(task, requests).execute_using_pool(pool)
    pool._pool.join()
    assert [answer for each in requests for answer in each.answers] == answers
    assert entered == ["e0"]
    assert states(engine) == dict.fromkeys(("e0", "e1", "e2"), "released")
    assert accounts(engine) == {}


@pytest.mark.few(1)
@pytest.mark.parametrize("ends", ["returns", "raises"])
@pytest.mark.parametrize("last", [False, True])
def test_a_body_that_handles_the_limit_of_a_batch_is_not_committed_with_it(
    bank: Celery, engine: Engine, ends: str, last: bool
) -> None:
    """The pool raises it once: whatever was begun after that would have none."""
    entered: list[str] = []
    slow = "e2" if last else "e0"

    def body(self: IdempotentTask, account: str) -> None:
        entered.append(account)
        put(self, account)
        if account == slow and entered.count(account) == 1:
            try:
                time.sleep(LIMIT)
                raise SoftTimeLimitExceeded
            except SoftTimeLimitExceeded as error:
                if ends == "raises":
                    raise RuntimeError("the provider is too slow") from error

    task = make_task(bank, body, key="{account}", batch=10, max_attempts=1)
    messages = many(bank, task)
    assert run(bank, task, *messages, limit=LIMIT) == [None] * 3
    assert entered == (["e0", "e1", "e2"] if last else ["e0"])
    assert (states(engine), accounts(engine)) == (dict.fromkeys(("e0", "e1", "e2"), "released"), {})
    for each_message in messages:
        run(bank, task, each_message)
    assert accounts(engine) == {"e0": [1], "e1": [1], "e2": [1]}
    with engine.connect() as connection:
        assert connection.execute(COUNTS).scalars().all() == [1, 1, 1]


@pytest.mark.few(2)
@pytest.mark.parametrize("commit", ["together", "each"])
@pytest.mark.parametrize("ended_by", [SoftTimeLimitExceeded, SystemExit])
def test_claims_that_are_made_as_a_job_ends_are_given_back(
    bank: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch, commit: str, ended_by: type[BaseException]
) -> None:
    entered: list[str] = []

    def body(self: IdempotentTask, account: str) -> None:
        entered.append(account)
        put(self, account)

    claim_new = batches.claim_new

    def ended(*args: Any, **kwargs: Any) -> Any:
        list(claim_new(*args, **kwargs))
        raise ended_by

    task = make_task(bank, body, key="{account}", batch=10, max_attempts=1, batch_commit=commit)
    messages = many(bank, task)
    with monkeypatch.context() as patch:
        patch.setattr(batches, "claim_new", ended)
        if ended_by is SystemExit:
            with pytest.raises(SystemExit):
                run(bank, task, *messages)
        else:
            assert run(bank, task, *messages) == [None, None, None]
    assert states(engine) == dict.fromkeys(("e0", "e1", "e2"), "released")
    for each_message in messages:
        run(bank, task, each_message)
    assert states(engine) == dict.fromkeys(("e0", "e1", "e2"), "completed")
    assert entered == ["e0", "e1", "e2"]
