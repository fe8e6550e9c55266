"""Two applications on one database and one broker: each touches its own, also beside code that knows no applications."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator

import pytest
from amqp.exceptions import NotFound
from celery import Celery
from sqlalchemy import Connection, text
from typer.testing import CliRunner, Result

from idempotency.application import close_runtime, runtime_of, settings_of
from idempotency.checks.doctor import doctor
from idempotency.checks.findings import Level
from idempotency.cli.root import cli
from idempotency.errors import IdempotencyError, ServiceMismatch
from idempotency.events import publish
from idempotency.handle import Handle
from idempotency.queues import quorum_queue
from idempotency.relay.relay import Relay
from idempotency.relay.resend import resend_lost
from idempotency.store import outbox
from idempotency.store.adoption import ADOPT
from idempotency.store.answers import Busy, Completed, Failed, Foreign
from idempotency.store.overview import monitoring_connection
from idempotency.upkeep import alarms, alerts, maintenance, overview
from idempotency.upkeep.presence import SignOfLife
from idempotency.wire.headers import SERVICE_HEADER
from idempotency.wire.message import Message
from tests.support import bank as b
from tests.support import operations as op
from tests.support import queues
from tests.support.applications import application, delete_queues, enqueue
from tests.support.bank import enqueue_deposit
from tests.support.deliveries import Deliveries
from tests.support.plans import rows_read
from tests.support.relaying import make_due

DEPOSIT = b.deposit.name
PLACE = "orders.place"
# As code of schema 0011 writes them.
OLD_ROW = """
INSERT INTO idempotency.outbox
    (message_id, tenant, task, key, fingerprint, message, queue, ordering_key, origin, available_at, settled_at,
     generation)
SELECT :key, 'default', :task, :key, 'v1:f', :message, :queue, :lane, 'enqueue', clock_timestamp(), NULL, 1
"""
OLD_CLAIM = """
INSERT INTO idempotency.records AS r
    (tenant, task, key, status, fence, token, locked_until, locked_by, fingerprint, message, queue)
VALUES ('default', :task, :key, 'started', nextval('idempotency.fence'), 't',
        clock_timestamp() - interval '1 s', 'h', 'v1:same', :message, '')
"""
OLD_END = """
UPDATE idempotency.records SET status = 'completed', result = '1', response_code = 200, locked_until = NULL,
    completed_at = clock_timestamp(), expires_at = clock_timestamp() - interval '1 s' WHERE key = :key
"""


@pytest.fixture
def orders(bank: Celery) -> Iterator[Celery]:
    """Another application, on the database and the broker of the bank."""
    app = application("orders")
    yield app
    close_runtime(app)
    delete_queues(app)


@pytest.fixture
def run(bank: Celery, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """A command of the bank, as typed; `refused`: it ends with an error."""
    monkeypatch.setenv("COLUMNS", "200")

    def command(*arguments: object, refused: bool = False) -> Result:
        result = CliRunner().invoke(cli, [*map(str, arguments), "-A", "tests.support.bank"])
        assert isinstance(result.exception, IdempotencyError) == refused, (result.output, result.exception)
        return result

    return command


def relay_once(app: Celery) -> int:
    """One pass of a relay of this application; returns how many rows it published."""
    relay = Relay(app)
    try:
        return relay.run_once().published
    finally:
        relay.close()


def by_key(connection: Connection) -> dict[str, tuple[str, str | None]]:
    """Status and service of the outbox rows, by key."""
    return {row.key: (row.status, row.service) for row in op.outbox(connection)}


def exists(app: Celery, queue: str) -> bool:
    with app.connection_for_write() as broker:
        try:
            broker.default_channel.queue_declare(queue, passive=True)
        except NotFound:
            return False
    return True


def write_as_0011(connection: Connection, app: Celery, task: str, key: str, lane: str | None = None) -> None:
    """Write a row as code of schema 0011 does."""
    queue = app.conf.task_default_queue
    message = Message({}, "[]", {"queue": queue}, {}).to_text()
    connection.execute(text(OLD_ROW), {"task": task, "key": key, "lane": lane, "queue": queue, "message": message})


# ---------------------------------------------------------------- the outbox


def test_a_relay_publishes_the_rows_of_its_own_application_alone(
    bank: Celery, orders: Celery, connection: Connection
) -> None:
    enqueue_deposit()
    enqueue(orders, PLACE, "o1")
    assert relay_once(bank) == 1
    assert by_key(connection) == {"a1": ("published", "bank"), "o1": ("pending", "orders")}
    assert relay_once(orders) == 1
    (message,) = queues.drained(orders)
    assert message.headers[SERVICE_HEADER] == "orders"
    assert queues.keys(queues.drained(bank)) == ["a1"]


def test_a_relay_declares_no_queue_that_its_application_does_not_have(
    bank: Celery, orders: Celery, connection: Connection
) -> None:
    """As Celery would, which makes missing queues by default, and makes classic ones."""
    older = application("orders", task_create_missing_queues=True)
    new = "orders-new-" + orders.conf.task_default_queue
    orders.conf.task_queues.append(quorum_queue(new, dead_letter_queue=f"{new}-dead"))
    orders.amqp.__dict__.pop("queues", None)
    enqueue(orders, PLACE, "o1", queue=new)
    try:
        relay = Relay(older)
        assert relay.run_once().refused == 1  # before the deploy has reached it
        assert relay.run_once().published == 0
        relay.close()
        assert new not in older.amqp.queues
        assert not exists(older, new)
        make_due(connection)
        assert relay_once(orders) == 1
        with orders.connection_for_write() as broker:  # as it is declared, with all its arguments
            orders.amqp.queues[new](broker.default_channel).declare()
    finally:
        close_runtime(older)
        delete_queues(older)


def test_a_lane_is_published_by_the_application_of_its_first_row(
    bank: Celery, orders: Celery, connection: Connection
) -> None:
    enqueue(orders, DEPOSIT, "o1", ordering_key="lane")
    enqueue(bank, DEPOSIT, "a1", ordering_key="lane")
    assert relay_once(bank) == 0
    assert relay_once(orders) == 1
    assert by_key(connection) == {"o1": ("published", "orders"), "a1": ("pending", "bank")}
    assert relay_once(orders) == 0
    assert relay_once(bank) == 1


def test_events_for_external_consumers_are_published_by_their_application(
    bank: Celery, orders: Celery, connection: Connection
) -> None:
    with runtime_of(orders).engine.begin() as transaction:
        publish(transaction, "order.placed", {}, exchange="amq.topic", app=orders)
    assert relay_once(bank) == 0
    assert relay_once(orders) == 1


def test_events_for_external_consumers_wait_behind_those_of_their_own_application_alone(
    bank: Celery, orders: Celery, connection: Connection
) -> None:
    """The ordering key is a customer's number; the other application's relay is away."""
    for app in (orders, bank):
        with runtime_of(app).engine.begin() as transaction:
            publish(transaction, "order.placed", {}, exchange="amq.topic", ordering_key="customer-7", app=app)
    assert relay_once(bank) == 1
    assert {(row.service, row.status) for row in op.outbox(connection)} == {
        ("orders", "pending"),
        ("bank", "published"),
    }


def test_a_relay_reads_nothing_of_the_rows_of_another_application(bank: Celery, connection: Connection) -> None:
    connection.execute(
        text("""
            INSERT INTO idempotency.outbox (message_id, tenant, task, key, fingerprint, message, queue, origin, service,
                                            ordering_key)
            SELECT n, 'default', 'place', n, 'v1:f', '{}', 'orders', 'enqueue', CASE WHEN n % 3 > 0 THEN 'orders' END,
                   CASE WHEN n % 10 = 0 THEN n::text END
            FROM generate_series(1, 20000) n
        """)
    )
    enqueue_deposit()
    enqueue_deposit(ordering_key="lane", idempotency_key="a2")
    reserving = {"service": "bank", "batch": 200, "seconds": 30.0, "silent": []}
    assert rows_read(bank, outbox._RESERVE_ROWS, **reserving) <= 2
    assert rows_read(bank, outbox._RESERVE_LANES, **reserving) <= 2
    adopting = {"service": "bank", "batch": 1000, "tasks": [DEPOSIT], "queues": [bank.conf.task_default_queue]}
    assert rows_read(bank, ADOPT.batch, **adopting) <= 2


# ---------------------------------------------------------------- rows of schema 0011


@pytest.mark.parametrize("lane", [None, "lane"], ids=["without order", "ordered"])
def test_a_row_without_a_name_is_adopted_by_the_application_that_knows_its_task(
    bank: Celery, orders: Celery, connection: Connection, lane: str | None
) -> None:
    write_as_0011(connection, orders, PLACE, "o1", lane)
    assert relay_once(bank) == 0
    assert by_key(connection) == {"o1": ("pending", None)}
    assert relay_once(orders) == 1
    assert by_key(connection) == {"o1": ("published", "orders")}


def test_a_row_without_a_name_that_was_published_before_is_looked_for(
    bank: Celery, orders: Celery, connection: Connection
) -> None:
    write_as_0011(connection, orders, PLACE, "o1")
    connection.execute(
        text("UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp() - interval '1 day'")
    )
    assert resend_lost(bank).resent == 0
    assert resend_lost(orders).resent == 1


def test_a_record_without_a_name_is_that_of_whoever_claims_it(
    bank: Celery, orders: Celery, connection: Connection, record: op.Record
) -> None:
    connection.execute(text(OLD_CLAIM), {"task": DEPOSIT, "key": "a1", "message": op.MESSAGE})
    claimed = op.claim(connection, op.operation(b.deposit, "a1"))
    assert not isinstance(claimed, Busy | Completed | Failed | Foreign)
    assert record("a1").service == "bank"


def test_a_record_without_a_name_is_recovered_by_an_application_that_knows_its_task(
    bank: Celery, orders: Celery, connection: Connection, record: op.Record
) -> None:
    connection.execute(text(OLD_CLAIM), {"task": PLACE, "key": "o1", "message": op.MESSAGE})
    assert maintenance.recover(bank) == 0
    assert maintenance.recover(orders) == 1
    assert (record("o1").status, record("o1").service) == ("released", "orders")
    assert by_key(connection) == {"o1": ("pending", "orders")}


def test_a_record_without_a_name_is_purged_by_any_application(
    bank: Celery, connection: Connection, record: op.Record
) -> None:
    """Its task may be one that no application has any more."""
    connection.execute(text(OLD_CLAIM), {"task": "retired", "key": "a1", "message": op.MESSAGE})
    connection.execute(text(OLD_END), {"key": "a1"})
    assert maintenance.purge(bank) == 1
    assert record("a1") is None


def test_a_row_without_a_name_is_left_to_the_application_that_has_its_queue(
    bank: Celery, orders: Celery, connection: Connection
) -> None:
    """Both import the same tasks."""
    write_as_0011(connection, bank, DEPOSIT, "a1")
    assert relay_once(orders) == 0
    assert by_key(connection) == {"a1": ("pending", None)}
    assert relay_once(bank) == 1


def test_a_row_without_a_name_that_postgres_refuses_to_change_stops_no_other(
    bank: Celery, connection: Connection
) -> None:
    connection.execute(
        text("""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused'; END $$;
        CREATE TRIGGER refuse BEFORE UPDATE ON idempotency.outbox FOR EACH ROW
        WHEN (OLD.key = 'bad') EXECUTE FUNCTION refuse()""")
    )
    try:
        for key in ("bad", "a1"):
            write_as_0011(connection, bank, DEPOSIT, key)
        enqueue_deposit(idempotency_key="a2")
        assert relay_once(bank) == 2
        assert by_key(connection) == {
            "bad": ("pending", None),
            "a1": ("published", "bank"),
            "a2": ("published", "bank"),
        }
    finally:
        connection.execute(text("DROP FUNCTION refuse() CASCADE"))


def test_a_record_without_a_name_is_left_to_the_application_that_has_its_queue(
    bank: Celery, orders: Celery, connection: Connection, record: op.Record
) -> None:
    connection.execute(text(OLD_CLAIM), {"task": DEPOSIT, "key": "a1", "message": op.MESSAGE})
    connection.execute(text("UPDATE idempotency.records SET queue = :queue"), {"queue": bank.conf.task_default_queue})
    assert maintenance.recover(orders) == 0
    assert maintenance.recover(bank) == 1
    assert record("a1").service == "bank"


# ---------------------------------------------------------------- operations


def test_a_key_of_another_application_is_refused_and_kept_for_a_person(
    bank: Celery, orders: Celery, deliveries: Deliveries, connection: Connection, entries: op.Entries, record: op.Record
) -> None:
    assert deliveries.deliver(b.deposit, "a1").state == "SUCCESS"
    before = record("a1")
    outcome = Deliveries(orders).deliver(orders.tasks[DEPOSIT], "a1")
    assert isinstance(outcome.value, ServiceMismatch)
    assert entries("a1") == 1
    assert record("a1") == before
    (letter,) = op.dead_letters(connection)
    assert (letter.reason, letter.consumer_service, letter.key) == ("service_mismatch", "orders", "a1")


def test_a_duplicate_of_another_application_is_not_acknowledged_because_of_a_hint(
    bank: Celery, orders: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    id = op.operation(b.deposit, "a1")
    fingerprint = b.fingerprint_of("a1")
    op.started(connection, id, fingerprint=fingerprint)
    assert deliveries.deliver(b.deposit, "a1").state == "IGNORED"  # counted, and the hint says so
    assert deliveries.deliver(b.deposit, "a1").state == "IGNORED"
    outcome = Deliveries(orders).deliver(orders.tasks[DEPOSIT], "a1")
    assert isinstance(outcome.value, ServiceMismatch)
    assert [letter.consumer_service for letter in op.dead_letters(connection)] == ["orders"]


def test_a_sweep_leaves_alone_what_another_application_has(
    bank: Celery, orders: Celery, connection: Connection, record: op.Record
) -> None:
    expired = op.expired(connection, op.operation(b.deposit, "a1"))
    assert maintenance.recover(orders) == 0
    assert record(expired.id.key).status == "started"
    assert maintenance.recover(bank) == 1


def test_what_the_broker_has_lost_is_resent_by_its_application(
    bank: Celery, orders: Celery, connection: Connection
) -> None:
    enqueue_deposit()
    assert relay_once(bank) == 1
    queues.drained(bank)
    connection.execute(text("UPDATE idempotency.outbox SET published_at = published_at - interval '1 day'"))
    assert resend_lost(orders).resent == 0
    assert resend_lost(orders, lambda _: 0).resent == 0
    assert by_key(connection) == {"a1": ("published", "bank")}
    assert resend_lost(bank).resent == 1


def test_a_row_whose_key_another_application_has_is_not_settled_by_its_record(
    bank: Celery, orders: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """Its message is lost before a worker could refuse it."""
    assert deliveries.deliver(b.deposit, "a1").state == "SUCCESS"
    enqueue(orders, DEPOSIT, "a1")
    assert relay_once(orders) == 1
    queues.drained(orders)
    connection.execute(text("UPDATE idempotency.outbox SET published_at = published_at - interval '1 day'"))
    resend_lost(orders)
    (letter,) = op.dead_letters(connection)
    assert (letter.reason, letter.consumer_service, letter.message_id) == (
        "service_mismatch",
        "orders",
        op.outbox(connection)[0].message_id,
    )


def test_an_application_purges_by_its_own_retentions_alone(
    bank: Celery, orders: Celery, connection: Connection, record: op.Record
) -> None:
    op.completed(connection, op.operation(b.deposit, "a1"))
    connection.execute(text("UPDATE idempotency.records SET expires_at = clock_timestamp() - interval '1 s'"))
    assert maintenance.purge(orders) == 0
    assert record("a1") is not None
    assert maintenance.purge(bank) == 1


def test_a_purge_keeps_the_record_while_another_application_has_accepted_its_key(
    bank: Celery, orders: Celery, deliveries: Deliveries, connection: Connection, record: op.Record
) -> None:
    """Its workers are away for a day, and the broker is wiped. Its relay then says that the key is used."""
    assert deliveries.deliver(b.deposit, "a1").state == "SUCCESS"
    enqueue(orders, DEPOSIT, "a1")
    assert relay_once(orders) == 1
    connection.execute(text("UPDATE idempotency.outbox SET published_at = published_at - interval '2 days'"))
    connection.execute(text("UPDATE idempotency.records SET expires_at = clock_timestamp() - interval '1 s'"))
    queues.drained(orders)
    assert maintenance.purge(bank) == 0
    resend_lost(orders)
    assert [letter.reason for letter in op.dead_letters(connection)] == ["service_mismatch"]


def test_a_letter_alerts_the_application_that_it_belongs_to(
    bank: Celery, orders: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    deliveries.deliver(b.failing, "a1", "permanent")
    assert len(op.dead_letters(connection)) == 1
    assert alerts.run_once(orders) == 0
    assert alerts.run_once(bank) == 1


# ---------------------------------------------------------------- what people see and change


def test_commands_show_what_their_application_has_and_others_when_named(
    bank: Celery, orders: Celery, deliveries: Deliveries, run: Callable[..., Result]
) -> None:
    deliveries.deliver(b.failing, "a1", "permanent")
    Deliveries(orders).deliver(orders.tasks[b.failing.name], "o1", "permanent")

    def keys(*arguments: str) -> list[str]:
        return [row["key"] for row in json.loads(run(*arguments, "--json").stdout)]

    assert keys("list") == ["a1"]
    assert keys("list", "--service", "orders") == ["o1"]
    assert keys("dead-letters", "list") == ["a1"]
    assert keys("dead-letters", "list", "--service", "orders") == ["o1"]
    refused = run("show", "o1", refused=True)
    assert str(refused.exception) == "key 'o1': no operation of 'bank' has it; this application has: orders"
    assert json.loads(run("show", "o1", "--service", "orders", "--json").stdout)["record"]["service"] == "orders"


def test_a_letter_of_another_application_is_replayed_only_when_it_is_named(
    bank: Celery, orders: Celery, run: Callable[..., Result], connection: Connection, record: op.Record
) -> None:
    Deliveries(orders).deliver(orders.tasks[b.failing.name], "o1", "permanent")
    (letter,) = op.dead_letters(connection)
    for command in (("show",), ("replay",)):
        refused = run("dead-letters", *command, letter.id, refused=True)
        assert str(refused.exception) == (
            f"dead letter {letter.id}: is of the application 'orders'; name it with --service"
        )
    run("dead-letters", "replay", "--task", b.failing.name, "--yes")
    assert record("o1").status == "failed"
    run("dead-letters", "replay", letter.id, "--service", "orders", "--yes")
    assert record("o1").status == "released"
    assert [(row.origin, row.service) for row in op.outbox(connection)] == [("replay", "orders")]


def test_an_operation_of_another_application_is_not_changed(
    bank: Celery, orders: Celery, run: Callable[..., Result], connection: Connection
) -> None:
    op.started(connection, op.operation(b.deposit, "o1"))
    connection.execute(text("UPDATE idempotency.records SET service = 'orders'"))
    enqueue_deposit(idempotency_key="o1")  # of the same tenant, task and key
    for command in ("release", "cancel"):
        refused = run(command, "o1", "--reason", "r", refused=True)
        assert "is an operation of the application 'orders', not of 'bank'" in str(refused.exception)


def test_a_refused_key_of_another_application_cannot_be_replayed(
    bank: Celery, orders: Celery, deliveries: Deliveries, connection: Connection, run: Callable[..., Result]
) -> None:
    Deliveries(orders).deliver(orders.tasks[b.failing.name], "a1", "permanent")
    deliveries.deliver(b.failing, "a1", "permanent")
    (refusal,) = [letter for letter in op.dead_letters(connection) if letter.reason == "service_mismatch"]
    refused = run("dead-letters", "replay", refusal.id, refused=True)
    assert "its key is used by another application" in str(refused.exception)
    assert {(row.key, row.status) for row in op.dead_letters(connection)} == {("a1", "open")}


def test_a_handle_does_not_read_the_result_of_another_application(
    bank: Celery, orders: Celery, deliveries: Deliveries
) -> None:
    deliveries.deliver(b.deposit, "a1")
    id = op.operation(b.deposit, "a1")
    assert Handle(bank, id).status() == "completed"
    assert Handle(orders, id).status() == "not_found"


# ---------------------------------------------------------------- who shares the database


def sharers(run: Callable[..., Result]) -> list[tuple[str | None, int, bool]]:
    seen = json.loads(run("status", "--json").stdout)["other_services"]
    return [(row["service"], row["due"], row["has_relay"]) for row in seen]


def test_status_names_the_applications_that_share_the_database(
    bank: Celery, orders: Celery, connection: Connection, run: Callable[..., Result]
) -> None:
    assert sharers(run) == []
    enqueue(orders, PLACE, "o1")
    enqueue(orders, PLACE, "o2", ordering_key="lane")
    enqueue(orders, PLACE, "later", countdown=60)
    write_as_0011(connection, orders, PLACE, "old")
    connection.execute(text(OLD_CLAIM), {"task": PLACE, "key": "orphan", "message": op.MESSAGE})
    assert sharers(run) == [("orders", 2, False), (None, 2, False)]
    relay = SignOfLife(orders, "relay")
    assert relay.sign()
    assert sharers(run) == [("orders", 2, True), (None, 2, False)]
    shown = run("status").stdout
    assert "the application orders shares the database: its relay is running, 2 rows due" in shown
    assert "rows without a service, whose tasks this application does not know: 2" in shown


def test_rows_of_an_application_without_a_relay_are_an_alarm(
    bank: Celery, orders: Celery, connection: Connection
) -> None:
    enqueue(orders, PLACE, "o1")
    write_as_0011(connection, orders, PLACE, "old")
    settings = settings_of(bank)

    def names() -> set[str]:
        with monitoring_connection(settings) as monitoring:
            return {
                alarm.name for alarm in alarms.lasting(overview.take_snapshot(monitoring, bank, settings), settings)
            }

    assert names() == {"no_relay/orders", "unnamed_rows"}
    SignOfLife(orders, "relay").sign()
    assert names() == {"unnamed_rows"}


def test_the_doctor_detects_applications_that_share_what_they_must_not(
    bank: Celery, orders: Celery, connection: Connection
) -> None:
    ours, theirs = bank.conf.task_default_queue, orders.conf.task_default_queue
    SignOfLife(orders, "worker", "w1", queues=lambda: [theirs, ours]).sign()
    namesake = application("bank")
    SignOfLife(namesake, "worker", "w2", queues=lambda: ["elsewhere"]).sign()
    close_runtime(namesake)
    found = {finding.subject: finding for finding in doctor(bank)}
    assert found["application orders"].level is Level.OK
    shared = [f for f in doctor(bank) if f.subject == f"queue {ours}" and f.level is Level.REFUSAL]
    assert [f.found for f in shared] == ["also consumed by w1 of the application orders"]
    assert found["idempotency_service bank"].level is Level.WARNING
    assert "w2 has this name, and consumes elsewhere" in found["idempotency_service bank"].found


def test_processes_of_the_same_name_do_not_replace_each_other(
    bank: Celery, orders: Celery, connection: Connection
) -> None:
    for app in (bank, orders):
        life = SignOfLife(app, "relay", "relay@host")
        life._fields["pid"] = os.getpid() + (app is orders)
        assert life.sign()
    query = "SELECT service FROM idempotency.processes ORDER BY service"
    assert connection.execute(text(query)).scalars().all() == ["bank", "orders"]
