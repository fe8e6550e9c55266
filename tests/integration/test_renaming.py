"""An application gets another name: nothing of the old one is recovered, published or changed until it is renamed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text
from typer.testing import CliRunner, Result

from idempotency import publish
from idempotency.application import close_runtime, runtime_of
from idempotency.checks.startup import require_safe_setup
from idempotency.cli.root import cli
from idempotency.errors import ChangeRefused
from idempotency.letters.consumer import DeadLetterConsumer, consume_once
from idempotency.letters.examine import examine
from idempotency.operate.replay import replay
from idempotency.queues import dead_letter_queue, forwarded_dead_letters
from idempotency.relay.relay import Relay
from idempotency.store import alarms as alarms_store
from idempotency.store import renaming
from idempotency.store.outbox import external_task
from idempotency.store.overview import monitoring_connection
from idempotency.upkeep import alarms, maintenance, overview
from idempotency.upkeep.presence import SignOfLife
from idempotency.wire.headers import SERVICE_HEADER
from tests.support import bank as b
from tests.support import operations as op
from tests.support import queues
from tests.support.dead_messages import body_of, headers, waiting
from tests.support.dead_messages import publish as publish_message
from tests.support.deliveries import Deliveries
from tests.support.operators import ANN
from tests.support.processes import eventually
from tests.support.tasks import enqueued, transactional


@pytest.fixture(autouse=True)
def named_as_before(bank: Celery) -> Iterator[None]:
    yield
    rename(bank, None)


def rename(app: Celery, name: str | None) -> None:
    """What a deploy with another `idempotency_service` does; None: as at first."""
    app.conf.changes.pop("idempotency_service", None)
    app.conf.pop("idempotency_service", None)
    if name is not None:
        app.conf.idempotency_service = name
    close_runtime(app)


def command(*typed: object) -> Result:
    return CliRunner().invoke(cli, [*map(str, typed), "--reason", "renamed", "--as", "ann", "-A", "tests.support.bank"])


def renamed(old: str = "bank", new: str = "ledger") -> dict[str, object]:
    result = command("rename-service", old, new, "--json")
    assert result.exit_code == 0, result.exception
    found: dict[str, object] = json.loads(result.stdout)
    return found


def test_what_was_begun_under_the_old_name_is_recovered_under_the_new_one(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: op.Record
) -> None:
    op.expired(connection, op.operation(b.deposit, "a1"), fingerprint=b.fingerprint_of("a1"))  # its worker died
    rename(bank, "ledger")
    assert maintenance.recover(bank) == 0
    settings = runtime_of(bank).settings
    with monitoring_connection(settings) as monitoring:
        state = overview.status(monitoring, bank, settings)
        lasting = alarms.lasting(overview.take_snapshot(monitoring, bank, settings), settings)
    assert [(row["service"], row["lease_over"]) for row in state["other_services"]] == [("bank", 1)]
    assert "no_relay/bank" in [alarm.name for alarm in lasting]
    assert "no operation of 'ledger' has it" in str(command("release", "a1").exception)
    assert renamed()["records"] == 1
    assert maintenance.recover(bank) == 1
    assert deliveries.deliver(b.deposit, "a1", origin="recover").state == "SUCCESS"
    assert (record("a1").status, record("a1").service) == ("completed", "ledger")
    query = text("SELECT actor, action, details ->> 'table' FROM idempotency.audit")
    assert connection.execute(query).all() == [("ann", "rename_service", "records")]


def test_rows_lanes_and_dead_letters_of_the_old_name_go_on_under_the_new_one(
    bank: Celery, deliveries: Deliveries, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renaming, "PAGE", 1)
    deliveries.deliver(b.failing, "f1", "permanent")
    deliveries.deliver(b.failing, "f2", "permanent")
    b.enqueue_deposit()
    b.enqueue_deposit(idempotency_key="a2", ordering_key="lane")
    rename(bank, "ledger")
    relay = Relay(bank)
    assert relay.run_once().published == 0
    counts = {"saga_events": 0, "records": 2, "dead_letters": 2, "lanes": 1, "outbox": 2, "sagas": 0}
    counts |= {"webhook_endpoints": 0, "webhook_deliveries": 0, "stream_positions": 0, "processes": 0}
    assert renamed() == {"change": "renamed", "old": "bank", "new": "ledger"} | counts
    assert relay.run_once().published == 2
    relay.close()
    assert queues.keys(queues.drained(bank)) == ["a1", "a2"]
    (letter, _) = op.dead_letters(connection)
    replay(bank, letter.id, ANN)
    assert [(row.key, row.origin, row.service) for row in op.outbox(connection)][-1] == ("f1", "replay", "ledger")
    assert renamed() == {"change": "renamed", "old": "bank", "new": "ledger"} | dict.fromkeys(counts, 0)


def test_what_a_relay_of_the_old_name_publishes_is_left_to_its_own_workers(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, record: op.Record
) -> None:
    """The workers were deployed before the relay. What the one runs, the other would take for another's."""
    consumer.run_once()  # declares the queue
    b.enqueue_deposit()
    relay = Relay(bank)
    assert relay.run_once().published == 1
    relay.close()
    rename(bank, "ledger")
    name = bank.conf.task_default_queue
    with bank.connection_for_write() as broker:
        channel = broker.default_channel
        message = channel.message_to_python(eventually(lambda: channel.basic_get(name, no_ack=False)))
        message.accept = {"application/json"}
        assert examine(bank, message).reason == "other_service"  # so the guard rejects it
        channel.basic_reject(message.delivery_tag, requeue=False)
        eventually(lambda: waiting(bank) == 1)
    consumer.run_once()
    (row,) = op.outbox(connection)
    assert (row.status, row.service, row.refusals) == ("pending", "bank", 1)
    assert (record("a1"), op.dead_letters(connection)) == (None, [])


def test_a_worker_does_not_start_on_a_queue_that_another_application_consumes(bank: Celery, engine: Engine) -> None:
    name = bank.conf.task_default_queue
    SignOfLife(bank, "worker", "w1@host", queues=lambda: [name]).sign()
    assert require_safe_setup(bank, consumed=[name]) is None
    rename(bank, "ledger")
    with pytest.raises(SystemExit, match=f"queue {name}: also consumed by w1@host of the application bank"):
        require_safe_setup(bank, consumed=[name])
    assert require_safe_setup(bank, consumed=["elsewhere"]) is None


def test_a_name_is_not_taken_from_an_application_that_is_running(bank: Celery, connection: Connection) -> None:
    SignOfLife(bank, "relay", "relay@host").sign()
    op.started(connection, op.operation(b.deposit, "a1"))
    rename(bank, "ledger")
    refused = command("rename-service", "bank", "ledger").exception
    assert isinstance(refused, ChangeRefused)
    assert str(refused) == "bank: is running (relay relay@host); stop its processes first"
    refused = command("rename-service", "bank", "leger").exception
    assert str(refused) == "NEW: must be this application's name, 'ledger', and OLD another; got 'leger'"


@pytest.fixture
def topic(bank: Celery) -> Iterator[Callable[[], list[int]]]:
    """An exchange of a consumer outside, which is not there yet: the first call makes it, each returns the numbers of its events."""
    name = f"outside-{bank.conf.task_default_queue}"
    with bank.connection_for_write() as broker:
        channel = broker.channel()

        def numbers() -> list[int]:
            channel.exchange_declare(name, "topic", auto_delete=False)
            channel.queue_declare(name, auto_delete=False)
            channel.queue_bind(name, name, "#")
            found = []
            while (message := channel.basic_get(name, no_ack=True)) is not None:
                found.append(json.loads(message.body)["n"])
            return found

        yield numbers
        channel.queue_delete(name)
        channel.exchange_delete(name)


def test_events_for_others_keep_their_order_over_a_rename(
    bank: Celery,
    engine: Engine,
    connection: Connection,
    topic: Callable[[], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(renaming, "PAGE", 1)

    def happen(n: int) -> None:
        name = f"outside-{bank.conf.task_default_queue}"
        with transactional(engine).begin() as transaction:
            publish(transaction, "order.paid", {"n": n}, exchange=name, ordering_key="order-7", app=bank)

    def published() -> int:
        connection.execute(text("UPDATE idempotency.outbox SET available_at = now() WHERE status = 'pending'"))
        connection.execute(text("UPDATE idempotency.lanes SET available_at = now(), relayed_until = NULL"))
        with closing(Relay(bank)) as relay:
            return relay.run_once().published

    happen(1)
    happen(2)
    assert published() == 0  # the exchange is not there yet
    assert topic() == []
    rename(bank, "ledger")
    happen(3)  # too early, but no reason for another order
    renamed()
    happen(4)
    assert connection.execute(text("SELECT task FROM idempotency.lanes")).scalars().all() == [external_task("ledger")]
    got: list[int] = []
    eventually(lambda: published() < 0 or got.extend(topic()) or len(got) == 4, timeout=20)
    assert got == [1, 2, 3, 4]
    assert connection.execute(text("SELECT count(*) FROM idempotency.lanes")).scalar_one() == 0


def test_a_silent_process_and_its_alarm_have_the_new_name(bank: Celery, connection: Connection) -> None:
    SignOfLife(bank, "worker", "w1@host", queues=lambda: ["q"]).sign()
    SignOfLife(bank, "worker", "w2@host", queues=lambda: ["q"]).sign()
    connection.execute(text("UPDATE idempotency.processes SET seen_at = now() - interval '2 days'"))  # kill -9
    for service, name in (("bank", "silent/w1"), ("bank", "silent/w2"), ("ledger", "silent/w2")):
        alarms_store.begin(connection, service, [name])
    rename(bank, "ledger")
    assert renamed()["processes"] == 2
    assert connection.execute(text("SELECT DISTINCT service FROM idempotency.processes")).scalars().all() == ["ledger"]
    assert connection.execute(text("SELECT service, name FROM idempotency.alarms ORDER BY name")).all() == [
        ("ledger", "silent/w1"),
        ("ledger", "silent/w2"),
    ]
    assert command("forget", "w1@host").exit_code == 0


def test_a_process_in_the_place_of_one_of_the_old_name_has_its_own(bank: Celery, connection: Connection) -> None:
    """In a container, the next process has the same host and number."""
    SignOfLife(bank, "worker", "w1@host", queues=lambda: ["q"]).sign()
    rename(bank, "ledger")
    SignOfLife(bank, "worker", "w1@host", queues=lambda: ["q"]).sign()
    assert connection.execute(text("SELECT service FROM idempotency.processes")).scalars().all() == ["ledger"]


def test_a_name_is_not_given_up_while_others_have_forwarded_dead_messages_to_it(
    bank: Celery, connection: Connection
) -> None:
    queue = forwarded_dead_letters("bank")
    with bank.connection_for_write() as broker:
        channel = broker.channel()
        dead_letter_queue(queue)(channel).declare()
        try:
            publish_message(bank, body_of("a1"), queue=queue, headers=headers(**{SERVICE_HEADER: "bank"}))
            eventually(lambda: channel.queue_declare(queue, passive=True).message_count == 1)
            rename(bank, "ledger")
            refused = command("rename-service", "bank", "ledger").exception
            assert isinstance(refused, ChangeRefused)
            assert f"the queue {queue} has dead messages (1)" in str(refused)
            rename(bank, None)
            consume_once(bank)
            assert [letter.consumer_service for letter in op.dead_letters(connection)] == ["bank"]
            rename(bank, "ledger")
            renamed()
            assert [letter.consumer_service for letter in op.dead_letters(connection)] == ["ledger"]
        finally:
            channel.queue_delete(queue)


def test_a_relay_of_the_new_name_that_runs_meanwhile_leaves_no_lane_behind(
    bank: Celery, connection: Connection, engine: Engine
) -> None:
    enqueued(connection, b.deposit, "a", ordering_key="k")
    rename(bank, "ledger")
    published = 0
    with closing(Relay(bank)) as relay:
        for table in renaming.TABLES:
            with engine.execution_options(isolation_level="READ COMMITTED").begin() as own:
                renaming.rename(own, table, "bank", "ledger", after=None)
            published += relay.run_once().published
        connection.execute(
            text("UPDATE idempotency.lanes SET relayed_until = NULL")
        )  # as a reservation is over after a while
        published += relay.run_once().published
    assert published == 1
    assert connection.execute(text("SELECT count(*) FROM idempotency.lanes")).scalar_one() == 0
