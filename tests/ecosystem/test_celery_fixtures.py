"""Celery's own pytest fixtures: a worker in a thread of the test, an in-memory broker, our records."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from celery.result import allow_join_result

from idempotency import IdempotentTask
from idempotency.application import close_runtime
from tests.support.bank import INSERT
from tests.support.operations import Entries, Record

pytestmark = pytest.mark.ecosystem
pytest_plugins = ("celery.contrib.pytest",)


@pytest.fixture
def celery_app(celery_app: Celery, database: str, redis_url: str) -> Any:
    """Celery's application, with our two addresses and a task."""
    celery_app.conf.update(idempotency_database_url=database, idempotency_redis_url=redis_url)

    @celery_app.task(base=IdempotentTask, bind=True, name="test.deposit", key="{account}", shared=False)
    def deposit(self: IdempotentTask, account: str) -> str:
        self.session.execute(INSERT, {"account": account, "amount": 1})
        return account

    yield celery_app
    close_runtime(celery_app)


@pytest.mark.usefixtures("celery_worker")
def test_celerys_worker_fixture_runs_an_idempotent_task_once(
    celery_app: Celery, entries: Entries, record: Record
) -> None:
    deposit = celery_app.tasks["test.deposit"]
    with allow_join_result():
        assert [deposit.delay("a").get(timeout=20) for _ in range(2)] == ["a", "a"]
    assert (entries("a"), record("a").status) == (1, "completed")
