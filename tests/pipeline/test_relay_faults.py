"""The relay killed, the broker frozen: a row is published at least once, and never marked without a confirm."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import text
from sqlalchemy.engine import Engine
from sqlalchemy.orm import Session

import services
from idempotency.relay.relay import Relay, Relayed
from idempotency.store.outbox import insert
from idempotency.wire.message import Message
from tests.support import bank as app_module
from tests.support import crashing
from tests.support.operations import FINGERPRINT, MESSAGE, Entries, Record, age, completed
from tests.support.processes import Worker, eventually

POINTS = ("relay.selected", "relay.published", "relay.confirmed", "relay.marked")


@pytest.fixture
def enqueue(engine: Engine) -> Callable[..., Any]:
    def enqueue(*accounts: Any) -> None:
        with Session(engine.execution_options(isolation_level="READ COMMITTED")) as session, session.begin():
            for account in accounts:
                app_module.deposit.enqueue(session, account)

    return enqueue


def states(engine: Engine) -> Any:
    with engine.connect() as connection:
        return connection.execute(text("SELECT status FROM idempotency.outbox ORDER BY id")).scalars().all()


@pytest.mark.parametrize(
    "points",
    [pytest.param(points, marks=pytest.mark.long) for points in (POINTS[1::2], POINTS[::2])],
    ids=["after it", "before it"],
)
def test_a_relay_killed_at_every_point_loses_nothing_and_doubles_nothing(
    points: tuple[str, ...],
    subtests: pytest.Subtests,
    bank: Celery,
    worker: Worker,
    environment: dict[str, str],
    engine: Engine,
    enqueue: Callable[..., Any],
    entries: Entries,
) -> None:
    directory = Path(environment["CRASH_DIRECTORY"])
    command = [sys.executable, "-m", "idempotency.cli", "relay", "-A", "tests.support.bank"]
    for point in points:
        with subtests.test(point=point):
            crashing.plan(directory, point, crashing.KILL_CHILD)
            accounts = [f"{point}-{number}" for number in range(5)]
            enqueue(*accounts)
            killed = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
            assert killed.wait(30) == -9
            with engine.connect() as connection:  # its reservation of the rows is over, without waiting for it
                connection.execute(text("UPDATE idempotency.outbox SET relayed_until = NULL"))
            relay = Relay(bank)
            while relay.run_once().published:
                pass
            relay.close()
            eventually(lambda accounts=accounts: all(entries(account) for account in accounts))
            assert [entries(account) for account in accounts] == [1] * 5
            assert set(states(engine)) == {"published"}


def test_a_frozen_broker_neither_blocks_the_relay_nor_confirms_falsely(
    servers: services.Services, bank: Celery, engine: Engine, enqueue: Callable[..., Any]
) -> None:
    if servers.broker != "rabbitmq":
        pytest.skip("needs a RabbitMQ of our own to freeze")
    relay = Relay(bank, confirm_timeout=1.0)
    enqueue("before")
    assert relay.run_once() == Relayed(1, 0)
    enqueue("while frozen")
    servers.rabbitmq.pause()
    try:
        assert relay.run_once() == Relayed(0, 0, broker_unavailable=True)
        assert states(engine) == ["published", "pending"]
    finally:
        servers.rabbitmq.resume()
    eventually(lambda: relay.run_once().published == 1)
    assert states(engine) == ["published", "published"]
    relay.close()


@pytest.fixture
def memory_alarm(servers: services.Services) -> Iterator[Callable[..., Any]]:
    """RabbitMQ believes that its memory is used up: it accepts connections, and reads nothing that is published."""
    if servers.broker != "rabbitmq" or (program := shutil.which("rabbitmqctl", path="/usr/lib/rabbitmq/bin")) is None:
        pytest.skip("needs a RabbitMQ of our own and its rabbitmqctl")
    environment = servers.rabbitmq._environment()  # HOME has the node's cookie

    def watermark(fraction: Any) -> None:
        command = [program, "-q", "-n", environment["RABBITMQ_NODENAME"], "set_vm_memory_high_watermark", fraction]
        subprocess.run(command, env=environment, capture_output=True, timeout=60, check=True)

    yield watermark
    watermark("0.4")  # RabbitMQ's default


@pytest.mark.long
def test_under_a_memory_alarm_work_is_accepted_and_flows_later(
    memory_alarm: Callable[..., Any], bank: Celery, engine: Engine, enqueue: Callable[..., Any]
) -> None:
    relay = Relay(bank, confirm_timeout=1.0)
    enqueue("before")
    assert relay.run_once() == Relayed(1, 0)
    memory_alarm("0.0000001")
    enqueue("during")
    for _ in range(2):  # on the open connection, and on a new one
        assert relay.run_once() == Relayed(0, 0, broker_unavailable=True)
        with engine.connect() as connection:
            connection.execute(text("UPDATE idempotency.outbox SET relayed_until = NULL"))
    assert states(engine) == ["published", "pending"]
    memory_alarm("0.4")
    eventually(lambda: relay.run_once().published == 1)
    assert states(engine) == ["published", "published"]
    relay.close()


def test_an_unpublishable_row_becomes_failed_with_its_dead_letter(
    bank: Celery, engine: Engine, enqueue: Callable[..., Any]
) -> None:
    relay = Relay(bank)
    enqueue("broken", "fine")
    with engine.connect() as connection:
        connection.execute(text("UPDATE idempotency.outbox SET message = '{' WHERE key = 'broken'"))
    for _ in range(5):
        with engine.connect() as connection:
            connection.execute(
                text("UPDATE idempotency.outbox SET available_at = clock_timestamp() WHERE status = 'pending'")
            )
        relay.run_once()
    relay.close()
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT key, status, attempts FROM idempotency.outbox ORDER BY id")).all()
        letters = connection.execute(text("SELECT source, key, reason, payload FROM idempotency.dead_letters")).all()
    assert [tuple(row) for row in rows] == [("broken", "failed", 5), ("fine", "published", 0)]
    assert [tuple(letter) for letter in letters] == [("relay", "broken", "unpublishable", "{")]


@pytest.mark.long
@pytest.mark.direct  # behind a pooler it polls and never sleeps
def test_a_relay_says_that_it_sleeps_and_publishes_what_is_then_committed(
    bank: Celery, engine: Engine, enqueue: Callable[..., Any], relay: Relay, worker: Worker, entries: Entries
) -> None:
    with engine.connect() as connection:
        slept = "SELECT until > clock_timestamp() FROM idempotency.relay_sleep"
        eventually(lambda: connection.execute(text(slept)).scalar_one())
    enqueue("a")
    eventually(lambda: entries("a") == 1)


def test_a_sleeping_relay_is_notified_of_a_commit(bank: Celery, engine: Engine, enqueue: Callable[..., Any]) -> None:
    with engine.connect() as connection:
        # no relay runs that could happen to wake up now
        asleep = "UPDATE idempotency.relay_sleep SET until = clock_timestamp() + interval '1 minute'"
        connection.execute(text(asleep))
        connection.execute(text("LISTEN idempotency_outbox"))
        enqueue("a")
        driver: Any = connection.connection.driver_connection
        assert [notice.channel for notice in driver.notifies(timeout=5, stop_after=1)] == ["idempotency_outbox"]


def test_a_busy_relay_is_not_notified(bank: Celery, engine: Engine, enqueue: Callable[..., Any]) -> None:
    with engine.connect() as connection:
        connection.execute(text("UPDATE idempotency.relay_sleep SET until = '-infinity'"))
        connection.execute(text("LISTEN idempotency_outbox"))
        enqueue("a")
        driver: Any = connection.connection.driver_connection
        assert list(driver.notifies(timeout=0.2)) == []


@pytest.mark.long
def test_deleting_queues_and_hints_under_load_loses_and_doubles_nothing(
    bank: Celery,
    worker: Worker,
    relay: Relay,
    engine: Engine,
    enqueue: Callable[..., Any],
    entries: Entries,
    record: Record,
    redis_url: str,
) -> None:
    import redis

    from idempotency.relay.resend import resend_lost

    accounts = [f"a{number}" for number in range(60)]
    for account in accounts[:30]:
        enqueue(account)
    with bank.connection_for_write() as connection:
        connection.default_channel.queue_delete(bank.conf.task_default_queue)
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    for account in accounts[30:]:
        enqueue(account)

    def all_done() -> Any:
        with engine.connect() as connection:  # patience is a setting; here it is over
            connection.execute(
                text(
                    "UPDATE idempotency.outbox SET published_at = published_at - interval '1 hour', resends = 0 "
                    "WHERE status = 'published' AND settled_at IS NULL"
                )
            )
        resend_lost(bank)
        return all((row := record(account)) and row.status == "completed" for account in accounts)

    eventually(all_done, timeout=60)
    assert [entries(account) for account in accounts] == [1] * len(accounts)


def test_insert_is_usable_with_a_plain_connection(bank: Celery, engine: Engine) -> None:
    from idempotency.wire.keys import OperationId
    from idempotency.wire.message import Message

    message = Message({"task": "x", "id": "t"}, "[]", {"queue": "q"}, {})
    with engine.connect() as connection:
        insert(connection, OperationId("t", "x", "k"), "v1:f", message, service="bank")
    assert states(engine) == ["pending"]


@pytest.mark.long
def test_a_relay_purges_and_goes_on_publishing_beside_a_purge_that_waits(
    bank: Celery, environment: dict[str, str], engine: Engine, enqueue: Callable[..., Any]
) -> None:
    with engine.connect() as connection:
        gone = [completed(connection).id for _ in range(3)]
        for id in gone:
            insert(connection, id, FINGERPRINT, Message.from_text(MESSAGE), service="bank")
            age(connection, id, expires_at=-1)
        connection.execute(
            text("UPDATE idempotency.outbox SET status = 'published', published_at = now() - interval '2 days'")
        )
        with engine.connect().execution_options(isolation_level="READ COMMITTED") as other:
            # a table that cannot be purged now
            other.execute(text("LOCK TABLE idempotency.dead_letters IN ACCESS EXCLUSIVE MODE"))
            command = [sys.executable, "-m", "idempotency.cli", "relay", "-A", "tests.support.bank"]
            relay = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
            try:
                enqueue("a1")
                eventually(lambda: set(states(engine)) == {"published"})
                assert connection.execute(text("SELECT count(*) FROM idempotency.records")).scalar_one() == 3
            finally:
                relay.terminate()
                relay.wait(30)
        relay = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        try:
            eventually(lambda: not connection.execute(text("SELECT count(*) FROM idempotency.records")).scalar_one())
            assert len(states(engine)) == 1
        finally:
            relay.terminate()
            relay.wait(30)
