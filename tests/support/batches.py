"""Batches that run in the process of a test: their tasks, their messages, and what has become of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from celery.app.trace import trace_task_ret
from sqlalchemy import Engine, text

from idempotency import IdempotentTask
from idempotency.store import batches
from idempotency.worker.batch import run_batch
from tests.support.bank import INSERT
from tests.support.deliveries import request_of
from tests.support.tasks import make_task

SETTING = "SELECT current_setting('app.tenant', true)"
TRANSACTIONS = text("SELECT count(DISTINCT xmin::text) FROM entries")
# As anything that has begun an operation and is not committed yet.
OTHER = """
INSERT INTO idempotency.records (tenant, task, key, status, fence, fingerprint, message, queue, service, available_at)
VALUES ('default', %s, 'e1', 'released', 1, 'v1:f', '', 'q', 'bank', clock_timestamp())"""


def together(app: Celery, body: Callable[..., Any]) -> Any:
    return make_task(app, body, key="{account}", batch=10, max_attempts=1)


def each(app: Celery, body: Callable[..., Any], **options: Any) -> Any:
    return make_task(app, body, key="{account}", batch=10, batch_commit="each", **options)


def message(app: Celery, task: Any, *args: Any, body: str | None = None) -> Any:
    """As the pool is given it."""
    id = str(uuid4())
    request = request_of(app, task, id) | {"hostname": "h", "reply_to": None, "timelimit": [None, None]}
    return id, request, body or json.dumps([list(args), {}, {}]), "application/json", "utf-8"


def many(app: Celery, task: Any, count: int = 3) -> list[Any]:
    return [message(app, task, f"e{n}") for n in range(count)]


def put(task: IdempotentTask, account: str, amount: int = 1) -> None:
    task.session.execute(INSERT, {"account": account, "amount": amount})


def put_one(self: IdempotentTask, account: str) -> str:
    put(self, account)
    return account


def run(app: Celery, task: Any, *messages: Any, limit: float | None = None, trace: Any = None) -> list[Any]:
    """What a process of the pool returns for them. `limit`: the job's, in seconds; `trace`: instead of Celery's."""
    app.finalize()
    app.set_current()  # in a worker there is no other
    trace = trace or (lambda *call: trace_task_ret(*call, app=app))
    return run_batch(trace, task.name, messages, limit or task.soft_time_limit)


def lose_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The claims of the batches to come are made and committed, and then the connection breaks."""
    claim_new = batches.claim_new

    def lost(*args: Any, **kwargs: Any) -> Any:
        list(claim_new(*args, **kwargs))
        raise ConnectionError("the answer was lost")

    monkeypatch.setattr(batches, "claim_new", lost)


def accounts(engine: Engine) -> dict[str, list[int]]:
    query = text("SELECT account, array_agg(amount ORDER BY amount) AS amounts FROM entries GROUP BY account")
    with engine.connect() as connection:
        return {row.account: list(row.amounts) for row in connection.execute(query)}


def states(engine: Engine) -> dict[str, str]:
    with engine.connect() as connection:
        return {row.key: row.status for row in connection.execute(text("SELECT key, status FROM idempotency.records"))}


def queued(bank: Celery) -> int:
    with bank.connection_for_write() as connection:
        return int(connection.default_channel.queue_declare(bank.conf.task_default_queue, passive=True).message_count)


class Request:
    """What a batch uses of Celery's request."""

    _already_revoked = False

    def __init__(self, call: Any) -> None:
        self.id, self._request_dict, self._body, self._content_type, self._content_encoding = call
        self.answers: list[str] = []

    def revoked(self) -> bool:
        return False

    def on_accepted(self, pid: int, at: float) -> None:
        pass

    def on_success(self, traced: Any) -> None:
        self.answers.append("answered")

    def reject(self, requeue: bool) -> None:
        self.answers.append("requeued")
