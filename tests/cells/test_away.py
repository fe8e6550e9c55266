"""While `cell_of` raises, nothing is done under a guess, and nothing is lost: what arrives waits, as while Postgres is away."""

from __future__ import annotations

import json
import threading
import time
from functools import partial
from typing import Any

import pytest
from celery.exceptions import Retry
from kombu import Connection as BrokerConnection
from kombu.transport.native_delayed_delivery import declare_native_delayed_delivery_exchanges_and_queues
from sqlalchemy import Engine, text

from idempotency import DeduplicatedTask, SettingsError, runtime_for
from idempotency.application import close_runtime, runtime_of, settings_of
from idempotency.letters import consumer as letters_consumer
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.streams import Handling, StreamMessage, kafka, stream
from idempotency.streams.consumer import Consumer
from idempotency.streams.preparing import Prepared, prepare, prepare_many
from idempotency.streams.process import make_reader
from idempotency.worker import waiting
from tests.cells.conftest import Cells, Count, Serve
from tests.cells.test_http import edge, post
from tests.cells.test_page import run_all
from tests.support.celled import app, deposit
from tests.support.deliveries import Deliveries
from tests.support.processes import eventually
from tests.support.streaming import RabbitBroker, insert


class Directory:
    """Which cell a tenant is of; it is away for those whose names begin with `eu-away`, while `is_away`."""

    def __init__(self) -> None:
        self.is_away = True
        self.asked = 0

    def __call__(self, tenant: str) -> str | None:
        if self.is_away and tenant.startswith("eu-away"):
            self.asked += 1
            raise RuntimeError("the directory of tenants is away")
        return tenant[:2]


@pytest.fixture
def directory(serve: Serve) -> Directory:
    serve("eu")
    found = app.conf.idempotency_cell_of = Directory()
    close_runtime(app)
    return found


def test_a_message_waits_and_is_put_back_and_no_letter_is_made(
    directory: Directory, cells: Cells, engines: dict[str, Engine], count: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "PATIENCE", 0.6)
    assert Deliveries(app).deliver(deposit, "a1", tenant="eu-away").state == "IGNORED"
    assert directory.asked > 1  # it has waited, too
    with engines["eu"].connect() as connection:
        row = connection.execute(text("SELECT tenant, status, origin FROM idempotency.outbox")).one()
        assert tuple(row) == ("eu-away", "pending", "retry")
        assert connection.execute(text("SELECT count(*) FROM idempotency.records")).scalar_one() == 0
    directory.is_away = False
    run_all(cells, "eu")
    assert count("eu", "a1") == 1


@pytest.mark.long
def test_a_message_goes_on_as_soon_as_the_cell_can_be_told(directory: Directory, count: Count) -> None:
    threading.Timer(1.0, lambda: setattr(directory, "is_away", False)).start()
    assert Deliveries(app).deliver(deposit, "a1", tenant="eu-away").state == "SUCCESS"
    assert count("eu", "a1") == 1


def test_a_message_whose_key_cannot_be_made_is_rejected_all_the_same(directory: Directory) -> None:
    assert Deliveries(app).deliver(deposit, "a" * 300, tenant="eu-away").state == "REJECTED"
    assert Deliveries(app).deliver(deposit, "a1", tenant="us-bolt").state == "REJECTED"


@pytest.mark.long
def test_a_message_of_a_deduplicated_task_comes_again(directory: Directory, cells: Cells) -> None:
    app.conf.idempotency_store = cells["eu"]["redis_url"]
    ran: list[str] = []
    with app.connection_for_write() as broker:  # as a worker does at its start
        declare_native_delayed_delivery_exchanges_and_queues(broker, "quorum")

    @app.task(name="away.charge", base=DeduplicatedTask, bind=True, key="{id}", shared=False)
    def task(self: Any, id: str) -> str:
        ran.append(id)
        return id

    try:
        found = Deliveries(app).deliver(task, "a1", tenant="eu-away")
        assert isinstance(found.value, Retry)
        assert ran == []
        with pytest.raises(SettingsError, match="idempotency_cell_of"):
            task.apply(("a2",), tenant="eu-away")
        assert Deliveries(app).deliver(task, "a3", tenant="us-bolt").state == "REJECTED"
        directory.is_away = False
        assert Deliveries(app).deliver(task, "a1", tenant="eu-away").state == "SUCCESS"
        assert ran == ["a1"]
    finally:
        app.tasks.pop("away.charge")
        app.conf.changes.pop("idempotency_store", None)


def test_a_streams_messages_are_prepared_up_to_the_first_whose_cell_cannot_be_told(directory: Directory) -> None:
    declared = stream("away", source=kafka("t"), key="{event[id]}", tenant="{event[tenant]}")(lambda given, event: None)

    def message(offset: int, tenant: str) -> StreamMessage:
        return StreamMessage("t", 0, offset, b"", json.dumps({"id": f"k{offset}", "tenant": tenant}).encode())

    messages = [message(0, "eu-acme"), message(1, "eu-away"), message(2, "eu-acme")]
    with pytest.raises(SettingsError, match="idempotency_cell_of: raised RuntimeError"):
        prepare(declared, messages[1], settings_of(app))
    assert [each.message.offset for each in prepare_many(declared, messages, settings_of(app))] == [0]
    with pytest.raises(SettingsError):
        prepare_many(declared, messages[1:], settings_of(app))
    directory.is_away = False
    assert all(isinstance(each, Prepared) for each in prepare_many(declared, messages, settings_of(app)))


@pytest.mark.long
def test_a_stream_stays_where_it_is_and_says_so(
    directory: Directory,
    cells: Cells,
    engines: dict[str, Engine],
    count: Count,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its loop goes on, and so does what comes before; nothing is a letter."""
    broker = RabbitBroker(cells["eu"]["broker_url"], "away", 1)

    def handle(given: Handling, event: Any) -> None:
        insert(given, event["id"])

    declared = stream("away", source=broker.source(), key="{event[id]}", tenant="{event[tenant]}")(handle)
    for id, tenant in (("a1", "eu-acme"), ("a2", "eu-away"), ("a3", "eu-acme")):
        broker.publish({"id": id, "tenant": tenant})
    stop = threading.Event()
    consumer = Consumer(runtime_of(app), declared, partial(make_reader, app, runtime_of(app), declared, None), stop)
    loop = threading.Thread(target=consumer.run)
    loop.start()
    try:
        eventually(lambda: directory.asked > 2, what="it asks again")
        assert [count("eu", each) for each in ("a1", "a2", "a3")] == [1, 0, 0]
        assert "stream_message_waits" in caplog.text
        directory.is_away = False
        eventually(lambda: [count("eu", each) for each in ("a1", "a2", "a3")] == [1, 1, 1])
        with engines["eu"].connect() as connection:
            assert connection.execute(text("SELECT count(*) FROM idempotency.dead_letters")).scalar_one() == 0
    finally:
        stop.set()
        loop.join(20)
        broker.close()
    assert not loop.is_alive()


@pytest.mark.long
def test_dead_messages_are_held_without_counting(
    directory: Directory, engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(letters_consumer, "HELD_PAUSE", 0.01)
    monkeypatch.setattr(letters_consumer, "HELD_CAP", 0.01)
    consumer = DeadLetterConsumer(app)
    consumer._connect()
    fingerprint = deposit._checked(("a1",), {}, "a1", "eu-acme")[1]["idempotency-fingerprint"]
    headers = {"task": "deposit", "id": "m1", "idempotency-key": "a1", "idempotency-tenant": "eu-away"}
    headers |= {"idempotency-fingerprint": fingerprint}
    with app.connection_for_write() as broker:
        broker.Producer().publish(
            [["a1"], {}, {}], routing_key="deposits.dead_letters", headers=headers, serializer="json"
        )

    def letters() -> list[str]:
        with engines["eu"].connect() as connection:
            return list(connection.execute(text("SELECT reason FROM idempotency.dead_letters")).scalars())

    for _ in range(30):
        consumer.run_once()
        time.sleep(0.02)
    assert [held.tries > 5 for held in consumer._held] == [True]
    assert letters() == []
    directory.is_away = False
    eventually(lambda: (consumer.run_once() and False) or letters(), what="it is stored")
    consumer.close()


def test_a_request_is_not_begun(serve: Serve, engines: dict[str, Engine]) -> None:
    """The error is the server's: it answers 500."""
    serve(None)
    web = edge(runtime=partial(runtime_for, app))
    with pytest.raises(SettingsError, match="idempotency_cell_of: raised RuntimeError"):
        post(web, "broken")
    for engine in engines.values():
        with engine.connect() as connection:
            assert connection.execute(text("SELECT count(*) FROM idempotency.records")).scalar_one() == 0


def test_a_call_by_delay_does_not_go_to_the_broker_of_another_cell(
    serve: Serve, cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable of the environment wins over every configuration; a web server is looked at by nobody at its start."""
    serve("eu")
    with BrokerConnection(cells["us"]["broker_url"]) as broker:
        queue = app.amqp.queues["deposits"](broker)
        queue.declare()
        monkeypatch.setenv("CELERY_BROKER_WRITE_URL", cells["us"]["broker_url"])
        app.amqp._producer_pool = app._pool = None
        with pytest.raises(SettingsError, match="the broker is not that of the cell 'eu'"):
            deposit.apply_async(("a1",), tenant="eu-acme")
        assert queue.get() is None
