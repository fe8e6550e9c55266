"""What Celery and its hooks are told of the messages of a batch: never another end than their operations have had."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery, signals
from celery.app.trace import trace_task_ret
from sqlalchemy import Engine, text

from idempotency import IdempotentTask
from tests.support import batched, crashing
from tests.support.bank import deposit
from tests.support.batches import many, message, put, queued, run, states
from tests.support.deliveries import Deliveries
from tests.support.processes import Processes, eventually
from tests.support.proxy import Proxy
from tests.support.tasks import make_task

app = batched.app
IN_BATCHES: Any = {
    "bind": True,
    "key": "{account}",
    "batch": 10,
    "batch_wait": 1.0,
    "batch_commit": "each",
    "ignore_result": False,
}
EACH_WAY = pytest.mark.parametrize("commit", ["none", "each", "together"])


class Told(IdempotentTask):
    abstract = True

    def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        logging.getLogger("told").error("hook on_retry of %s: %s", task_id, exc)


class SomeRows(Exception):
    """As of an import that collects what is wrong with its rows."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.exceptions = ["row 3: no date"]


@app.task(base=Told, name="told.post", max_attempts=1, **IN_BATCHES)
def post(self: IdempotentTask, account: str, how: str = "") -> Any:
    return batched.post(self, account, how)


@app.task(base=IdempotentTask, name="told.load", **IN_BATCHES)
def load(self: IdempotentTask, account: str, how: str = "") -> Any:
    if how == "rows" and self.request.retries == 0:
        raise SomeRows("2 rows of 3")
    return batched.post(self, account, "")


if "TOLD_BACKEND" in os.environ:
    app.conf.result_backend = os.environ["TOLD_BACKEND"]

    @signals.task_retry.connect
    def _announce(sender: Any = None, request: Any = None, **_: Any) -> None:
        logging.getLogger("told").error("announced as retried: %s", request.id)


def accounts(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return sorted(connection.execute(text("SELECT account FROM entries")).scalars())


def options(commit: str) -> dict[str, Any]:
    return {} if commit == "none" else {"batch": 10, "batch_commit": commit}


def handed(bank: Celery, task: Any, commit: str, messages: list[Any]) -> None:
    """To a batch, or without one, each to Celery's own trace."""
    if commit != "none":
        run(bank, task, *messages)
        return
    bank.finalize()
    for id, request, body, content_type, encoding in messages:
        trace_task_ret(task.name, id, request, body, content_type, encoding, app=bank)


def declare(bank: Celery) -> None:
    with bank.connection_for_write() as connection:
        bank.amqp.queues[bank.conf.task_default_queue].bind(connection.default_channel).declare()


def test_what_has_ended_is_not_said_to_be_retried(
    bank: Celery, engine: Engine, processes: Processes, environment: dict[str, str]
) -> None:
    crashing.plan(environment["CRASH_DIRECTORY"], "working", crashing.HOLD)
    held = Path(environment["CRASH_DIRECTORY"]) / "working.held"
    for number, how in enumerate(("", "permanent", "works", "")):
        post.apply_async((f"e{number}", how), task_id=f"told-{number}")
    proxy, through = Proxy.before(environment["BROKER_URL"])
    with proxy:
        worker = processes.worker(
            "--concurrency", "1", app=__name__, BROKER_URL=through, TOLD_BACKEND=environment["REDIS_URL"]
        )
        eventually(held.exists, what="the third body runs")
        assert (states(engine)["e0"], states(engine)["e1"]) == ("completed", "failed")
        proxy.reset()
        eventually(lambda: "batch_lost" in worker.log, what="lost")
        eventually(
            lambda: set(states(engine).values()) == {"completed", "failed"} and len(states(engine)) == 4, timeout=90
        )
    said = [line for line in worker.log.splitlines() if "told-" in line and ("retr" in line.lower())]
    assert [line for line in said if "told-0" in line or "told-1" in line] == []


def test_neither_a_retry_nor_what_is_committed_is_told_as_a_failure(
    bank: Celery, engine: Engine, processes: Processes, environment: dict[str, str], relay: Any
) -> None:
    """An error whose `exceptions` are none, and a callback of a kind that this worker does not know: no errback is sent."""
    odd = {**deposit.si("after-e1"), "subtask_type": "theirs", "immutable": True}
    load.apply_async(("e0", "rows"), task_id="load-0", link_error=deposit.si("undo-e0"))
    link_error, headers = [dict(deposit.si("undo-e1"))], {"idempotency-key": "e1"}
    bank.send_task(load.name, ("e1",), task_id="load-1", link=[odd], link_error=link_error, headers=headers)
    worker = processes.worker("--concurrency", "1", app=__name__, TOLD_BACKEND=environment["REDIS_URL"])
    eventually(lambda: states(engine) == {"e0": "completed", "e1": "completed"}, timeout=60, what=worker.log)
    load.apply_async(("e2",), link=deposit.si("after-e2"))
    eventually(lambda: "after-e2" in accounts(engine), timeout=60, what="what is sent later has been run")
    assert accounts(engine) == ["after-e2", "e0", "e1", "e2"]


@EACH_WAY
@pytest.mark.parametrize("what", ["chain", "callbacks"])
def test_a_body_that_ends_its_chain_ends_it_in_a_batch_too(
    bank: Celery, engine: Engine, commit: str, what: str
) -> None:
    def body(self: IdempotentTask, account: str) -> str:
        put(self, account)
        setattr(self.request, what, None)  # nothing follows, this time
        return account

    task = make_task(bank, body, key="{account}", **options(commit))
    declare(bank)
    follows = deposit.si(f"follows-{uuid4().hex}")
    follows = json.loads(json.dumps(dict(follows)))
    sent = [json.dumps([[f"e{n}"], {}, {what: [follows], "errbacks": None, "chord": None}]) for n in range(2)]
    messages = [message(bank, task, body=each) for each in sent]
    handed(bank, task, commit, messages)
    assert states(engine) == {"e0": "completed", "e1": "completed"}
    assert queued(bank) == 0


def test_what_follows_those_that_have_ended_waits_for_none_that_runs_alone(bank: Celery, engine: Engine) -> None:
    """Which may wait for minutes until it is claimed."""
    sent_before: list[int] = []

    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)
        if account == "e0":
            sent_before.append(queued(bank))
            raise ValueError("bad")

    task = make_task(bank, body, key="{account}", max_attempts=1, **options("together"))
    declare(bank)
    follows = json.loads(json.dumps(dict(deposit.si(f"follows-{uuid4().hex}"))))
    embedded = {"chain": None, "callbacks": [follows], "errbacks": None, "chord": None}
    run(bank, task, *(message(bank, task, body=json.dumps([[f"e{n}"], {}, embedded])) for n in range(3)))
    assert states(engine) == {"e0": "failed", "e1": "completed", "e2": "completed"}
    assert sent_before == [0, 0, 2]  # together, behind a savepoint, alone


class Timed(IdempotentTask):
    abstract = True
    seen: list[Any] = []

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        self.request.began = "began"

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        type(self).seen.append((getattr(self.request, "began", None), getattr(self.request, "found", None)))


@EACH_WAY
def test_hooks_read_what_the_body_has_left_in_its_request(bank: Celery, engine: Engine, commit: str) -> None:
    def body(self: Any, account: str) -> str:
        put(self, account)
        self.request.found = account
        return account

    Timed.seen.clear()
    task = bank.task(base=Timed, bind=True, name=f"test.{id(body)}", shared=False, key="{account}", **options(commit))(
        body
    )
    messages = [message(bank, task, f"e{n}") for n in range(2)]
    handed(bank, task, commit, messages)
    assert states(engine) == {"e0": "completed", "e1": "completed"}
    assert Timed.seen == [("began", "e0"), ("began", "e1")]


def test_a_soft_limit_while_a_stored_result_is_read_brings_the_message_again(
    bank: Celery, deliveries: Deliveries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A redelivery after a process that died just behind its COMMIT: it owes result and chain."""
    assert deliveries.deliver(deposit, "a").state == "SUCCESS"

    def limited(store: Any, text: str) -> Any:
        raise SoftTimeLimitExceeded  # as the pool raises it, while the place of large results is asked

    with monkeypatch.context() as patch:
        patch.setattr("idempotency.attempt.runtime.objects.fetch", limited)
        outcome = deliveries.deliver(deposit, "a")
    assert (outcome.state, getattr(outcome.value, "requeue", None)) == ("REJECTED", True), outcome


@EACH_WAY
@pytest.mark.parametrize(("max_attempts", "state"), [(5, "released"), (1, "failed")])
def test_an_error_with_an_attribute_exceptions_is_told_like_others(
    bank: Celery, engine: Engine, deliveries: Deliveries, commit: str, max_attempts: int, state: str
) -> None:
    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)
        if account == "e0":
            raise SomeRows("2 rows of 3")

    task = make_task(bank, body, key="{account}", max_attempts=max_attempts, **options(commit))
    if commit == "none":
        told: Any = deliveries.deliver(task, "e0").value
    else:
        traced = run(bank, task, *many(bank, task, 3))
        told = getattr(traced[0][1].exception, "exc", traced[0][1].exception)
    assert states(engine)["e0"] == state
    assert type(told).__name__ == ("Retry" if max_attempts > 1 else "SomeRows")
