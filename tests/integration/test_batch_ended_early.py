"""A batch that ends early, or waits for long: what has not begun is given back, is not counted, and does not fail."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from celery import Celery, Task, _state
from celery.concurrency.gevent import TaskPool as Greenlets
from celery.concurrency.thread import TaskPool as Threads
from sqlalchemy import Engine, text

from idempotency import IdempotentTask, OperationBusy
from idempotency.attempt.batch import BatchAnswer
from idempotency.attempt.giving_back import give_back
from idempotency.attempt.policy import Policy
from idempotency.attempt.runtime import Runtime
from idempotency.upkeep import maintenance
from idempotency.wire.delivery import Delivery
from idempotency.wire.headers import TENANT_HEADER
from idempotency.wire.keys import OperationId, fingerprint
from idempotency.worker import batch, waiting
from idempotency.worker.batching import _Job
from tests.support import batched, crashing
from tests.support import operations as op
from tests.support.batches import OTHER, TRANSACTIONS, Request, many, message, put, run, states
from tests.support.processes import Processes, eventually
from tests.support.tasks import make_task

app = batched.app
ROWS = text("SELECT key, status, attempts FROM idempotency.records ORDER BY key")


@app.task(
    base=IdempotentTask, name="remote.post", bind=True, key="{account}", batch=10, batch_wait=1.0, batch_commit="each"
)
def post(self: IdempotentTask, account: str, how: str = "") -> Any:
    return batched.post(self, account, how)


def test_an_exit_that_comes_while_claims_are_given_back_leaves_none(
    bank: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)
        waiting.note_shutdown()  # told to stop, warm

    def interrupted(runtime: Runtime, given: Sequence[tuple[Delivery, BatchAnswer]], policy: Policy) -> None:
        calls.append(len(given))
        if len(calls) == 1:
            raise SystemExit(0)  # as the handler of SIGTERM raises it
        give_back(runtime, given, policy)

    monkeypatch.setattr(batch, "give_back", interrupted)
    task = make_task(bank, body, key="{account}", batch=10, max_attempts=1, batch_commit="each")
    try:
        with pytest.raises(SystemExit):
            run(bank, task, *many(bank, task, 4))
    finally:
        waiting.note_start()
    assert states(engine) == {"e0": "completed"} | dict.fromkeys(("e1", "e2", "e3"), "released")


@contextmanager
def recovering(bank: Celery) -> Iterator[None]:
    """As a relay does, again and again."""
    stop = threading.Event()

    def recover() -> None:
        while not stop.wait(0.1):
            maintenance.recover(bank)

    thread = threading.Thread(target=recover)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(("commit", "max_attempts"), [("each", 1), ("each", 5), ("together", 1)])
def test_what_waits_longer_than_max_run_is_not_counted(
    bank: Celery, engine: Engine, configure: Any, commit: str, max_attempts: int
) -> None:
    configure(lease=1.0, heartbeat=0.25, max_run=2.0, retention_http=3600.0)
    entered: list[str] = []

    def body(self: IdempotentTask, account: str) -> None:
        entered.append(account)
        put(self, account)
        time.sleep(1.3)  # each of them is far below max_run

    task = make_task(bank, body, key="{account}", batch=10, max_attempts=max_attempts, batch_commit=commit)
    messages = many(bank, task, 5)
    with recovering(bank):
        run(bank, task, *messages)
    with engine.connect() as connection:
        found = connection.execute(ROWS).all()
        assert connection.execute(TRANSACTIONS).scalar_one() >= 4  # also together: the third begins after max_run
    assert [(row.status, row.attempts) for row in found] == [("completed", 1)] * 5
    assert entered == ["e0", "e1", "e2", "e3", "e4"]


def test_what_waits_for_the_batches_of_other_tenants_is_not_counted(
    bank: Celery, engine: Engine, configure: Any
) -> None:
    """Tenant a has one message, and those of b run alone: both are claimed before the others run."""
    configure(lease=1.0, heartbeat=0.25, max_run=2.0, retention_http=3600.0)

    def body(self: IdempotentTask, account: str) -> None:
        if self.tenant == "b":
            self.step("alone", lambda session: None)
        elif self.tenant > "b":
            time.sleep(0.7)
        put(self, account)

    task = make_task(bank, body, key="{account}", batch=20, max_attempts=1)
    tenants = "abbccddee"
    messages = many(bank, task, len(tenants))
    for tenant, (_, request, *_) in zip(tenants, messages, strict=True):
        request[TENANT_HEADER] = tenant
    with recovering(bank):
        run(bank, task, *messages)
    with engine.connect() as connection:
        found = connection.execute(ROWS).all()
    assert [(row.status, row.attempts) for row in found] == [("completed", 1)] * len(tenants)


def test_what_waits_behind_one_that_cannot_be_claimed_is_not_counted(
    bank: Celery, engine: Engine, configure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(lease=1.0, heartbeat=0.25, max_run=2.0, retention_http=3600.0)
    monkeypatch.setattr(waiting, "PATIENCE", 5.0)

    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)

    task = make_task(bank, body, key="{account}", batch=10, max_attempts=1, batch_commit="each")
    messages = many(bank, task, 3)
    with engine.connect() as connection:
        op.due(connection, OperationId("default", task.name, "e0"), fingerprint=fingerprint({"account": "e0"}))
        connection.exec_driver_sql("""
            CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not this one'; END $$;
            CREATE TRIGGER refuse BEFORE UPDATE ON idempotency.records FOR EACH ROW
            WHEN (NEW.key = 'e0' AND NEW.status = 'started') EXECUTE FUNCTION refuse()
        """)
    with recovering(bank):
        run(bank, task, *messages)
    with engine.connect() as connection:
        found = connection.execute(ROWS).all()
    assert [tuple(row) for row in found] == [("e0", "released", 1), ("e1", "completed", 1), ("e2", "completed", 1)]


def test_a_key_that_another_transaction_inserts_holds_the_others_up_for_a_lease(
    bank: Celery, engine: Engine, configure: Any
) -> None:
    """As docs/batches.md says: after that, each is claimed by itself. The other transaction stays open for four."""
    configure(lease=1.0, heartbeat=0.25, max_run=600.0)
    entered: dict[str, float] = {}

    def body(self: IdempotentTask, account: str) -> None:
        entered.setdefault(account, time.monotonic())
        put(self, account)

    task = make_task(bank, body, key="{account}", batch=10, batch_commit="each")
    with psycopg.connect(engine.url.set(drivername="postgresql").render_as_string(hide_password=False)) as other:
        other.execute(OTHER, (task.name,))  # of e1
        timer = threading.Timer(4.0, other.rollback)
        timer.start()
        began = time.monotonic()
        run(bank, task, *many(bank, task, 3))
        timer.join()
    assert states(engine) == dict.fromkeys(("e0", "e1", "e2"), "completed")
    assert 1.0 <= entered["e0"] - began < 4.0 <= entered["e1"] - began


def test_a_body_that_calls_what_waits_behind_it_is_told_that_it_is_busy(bank: Celery, engine: Engine) -> None:
    def body(self: IdempotentTask, account: str) -> None:
        if account == "e0":
            with pytest.raises(OperationBusy):
                task("e1")
        put(self, account)

    task = make_task(bank, body, key="{account}", batch=10, max_attempts=1, batch_commit="each")
    run(bank, task, *many(bank, task, 2))
    assert states(engine) == {"e0": "completed", "e1": "completed"}


@pytest.mark.parametrize("kind", [Threads, Greenlets])
def test_a_job_that_could_not_be_prepared_brings_its_messages_again(
    bank: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)

    task = make_task(bank, body, key="{account}", batch=10, batch_commit="each")
    bank.finalize()
    requests = [Request(message(bank, task, f"e{n}")) for n in range(3)]

    def broken(*_: Any) -> Any:
        raise RuntimeError("cannot be prepared")

    monkeypatch.setattr(Policy, "of", broken)
    monkeypatch.setattr(_state, "default_app", bank)  # as in a worker, for every thread
    pool = kind(2, app=bank)
    pool.start()
    _Job(task, requests).execute_using_pool(pool)
    pool.stop()
    eventually(lambda: [each.answers for each in requests] == [["requeued"]] * 3, timeout=10)


@pytest.mark.parametrize("how", ["signal", "remote"])
def test_a_worker_that_is_told_to_stop_begins_no_further_message(
    bank: Celery, engine: Engine, processes: Processes, environment: dict[str, str], how: str
) -> None:
    crashing.plan(environment["CRASH_DIRECTORY"], "working", crashing.HOLD)
    held = Path(environment["CRASH_DIRECTORY"]) / "working.held"
    for number in range(6):
        post.delay(f"e{number}", "works" if number == 0 else "")
    worker = processes.worker("--concurrency", "1", app=__name__)
    eventually(held.exists, what="the first body runs")
    if how == "remote":
        bank.control.shutdown()
        eventually(lambda: "shutdown from remote" in worker.log, what="told to stop")
    else:
        os.kill(worker.process.pid, signal.SIGTERM)
        eventually(lambda: "Warm shutdown" in worker.log, what="told to stop")
    held.with_name("working.go").touch()
    assert worker.process.wait(60) == 0
    assert states(engine) == {"e0": "completed"} | {f"e{n}": "released" for n in range(1, 6)}


@pytest.mark.parametrize(("stops", "tried"), [(False, 3), (True, 1)])
def test_a_worker_that_is_told_to_stop_tries_one_broker_that_is_away_once(
    bank: Celery, engine: Engine, stops: bool, tried: int
) -> None:
    """Each of them has ended and owes a callback; what is not sent now is sent when its message has come again."""
    sent: list[Any] = []

    class Away(Task):
        def apply_async(self, args: Any = None, kwargs: Any = None, **_: Any) -> Any:
            sent.append(args)
            raise ConnectionError("the broker is away")

    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)
        if stops:
            waiting.note_shutdown()

    def follow(result: Any) -> None: ...

    callback = bank.task(name="away", base=Away)(follow).s()
    task = make_task(bank, body, key="{account}", batch=10)
    bodies = [json.dumps([[f"e{n}"], {}, {"callbacks": [callback]}]) for n in range(3)]
    try:
        results = run(bank, task, *(message(bank, task, body=each) for each in bodies))
    finally:
        waiting.note_start()
    assert states(engine) == dict.fromkeys(("e0", "e1", "e2"), "completed")
    assert len(sent) == tried
    assert results.count(None) == 3 - tried
