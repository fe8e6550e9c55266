"""Errors of bodies that Celery's main process takes for its own, and errors that cannot even be printed."""

from __future__ import annotations

from asyncio import CancelledError
from typing import Any

import pytest
from billiard.exceptions import SoftTimeLimitExceeded, Terminated, TimeLimitExceeded, WorkerLostError
from celery import Celery
from celery.exceptions import Reject
from sqlalchemy import Engine

from idempotency import IdempotentTask, OperationFailed, PermanentError
from idempotency.application import runtime_of
from idempotency.attempt import attempt as attempts
from idempotency.worker.batching import _Job
from tests.support import batched
from tests.support.batches import accounts, many, put, run, states
from tests.support.processes import Processes, eventually
from tests.support.tasks import make_task

app = batched.app


def out_of_memory(self: IdempotentTask, account: str) -> Any:
    if account == "e0":
        raise MemoryError("too large a report")
    return batched.post(self, account, "")


OPTIONS = {"base": IdempotentTask, "bind": True, "key": "{account}", "max_attempts": 1}
alone = app.task(name="odd.alone", **OPTIONS)(out_of_memory)
in_batch = app.task(name="odd.in_batch", batch=10, batch_wait=1.0, batch_commit="each", **OPTIONS)(out_of_memory)


@pytest.mark.few(1)
@pytest.mark.parametrize("task", [alone, in_batch])
def test_a_body_without_memory_ends_its_operation_and_not_the_worker(
    bank: Celery, engine: Engine, processes: Processes, task: Any
) -> None:
    for number in range(3):
        task.delay(f"e{number}")
    worker = processes.worker("--concurrency", "1", app=__name__)
    eventually(lambda: states(engine) == {"e0": "failed", "e1": "completed", "e2": "completed"}, timeout=60)
    task.delay("e3")  # it works on
    eventually(lambda: states(engine).get("e3") == "completed", timeout=60)
    assert "Unrecoverable error" not in worker.log
    assert "batch_not_acknowledged" not in worker.log


@pytest.mark.parametrize("kind", [CancelledError, MemoryError, Terminated, TimeLimitExceeded, WorkerLostError])
def test_celery_is_told_of_a_failed_operation(bank: Celery, engine: Engine, kind: type[BaseException]) -> None:
    def body(self: IdempotentTask, account: str) -> None:
        raise kind("of the body")

    task = make_task(bank, body, key="{account}", batch=10, max_attempts=1, batch_commit="each")
    ((_, told, _),) = run(bank, task, *many(bank, task, 1))
    error = getattr(told.exception, "exc", told.exception)
    assert isinstance(error, OperationFailed)
    assert error.code == kind.__name__
    assert states(engine) == {"e0": "failed"}


@pytest.mark.parametrize("commit", ["each", "together"])
def test_a_body_that_is_cancelled_from_within_costs_the_others_of_its_batch_nothing(
    bank: Celery, engine: Engine, commit: str
) -> None:
    """As `asyncio.run` raises it, which is no `Exception`."""

    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)
        if account == "e0":
            raise CancelledError

    task = make_task(bank, body, key="{account}", batch=10, max_attempts=1, batch_commit=commit)
    assert None not in run(bank, task, *many(bank, task, 3))
    assert states(engine) == {"e0": "failed", "e1": "completed", "e2": "completed"}
    assert accounts(engine) == {"e1": [1], "e2": [1]}


class _Request:
    _already_revoked = False

    def __init__(self, fails: bool) -> None:
        self.id, self.fails, self.answers = "id", fails, list[str]()

    def on_success(self, traced: Any) -> None:
        if self.fails:
            raise ConnectionError("the result backend is away")
        self.answers.append("answered")

    def reject(self, requeue: bool) -> None:
        self.answers.append("requeued")
        raise ConnectionError("the broker is away, too")


class _Task:
    name = "t"


def test_a_message_whose_end_celery_could_not_note_comes_again() -> None:
    requests = [_Request(False), _Request(True), _Request(False)]
    _Job(_Task(), requests)._on_traced([(0, "r", 0.1)] * 3)  # type: ignore[arg-type]
    assert [each.answers for each in requests] == [["answered"], ["requeued"], ["answered"]]


class Odd(Exception):
    def __str__(self) -> str:
        raise AttributeError("detail")


class OddPermanent(PermanentError):
    def __str__(self) -> str:
        raise AttributeError("detail")


@pytest.mark.parametrize("commit", ["together", "each"])
@pytest.mark.parametrize(
    ("error", "max_attempts", "state"),
    [(Odd(), 1, "failed"), (Odd(), 5, "released"), (OddPermanent("no", "no"), 5, "failed")],
)
def test_an_error_that_cannot_be_printed_ends_the_attempt_like_others(
    bank: Celery, engine: Engine, commit: str, error: Exception, max_attempts: int, state: str
) -> None:
    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)
        if account == "e0":
            raise error

    task = make_task(bank, body, key="{account}", batch=10, max_attempts=max_attempts, batch_commit=commit)
    traced = run(bank, task, *many(bank, task, 3))
    raised = traced[0][1].exception
    assert not isinstance(getattr(raised, "exc", raised), Reject)
    assert states(engine) == {"e0": state, "e1": "completed", "e2": "completed"}
    assert accounts(engine) == {"e1": [1], "e2": [1]}


@pytest.mark.parametrize(
    ("where", "method"),
    [("between claim and body", "__init__"), ("after the commit", "close")],
    ids=["before", "after"],
)
def test_a_soft_limit_in_our_own_code_leaves_the_message_to_come_again(
    bank: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str, method: str
) -> None:
    entered: list[str] = []

    def body(self: IdempotentTask, account: str) -> None:
        entered.append(account)
        put(self, account)

    task = make_task(bank, body, key="{account}", batch=10, batch_commit="each")
    messages = many(bank, task, 2)
    own, raised = getattr(attempts.Attempt, method), list[str]()

    def interrupted(self: Any, *args: Any) -> None:
        if method == "__init__":
            own(self, *args)
        if not raised:
            raised.append(where)
            raise SoftTimeLimitExceeded
        if method == "close":
            own(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(attempts.Attempt, method, interrupted)
        traced = run(bank, task, *messages)
    first = traced[0][1]
    error = getattr(first.exception, "exc", first.exception)
    assert isinstance(error, Reject)
    assert error.requeue
    assert [each is None for each in traced] == [False, True]  # the limit is raised once for a job
    assert states(engine) == {"e0": "completed" if method == "close" else "released", "e1": "released"}
    assert not runtime_of(bank).heartbeat._holdings
    run(bank, task, *messages)  # as the broker brings them again
    assert states(engine) == {"e0": "completed", "e1": "completed"}
    assert entered == ["e0", "e1"]
    assert not runtime_of(bank).heartbeat._holdings
