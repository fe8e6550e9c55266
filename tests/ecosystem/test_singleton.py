"""celery-singleton's lock before the queue, and our key behind it."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from celery import Celery

from idempotency import IdempotentTask
from tests.support.bank import INSERT
from tests.support.deliveries import Deliveries
from tests.support.operations import Entries

celery_singleton = pytest.importorskip("celery_singleton")
pytestmark = pytest.mark.ecosystem


def test_a_singleton_is_queued_once_and_runs_once(
    bank: Celery, deliveries: Deliveries, redis_url: str, entries: Entries, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SingletonTask(celery_singleton.Singleton, IdempotentTask):  # type: ignore[name-defined]
        abstract = True

    def body(self: Any, account: str) -> str:
        self.session.execute(INSERT, {"account": account, "amount": 1})
        return account

    monkeypatch.setitem(bank.conf.changes, "singleton_backend_url", redis_url)
    task = bank.task(base=SingletonTask, bind=True, name="test.singleton", key="{account}", shared=False)(body)
    first, second = task.delay("a"), task.delay("a")
    assert first.id == second.id
    with bank.connection_for_read() as connection:
        queue = connection.SimpleQueue(bank.amqp.queues[bank.conf.task_default_queue])
        message = queue.get(timeout=10)
        assert queue.qsize() == 0
    assert message.headers["idempotency-key"] == "a"
    with redis.Redis.from_url(redis_url) as client:
        assert client.keys("SINGLETONLOCK_*")
        for _ in range(2):
            assert deliveries.deliver(task, "a", key="a", task_id=first.id).value == "a"
        assert not client.keys("SINGLETONLOCK_*")
    assert entries("a") == 1
