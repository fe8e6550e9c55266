"""Messages that Celery would drop, lose or crash on: each becomes one dead letter with its reason; the worker survives."""

from __future__ import annotations

import base64
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from kombu.message import Message as BrokerMessage
from sqlalchemy import Connection, Engine, create_engine, make_url, text
from sqlalchemy.exc import DataError
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

import services
from idempotency import IdempotentTask
from idempotency.application import close_runtime, runtime_of
from idempotency.errors import ReplayRefused
from idempotency.letters.consumer import DeadLetterConsumer, consume_once
from idempotency.letters.guard import Guard
from idempotency.observe import crash_points
from idempotency.relay.relay import Relay
from idempotency.store import dead_letters as letters
from idempotency.store import ends
from idempotency.wire.headers import MARKER_HEADER
from idempotency.wire.keys import OperationId
from idempotency.wire.message import Message
from tests.support import bank as b
from tests.support import operations as op
from tests.support.bank import fingerprint_of
from tests.support.dead_messages import die, headers, publish, reject
from tests.support.deliveries import Deliveries
from tests.support.operations import at_once, record
from tests.support.processes import Processes, Worker, eventually
from tests.support.proxy import Proxy
from tests.support.queues import depth
from tests.support.refused_messages import PAST, REFUSED, SECRET
from tests.support.tasks import transactional

DEPOSIT = b.deposit.name
ID, ID_AFTER = (OperationId("default", DEPOSIT, key) for key in ("a1", "after"))


def test_what_celery_would_lose_is_one_dead_letter_and_the_worker_lives(
    bank: Celery, worker: Worker, connection: Connection, entries: Callable[[str], int]
) -> None:

    for body, options, _ in REFUSED.values():
        publish(bank, body, **options)
    b.deposit.delay("after")
    eventually(lambda: entries("after") == 1, what="the worker goes on")
    consumer = DeadLetterConsumer(bank)
    eventually(lambda: consumer.run_once() or len(op.dead_letters(connection)) >= len(REFUSED), timeout=20)
    eventually(lambda: consumer.run_once() == 0)
    consumer.close()

    letters = op.dead_letters(connection)
    assert [letter.reason for letter in letters] == [reason for _, _, reason in REFUSED.values()]
    for letter, (body, _, _) in zip(letters, REFUSED.values(), strict=True):
        assert (letter.source, letter.status, letter.consumer_service) == ("broker", "open", "bank")
        assert letter.queue == bank.conf.task_default_queue
        assert json.loads(letter.last_error)["code"] == letter.reason
        kept = Message.from_text(letter.payload).body
        if json.loads(letter.headers).get("idempotency-body") == "base64":
            assert base64.b64decode(kept) == body
        else:
            assert kept == (body if isinstance(body, str) else body.decode())
    assert worker.process.poll() is None
    assert SECRET not in worker.log
    # of all of these only the expired one names an operation
    ended = connection.execute(text("SELECT key, status FROM idempotency.records ORDER BY key")).all()
    assert ended == [(SECRET, "failed"), ("after", "completed")]


# ---------------------------------------------------------------- the dead-letter queue


@pytest.mark.few(1)
@pytest.mark.parametrize("moment", ["in the transaction", "before the answer to COMMIT", "after the commit"])
def test_a_postgres_that_dies_during_a_pass_loses_and_doubles_nothing(
    bank: Celery,
    consumer: DeadLetterConsumer,
    servers: services.Services,
    database: str,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    """The message is acknowledged only after the commit, and its second coming finds what was committed."""
    if "postgres" not in servers.servers:
        pytest.skip("a Postgres that was given is not ours to kill")
    address = make_url(database)
    proxy = Proxy("127.0.0.1", address.port or 0)
    keys = ("a1", "a2", "a3")
    consumer.run_once()  # declares the queue
    for number, key in enumerate(keys, start=1):
        reject(bank, json.dumps([[key], {}, {}]), dead=number)
    died = threading.Event()

    def kill_at_the_second(count: Iterator[int]) -> None:
        if next(count) == 2:
            servers.postgres.kill()
            died.set()

    counted = itertools.count(1)
    if moment == "in the transaction":
        task = bank.tasks[DEPOSIT]
        on_failed = task.on_failed

        def dying(*args: Any) -> None:
            kill_at_the_second(counted)
            on_failed(*args)

        monkeypatch.setattr(task, "on_failed", dying)
    elif moment == "after the commit":
        crash_points.install(lambda point: kill_at_the_second(counted) if point == "dead_letter.stored" else None)
    else:
        close_runtime(bank)
        bank.conf.idempotency_database_url = address.set(port=proxy.port).render_as_string(hide_password=False)
        proxy.cut_reply_to(b"COMMIT", skip=1)

    stop = threading.Event()
    thread = threading.Thread(target=consumer.run, args=(stop,), daemon=True)
    thread.start()
    try:
        eventually(lambda: died.is_set() or proxy.cuts, what="the second message")
        if died.is_set():
            servers.postgres.start()
        engine = create_engine(database, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        with bank.connection_for_write() as broker, engine.connect() as connection:
            dead = f"{bank.conf.task_default_queue}-dead"
            eventually(
                lambda: connection.execute(text("SELECT count(*) FROM idempotency.dead_letters")).scalar_one() == 3
            )
            stop.set()
            thread.join(30)
            consumer.close()  # an unacknowledged message returns to its queue
            eventually(lambda: consumer.run_once() == 0 and _consumed(broker, dead))
            for table, column in (("idempotency.dead_letters", "key"), ("failures", "account")):
                found = connection.execute(text(f"SELECT {column} FROM {table} ORDER BY 1")).scalars().all()
                assert found == [*keys], table
            states = connection.execute(text("SELECT key, status FROM idempotency.records ORDER BY 1")).all()
            assert states == [(key, "failed") for key in keys]
    finally:
        stop.set()
        thread.join(30)
        crash_points.install(None)
        if died.is_set():
            servers.postgres.start()
        proxy.close()


def _consumed(broker: Any, queue: str) -> bool:
    with broker.channel() as channel:
        return bool(channel.queue_declare(queue, passive=True).message_count == 0)


def test_a_message_without_a_record_fails_with_on_failed_and_one_letter(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    die(bank, consumer, headers=headers(**{"trace-id": "t"}))
    assert consumer.run_once() == 1
    row = record(connection, ID)
    assert row is not None
    assert (row.status, row.attempts, row.response_code) == ("failed", 0, 422)
    (letter,) = op.dead_letters(connection)
    assert (letter.reason, letter.generation, letter.fingerprint) == ("rejected", 1, row.fingerprint)
    assert (letter.tenant, letter.task, letter.key) == (ID.tenant, ID.task, ID.key)
    assert json.loads(letter.headers)["trace-id"] == "t"
    assert connection.execute(text("SELECT account, code FROM failures")).all() == [("a1", "rejected")]
    # a late original finds the end; a replay runs it
    assert Deliveries(bank).deliver(b.deposit, "a1").state == "FAILURE"
    with runtime_of(bank).engine.begin() as transaction:
        letters.replay(transaction, letter.id)
    (row,) = op.outbox(connection, ID)
    message = Message.from_text(row.message)
    assert message.destination(bank)[1] == bank.conf.task_default_queue
    assert Deliveries(bank).deliver(b.deposit, "a1", origin="replay").state == "SUCCESS"


def test_an_expired_message_ends_its_operation_and_replays_without_expiry(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    die(bank, consumer, headers=headers(expires=PAST))
    consumer.run_once()
    (letter,) = op.dead_letters(connection)
    assert (letter.reason, letter.key) == ("expired", "a1")
    assert json.loads(letter.headers)["expires"] == PAST
    with runtime_of(bank).engine.begin() as transaction:
        letters.replay(transaction, letter.id)
    (row,) = op.outbox(connection, ID)
    assert "expires" not in Message.from_text(row.message).headers


@b.app.task(name="tests.tick")
def tick() -> None:
    """A plain task, as beat sends it: the next tick does the work of this one."""


def expire(app: Celery, consumer: DeadLetterConsumer, send: Callable[[], object]) -> None:
    """Send a message that is not taken in time; it is in the dead-letter queue when this returns."""
    consumer.run_once()  # declares the queue
    send()
    with app.connection_for_write() as broker:
        name = f"{app.conf.task_default_queue}-dead"
        eventually(lambda: broker.default_channel.queue_declare(name, passive=True).message_count)


def test_a_plain_task_that_expired_in_its_queue_leaves_no_letter(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    expire(bank, consumer, lambda: tick.apply_async(expires=0.1))
    assert consumer.run_once() == 1
    assert op.dead_letters(connection) == []
    assert consumer.run_once() == 0


def test_an_operation_that_the_broker_let_expire_leaves_its_letter(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    expire(bank, consumer, lambda: publish(bank, json.dumps([["a1"], {}, {}]), expiration=0.1))
    consumer.run_once()
    assert [(letter.reason, letter.key) for letter in op.dead_letters(connection)] == [("expired", "a1")]


def test_a_plain_task_that_was_rejected_leaves_its_letter(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    die(bank, consumer, json.dumps([[], {}, {}]), headers=headers(task=tick.name))
    consumer.run_once()
    assert [(letter.reason, letter.header_task) for letter in op.dead_letters(connection)] == [("rejected", tick.name)]


@pytest.mark.parametrize("state", [op.early, op.due])
def test_a_released_operation_ends_when_its_only_delivery_is_dead(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, state: Callable[..., Any]
) -> None:
    held = state(connection, ID, fingerprint=fingerprint_of())
    die(bank, consumer, headers=headers(**op.sent(connection, ID)))
    assert consumer.run_once() == 1
    row = record(connection, ID)
    assert row is not None
    assert (row.status, row.attempts) == ("failed", 1)
    assert row.fence > held.fence
    assert [letter.attempts for letter in op.dead_letters(connection)] == [1]
    with pytest.raises(DataError):  # the former holder's finish matches nothing
        ends.complete(connection, held, "1", retention=60.0, lease=60.0)


@pytest.mark.parametrize(("state", "duplicates"), [(op.started, 1), (op.completed, 0), (op.failed, 0)])
def test_a_duplicate_of_what_is_held_or_has_ended_leaves_no_letter(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, state: Callable[..., Any], duplicates: int
) -> None:
    state(connection, ID, fingerprint=fingerprint_of())
    before = record(connection, ID)
    die(bank, consumer)
    assert consumer.run_once() == 1
    assert op.dead_letters(connection) == []
    after = record(connection, ID)
    assert before is not None
    assert after is not None
    assert (after.status, after.fence, after.duplicates) == (before.status, before.fence, duplicates)
    assert connection.execute(text("SELECT count(*) FROM failures")).scalar_one() == 0


def test_another_request_under_a_used_key_is_kept_and_touches_no_record(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    op.due(connection, ID, fingerprint="v1:another")
    before = record(connection, ID)
    die(bank, consumer)
    consumer.run_once()
    assert [letter.reason for letter in op.dead_letters(connection)] == ["fingerprint_mismatch"]
    assert record(connection, ID) == before


def test_a_dead_letter_handed_out_again_makes_no_second_row(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    for body, sent in [(json.dumps([["a1"], {}, {}]), headers()), ("[]", headers())]:
        die(bank, consumer, body, headers=sent)
        at_point = crash_points.install
        at_point(lambda name: _raise(KeyboardInterrupt) if name == "dead_letter.stored" else None)
        try:
            with pytest.raises(KeyboardInterrupt):
                consumer.run_once()
        finally:
            at_point(None)
        consumer.close()
        before = op.dead_letters(connection)
        assert eventually(consumer.run_once) == 1
        assert op.dead_letters(connection) == before
    assert [letter.reason for letter in op.dead_letters(connection)] == ["rejected", "envelope"]
    assert connection.execute(text("SELECT count(*) FROM failures")).scalar_one() == 1


def _raise(error: type[BaseException]) -> None:
    raise error


def test_what_the_broker_delivered_too_often_is_given_up(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    consumer.run_once()
    with bank.connection_for_write() as broker, Session(runtime_of(bank).engine) as session:
        b.deposit.enqueue(session, "a1")
        session.commit()
        relay = Relay(bank)
        relay.run_once()
        relay.close()
        channel = broker.channel()

        def returned() -> bool:
            message = channel.basic_get(bank.conf.task_default_queue, no_ack=False)
            if message is not None:
                channel.basic_reject(message.delivery_tag, requeue=True)
            return len(op.dead_letters(connection)) == 1

        eventually(lambda: returned() or (consumer.run_once(), None)[1])
    (letter,) = op.dead_letters(connection)
    (sent,) = op.outbox(connection)
    assert (letter.reason, letter.outbox_id, letter.message_id) == ("delivery_limit", sent.id, sent.message_id)
    row = record(connection, ID)
    assert row is not None
    assert row.status == "failed"


def test_several_consumers_at_once_store_each_message_once(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    consumer.run_once()
    for number in range(60):
        publish(bank, json.dumps([[f"a{number % 40}"], {}, {}]), queue=f"{bank.conf.task_default_queue}-dead")

    def consume(_: int) -> int:
        return consume_once(bank)

    assert sum(at_once(3, consume)) == 60
    stored = [letter.key for letter in op.dead_letters(connection)]
    assert sorted(stored) == sorted(f"a{number}" for number in range(40))
    assert connection.execute(text("SELECT count(*), count(DISTINCT account) FROM failures")).one() == (40, 40)


@b.app.task(base=IdempotentTask, bind=True, key="{account}", name="tests.broken_handler", on_failed=lambda *_: 1 / 0)
def broken_handler(self: IdempotentTask, account: str) -> None:
    """Its handler fails too."""


def test_a_broken_on_failed_keeps_no_message_for_ever(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    die(bank, consumer, headers=headers(task=broken_handler.name))
    assert consumer.run_once() == 1
    assert [letter.reason for letter in op.dead_letters(connection)] == ["on_failed_error"]
    row = record(connection, OperationId("default", broken_handler.name, "a1"))
    assert row is not None
    assert row.status == "failed"


def test_the_relay_stores_what_a_worker_rejects(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, environment: dict[str, str]
) -> None:
    die(bank, consumer, "[]", headers=headers())
    command = [sys.executable, "-m", "idempotency.cli", "relay", "-A", "tests.support.bank"]
    relay = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        eventually(lambda: len(op.dead_letters(connection)) == 1)
        # it alerts, too
        eventually(lambda: all(letter.alert_logged_at is not None for letter in op.dead_letters(connection)))
    finally:
        relay.terminate()
        _, log = relay.communicate(timeout=30)
    assert relay.returncode == 0
    assert "event=dead_letter" in log
    assert "event=alert service=bank reason=envelope" in log


# ---------------------------------------------------------------- replayed by the message alone


def test_a_letter_of_an_unknown_task_is_replayed_once_the_task_is_known(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    die(bank, consumer, headers=headers(task="tests.known_later"))
    consumer.run_once()
    (letter,) = op.dead_letters(connection)
    assert (letter.reason, letter.header_task, letter.task) == ("unknown_task", "tests.known_later", None)

    def replay() -> OperationId:
        with runtime_of(bank).engine.begin() as transaction:
            return letters.replay(transaction, letter.id, app=bank)

    with pytest.raises(ReplayRefused, match="unknown_task, and no task of this application can run it"):
        replay()

    def known_later(account: str) -> str:
        return account

    known = bank.task(base=IdempotentTask, key="{account}", name="tests.known_later")(known_later)
    try:
        id = OperationId("default", known.name, "a1")
        assert replay() == id
        with pytest.raises(ReplayRefused, match="already replayed"):
            replay()
        (row,) = op.outbox(connection, id)
        assert row.fingerprint == fingerprint_of()
    finally:
        bank.tasks.unregister(known)


@pytest.mark.parametrize(
    ("body", "sent", "why"),
    [
        ("{}", headers(), "envelope, not a task message"),
        ("5", headers(), "envelope, not a task message"),
        (json.dumps([[], {}, {}]), headers(task="celery.backend_cleanup"), "not an idempotent task"),
        (json.dumps([[], {}, {}]), headers(task=b.returning.name), "missing_key, .*idempotency_key"),
    ],
)
def test_a_letter_that_is_no_task_message_is_not_replayed(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, body: str, sent: dict[str, Any], why: str
) -> None:
    die(bank, consumer, body, headers=sent)
    consumer.run_once()
    (letter,) = op.dead_letters(connection)
    with pytest.raises(ReplayRefused, match=why), runtime_of(bank).engine.begin() as transaction:
        letters.replay(transaction, letter.id, app=bank)
    assert op.dead_letters(connection) == [letter]
    assert op.outbox(connection) == []


# ---------------------------------------------------------------- Redis as the broker


@pytest.mark.long
def test_without_dead_lettering_in_the_broker_the_guard_stores_refusals(
    environment: dict[str, str], bank: Celery, processes: Processes, servers: services.Services, connection: Connection
) -> None:
    redis = make_url(servers.redis_url).set(database="3").render_as_string(hide_password=False)
    b.configure(environment | {"BROKER_URL": redis})
    bank.conf.broker_transport_options = {}
    try:
        worker = processes.worker(BROKER_URL=redis)
        publish(bank, "[]", headers=headers())
        publish(bank, json.dumps([["a1"], {}, {}]), headers=headers(task="bank.gone"))
        b.deposit.delay("after")
        eventually(lambda: (row := record(connection, ID_AFTER)) and row.status == "completed")
        eventually(lambda: len(op.dead_letters(connection)) == 2)
        assert [letter.reason for letter in op.dead_letters(connection)] == ["envelope", "unknown_task"]
        assert worker.process.poll() is None
        with bank.connection_for_read() as broker:
            assert broker.default_channel.client.hlen("unacked") == 0
            broker.default_channel.client.flushdb()
    finally:
        b.configure(environment)


def test_a_marker_that_no_worker_took_is_no_dead_letter(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    marker = headers(**{"task": "celery.accumulate", MARKER_HEADER: "m"})
    die(bank, consumer, json.dumps([[], {}, {}]), headers=marker)
    assert consumer.run_once() == 1
    assert op.dead_letters(connection) == []


@pytest.mark.long
def test_markers_that_others_have_made_begin_no_threads_and_keep_none_of_ours_away(
    bank: Celery, worker: Worker, engine: Engine, connection: Connection
) -> None:
    """While Postgres does not answer, what waits to be noted is bounded; afterwards our markers are noted again."""

    def publish_marker(marker: str) -> None:
        publish(bank, json.dumps([[], {}, {}]), headers=headers(**{"task": "celery.accumulate", MARKER_HEADER: marker}))

    def threads() -> int:
        return len(list(Path(f"/proc/{worker.process.pid}/task").iterdir()))

    row = "INSERT INTO idempotency.markers (id, queue, priority) VALUES ('ours', 'bank', 0)"
    connection.execute(text(row))
    before = threads()
    with transactional(engine).begin() as slow:
        slow.execute(text("LOCK TABLE idempotency.markers IN ACCESS EXCLUSIVE MODE"))
        for number in range(200):
            publish_marker(f"forged {number}")
        eventually(lambda: depth(bank) == 0)
        assert threads() - before < 10

    def is_noted() -> Any:
        publish_marker("ours")
        return connection.execute(text("SELECT taken_at FROM idempotency.markers")).scalar_one()

    eventually(is_noted)


def test_a_connection_that_breaks_as_a_message_is_answered_ends_no_worker(
    bank: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    """A marker that is acknowledged, and a message that is refused: the broker delivers them again."""

    class Gone(BrokerMessage):
        def ack(self, multiple: bool = False) -> None:
            raise ConnectionResetError

        def reject(self, requeue: bool = False) -> None:
            raise ConnectionResetError

    with bank.connection_for_read() as broker:
        errors = broker.connection_errors
    consumer = SimpleNamespace(app=bank, connection_errors=errors, create_task_handler=lambda: pytest.fail)
    guard = Guard(consumer)
    message = Gone(body=b"", headers={MARKER_HEADER: "m"}, delivery_info={})
    consumer.create_task_handler()(message)
    guard._refuse(message, "invalid")
    assert caplog.text.count("event=not_answered error=ConnectionResetError") == 2
