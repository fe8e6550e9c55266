"""What an application meets in its first year: foreign headers, a full Postgres, deploys, shared servers, hasty operators."""

from __future__ import annotations

import calendar
import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from kombu import Connection as BrokerConnection
from kombu import Queue
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool
from typer.testing import CliRunner

import services
from idempotency import NotSent, discards, keys, operators, publish, records
from idempotency.cli import cli
from idempotency.dead_letter_queue import DeadLetterConsumer
from idempotency.discards import DiscardRefused
from idempotency.keys import OperationId
from idempotency.lease import Hint
from idempotency.message import FINGERPRINT_HEADER, KEY_HEADER, TENANT_HEADER, VERSION_HEADER, Message
from idempotency.operators import Change
from idempotency.reconcile import reconcile
from idempotency.relay import Relay, Relayed
from idempotency.runtime import Runtime
from tests import bank as b
from tests import operations as op
from tests.dead_messages import bury, die, headers, waiting
from tests.dead_messages import publish as publish_raw
from tests.deliveries import Deliveries
from tests.outside import OutsideWorld
from tests.processes import Worker, eventually


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    with engine.connect() as connection:
        yield connection


@pytest.fixture
def consumer(bank: Celery) -> Iterator[DeadLetterConsumer]:
    consumer = DeadLetterConsumer(bank)
    yield consumer
    consumer.close()


def test_a_header_that_the_client_cannot_read_becomes_a_dead_letter(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timestamp in milliseconds (a producer in JavaScript, say): py-amqp would raise before there is a message."""
    consumer.run_once()
    with monkeypatch.context() as patched:
        patched.setattr(calendar, "timegm", lambda _: 1_763_784_000_000)
        bury(bank, ["foreign"], [{"sent-at": datetime.now(UTC)}])
    bury(bank, ["a1", "a2", "a3"])
    assert consumer.run_once() == 4
    assert len(op.dead_letters(connection)) == 4
    assert waiting(bank) == 0


def test_a_dead_letter_queue_declared_otherwise_is_consumed(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    """A queue that exists otherwise: a classic one, say, or one with another limit."""
    name = f"{bank.conf.task_default_queue}-dead"
    with bank.connection_for_write() as broker:
        channel = broker.channel()
        Queue(name, routing_key=name, durable=True)(channel).declare()
    bury(bank, ["a1", "a2"])
    assert consumer.run_once() == 2
    assert len(op.dead_letters(connection)) == 2
    assert waiting(bank) == 0


def test_one_record_that_is_refused_stops_no_bulk_replay(
    bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """Refused by a trigger here; by a lock that is held for longer than a lease, elsewhere."""
    for account in ("a1", "a2", "a3"):
        deliveries.deliver(b.failing, account, "permanent")
    connection.execute(
        text("""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'frozen account'; END $$;
        CREATE TRIGGER refuse BEFORE UPDATE ON idempotency.records FOR EACH ROW
        WHEN (NEW.key = 'a2') EXECUTE FUNCTION refuse()""")
    )
    arguments = ["dead-letters", "replay", "--operation", b.failing.name, "--json", "-A", "tests.bank"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 1
    said = json.loads(result.stdout)
    assert (len(said["replayed"]), len(said["refused"])) == (2, 1)
    assert "frozen account" in said["refused"][0]["why"]
    assert [(letter.key, letter.status) for letter in op.dead_letters(connection)] == [
        ("a1", "replayed"),
        ("a2", "open"),
        ("a3", "replayed"),
    ]


@pytest.fixture
def crowded(bank: Celery, engine: Engine, database: str) -> Iterator[Engine]:
    """The application, under a role limited to two connections; a connection of this engine takes the last one."""
    role = f"app_{uuid4().hex[:8]}"
    with engine.connect() as connection:
        owner = connection.execute(text("SELECT current_user")).scalar_one()
        connection.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD 'secret' CONNECTION LIMIT 2"))
        connection.execute(text(f'GRANT "{owner}" TO {role}'))
    limited = make_url(database).set(username=role, password="secret")
    Runtime.discard(bank)
    bank.conf.update(idempotency_database_url=limited.render_as_string(hide_password=False))
    other = create_engine(limited, poolclass=NullPool)
    yield other
    other.dispose()
    Runtime.discard(bank)
    with engine.connect() as connection:
        connection.execute(text(f"DROP ROLE {role}"))


def test_a_postgres_that_is_full_uses_no_attempt(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Any, entries: Any, crowded: Engine
) -> None:
    """Claims have their connections, bodies get none (53300)."""
    id = OperationId("default", b.deposit.name, "a1")
    with Runtime.of(bank).autocommit() as own:
        own.exec_driver_sql("SELECT 1")  # the pool of claims has its connection
    with crowded.connect():
        for attempt in range(1, 7):
            deliveries.deliver(b.deposit, "a1", origin="retry" if attempt > 1 else None)
            assert (record("a1").status, record("a1").attempts) == ("released", 0)
            op.age(connection, id, available_at=-1)
    assert deliveries.deliver(b.deposit, "a1", origin="retry").state == "SUCCESS"  # Postgres has room again
    assert (record("a1").status, record("a1").attempts) == ("completed", 1)
    assert entries("a1") == 1


def test_a_retry_that_old_code_cannot_bind_comes_back(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, engine: Engine, record: Any
) -> None:
    """A rolling deploy (or a rollback) with a new parameter: newer code has charged and been released, and an old worker
    gets the retry. It comes back; after the time of grace it is a letter that can be replayed.
    """
    bank.conf.update(idempotency_unknown_task_grace=3600.0)
    id = OperationId("default", b.deposit.name, "a1")
    fingerprint = keys.fingerprint({"account": "a1", "note": "new"})
    sent = headers(**{KEY_HEADER: "a1", TENANT_HEADER: "default", FINGERPRINT_HEADER: fingerprint, VERSION_HEADER: 1})
    body = json.dumps([[], {"account": "a1", "note": "new"}, {}])
    queue = bank.conf.task_default_queue
    message = Message(sent, body, {"queue": queue}, {})
    held = op.started(connection, id, fingerprint=fingerprint, message=message.to_text(), queue=queue)
    entry = {"kind": "effect", "state": "begun", "key": "k", "number": 1, "args": "v1:x", "position": 1}
    assert records.begin_effect(connection, held, "capture", entry | {"ended_at": None}) is not None
    assert records.release(connection, held, delay=0.0, error=op.ERROR)
    marks = op.sent(connection, id)

    die(bank, consumer, body, headers=sent | marks)  # an old worker
    consumer.run_once()  # an old relay
    assert op.dead_letters(connection) == []
    (row,) = op.outbox(connection)
    assert (row.status, row.refusals) == ("pending", 1)

    connection.execute(
        text("UPDATE idempotency.outbox SET status = 'published', first_refused_at = now() - interval '1 day'")
    )
    die(bank, consumer, body, headers=sent | marks)  # the deploy took longer than the time of grace
    consumer.run_once()
    (letter,) = op.dead_letters(connection)
    assert (letter.reason, letter.operation, letter.generation, letter.status) == (
        "invalid_arguments", id.operation, None, "open",
    )  # fmt: skip
    assert record("a1").status == "released"

    # the deploy is over: every process knows `note` from here on
    connection.execute(text("UPDATE idempotency.outbox SET published_at = clock_timestamp() - interval '1 day'"))
    connection.execute(text("UPDATE idempotency.records SET available_at = clock_timestamp() - interval '1 day'"))
    assert reconcile(bank).resent == 0
    assert [(row.status, row.taken) for row in op.outbox(connection)] == [("published", True)]
    operators.replay(bank, letter.id, Change("ann", "the deploy is over"))
    assert [(row.status, row.origin) for row in op.outbox(connection)] == [
        ("published", "retry"),
        ("pending", "replay"),
    ]
    assert record("a1").status == "released"


def test_an_application_that_shares_redis_runs_its_own_messages(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Any, entries: Any, redis_url: str,
    servers: services.Services,
) -> None:  # fmt: skip
    """Staging beside production, or a database for each region: what runs there says nothing about what runs here."""
    theirs = servers.create_database(f"theirs_{uuid4().hex[:8]}")
    b.prepare(theirs)
    ours = bank.conf.idempotency_database_url

    Runtime.discard(bank)
    bank.conf.update(idempotency_database_url=theirs)
    runtime = Runtime.of(bank)
    id = OperationId("default", b.deposit.name, "a1")
    fingerprint = keys.fingerprint({"account": "a1"})
    their_delivery = uuid4().hex
    assert runtime.leases.take(id, their_delivery, fingerprint) is Hint.FREE  # as their worker does, and then claims
    with runtime.autocommit() as there:
        op.started(there, id, token=their_delivery, fingerprint=fingerprint)
    assert deliveries.deliver(b.deposit, "a1").state == "IGNORED"  # a duplicate there: counted there, and guarded

    Runtime.discard(bank)
    bank.conf.update(idempotency_database_url=ours)
    assert deliveries.deliver(b.deposit, "a1").state == "SUCCESS"  # the only message here
    assert record("a1").status == "completed"
    assert entries("a1") == 1
    servers.drop_database(str(make_url(theirs).database))


def test_events_for_a_missing_exchange_cost_the_relay_few_connections(
    bank: Celery, connection: Connection, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its refusal closes the channel: once for the exchange, and not for each of the events."""
    connected: list[object] = []
    connect = BrokerConnection.connect
    monkeypatch.setattr(BrokerConnection, "connect", lambda self: (connected.append(self), connect(self))[1])
    with engine.begin() as own:
        for number in range(200):
            publish(own, "order.paid", {"order": number}, exchange="misspelt", app=bank)
        b.deposit.enqueue(own, "a1")
    relay = Relay(bank)
    assert relay.run_once() == Relayed(published=0, failed=200)
    assert relay.run_once() == Relayed(published=1, failed=0)
    relay.close()
    assert len(connected) < 10
    (payment,) = [row for row in op.outbox(connection) if row.operation == b.deposit.name]
    assert payment.status == "published"


def test_a_session_cannot_be_set_to_autocommit(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Any, entries: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """COMMIT is refused in this spelling too: the execution option that VACUUM or a long report is run with."""

    def body(account: str) -> None:
        task = bank.tasks[b.deposit.name]
        task.session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        task.session.execute(b.INSERT, {"account": account, "amount": 1})
        raise ValueError("again")

    monkeypatch.setattr(bank.tasks[b.deposit.name], "run", body)
    deliveries.deliver(b.deposit, "a1")
    assert (record("a1").status, record("a1").error_code) == ("failed", "session_not_yours")
    assert entries("a1") == 0


# In a separate process, because the application reads its addresses when it is imported.
TWO_KEYS = """
import json
import threading
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker
from celeryconfig import environment
engine = create_engine(environment.database_url.get_secret_value())
from idempotency import schema
from tasks.migrate import migrate
schema.migrate(engine); migrate(engine)
from tasks import payments
from idempotency import StoredRefusal
charges, answers, second = [], [], []

class Provider:
    def capture(self, *, payment_id, customer_id, amount, currency, idempotency_key):
        if payment_id == "declined":
            raise StoredRefusal("the card was declined", "card_declined")
        charges.append((payment_id, idempotency_key))
        if len(charges) == 1:  # slow: meanwhile the other call is made
            other = threading.Thread(target=call, args=("p1", "p1-again"))
            other.start(); other.join(60)
        return {"id": f"ch_{len(charges)}", "amount": amount, "currency": currency, "status": "succeeded"}
    def find_capture(self, **_):
        raise AssertionError("not asked")

def call(payment_id, key):
    result = payments.capture_payment.apply(kwargs={"payment_id": payment_id}, idempotency_key=key)
    answers.append((key, result.state))

payments.gateway = Provider()
with sessionmaker(engine).begin() as session:
    for id in ("p1", "declined"):
        payments.submit_payment(session, payment_id=id, customer_id="c1", amount=1000, currency="EUR")
call("p1", "p1")
call("declined", "declined-again")
with engine.connect() as c:
    rows = c.exec_driver_sql("SELECT id, status FROM payments ORDER BY id").all()
    records = c.exec_driver_sql("SELECT key, status, error_code FROM idempotency.records WHERE operation LIKE 'payments%%' ORDER BY key").all()
print(json.dumps({"charges": len(charges), "keys": len(set(charges)), "answers": answers, "payments": [list(r) for r in rows], "records": [list(r) for r in records]}))
"""


def test_a_payment_that_is_called_under_two_keys_is_not_completed_twice(
    servers: services.Services, environment: dict[str, str]
) -> None:
    """Two keys are two operations, and the provider is called for both. The second charge is found; a failure is told."""
    database = servers.create_database(f"shop_{uuid4().hex[:8]}")
    done = subprocess.run(
        [sys.executable, "-c", TWO_KEYS],
        env=environment | {"DATABASE_URL": database},
        capture_output=True, check=False, timeout=120, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    servers.drop_database(str(make_url(database).database))
    assert (found["charges"], found["keys"]) == (2, 2)
    # one of them did not come to its effect in its second attempt
    assert sorted(record[2] or record[1] for record in found["records"] if record[0] != "declined-again") == [
        "completed",
        "unfinished",
    ]
    assert found["payments"] == [["declined", "failed"], ["p1", "captured"]]


def test_no_operation_completes_over_a_charge_that_its_body_passed_over(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Any, outside: OutsideWorld,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A deploy renames an effect between two attempts: it is called under another key, and a person is told of both."""
    task = bank.tasks[b.transfer.name]
    names = iter(["capture", "charge"])

    def body(account: str, url: str) -> Any:
        name = next(names)
        answer = task.effect(name, b.call, url)
        if name == "capture":
            raise ValueError("the commit failed")
        task.session.execute(b.INSERT, {"account": account, "amount": answer["amount"]})
        return answer

    monkeypatch.setattr(task, "run", body)
    id = OperationId("default", task.name, "a1")
    deliveries.deliver(task, "a1", outside.url)
    op.age(connection, id, available_at=-1)
    assert deliveries.deliver(task, "a1", outside.url, origin="retry").state == "FAILURE"
    assert (record("a1").status, record("a1").error_code) == ("failed", "unfinished")
    assert {name: entry["state"] for name, entry in record("a1").effects.items()} == {
        "capture": "done",
        "charge": "done",
    }
    assert sorted(outside.acts.values()) == [1, 1]  # a name is part of the key: a deploy must keep it
    (letter,) = op.dead_letters(connection)
    assert (letter.reason, "'capture'" in letter.last_error) == ("unfinished", True)


def test_an_operation_that_says_nothing_charged_is_unfinished_over_its_charge(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Any, outside: OutsideWorld,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Attempt 1 charges and its commit fails; the order is cancelled; attempt 2 returns early."""
    task = bank.tasks[b.transfer.name]
    cancelled: list[int] = []

    def body(account: str, url: str) -> Any:
        if cancelled:
            return {"status": "cancelled, nothing charged"}
        task.effect("capture", b.call, url)
        raise ValueError("the commit failed")

    monkeypatch.setattr(task, "run", body)
    deliveries.deliver(task, "a1", outside.url)
    cancelled.append(1)
    op.age(connection, OperationId("default", task.name, "a1"), available_at=-1)
    assert deliveries.deliver(task, "a1", outside.url, origin="retry").state == "FAILURE"
    assert (record("a1").error_code, record("a1").effects["capture"]["state"]) == ("unfinished", "done")
    assert sum(outside.acts.values()) == 1
    assert [letter.reason for letter in op.dead_letters(connection)] == ["unfinished"]


def test_the_letter_of_an_unknown_effect_is_not_discarded(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Any, outside: OutsideWorld
) -> None:
    """The purge would forget the effect, and the next call would begin as if there was none."""
    task, id = bank.tasks[b.transfer.name], OperationId("default", b.transfer.name, "a1")
    outside.script = ["fail after"] * 10  # charged, and every answer is lost
    for attempt in range(10):
        if record("a1") is not None and record("a1").status == "failed":
            break
        deliveries.deliver(task, "a1", outside.url, origin="retry" if attempt else None)
        if record("a1").status == "released":
            op.age(connection, id, available_at=-1)
    assert record("a1").error_code == "effect_unknown"
    (letter,) = op.dead_letters(connection)
    with Runtime.of(bank).engine.begin() as own:
        discards.request(own, discards.Person("ann", "admin"), letter.id, "old")
    with (
        pytest.raises(DiscardRefused, match="its outcome is not known; settle it first"),
        Runtime.of(bank).engine.begin() as own,
    ):
        discards.approve(own, discards.Person("ben", "admin"), letter.id)
    assert [letter.status for letter in op.dead_letters(connection)] == ["open"]


def test_a_call_that_was_never_made_leaves_nothing_unknown(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open circuit: the effect is begun before its function can say that nothing was sent."""
    task, id = bank.tasks[b.transfer.name], OperationId("default", b.transfer.name, "a1")

    keys_used: list[str] = []

    def circuit_open(url: str, *, idempotency_key: str) -> Any:
        keys_used.append(idempotency_key)
        raise NotSent(5.0, "circuit open")

    monkeypatch.setattr(b, "call", circuit_open)
    deliveries.deliver(task, "a1", "http://127.0.0.1:1")
    op.age(connection, id, opened_at=-13 * 3600)
    for _ in range(10):
        if record("a1").status == "failed":
            break
        op.age(connection, id, available_at=-1)
        deliveries.deliver(task, "a1", "http://127.0.0.1:1", origin="retry")
    assert (record("a1").status, record("a1").error_code) == ("failed", "attempts_exhausted")
    assert connection.execute(text("SELECT code FROM failures")).scalars().all() == ["attempts_exhausted"]
    assert len(keys_used) > 1
    assert len(set(keys_used)) == 1  # nothing was sent under it


def test_a_header_that_the_client_cannot_read_ends_no_worker(
    bank: Celery, worker: Worker, connection: Connection, entries: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same header in a task queue."""
    with monkeypatch.context() as patched:
        patched.setattr(calendar, "timegm", lambda _: 1_763_784_000_000)
        publish_raw(bank, headers=headers(**{"sent-at": datetime.now(UTC)}))
    b.deposit.delay("a1")
    assert eventually(lambda: entries("a1") == 1, what="the next message to be worked on")
    assert worker.process.poll() is None
