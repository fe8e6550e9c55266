"""Which messages of a task a batch takes, and how many its worker fetches for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.worker import state

from idempotency import IdempotentTask
from idempotency.queues import quorum_queue
from idempotency.worker import batching
from idempotency.worker.batching import MOST_AHEAD, _Job, _may_join


@pytest.fixture
def app() -> Celery:
    app = Celery("gathering", set_as_current=False)
    app.conf.task_queues = [quorum_queue("postings"), quorum_queue("charges")]
    app.conf.task_routes = {"post": {"queue": "postings"}}
    return app


def task_of(app: Celery, **options: Any) -> Any:
    @app.task(base=IdempotentTask, name="post", key="{a}", batch=100, **options)
    def post(a: str) -> None: ...

    return app.tasks["post"]


def request(limits: tuple[Any, Any] = (None, None), *, redelivered: bool = False, origin: str | None = None) -> Any:
    return SimpleNamespace(
        time_limits=limits,
        delivery_info={"redelivered": redelivered},
        request_dict={} if origin is None else {"idempotency-origin": origin},
    )


@pytest.mark.parametrize(
    ("limits", "joins"),
    [((None, None), True), ((90, 60), True), ((None, 60), True), ((None, 30), False), ((5, 60), False)],
)
def test_the_limits_of_its_task_are_in_each_message_and_keep_none_out(
    app: Celery, limits: tuple[Any, Any], joins: bool
) -> None:
    task = task_of(app, time_limit=90, soft_time_limit=60)
    assert _may_join(task, request(limits)) is joins


@pytest.mark.parametrize(
    ("origin", "joins"),
    [(None, True), ("enqueue", True), ("resend", True), ("retry", False), ("recover", False), ("replay", False)],
)
def test_a_later_attempt_and_a_redelivery_run_by_themselves(app: Celery, origin: str | None, joins: bool) -> None:
    task = task_of(app)
    assert _may_join(task, request(origin=origin)) is joins
    assert not _may_join(task, request(origin=origin, redelivered=True))


@pytest.mark.parametrize(
    ("consumed", "processes", "before", "fetched"),
    [
        ("postings", 4, 4, 500),
        ("postings", 4, 800, 800),
        ("postings", 4, 0, 0),  # without a limit
        ("postings", 1000, 4, MOST_AHEAD),
        ("charges", 4, 4, 4),  # no message of the task comes here
    ],
)
def test_a_worker_that_takes_its_messages_fetches_whole_batches(
    app: Celery, monkeypatch: pytest.MonkeyPatch, consumed: str, processes: int, before: int, fetched: int
) -> None:
    monkeypatch.setattr(batching, "default", lambda *args, **options: None)
    task = task_of(app)
    app.amqp.queues.select(consumed)
    consumer = SimpleNamespace(pool=SimpleNamespace(num_processes=processes), initial_prefetch_count=before)
    batching.strategy(task, app, consumer)
    assert consumer.initial_prefetch_count == fetched


def test_what_fails_for_one_message_keeps_no_other_from_running(app: Celery) -> None:
    told: list[str] = []

    class Request:
        time_limits = (None, None)
        _request_dict = _body = _content_type = _content_encoding = None

        def __init__(self, id: str) -> None:
            self.id = id

        def revoked(self) -> None:
            told.append(f"revoked? {self.id}")
            if self.id == "1":
                raise ValueError("of Celery")

        def on_accepted(self, pid: int, at: float) -> None:
            told.append(f"accepted {self.id}")
            if self.id == "1":
                raise ValueError("of Celery")

    requests: list[Any] = [Request(id) for id in "123"]
    job = _Job(task_of(app), requests)
    pool = SimpleNamespace(apply_async=lambda *args, accept_callback, **options: accept_callback(7, 0.0))
    job.execute_using_pool(pool)
    assert told == [*(f"revoked? {id}" for id in "123"), *(f"accepted {id}" for id in "123")]


class Answered:
    """A message whose connection may be lost."""

    def __init__(self, *, is_lost: bool = False) -> None:
        self.is_lost, self.answer = is_lost, ""

    def on_success(self, traced: Any) -> None:
        self.answer = "acknowledged"

    def reject(self, requeue: bool) -> None:
        if self.is_lost:
            raise ConnectionError("lost")
        self.answer = "put back"


@pytest.mark.parametrize("results", [[(0, "r", 0.1), None, (0, "r", 0.1)], ConnectionError("the process was lost")])
def test_a_message_that_cannot_be_put_back_keeps_no_other_from_its_answer(
    app: Celery, monkeypatch: pytest.MonkeyPatch, results: Any
) -> None:
    monkeypatch.setattr(state, "task_ready", lambda request: None)
    requests: list[Any] = [Answered(), Answered(is_lost=True), Answered()]
    for each in requests:
        each.id, each._already_revoked = "i", False
    _Job(task_of(app), requests)._on_traced(results)
    expected = "acknowledged" if isinstance(results, list) else "put back"
    assert [each.answer for each in requests] == [expected, "", expected]
