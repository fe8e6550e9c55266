"""Headers that the signature does not cover: what Celery would take for an attribute of its request, or we for one of ours."""

from __future__ import annotations

import json
from typing import Any

import kombu
import pytest
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
    raise Ignore


def with_header(app: Celery, task: Any, name: str, value: Any) -> kombu.Message:
    """A message of the application's own, to which somebody has added a header on its way."""
    queues.drained(app)
    task.delay("a1")
    (sent,) = queues.drained(app)
    return kombu.Message(
        body=sent.body,
        headers={**sent.headers, name: value},
        content_type="application/json",
        content_encoding="utf-8",
        accept={"application/json"},
    )


def stored(connection: Connection, task: Any) -> Any:
    query = "SELECT status, result FROM idempotency.records WHERE task = :task"
    return tuple(connection.execute(text(query), {"task": task.name}).one())


@pytest.mark.parametrize(
    ("name", "reason"), [("_children", "invalid_header"), ("_protected", "invalid_header"), ("colour", None)]
)
def test_what_celery_would_take_for_its_own_is_refused(bank: Celery, name: str, reason: str | None) -> None:
    assert examine(bank, with_header(bank, b.deposit, name, "x")).reason == reason


def test_a_callers_header_is_not_the_result_of_a_body_that_was_ignored(bank: Celery, connection: Connection) -> None:
    given = {"replacement": "blue"}
    assert senders_headers(given) == given  # not refused where it is given
    task = make_task(bank, ignoring, key="{account}", max_attempts=1)
    Deliveries(bank).deliver(task, "a1", headers=given)
    assert stored(connection, task) == ("failed", None)


def test_who_adds_it_to_a_signed_message_has_no_worker_sign_a_call(bank: Celery, connection: Connection) -> None:
    bank.finalize()
    close_runtime(bank)
    bank.conf.idempotency_message_secrets = SECRET
    task = make_task(bank, ignoring, key="{account}", max_attempts=1)
    forged = {"idempotency-replaced-by": dict(b.deposit.s("thief", 1000))}
    try:
        arrived = with_header(bank, task, "replacement", forged)
        assert examine(bank, arrived).reason is None  # the guard lets it pass: its signature is valid
        Deliveries(bank).deliver(task, "a1", headers=json.loads(json.dumps(arrived.headers)))
        assert queues.drained(bank) == []
        assert stored(connection, task) == ("failed", None)
    finally:
        close_runtime(bank)
        bank.conf.idempotency_message_secrets = ""
