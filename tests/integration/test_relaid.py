"""What a second reader found in the re-laid house: operations without a message, installing, late answers, deploys."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from idempotency.application import runtime_of
from idempotency.attempt.claim import claim
from idempotency.attempt.endings import Ended, Finished, Release
from idempotency.attempt.policy import Policy
from idempotency.attempt.run import run
from idempotency.attempt.runtime import Runtime
from idempotency.errors import PermanentError, ReplayRefused
from idempotency.operate.change import read
from idempotency.operate.release import release
from idempotency.operate.replay import replay
from idempotency.relay.relay import OWN_ERRORS, Relay
from idempotency.relay.resend import resend_lost
from idempotency.store import outbox, schema
from idempotency.store.answers import Busy, Claimed, Completed
from idempotency.wire.delivery import Delivery
from idempotency.wire.keys import OperationId, fingerprint
from idempotency.wire.message import Message
from tests.support import bank as b
from tests.support import operations as op
from tests.support.deliveries import Deliveries, deliver_row
from tests.support.operators import ANN
from tests.support.processes import Processes, eventually
from tests.support.relaying import make_due
from tests.support.tasks import make_task

POLICY = Policy(max_attempts=3, retention_completed=3600, retention_failed=3600, provider_key_retention=3600)


def request(key: str, task: str = "http.pay", **arguments: Any) -> Delivery:
    """As in test_without_celery: a delivery that came without a message."""
    return Delivery(OperationId("default", task, key), fingerprint(arguments), arguments)


def relayed(relay: Relay, connection: Connection) -> None:
    for _ in range(OWN_ERRORS):
        make_due(connection)
        relay.run_once()


# ---------------------------------------------------------------- without Celery


def test_a_crashed_attempt_without_a_message_is_released_and_nothing_else(bank: Celery, connection: Connection) -> None:
    """Its process dies, the relay recovers it: there is nothing to deliver, and its caller asks again."""
    runtime, asked = runtime_of(bank), request("c")
    for number in range(3):
        assert isinstance(claim(runtime, asked, f"a holder that is gone {number}"), Claimed)
        op.recover_now(bank, connection)
    assert isinstance(claim(runtime, asked, "stuck"), Claimed)
    release(bank, read(connection, asked.id), ANN)
    assert (op.status(connection, asked.id), op.outbox(connection, asked.id)) == ("released", [])
    policy = replace(POLICY, max_attempts=9)
    assert isinstance(run(runtime, asked, policy, lambda attempt: "paid"), Finished)
    assert isinstance(run(runtime, asked, policy, lambda attempt: "paid"), Completed)
    assert op.dead_letters(connection, asked.id) == []


def test_a_replay_without_a_message_reopens_the_operation_for_its_caller(bank: Celery, connection: Connection) -> None:
    runtime, asked = runtime_of(bank), request("d")

    def refuse(attempt: Any) -> None:
        raise PermanentError("declined", "card_declined")

    assert isinstance(run(runtime, asked, POLICY, refuse), Ended)
    (letter,) = op.dead_letters(connection, asked.id)
    replay(bank, letter.id, ANN)
    assert (op.status(connection, asked.id), op.outbox(connection, asked.id)) == ("released", [])
    assert isinstance(run(runtime, asked, POLICY, lambda attempt: "paid"), Finished)
    assert [each.status for each in op.dead_letters(connection, asked.id)] == ["replayed"]


def test_a_replay_without_a_message_is_refused_once_the_record_is_gone(bank: Celery, connection: Connection) -> None:
    runtime, asked = runtime_of(bank), request("g")

    def refuse(attempt: Any) -> None:
        raise PermanentError("declined", "card_declined")

    assert isinstance(run(runtime, asked, POLICY, refuse), Ended)
    (letter,) = op.dead_letters(connection, asked.id)
    connection.execute(text("DELETE FROM idempotency.records"))
    with pytest.raises(ReplayRefused, match="was not asked for by a message"):
        replay(bank, letter.id, ANN)
    assert [each.status for each in op.dead_letters(connection, asked.id)] == ["open"]


def test_a_message_that_meets_an_attempt_without_one_is_its_next_delivery(
    bank: Celery, relays: Callable[..., Relay], deliveries: Deliveries, connection: Connection
) -> None:
    """The same operation, asked for by a message and by an HTTP call at once: the message is counted and acknowledged."""
    runtime = runtime_of(bank)
    with Session(runtime.engine) as session, session.begin():
        b.deposit.enqueue(session, account="m")
    id = OperationId("default", b.deposit.name, "m")
    seen = []

    def body(attempt: Any) -> None:
        relay = relays()
        relay.run_once()  # publishes the accepted row
        seen.append(deliver_row(deliveries, b.deposit, op.outbox(connection, id)[-1]).state)
        # what the resend pass of a relay does with a row whose operation is started
        connection.execute(
            text("UPDATE idempotency.outbox SET published_at = published_at - interval '1 hour' WHERE key = 'm'")
        )
        with bank.connection_for_write() as broker:
            broker.default_channel.queue_purge(bank.conf.task_default_queue)
        resend_lost(bank, publisher=relay.publisher)
        raise ValueError("try again")

    outcome = run(runtime, Delivery(id, fingerprint({"account": "m"}), {"account": "m"}), POLICY, body)
    assert isinstance(outcome, Release)
    assert seen == ["IGNORED"]
    assert op.status(connection, id) == "released"
    (row,) = [row for row in op.outbox(connection, id) if row.origin == "retry"]
    assert row.message == op.record(connection, id).message != ""
    make_due(connection)
    op.age(connection, id, available_at=-1)
    relay = relays()
    assert relay.run_once().published == 1
    assert deliver_row(deliveries, b.deposit, row).state == "SUCCESS"


def test_a_workers_retry_is_delivered_though_the_first_attempt_had_no_message(
    bank: Celery, relays: Callable[..., Relay], deliveries: Deliveries, connection: Connection, engine: Engine
) -> None:
    """The record keeps the first message that has come, and a release sends it."""

    def body(self: Any, name: str) -> None:
        raise ValueError("not yet")

    task = make_task(bank, body, key="{name}")
    id = OperationId("default", task.name, "w")

    def fails(attempt: Any) -> None:
        raise ValueError("not yet")

    asked = Delivery(id, fingerprint({"name": "w"}), {"name": "w"})
    assert isinstance(run(runtime_of(bank), asked, POLICY, fails), Release)
    op.make_due(engine, "w")
    with Session(engine) as session, session.begin():
        task.enqueue(session, "w")
    relay = relays()
    relay.run_once()
    assert deliver_row(deliveries, task, op.outbox(connection, id)[-1]).state == "RETRY"  # acknowledged
    next_delivery = op.outbox(connection, id)[-1]
    assert (next_delivery.origin, next_delivery.message) == ("retry", op.record(connection, id).message)
    assert Message.from_text(next_delivery.message).headers["task"] == task.name


# ---------------------------------------------------------------- a deploy


def test_a_worker_that_cannot_count_does_not_start(processes: Processes) -> None:
    worker = processes.start(PROMETHEUS_MULTIPROC_DIR="/proc/no/such/place")
    eventually(lambda: " ready." in worker.log or worker.process.poll() is not None)
    assert worker.process.poll() is not None, worker.log[-2000:]
    assert "/proc/no" in worker.log


def test_a_migration_that_deadlocks_with_a_transaction_is_tried_again(empty_database: str) -> None:
    """0011 takes exclusive locks on six tables in one transaction."""
    engine = create_engine(empty_database)
    schema.migrate(engine, "0010")
    with engine.connect() as application:
        # an application that is still accepting work: a row in the outbox, and then a look at a record
        application.execute(text("LOCK TABLE idempotency.outbox IN ROW EXCLUSIVE MODE"))
        migrated = op.in_background(lambda: schema.migrate(engine))
        with create_engine(empty_database).connect() as watching:
            eventually(
                lambda: watching.execute(
                    text(
                        "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'idempotency.outbox'::regclass"
                    )
                ).scalar_one()
            )
        with contextlib.suppress(OperationalError):  # one of the two is chosen to fail
            application.execute(text("SELECT operation FROM idempotency.records"))
        application.rollback()
        assert migrated.result(60) == schema._known()[0]
    engine.dispose()


# ---------------------------------------------------------------- imports


def test_the_modules_for_applications_are_there_after_importing_the_package() -> None:
    script = "import idempotency\nfor n in ('queues', 'providers', 'errors'): print(n, hasattr(idempotency, n))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["queues", "True", "providers", "True", "errors", "True"]


EAGER = """
import sys, threading
import psycopg
from celery import Celery
url = sys.argv[1]
opened = threading.Event()

def other():  # a thread with its own driver connection, as Django's are, in the middle of a transaction
    global held
    held = psycopg.connect(url.replace("postgresql+psycopg", "postgresql"))
    held.execute("SELECT 1")
    opened.set()

thread = threading.Thread(target=other); thread.start(); opened.wait(); thread.join()

from idempotency import IdempotentTask
app = Celery("a", broker="memory://")
app.conf.update(idempotency_database_url=url)

@app.task(base=IdempotentTask, bind=True, key="{name}")
def hello(self, name):
    return name

for number in range(3):  # for as long as that connection lives
    try:
        print(hello.apply((f"n{number}",)).get())
    except Exception as error:
        print(type(error).__name__)
"""


def test_an_eager_call_passes_beside_a_connection_opened_without_sqlalchemy(database: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EAGER, database], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.split() == ["n0", "n1", "n2"], done.stderr[-2000:]


HOOK = """
import sys
from celery import Celery, signals
from sqlalchemy import create_engine, text
from idempotency import IdempotentTask
url = sys.argv[1]
app = Celery("a", broker="memory://")
app.conf.update(idempotency_database_url=url)

class Base(IdempotentTask):
    abstract = True

    @classmethod
    def on_bound(cls, app):  # Celery's hook for applications; its own does nothing, so nobody calls it
        app.conf.seen = True

@app.task(base=Base, bind=True, key="{name}")
def hello(self, name):
    return name

app.finalize()
ours = [receiver for signal in (signals.worker_init, signals.celeryd_init, signals.beat_init, signals.worker_shutting_down)
        for _, receiver in signal.receivers or ()]
print(len(ours))
with create_engine(url).connect() as connection:
    connection.execute(text("SELECT 1"))
    try:
        print(hello.apply(("a",)).get())
    except Exception as error:
        print(type(error).__name__)
"""


def test_a_base_class_with_its_own_on_bound_is_guarded_and_checked(database: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOOK, database], capture_output=True, text=True, check=False, timeout=60
    )
    receivers, answer = done.stdout.split()
    assert (int(receivers) >= 8, answer) == (True, "CallRefused"), done.stdout + done.stderr[-2000:]


UNSAFE = """
from celery import Celery
import os
from idempotency import IdempotentTask

app = Celery("unsafe", broker=os.environ["BROKER_URL"])
app.conf.update(
    idempotency_database_url=os.environ["DATABASE_URL"],
    task_default_queue=os.environ["BANK_QUEUE"],
    task_acks_late=False,
    accept_content=["json"],
)

class Plain(IdempotentTask):
    abstract = True

class Base(IdempotentTask):
    abstract = True

    @classmethod
    def on_bound(cls, app):
        pass

@app.task(base=Base if os.environ["HOOK"] == "1" else Plain, bind=True, key="{name}")
def hello(self, name):
    return name
"""


@pytest.mark.parametrize("hook", ["0", "1"], ids=["without the hook", "with the hook"])
def test_a_worker_with_such_a_base_class_refuses_an_unsafe_set_up(
    processes: Processes, tmp_path: Path, hook: str
) -> None:
    (tmp_path / "unsafe_app.py").write_text(UNSAFE)
    path = f"{tmp_path}:{processes.environment['PYTHONPATH']}"
    worker = processes.start("--pool", "solo", app="unsafe_app", PYTHONPATH=path, HOOK=hook)
    eventually(lambda: " ready." in worker.log or worker.process.poll() is not None)
    assert " ready." not in worker.log, worker.log[-2000:]
    assert "refused to start" in worker.log, worker.log[-2000:]


# ---------------------------------------------------------------- pauses


@pytest.mark.parametrize("answer", ["refused", "confirmed"])
def test_a_late_answer_says_nothing_about_a_row_that_was_replayed_since(
    bank: Celery, connection: Connection, answer: str
) -> None:
    b.enqueue_deposit()
    connection.execute(text("UPDATE idempotency.outbox SET attempts = 4"))
    (sent,) = outbox.reserve_rows(connection, batch=10, seconds=30)  # a relay that is paused from here on
    make_due(connection)
    (again,) = outbox.reserve_rows(connection, batch=10, seconds=30)
    outbox.give_up(connection, again, "too long", service="bank")  # another one gives up
    (letter,) = op.dead_letters(connection)
    replay(bank, letter.id, ANN)  # a person has repaired the cause
    (row,) = op.outbox(connection)
    assert (row.status, row.origin) == ("pending", "replay")
    if answer == "refused":  # the paused relay goes on
        outbox.give_up(connection, sent, "too long", service="bank")
    else:
        outbox.mark_published(connection, [sent])
    (row,) = op.outbox(connection)
    assert (row.status, row.origin) == ("pending", "replay")
    assert [each.status for each in op.dead_letters(connection)] == ["replayed"]


def test_a_caller_without_a_message_is_answered_by_postgres_and_not_by_a_hint(
    bank: Celery, connection: Connection
) -> None:
    here, there, asked = runtime_of(bank), Runtime(runtime_of(bank).settings), request("h")
    told: list[Any] = []

    def body(attempt: Any) -> None:
        told.extend(run(there, asked, POLICY, body) for _ in range(2))
        raise ValueError("again")

    try:
        released = run(here, asked, POLICY, body)
        assert isinstance(released, Release)
        assert told == [Busy(), Busy()]
        time.sleep(released.delay + 0.1)
        assert op.seconds_from_now(connection, asked.id, "available_at") < 0
        assert isinstance(run(there, asked, POLICY, lambda attempt: "paid"), Finished)
    finally:
        there.close()


def test_the_hint_of_an_attempt_under_another_fingerprint_goes_with_it(bank: Celery, connection: Connection) -> None:
    """After a deploy that renamed a parameter."""
    runtime, there = runtime_of(bank), Runtime(runtime_of(bank).settings)
    id = OperationId("default", "http.pay", "x")
    old, new = fingerprint({"account": "x"}), fingerprint({"account_id": "x"})
    op.due(connection, id, fingerprint=old)
    asked = Delivery(id, new, {"account_id": "x"}, message=op.MESSAGE, also=[old])

    def body(attempt: Any) -> str:
        runtime.heartbeat.run_once()
        assert run(there, asked, POLICY, body) == Busy()  # a duplicate, counted
        return "paid"

    try:
        assert isinstance(run(runtime, asked, POLICY, body), Finished)
        runtime.hints.flush()  # what the heartbeat and the next claim of this process do
        assert op.status(connection, id) == "completed"
        assert isinstance(run(runtime, asked, POLICY, body), Completed)
        assert isinstance(run(there, asked, POLICY, body), Completed)
    finally:
        there.close()


COUNTERS = """
import os, sys
os.environ["PROMETHEUS_MULTIPROC_DIR"] = sys.argv[1]
from idempotency.observe import metrics
inside_the_way = os.path.join(sys.argv[1], f"counter_{os.getpid()}.db")
os.mkdir(inside_the_way)  # stands for a full disk, or too many open files, at the first delivery
for number in range(3):
    try:
        with metrics.phase("task", "claim"):
            print("counted")
    except Exception as error:
        print(type(error).__name__)
    if number == 0:
        os.rmdir(inside_the_way)  # over
"""


def test_counters_that_could_not_be_made_once_are_made_at_the_next_try(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", COUNTERS, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["IsADirectoryError", "counted", "counted"], done.stdout + done.stderr[-2000:]
