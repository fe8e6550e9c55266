"""Two applications with their workers and relays on one database and one virtual host, and a deploy of one of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from uuid import uuid4

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text

import services
from idempotency.application import close_runtime
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.relay.relay import Relay
from tests.support import bank as b
from tests.support import operations as op
from tests.support import orders
from tests.support.applications import enqueue
from tests.support.processes import Processes, eventually
from tests.support.tasks import enqueued

PLACE = "orders.place"


@pytest.fixture
def environment(environment: dict[str, str], servers: services.Services) -> Iterator[dict[str, str]]:
    if servers.broker != "rabbitmq":
        pytest.skip("needs a RabbitMQ that this run has started")
    vhost = f"two-{uuid4().hex[:8]}"
    yield environment | {"BROKER_URL": servers.create_vhost(vhost), "DEAD_LETTER_QUEUE": ""}
    servers.delete_vhost(vhost)


@pytest.fixture
def relaying() -> Iterator[Callable[[Celery], Callable[[], None]]]:
    """Starts a relay with a consumer of dead letters, in threads of this process. Returns what stops it."""
    ends = []

    def start(app: Celery) -> Callable[[], None]:
        stop = threading.Event()
        loops = (Relay(app).run, DeadLetterConsumer(app).run)
        threads = [threading.Thread(target=loop, args=(stop,), daemon=True) for loop in loops]
        for thread in threads:
            thread.start()

        def end() -> None:
            stop.set()
            for thread in threads:
                thread.join(10)
            close_runtime(app)

        ends.append(end)
        return end

    yield start
    for end in ends:
        end()


def refused(connection: Connection, key: str) -> int:
    """How often a relay could not publish the row of this key."""
    query = text("SELECT attempts FROM idempotency.outbox WHERE key = :key")
    return int(connection.execute(query, {"key": key}).scalar_one())


@pytest.mark.long
def test_each_application_goes_on_beside_the_other_and_through_a_deploy_that_adds_a_queue(
    bank: Celery,
    processes: Processes,
    relaying: Callable[[Celery], Callable[[], None]],
    engine: Engine,
    entries: op.Entries,
) -> None:
    older, newer = orders.make("orders"), orders.make("orders", "express")
    processes.start(app="tests.support.bank")
    processes.start(app="tests.support.orders", ORDERS_QUEUES="orders")
    relaying(bank)
    stop_older_relay = relaying(older)
    b.enqueue_deposit()
    enqueue(older, PLACE, "o1")
    eventually(lambda: entries("a1") == entries("orders/o1") == 1, what="both")
    # the web servers are deployed first
    enqueue(newer, PLACE, "o2", queue="express")
    with engine.connect() as connection:
        eventually(lambda: refused(connection, "o2") > 0, what="a relay of before the deploy")
        enqueued(connection, b.deposit, "a2")
        enqueue(older, PLACE, "o3")
        eventually(lambda: entries("a2") == entries("orders/o3") == 1, what="the others")
    assert "express" not in older.amqp.queues
    # then workers and relays: the queue is theirs to declare
    processes.worker(app="tests.support.orders", ORDERS_QUEUES="orders,express")
    stop_older_relay()  # it would take the row as often as the newer one, and be as often in vain
    relaying(newer)
    eventually(lambda: entries("orders/o2") == 1, timeout=60, what="the new queue")
    with engine.connect() as connection:
        assert op.dead_letters(connection) == []
        services_of = text("SELECT key, service, status FROM idempotency.records ORDER BY key")
        assert [tuple(row) for row in connection.execute(services_of)] == [
            ("a1", "bank", "completed"),
            ("a2", "bank", "completed"),
            ("o1", "orders", "completed"),
            ("o2", "orders", "completed"),
            ("o3", "orders", "completed"),
        ]
