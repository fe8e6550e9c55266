"""Two applications on one broker, with a database each: a dead letter lands in that of its application alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from kombu import Queue
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.engine import make_url

import services
from idempotency.application import close_runtime
from idempotency.checks.doctor import doctor
from idempotency.checks.findings import Level
from idempotency.letters import consumer as consuming
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.queues import SHARED_DEAD_LETTERS, QuorumQueue, dead_letter_queues, quorum_queue
from idempotency.relay.relay import Relay
from idempotency.wire.headers import SERVICE_HEADER
from idempotency.wire.keys import OperationId
from tests.support import bank as b
from tests.support import operations as op
from tests.support.applications import application
from tests.support.dead_messages import body_of, headers, publish
from tests.support.processes import Processes, eventually

PLACE = "orders.place"


@pytest.fixture
def environment(environment: dict[str, str], servers: services.Services) -> Iterator[dict[str, str]]:
    """On a virtual host of its own: the names of shared queues are fixed."""
    if servers.broker != "rabbitmq":
        pytest.skip("needs a RabbitMQ that this run has started")
    vhost = f"shared-{uuid4().hex[:8]}"
    yield environment | {"BROKER_URL": servers.create_vhost(vhost)}
    servers.delete_vhost(vhost)


@pytest.fixture
def other_engine(servers: services.Services, template: str) -> Iterator[Engine]:
    """The other application's database."""
    name = f"other_{uuid4().hex[:12]}"
    admin = create_engine(servers.database_url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template}"))
    admin.dispose()
    url = make_url(servers.database_url).set(database=name)
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    yield engine
    engine.dispose()
    servers.drop_database(name)


Start = Callable[..., Celery]


@pytest.fixture
def start(bank: Celery, other_engine: Engine) -> Iterator[Start]:
    """Makes applications with these queues: `ours` on the test's database, any other on the other one."""
    made: list[Celery] = []

    def start(name: str, *queues: Queue, **settings: Any) -> Celery:
        if name != "ours":
            settings["idempotency_database_url"] = other_engine.url.render_as_string(hide_password=False)
        app = application(name, task_queues=list(queues), task_default_queue=queues[0].name, **settings)
        app.conf.task_default_routing_key = queues[0].name
        made.append(app)
        return app

    yield start
    for app in made:
        close_runtime(app)


@pytest.fixture
def others(other_engine: Engine) -> Iterator[Connection]:
    with other_engine.connect() as connection:
        yield connection


def old_queue(name: str) -> Queue:
    """As `quorum_queue` of an earlier version declares it."""
    return quorum_queue(name, dead_letter_queue=SHARED_DEAD_LETTERS)


def declare(app: Celery, *queues: Queue) -> None:
    with app.connection_for_write() as broker:
        for queue in [*queues, *dead_letter_queues(queues)]:
            queue(broker.default_channel).declare()


def rejected(app: Celery, task: str, key: str, *, named: bool = True) -> None:
    """A message of this application is rejected by a worker, and is in the dead-letter queue when this returns."""
    queue = app.amqp.queues[app.conf.task_default_queue]
    sent = headers(task=task, **{SERVICE_HEADER: app.main if named else None})
    with app.connection_for_write() as broker:
        channel = broker.channel()
        body = f'[["{key}"], {{}}, {{}}]'
        options = {"content_type": "application/json", "content_encoding": "utf-8", "headers": sent}
        broker.Producer(channel).publish(body, exchange="", routing_key=queue.name, **options)
        message = eventually(lambda: channel.basic_get(queue.name, no_ack=False))
        channel.basic_reject(message.delivery_tag, requeue=False)
        eventually(lambda: sum(depth(app, each) for each in possible(app)) > 0)


def possible(app: Celery) -> list[str]:
    """Where a dead letter of this application may be."""
    own = [queue.name for queue in dead_letter_queues(app.amqp.queues.values())]
    return [*own, SHARED_DEAD_LETTERS]


def depth(app: Celery, queue: str) -> int:
    with app.connection_for_write() as broker:
        try:
            return int(broker.default_channel.queue_declare(queue, passive=True).message_count)
        except broker.channel_errors:
            return 0


def consume(app: Celery, *, passes: int = 2) -> None:
    consumer = DeadLetterConsumer(app)
    try:
        for _ in range(passes):
            consumer.run_once()
    finally:
        consumer.close()


def reasons(connection: Connection) -> list[tuple[str, str | None]]:
    return [(letter.reason, letter.consumer_service) for letter in op.dead_letters(connection)]


# ---------------------------------------------------------------- queues of this version


def test_a_queue_has_a_dead_letter_queue_of_its_own(start: Start, connection: Connection, others: Connection) -> None:
    orders, ours = start("orders", quorum_queue("orders")), start("ours", quorum_queue("payments"))
    for app in (orders, ours):
        declare(app, *app.amqp.queues.values())
    rejected(orders, PLACE, "o1")
    consume(ours)
    assert reasons(connection) == []
    consume(orders)
    assert reasons(others) == [("rejected", "orders")]


def test_what_another_application_has_in_a_shared_dead_letter_queue_is_forwarded_to_it(
    start: Start, connection: Connection, others: Connection
) -> None:
    orders = start("orders", quorum_queue("orders", dead_letter_queue="dead"))
    ours = start("ours", quorum_queue("payments", dead_letter_queue="dead"))
    for app in (orders, ours):
        declare(app, *app.amqp.queues.values())
    consume(orders)  # its relay has run before
    rejected(orders, PLACE, "o1")
    consume(ours)
    assert reasons(connection) == []
    assert (depth(ours, "dead"), depth(ours, "dead_letters.orders")) == (0, 1)
    consume(orders)
    assert reasons(others) == [("rejected", "orders")]
    assert op.record(others, OperationId("default", PLACE, "o1")).status == "failed"
    rejected(ours, b.deposit.name, "a1")
    consume(ours)
    assert reasons(connection) == [("rejected", "ours")]


def test_a_message_that_cannot_be_forwarded_stays_where_it_is(
    start: Start, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = start("orders", quorum_queue("orders", dead_letter_queue="dead"))
    ours = start("ours", quorum_queue("payments", dead_letter_queue="dead"))
    for app in (orders, ours):
        declare(app, *app.amqp.queues.values())
    consume(orders)
    rejected(orders, PLACE, "o1")

    def away(*_: Any) -> None:
        raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(consuming, "forward", away)
        consume(ours)
    eventually(lambda: depth(ours, "dead") == 1)
    assert reasons(connection) == []
    consume(ours)
    assert depth(ours, "dead_letters.orders") == 1


def test_what_names_an_application_that_nobody_has_heard_of_is_kept_without_ending_what_it_names(
    start: Start, connection: Connection
) -> None:
    """A name in a header declares no queue."""
    orders = start("orders", quorum_queue("orders", dead_letter_queue="dead"))
    ours = start("ours", quorum_queue("payments", dead_letter_queue="dead"))
    for app in (orders, ours):
        declare(app, *app.amqp.queues.values())
    rejected(orders, b.deposit.name, "a1")
    eventually(lambda: (consume(ours), reasons(connection))[1])  # without a time of grace
    assert reasons(connection) == [("unhandled", "ours")]
    assert op.record(connection, OperationId("default", b.deposit.name, "a1")) is None
    with ours.connection_for_write() as broker, pytest.raises(broker.channel_errors, match="NOT_FOUND"):
        broker.default_channel.queue_declare("dead_letters.orders", passive=True)


@pytest.mark.long
def test_what_names_nobody_in_a_dead_letter_queue_that_two_have_chosen_is_left_to_the_other_for_a_while(
    start: Start, connection: Connection, others: Connection
) -> None:
    orders = start("orders", quorum_queue("orders", dead_letter_queue="dead"))
    ours = start("ours", quorum_queue("payments", dead_letter_queue="dead"))
    for app in (orders, ours):
        declare(app, *app.amqp.queues.values())
    ours.conf.idempotency_unknown_task_grace = 3600.0
    close_runtime(ours)
    rejected(orders, PLACE, "o1", named=False)
    consume(ours)
    assert reasons(connection) == []
    eventually(lambda: (consume(orders), reasons(others))[1])
    assert reasons(others) == [("rejected", "orders")]


def test_what_says_that_it_will_die_in_the_years_to_come_is_not_left_to_others(
    start: Start, connection: Connection
) -> None:
    """By a sender who may publish to the dead-letter queue: it would be there forever."""
    ours = start("ours", quorum_queue("payments", dead_letter_queue="dead"))
    declare(ours, *ours.amqp.queues.values())
    ours.conf.idempotency_unknown_task_grace = 3600.0
    close_runtime(ours)
    for key, time in (("a1", datetime.now(UTC)), ("a2", datetime(2100, 1, 1, tzinfo=UTC))):
        death = [{"queue": "elsewhere", "reason": "rejected", "time": time}]
        sent = headers(**{SERVICE_HEADER: "nobody"}) | {"x-death": death}
        publish(ours, body_of(key), queue="dead", headers=sent)
    eventually(lambda: (consume(ours), reasons(connection))[1])
    assert [json.loads(json.loads(each.payload)["body"])[0] for each in op.dead_letters(connection)] == [["a2"]]


# ---------------------------------------------------------------- queues of an earlier version


def test_a_queue_of_an_earlier_version_goes_on_with_the_shared_dead_letter_queue(
    start: Start, connection: Connection
) -> None:
    ours = start("ours", quorum_queue("payments"))
    declare(ours, old_queue("payments"))
    declare(ours, *ours.amqp.queues.values())  # as Celery's worker does
    rejected(ours, b.deposit.name, "a1")
    assert depth(ours, SHARED_DEAD_LETTERS) == 1
    consume(ours)
    assert reasons(connection) == [("rejected", "ours")]


@pytest.mark.long
def test_only_that_difference_of_a_queue_is_accepted(start: Start) -> None:
    ours = start("ours", quorum_queue("payments"))
    declare(ours, quorum_queue("payments", dead_letter_queue=SHARED_DEAD_LETTERS, limit=50))
    with ours.connection_for_write() as broker, pytest.raises(broker.channel_errors, match="inequivalent arg"):
        ours.amqp.queues["payments"](broker.default_channel).declare()


def test_a_worker_starts_on_a_queue_of_an_earlier_version(
    bank: Celery, environment: dict[str, str], processes: Processes, entries: op.Entries
) -> None:
    queue = environment["BANK_QUEUE"]
    declare(bank, quorum_queue(queue, exchange=queue, dead_letter_queue=SHARED_DEAD_LETTERS))
    environment["DEAD_LETTER_QUEUE"] = ""  # as by default now
    b.configure(environment)
    processes.worker()
    b.enqueue_deposit()
    relay = Relay(bank)
    assert relay.run_once().published == 1
    relay.close()
    eventually(lambda: entries("a1") == 1)


@pytest.mark.long
@pytest.mark.parametrize("named", [True, False], ids=["says whose it is", "of an earlier version"])
def test_each_takes_its_own_from_the_shared_dead_letter_queue(
    start: Start, connection: Connection, others: Connection, named: bool
) -> None:
    orders, ours = start("orders", quorum_queue("orders")), start("ours", quorum_queue("payments"))
    for app, queue in ((orders, "orders"), (ours, "payments")):
        declare(app, old_queue(queue))
    rejected(orders, PLACE, "o1", named=named)
    ours.conf.idempotency_unknown_task_grace = 3600.0
    close_runtime(ours)
    consume(ours, passes=3)
    assert reasons(connection) == []
    # ours gave it back when it closed its connection, which the broker may notice late
    eventually(lambda: (consume(orders), reasons(others))[1])
    assert reasons(others) == [("rejected", "orders")]


def test_what_nobody_takes_from_the_shared_dead_letter_queue_is_kept_after_a_while(
    start: Start, connection: Connection
) -> None:
    orders, ours = start("orders", quorum_queue("orders")), start("ours", quorum_queue("payments"))
    for app, queue in ((orders, "orders"), (ours, "payments")):
        declare(app, old_queue(queue))
    rejected(orders, PLACE, "o1", named=False)
    eventually(lambda: (consume(ours), reasons(connection))[1])  # without a time of grace
    assert reasons(connection) == [("unknown_task", "ours")]


def test_the_doctor_names_a_queue_whose_dead_letters_are_shared(start: Start) -> None:
    ours = start("ours", quorum_queue("payments"), old_queue("refunds"))
    declare(ours, old_queue("payments"), old_queue("refunds"))
    found = {finding.subject: finding for finding in doctor(ours) if SHARED_DEAD_LETTERS in finding.found}
    assert {name: finding.level for name, finding in found.items()} == {
        "queue payments": Level.WARNING,
        "queue refunds": Level.WARNING,
    }
    assert "made by an earlier version" in found["queue payments"].found


def test_a_new_queue_is_declared_as_it_says(start: Start) -> None:
    ours = start("ours", quorum_queue("payments"))
    declare(ours, *ours.amqp.queues.values())
    queue = ours.amqp.queues["payments"]
    assert isinstance(queue, QuorumQueue)
    with ours.connection_for_write() as broker:
        assert not queue.points_to_shared(broker.default_channel)
    assert [str(f) for f in doctor(ours) if f.subject == "queue payments" and f.level is not Level.OK] == []
