"""django-celery-results and django-celery-beat beside idempotent tasks: a smoke test each."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from celery.result import AsyncResult
from django.utils import timezone
from django_celery_beat.models import IntervalSchedule, PeriodicTask
from django_celery_beat.schedulers import DatabaseScheduler
from django_celery_results.models import TaskResult

from tests.django.conftest import Entries, make_task
from tests.django.ledger.models import Entry
from tests.support.deliveries import Deliveries


def pay(self: Any, account: str) -> str:
    Entry.objects.create(account=account)
    return account


def test_results_and_duplicates_are_stored_by_django_celery_results(app: Celery, entries: Entries) -> None:
    app.conf.update(result_backend="django-db", task_ignore_result=False)
    deliveries, task = Deliveries(app), make_task(app, pay, key="{account}", ignore_result=False)
    for id in ("first", "again"):
        assert deliveries.deliver(task, "a", task_id=id).value == "a"
        assert AsyncResult(id, app=app).get(timeout=5) == "a"
    assert entries() == ["a"]
    assert TaskResult.objects.filter(status="SUCCESS").count() == 2


@pytest.mark.long
def test_a_plain_task_that_django_celery_beat_sends_may_enqueue(project: Celery, outbox: Entries) -> None:
    task = make_task(project, pay, key="{account}")

    @project.task(name="ledger.every_night", shared=False)
    def every_night() -> None:
        task.enqueue("2026-11-22")

    every = IntervalSchedule.objects.create(every=1, period=IntervalSchedule.DAYS)
    due = timezone.now() - timedelta(days=2)
    PeriodicTask.objects.create(name="nightly", task="ledger.every_night", interval=every, last_run_at=due)
    project.conf.task_always_eager = True
    scheduler = DatabaseScheduler(app=project)
    scheduler.tick()
    scheduler.close()
    assert outbox() == ["2026-11-22"]
    assert PeriodicTask.objects.get(name="nightly").total_run_count == 1
