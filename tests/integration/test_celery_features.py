"""What Celery calls around a delivery, and the ways to define a task: rows of docs/celery-features.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, signals

from idempotency import IdempotentTask, PermanentError
from idempotency.wire.headers import REVOKED_HEADER
from tests.support.bank import INSERT
from tests.support.deliveries import Deliveries
from tests.support.operations import Entries
from tests.support.tasks import make_task

HOOKS = ("on_success", "on_failure", "on_retry", "after_return")
SIGNALS = ("task_prerun", "task_postrun", "task_success", "task_failure", "task_retry")


@pytest.fixture
def seen() -> Iterator[list[str]]:
    """The hooks and signals of this test, in their order."""
    seen: list[str] = []
    receivers = {name: lambda name=name, **_: seen.append(name) for name in SIGNALS}
    for name, receiver in receivers.items():
        getattr(signals, name).connect(receiver, weak=False)
    yield seen
    for name, receiver in receivers.items():
        getattr(signals, name).disconnect(receiver)


SUCCESS = ["task_prerun", "on_success", "task_success", "after_return", "task_postrun"]
FAILURE = ["task_prerun", "on_failure", "task_failure", "after_return", "task_postrun"]


@pytest.mark.parametrize(
    ("how", "first", "duplicate"),
    [
        ("succeed", SUCCESS, SUCCESS),
        ("fail", FAILURE, FAILURE),
        # the duplicate is acknowledged: the operation is not due yet, and comes back by itself
        ("retry", ["task_prerun", "on_retry", "task_retry", "task_postrun"], ["task_prerun", "task_postrun"]),
    ],
)
def test_hooks_and_signals_of_the_first_delivery_and_of_a_duplicate(
    bank: Celery, deliveries: Deliveries, seen: list[str], how: str, first: list[str], duplicate: list[str]
) -> None:
    runs: list[str] = []

    def body(self: Any, how: str) -> None:
        runs.append(how)
        if how == "fail":
            raise PermanentError("no")
        if how == "retry":
            self.retry(countdown=600)

    hooks = {name: lambda self, *_, name=name: seen.append(name) for name in HOOKS}
    task = make_task(bank, body, key="{how}", **hooks)
    for expected in (first, duplicate):
        seen.clear()
        deliveries.deliver(task, how)
        assert seen == expected
    assert runs == [how]


def test_a_revoked_task_calls_neither_errbacks_nor_on_failure(
    bank: Celery, deliveries: Deliveries, seen: list[str]
) -> None:
    @bank.task(name="test.errback_of_revoked", shared=False)
    def errback(request: Any, exc: Any, traceback: Any) -> None:
        seen.append("errback")

    hooks = {name: lambda self, *_, name=name: seen.append(name) for name in HOOKS}
    task = make_task(bank, lambda self: seen.append("body"), on_failed=lambda *_: seen.append("on_failed"), **hooks)
    for ended in (["on_failed"], []):
        seen.clear()
        outcome = deliveries.deliver(task, key="k", headers={REVOKED_HEADER: True, "errbacks": [errback.s()]})
        assert (outcome.state, seen) == ("IGNORED", ["task_prerun", *ended, "task_postrun"])


def test_a_hook_that_raises_changes_no_end(bank: Celery, deliveries: Deliveries) -> None:
    def broken(self: Any, *_: Any) -> None:
        raise RuntimeError("bug")

    task = make_task(bank, lambda self: "done", on_success=broken, after_return=broken)
    assert [deliveries.deliver(task, key="k").value for _ in range(2)] == ["done", "done"]


def test_a_task_may_be_a_class(bank: Celery, deliveries: Deliveries, entries: Entries) -> None:
    class Deposit(IdempotentTask):
        name = "test.class"
        key = "{account}"

        def run(self, account: str) -> None:
            self.session.execute(INSERT, {"account": account, "amount": 1})

    task = bank.register_task(Deposit())
    assert [deliveries.deliver(task, "a").state for _ in range(2)] == ["SUCCESS", "SUCCESS"]
    assert entries("a") == 1
    del bank.tasks[task.name]


def test_a_delivery_without_our_headers_is_keyed_by_the_template(
    bank: Celery, deliveries: Deliveries, entries: Entries
) -> None:
    """As `send_task` from an application that does not know the library sends it."""
    from tests.support import bank as app_module

    sent = bank.send_task(app_module.deposit.name, ("a",), kwargs={"amount": 2})
    with bank.connection_for_read() as connection:
        queue = connection.SimpleQueue(bank.amqp.queues[bank.conf.task_default_queue])
        message = queue.get(timeout=10)
    assert not [name for name in message.headers if name.startswith("idempotency-")]
    args, kwargs, _ = message.payload
    for _ in range(2):
        outcome = deliveries.deliver(app_module.deposit, *args, task_id=sent.id, **kwargs)
        assert outcome.value == {"account": "a", "amount": 2}
    assert entries("a") == 1
