"""Bad outcomes that happen today: each test passes because of the defect that its docstring names."""

from __future__ import annotations

import calendar
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from amqp.exceptions import PreconditionFailed
from celery import Celery
from kombu import Connection as BrokerConnection
from kombu import Queue
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool
from typer.testing import CliRunner

import services
from idempotency import Defer, alarms, discards, keys, operators, overview, presence, publish, records, settings
from idempotency.cli import cli
from idempotency.dead_letter_queue import DeadLetterConsumer
from idempotency.dead_letters import ReplayRefused
from idempotency.keys import OperationId
from idempotency.lease import Hint
from idempotency.maintenance import purge, recover
from idempotency.message import FINGERPRINT_HEADER, KEY_HEADER, TENANT_HEADER, VERSION_HEADER, Message
from idempotency.operators import Change, ChangeRefused
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


def test_a_header_that_the_client_cannot_read_stops_the_dead_letters(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timestamp in milliseconds (a producer in JavaScript, say): py-amqp raises before there is a message to hold."""
    consumer.run_once()
    with monkeypatch.context() as patched:
        patched.setattr(calendar, "timegm", lambda _: 1_763_784_000_000)
        bury(bank, ["foreign"], [{"sent-at": datetime.now(UTC)}])
    bury(bank, ["a1", "a2", "a3"])
    for _ in range(20):  # twice as often as any letter is tried
        with pytest.raises(ValueError, match="out of range"):
            consumer.run_once()
        consumer.close()  # as `run` does after each
    assert op.dead_letters(connection) == []
    assert waiting(bank) == 4


def test_a_dead_letter_queue_declared_otherwise_is_never_consumed(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    """Workers and the publisher live with a queue that exists otherwise (a classic one, another limit); this does not."""
    name = f"{bank.conf.task_default_queue}-dead"
    with bank.connection_for_write() as broker:
        channel = broker.channel()
        Queue(name, routing_key=name, durable=True)(channel).declare()
    bury(bank, ["a1", "a2"])
    for _ in range(3):
        with pytest.raises(PreconditionFailed):  # `run` says "broker_unavailable", for ever
            consumer.run_once()
        consumer.close()
    assert op.dead_letters(connection) == []
    assert waiting(bank) == 2


def test_one_record_that_is_refused_stops_the_rest_of_a_bulk_replay(
    bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """`_each` goes on after an IdempotencyError only: a trigger, or a lock held for longer than a lease, ends the command."""
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
    assert type(result.exception).__name__ in ("ProgrammingError", "InternalError"), result.exception
    assert result.stdout == ""  # and it does not say what it has done
    assert [(letter.key, letter.status) for letter in op.dead_letters(connection)] == [
        ("a1", "replayed"),
        ("a2", "open"),
        ("a3", "open"),
    ]


@pytest.fixture
def crowded(bank: Celery, engine: Engine, database: str) -> Iterator[Engine]:
    """The application under a role that may have two connections; whoever takes one by this engine fills Postgres."""
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


def test_a_postgres_that_was_full_ends_operations_that_never_ran(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Any, entries: Any, crowded: Engine
) -> None:
    """Claims have their connections, bodies get none (53300): each try is an attempt, and five take seconds."""
    id = OperationId("default", b.deposit.name, "a1")
    with Runtime.of(bank).autocommit() as own:
        own.exec_driver_sql("SELECT 1")  # the pool of claims has its connection
    with crowded.connect():
        for attempt in range(1, 6):
            deliveries.deliver(b.deposit, "a1", origin="retry" if attempt > 1 else None)
            assert record("a1").attempts == attempt
            op.age(connection, id, **({"available_at": -1} if attempt < 5 else {"locked_until": -1}))
    outcome = deliveries.deliver(b.deposit, "a1", origin="recover")  # Postgres has room again
    assert (outcome.state, outcome.value.code) == ("FAILURE", "attempts_exhausted")
    assert (record("a1").status, record("a1").error_code) == ("failed", "attempts_exhausted")
    assert connection.execute(text("SELECT account, code FROM failures")).all() == [("a1", "attempts_exhausted")]
    assert entries("a1") == 0


def test_a_retry_that_old_code_cannot_bind_is_stuck_and_its_letter_no_use(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, engine: Engine, record: Any
) -> None:
    """A rolling deploy (or a rollback) with a new parameter: `invalid_arguments` does not come back, and ends nothing.

    Newer code has charged and been released; an old worker gets the retry, an old relay stores it. After the deploy the
    letter cannot be replayed, reconcile does not send the row again, and `cancel` is refused over the effect.
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
    with pytest.raises(ReplayRefused, match="the operation is released in generation 1"):
        operators.replay(bank, letter.id, Change("ann", "the deploy is over"))
    with pytest.raises(ChangeRefused, match="has happened or may have"):
        operators.cancel(bank, operators.read(connection, id), Change("ann", "stuck"))
    with pytest.raises(ChangeRefused, match="can only release what is started"):
        operators.release(bank, operators.read(connection, id), Change("ann", "stuck"))
    assert recover(bank) == 0
    assert record("a1").status == "released"


def test_an_application_that_shares_redis_has_messages_acknowledged_unseen(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Any, entries: Any, redis_url: str,
    servers: services.Services,
) -> None:  # fmt: skip
    """The name of a lease holds tenant, task and key, and not the database: another one's guarded mark counts as ours.

    Staging beside production, or a database for each region: `delay()` here is acknowledged while it runs there.
    """
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
    assert deliveries.deliver(b.deposit, "a1").state == "IGNORED"  # the only message here
    assert record("a1") is None
    assert entries("a1") == 0
    assert op.outbox(connection) == op.dead_letters(connection) == []
    servers.drop_database(str(make_url(theirs).database))


def test_each_event_for_a_missing_exchange_costs_the_relay_a_connection(
    bank: Celery, connection: Connection, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its refusal closes the channel, and `publish` the connection: 80 rows a second here, fewer over TLS.

    They are due again each minute, without end. From some thousands on, the loop that also recovers and reconciles does
    nothing else, and a payment waits behind them all.
    """
    connected: list[object] = []
    connect = BrokerConnection.connect
    monkeypatch.setattr(BrokerConnection, "connect", lambda self: (connected.append(self), connect(self))[1])
    with engine.begin() as own:
        for number in range(200):
            publish(own, "order.paid", {"order": number}, exchange="misspelt", app=bank)
        b.deposit.enqueue(own, "a1")
    relay, _began = Relay(bank), time.monotonic()
    assert relay.run_once() == Relayed(published=0, failed=200)
    relay.close()
    assert len(connected) > 200
    (payment,) = [row for row in op.outbox(connection) if row.operation == b.deposit.name]
    assert payment.status == "pending"


def test_a_session_set_to_autocommit_leaves_its_rows_of_every_attempt(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Any, entries: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """COMMIT is refused in every spelling but this one: the execution option that VACUUM or a long report is run with."""

    def body(account: str) -> None:
        task = bank.tasks[b.deposit.name]
        task.session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        task.session.execute(b.INSERT, {"account": account, "amount": 1})
        raise ValueError("again")

    monkeypatch.setattr(bank.tasks[b.deposit.name], "run", body)
    id = OperationId("default", b.deposit.name, "a1")
    deliveries.deliver(b.deposit, "a1")
    op.age(connection, id, available_at=-1)
    deliveries.deliver(b.deposit, "a1", origin="retry")
    assert (record("a1").status, record("a1").attempts) == ("released", 2)
    assert entries("a1") == 2


def test_a_scheduled_operation_that_was_sent_again_raises_a_false_alarm(
    bank: Celery, connection: Connection, engine: Engine
) -> None:
    """Accepted a week ahead and due for seconds: after one refused publish its age counts from the day it was accepted."""
    with engine.begin() as own:
        b.deposit.enqueue(own, "a1", countdown=7 * 86400)
    connection.execute(
        text("""UPDATE idempotency.outbox SET created_at = clock_timestamp() - interval '7 days',
                available_at = clock_timestamp() - interval '1 second', attempts = 1""")  # a broker that restarted
    )
    given = settings.from_app(bank)
    with overview.looking(given) as looking:
        found = overview.look(looking, bank, given)
    (alarm,) = [each for each in alarms.lasting(found, given) if each.name.startswith("accepted/")]
    assert "has waited for 604" in alarm.found


# In a process of its own, because the application reads its addresses when it is imported.
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


def test_a_payment_that_is_called_under_two_keys_is_charged_twice(
    servers: services.Services, environment: dict[str, str]
) -> None:
    """`capture_payment` sees what another key has done only after that has ended: nothing on the payment says "begun".

    And `payment_failed` looks for the payment under the operation's key: under another one it stays pending for ever.
    """
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
    # the charge that the books do not have ends as completed: its second attempt did not come to its effect
    assert [record[:2] for record in found["records"] if record[0] != "declined-again"] == [
        ["p1", "completed"],
        ["p1-again", "completed"],
    ]
    assert found["payments"] == [["declined", "pending"], ["p1", "captured"]]


def test_an_operation_completes_over_a_charge_that_its_body_passed_over(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Any, outside: OutsideWorld,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A deploy renames an effect between two attempts: what was *begun* is missed by `complete`, what has *happened* is not."""
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
    assert deliveries.deliver(task, "a1", outside.url, origin="retry").state == "SUCCESS"
    assert record("a1").status == "completed"
    assert {name: entry["state"] for name, entry in record("a1").effects.items()} == {
        "capture": "done",
        "charge": "done",
    }
    assert sorted(outside.acts.values()) == [1, 1]  # two charges under two keys; the books have one
    assert op.dead_letters(connection) == []


def test_an_operation_that_says_nothing_charged_completes_over_its_charge(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Any, outside: OutsideWorld,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Attempt 1 charges and its commit fails; the order is cancelled; attempt 2 returns early. Nobody is told of the charge."""
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
    outcome = deliveries.deliver(task, "a1", outside.url, origin="retry")
    assert outcome.value == {"status": "cancelled, nothing charged"}
    assert (record("a1").status, record("a1").effects["capture"]["state"]) == ("completed", "done")
    assert sum(outside.acts.values()) == 1
    assert op.dead_letters(connection) == []


def test_a_discarded_unknown_effect_is_purged_and_called_anew(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Any, outside: OutsideWorld
) -> None:
    """`approve` asks nothing about an open effect; the purge forgets it, and the next call begins as if there was none."""
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
    with Runtime.of(bank).engine.begin() as own:
        discards.approve(own, discards.Person("ben", "admin"), letter.id)  # not refused, though no one has resolved it
    op.age(connection, id, expires_at=-1)
    connection.execute(
        text("""UPDATE idempotency.outbox SET status = 'published', relayed_until = NULL,
                published_at = clock_timestamp() - interval '30 days', settled_at = clock_timestamp()""")
    )
    purge(bank)
    assert record("a1") is None
    outside.script, before = [], sum(outside.calls.values())
    assert deliveries.deliver(task, "a1", outside.url).state == "SUCCESS"
    assert sum(outside.calls.values()) == before + 1  # under key number 1 again, which a provider keeps for a day
    assert len(outside.calls) == 1


def test_a_call_that_was_never_made_ends_its_operation_as_unknown(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open circuit, a refused API key: the effect is begun before its function can say that nothing was sent.

    When the provider has been away for `defer_budget`, each payment accepted meanwhile waits for a person to find out
    about a call that nobody made; its refunds wait with it.
    """
    task, id = bank.tasks[b.transfer.name], OperationId("default", b.transfer.name, "a1")

    def circuit_open(url: str, *, idempotency_key: str) -> Any:
        raise Defer(5.0, "circuit open")

    monkeypatch.setattr(b, "call", circuit_open)
    deliveries.deliver(task, "a1", "http://127.0.0.1:1")
    op.age(connection, id, opened_at=-13 * 3600)
    for _ in range(10):
        if record("a1").status == "failed":
            break
        op.age(connection, id, available_at=-1)
        deliveries.deliver(task, "a1", "http://127.0.0.1:1", origin="retry")
    assert (record("a1").status, record("a1").error_code) == ("failed", "effect_unknown")
    assert connection.execute(text("SELECT code FROM failures")).scalars().all() == ["effect_unknown"]


def test_a_header_that_the_client_cannot_read_ends_every_worker(
    bank: Celery, worker: Worker, connection: Connection, entries: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same header in a task queue: the guard examines messages, and this never becomes one."""
    with monkeypatch.context() as patched:
        patched.setattr(calendar, "timegm", lambda _: 1_763_784_000_000)
        publish_raw(bank, headers=headers(**{"sent-at": datetime.now(UTC)}))
    assert eventually(lambda: worker.process.poll() is not None, what="the worker to end")
    assert "ValueError" in worker.log
    assert "out of range" in worker.log
    with bank.connection_for_write() as broker:  # and the next worker is handed it first, 20 times
        channel, name = broker.channel(), bank.conf.task_default_queue
        eventually(lambda: channel.queue_declare(name, passive=True).message_count == 1)


def test_the_alarm_about_a_hung_relay_ends_when_its_sibling_restarts(bank: Celery, connection: Connection) -> None:
    """Two relays on one host have one name, so each takes the other for its predecessor; a hung one does not sign again."""
    hung = presence.SignOfLife(bank, "relay")
    hung._fields["pid"] = 1
    assert hung.sign()
    connection.execute(text("UPDATE idempotency.processes SET seen_at = clock_timestamp() - interval '10 minutes'"))
    hung._expected_until["letters"] = 0.0
    assert not hung.sign()  # its letters hang

    def silent() -> list[str]:
        given = settings.from_app(bank)
        with overview.looking(given) as looking:
            found = alarms.lasting(overview.look(looking, bank, given), given)
        return [alarm.name for alarm in found if alarm.name.startswith("silent/relay")]

    assert len(silent()) == 1
    assert presence.SignOfLife(bank, "relay").sign()  # the other relay of this host is deployed anew
    assert silent() == []
