"""Django's own tasks on the library: enqueued in Django's transaction, run once by Celery's workers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import django
import pytest
from celery import Celery
from django.db import transaction
from django.utils import timezone
from sqlalchemy import Engine, text

from idempotency import SettingsError
from idempotency.contrib.django.backend import IdempotentBackend
from idempotency.wire.message import Message
from tests.django.conftest import Entries
from tests.support.deliveries import Deliveries, deliver_row
from tests.support.operations import Record

if django.VERSION >= (6, 0):
    from django.tasks import TaskResultStatus
    from django.tasks.exceptions import TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued
else:
    from django_tasks import TaskResultStatus
    from django_tasks.exceptions import TaskResultDoesNotExist
    from django_tasks.signals import task_enqueued


@pytest.fixture
def work(project: Celery) -> Any:
    from tests.django.ledger import work

    return work


@pytest.fixture
def deliver(app: Celery, work: Any, engine: Engine) -> Any:
    """Delivers the newest row of the outbox as a worker gets it."""
    deliveries = Deliveries(app)

    def newest() -> Any:
        with engine.connect() as connection:
            row = connection.execute(text("SELECT * FROM idempotency.outbox ORDER BY id DESC LIMIT 1")).one()
        assert Message.from_text(row.message).headers["task"] == "idempotency.django_task"
        return deliver_row(deliveries, app.tasks["idempotency.django_task"], row)

    return newest


def test_a_task_leaves_with_the_commit_and_runs_once(
    work: Any, deliver: Any, outbox: Entries, entries: Entries
) -> None:
    with transaction.atomic():
        result = work.post.enqueue("a", amount=2)
        assert outbox() == []
    assert (outbox(), result.status) == ([result.id], TaskResultStatus.READY)
    result.refresh()
    assert (result.status, result.is_finished, result.args, result.kwargs) == ("READY", False, ["a"], {"amount": 2})

    assert deliver().value == deliver().value == {"entry": 1}
    result.refresh()
    assert (result.status, result.return_value, result.attempts) == ("SUCCESSFUL", {"entry": 1}, 1)
    assert work.post.get_result(result.id).finished_at >= result.started_at >= result.enqueued_at
    assert entries() == ["a"]


def test_a_task_of_a_block_that_rolls_back_never_was(work: Any, outbox: Entries) -> None:
    with pytest.raises(ValueError, match="no"), transaction.atomic():
        result = work.post.enqueue("a")
        raise ValueError("no")
    assert outbox() == []
    with pytest.raises(TaskResultDoesNotExist):
        work.post.get_result(result.id)


def test_an_async_tasks_queries_are_the_attempts(work: Any, deliver: Any, entries: Entries) -> None:
    work.post_async.enqueue("a", fails=True)
    assert deliver().state == "RETRY"
    assert entries() == []
    work.post_async.enqueue("b", fails=False)
    assert (deliver().value, entries()) == ("b", ["b"])


def test_a_task_that_fails_leaves_no_rows_and_says_why(
    app: Celery, work: Any, deliver: Any, entries: Entries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(app.tasks["idempotency.django_task"]), "max_attempts", 1)
    result = work.fail.enqueue("a")
    deliver()
    result.refresh()
    assert (result.status, entries()) == (TaskResultStatus.FAILED, [])
    assert f"attempt 1 of {result.id}" in result.errors[0].traceback


def test_a_task_may_be_deferred(work: Any, engine: Engine) -> None:
    work.post.using(run_after=timezone.now() + timedelta(hours=1)).enqueue("a")
    with engine.connect() as connection:
        due = connection.execute(text("SELECT available_at - now() FROM idempotency.outbox")).scalar_one()
    assert timedelta(minutes=59) < due < timedelta(minutes=61)


def test_the_signal_of_an_accepted_task_is_sent(work: Any) -> None:
    sent = []

    def note(task_result: Any, **_: Any) -> None:
        sent.append(task_result.id)

    task_enqueued.connect(note)
    result = work.post.enqueue("a")
    task_enqueued.disconnect(note)
    assert sent == [result.id]


@pytest.mark.long
@pytest.mark.parametrize(("grace", "end"), [(3600.0, ("released", None, 0)), (0.0, ("failed", "unknown_task", 1))])
def test_a_function_that_this_worker_does_not_have_waits_for_one_that_has_it(
    app: Celery, work: Any, deliver: Any, record: Record, monkeypatch: pytest.MonkeyPatch, grace: float, end: object
) -> None:
    app.conf.update(idempotency_unknown_task_grace=grace)
    result, post = work.post.enqueue("a"), work.post
    monkeypatch.delattr(work, "post")
    deliver()
    found = record(result.id)
    assert (found.status, found.error_code, found.attempts) == end
    with pytest.raises(TaskResultDoesNotExist, match=r"work\.post, which is gone"):
        post.get_backend().get_result(result.id)


def test_options_of_the_backend_are_refused() -> None:
    with pytest.raises(SettingsError, match="TASKS\\['default'\\]: OPTIONS: there are none"):
        IdempotentBackend("default", {"OPTIONS": {"max_attempts": 1}})
