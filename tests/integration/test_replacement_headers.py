"""A header named `replacement` is Celery's request's attribute of that name, where `replace` leaves what a body has asked for."""

from __future__ import annotations

import json
from typing import Any

import kombu
from celery import Celery
from celery.exceptions import Ignore
from sqlalchemy import Connection, text

from idempotency import IdempotentTask
from idempotency.application import close_runtime
from idempotency.letters.examine import examine
from idempotency.wire.headers import senders_headers
from tests.support import bank as b
from tests.support import queues
from tests.support.deliveries import Deliveries
from tests.support.tasks import make_task

SECRET = "a" * 32


def ignoring(self: IdempotentTask, account: str) -> None:
    """As plain tasks of Celery do. Here it is refused (UnsupportedControl), and the operation fails."""
    if account == "a1":
        raise Ignore


def stored(connection: Connection, task: Any) -> Any:
    query = "SELECT status, result FROM idempotency.records WHERE task = :task"
    return tuple(connection.execute(text(query), {"task": task.name}).one())


def test_a_callers_header_is_not_the_result_of_a_body_that_was_ignored(bank: Celery, connection: Connection) -> None:
    given = {"replacement": "blue"}
    assert senders_headers(given) == given  # not refused where it is given
    task = make_task(bank, ignoring, key="{account}", max_attempts=1)
    Deliveries(bank).deliver(task, "a1")
    assert stored(connection, task)[0] == "failed"
    connection.execute(text("TRUNCATE idempotency.records, idempotency.dead_letters, idempotency.outbox CASCADE"))
    Deliveries(bank).deliver(task, "a1", headers=given)
    assert stored(connection, task) == ("failed", None)


def test_who_adds_it_to_a_signed_message_has_no_worker_sign_a_call(bank: Celery, connection: Connection) -> None:
    """The signature does not cover it, and a body may raise what Celery raises after `replace`."""
    bank.finalize()
    close_runtime(bank)
    bank.conf.idempotency_message_secrets = SECRET
    task = make_task(bank, ignoring, key="{account}", max_attempts=1)
    try:
        queues.drained(bank)
        task.delay("a1")
        (message,) = queues.drained(bank)
        forged = {"idempotency-replaced-by": dict(b.deposit.s("thief", 1000))}
        headers = {**message.headers, "replacement": forged}
        arrived = kombu.Message(
            body=message.body,
            headers=headers,
            content_type="application/json",
            content_encoding="utf-8",
            accept={"application/json"},
        )
        assert examine(bank, arrived).reason is None  # the guard lets it pass: its signature is valid
        Deliveries(bank).deliver(task, "a1", headers=json.loads(json.dumps(headers)))
        assert queues.drained(bank) == []
        assert stored(connection, task) == ("failed", None)
    finally:
        close_runtime(bank)
        bank.conf.idempotency_message_secrets = ""
