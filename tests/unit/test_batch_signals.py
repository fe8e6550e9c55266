"""The signals of a batch's messages, which share a process: each reaches it once, and none is lost."""

from __future__ import annotations

import signal
from typing import Any

from idempotency.worker.batching import _Job


class Pool:
    """Notes what it is told to send."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def terminate_job(self, pid: int, number: int) -> None:
        self.sent.append(number)


class Request:
    """What Celery's own does with a signal: before the pool has accepted it, it is kept."""

    def __init__(self) -> None:
        self.kept: tuple[Any, int] | None = None
        self.pid: int | None = None

    def on_accepted(self, pid: int, at: float) -> None:
        self.pid = pid
        if self.kept is not None:
            self.terminate(*self.kept)

    def terminate(self, pool: Any, number: int) -> None:
        if self.pid is None:
            self.kept = pool, number
        else:
            pool.terminate_job(self.pid, number)

    cancel = terminate


def batch_of(many: int) -> tuple[_Job, list[Request]]:
    requests = [Request() for _ in range(many)]
    task: Any = None
    return _Job(task, requests), requests


def test_each_signal_reaches_the_process_of_a_batch_once() -> None:
    job, requests = batch_of(3)
    pool = Pool()
    job._on_accepted(1, 0.0)
    for request in requests:
        request.cancel(pool, signal.SIGTERM)
    requests[0].terminate(pool, signal.SIGKILL)
    assert pool.sent == [signal.SIGTERM, signal.SIGKILL]


def test_a_signal_that_came_before_the_pool_has_accepted_the_batch_is_sent_then() -> None:
    job, requests = batch_of(3)
    pool = Pool()
    requests[1].terminate(pool, signal.SIGTERM)
    assert pool.sent == []
    job._on_accepted(1, 0.0)
    for request in requests:
        request.cancel(pool, signal.SIGTERM)
    assert pool.sent == [signal.SIGTERM]
