"""Alarms begin, are repeated and end; each beside a twin that needs no alarm."""

from __future__ import annotations

import re
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text

from idempotency.application import close_runtime, settings_of
from idempotency.checks.doctor import doctor
from idempotency.checks.findings import Level
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.observe import metrics
from idempotency.relay.relay import Relay
from idempotency.store import alarms as stored
from idempotency.store.overview import monitoring_connection
from idempotency.upkeep import alarms, overview
from idempotency.upkeep.backlog import Backlog
from idempotency.upkeep.presence import SignOfLife
from idempotency.wire.keys import OperationId
from idempotency.wire.message import Message
from tests.support import bank as b
from tests.support import operations as op
from tests.support.dead_messages import die
from tests.support.processes import Processes, eventually
from tests.support.tasks import enqueued


@pytest.fixture
def environment(environment: dict[str, str]) -> dict[str, str]:
    """What no worker takes comes back, as by default."""
    return environment | {"UNKNOWN_TASK_GRACE": "3600"}


@pytest.fixture
def sent(bank: Celery, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the receiver takes, line by line."""
    lines: list[str] = []
    monkeypatch.setitem(bank.conf, "idempotency_alert_webhook_url", "https://alerts.bank.example/")
    close_runtime(bank)  # it was opened without
    monkeypatch.setattr(alarms, "post", lambda _, text, notices: lines.extend(text.splitlines()[1:]) or True)
    return lines


@pytest.fixture
def queue(bank: Celery) -> str:
    """A queue that is there, without consumers."""
    name: str = bank.conf.task_default_queue
    with bank.connection_for_write() as broker:
        bank.amqp.queues[name](broker.default_channel).declare()
    return name


def look(app: Celery, connection: Connection, *, later: float = 0.0) -> int:
    """The next look, so many seconds after the one before."""
    connection.execute(text("UPDATE idempotency.alerts SET sent_at = sent_at - interval '1 min'"))
    change = """UPDATE idempotency.alarms SET since = since - make_interval(secs => :later),
                sent_at = sent_at - make_interval(secs => :later),
                logged_at = logged_at - make_interval(secs => :later)"""
    connection.execute(text(change), {"later": later})
    return alarms.run_once(app)


def enqueue(
    connection: Connection, number: int, *, seconds_ago: float = 0.0, is_published: bool = True, **options: Any
) -> None:
    for each in range(number):
        enqueued(connection, b.deposit, f"account {each}", **options)
    if is_published:
        connection.execute(text("UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp()"))
    change = "UPDATE idempotency.outbox SET {0} = {0} - make_interval(secs => :ago)"
    for column in ("available_at", "created_at") if seconds_ago else ():  # a relay may be changing these rows, too
        connection.execute(text(change.format(column)), {"ago": seconds_ago})


def now(app: Celery) -> list[str]:
    given = settings_of(app)
    with monitoring_connection(given) as connection:
        return [alarm.name for alarm in alarms.lasting(overview.take_snapshot(connection, app, given), given)]


# ---------------------------------------------------------------- with real servers, the whole way


def test_payments_behind_a_stopped_worker_show_everywhere(
    bank: Celery, queue: str, relay: Relay, processes: Processes, connection: Connection, sent: list[str]
) -> None:
    enqueue(connection, 25, is_published=False)

    def state() -> dict[str, Any]:
        given = settings_of(bank)
        with monitoring_connection(given) as asked:
            found: dict[str, Any] = overview.status(asked, bank, given)["queues"][queue]
            return found

    eventually(lambda: state()["ready"] == 25, what="25 messages in the broker")
    shown = state()
    assert (shown["accepted"], shown["consumers"], shown["running"], shown["released"]) == (25, 0, 0, 0)
    gauges = {
        sample.name: sample.value
        for metric in Backlog(bank).collect()
        for sample in metric.samples
        if sample.labels.get("queue") == queue
    }
    assert (gauges["idempotency_accepted"], gauges["idempotency_queue_ready"]) == (25, 25)
    assert gauges["idempotency_queue_consumers"] == 0
    (warned,) = [finding for finding in doctor(bank) if "no consumers" in finding.found]
    assert warned.level is Level.WARNING
    assert str(warned) == f"queue {queue}: no consumers; 25 accepted, 0 released, 25 ready; start a worker for it"

    assert look(bank, connection) == 0  # a restart of the workers looks the same
    assert look(bank, connection, later=61) == 1
    assert sent == [f"bank: queue {queue}: no consumers; 25 accepted, 0 released, 25 ready"]

    processes.worker()
    eventually(lambda: state()["accepted"] == 0 and state()["ready"] == 0, what="25 payments done")
    assert look(bank, connection) == 1
    assert sent[1:] == [f"bank: over: no_consumers/{queue}"]
    assert now(bank) == []
    assert not [finding for finding in doctor(bank) if finding.level is not Level.OK]


# ---------------------------------------------------------------- each alarm and its twin


def test_an_empty_queue_without_consumers_is_no_alarm(bank: Celery, queue: str, connection: Connection) -> None:
    assert now(bank) == []
    op.early(connection, queue=queue)  # its next attempt is not due
    assert now(bank) == []
    op.due(connection, queue=queue)
    assert now(bank) == [f"no_consumers/{queue}"]


def test_consumers_that_are_unknown_neither_begin_nor_end_an_alarm(
    bank: Celery, queue: str, connection: Connection, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue(connection, 1)
    look(bank, connection)
    assert look(bank, connection, later=61) == 1
    with monkeypatch.context() as away:
        away.setitem(bank.conf, "broker_url", "amqp://guest:guest@127.0.0.1:1//")
        assert now(bank) == []
        assert look(bank, connection) == 0
    assert look(bank, connection) == 0  # still on, and was sent
    assert len(sent) == 1


@pytest.mark.parametrize(("age", "expected"), [(299.0, False), (301.0, True)])
def test_the_oldest_accepted_operation_is_an_alarm_after_its_time(
    bank: Celery, queue: str, connection: Connection, age: float, expected: bool
) -> None:
    enqueue(connection, 2, seconds_ago=age)
    assert (f"accepted/{queue}" in now(bank)) is expected


def test_neither_a_delay_that_was_asked_for_nor_a_begun_operation_is_old(
    bank: Celery, queue: str, connection: Connection
) -> None:
    enqueue(connection, 1, seconds_ago=1000, countdown=2000)
    assert now(bank) == []
    connection.execute(text("UPDATE idempotency.outbox SET available_at = clock_timestamp() - interval '1000 s'"))
    assert f"accepted/{queue}" in now(bank)
    op.started(connection, OperationId("default", b.deposit.name, "account 0"), queue=queue)
    assert now(bank) == []


def test_what_no_worker_knows_stays_accepted_while_it_comes_back(
    bank: Celery, queue: str, connection: Connection
) -> None:
    enqueue(connection, 1)
    id = OperationId("default", b.deposit.name, "account 0")
    message = Message.from_text(op.outbox(connection, id)[0].message)
    consumer = DeadLetterConsumer(bank)
    die(bank, consumer, message.body, headers=message.headers | op.sent(connection, id))
    assert consumer.run_once() == 1
    consumer.close()
    (row,) = op.outbox(connection, id)
    assert (row.status, row.refusals) == ("pending", 1)

    def seen() -> list[str]:
        return [name for name in now(bank) if name.startswith("accepted/")]

    assert seen() == []
    connection.execute(text("UPDATE idempotency.outbox SET first_refused_at = first_refused_at - interval '301 s'"))
    for status in ("pending", "published"):  # on its way again and again: the alarm does not come and go
        connection.execute(text("UPDATE idempotency.outbox SET status = :status"), {"status": status})
        assert seen() == [f"accepted/{queue}"]
        accepted = [s for metric in Backlog(bank).collect() for s in metric.samples if s.name == "idempotency_accepted"]
        assert [sample.value for sample in accepted if sample.labels["queue"] == queue] == [1]


def test_rows_that_are_due_without_a_relay_are_an_alarm(
    bank: Celery, queue: str, connection: Connection, sent: list[str]
) -> None:
    assert now(bank) == []  # nothing to publish
    enqueue(connection, 3, seconds_ago=95, is_published=False)
    (warned,) = [finding for finding in doctor(bank) if finding.subject == "relay"]
    assert warned.level is Level.WARNING
    assert re.fullmatch(r"none is running; rows due: 3, for \d+ s", warned.found)
    look(bank, connection)
    look(bank, connection, later=61)
    assert any(line.startswith("bank: relay: none is running; rows due: 3, for ") for line in sent)
    life = SignOfLife(bank, "relay")
    life.sign()
    assert "no_relay" not in now(bank)
    connection.execute(text("UPDATE idempotency.processes SET seen_at = seen_at - interval '61 s'"))
    assert "no_relay" in now(bank)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["worker", "relay", "beat"])
def test_a_process_that_falls_silent_is_an_alarm_until_it_signs(
    bank: Celery, connection: Connection, sent: list[str], kind: str
) -> None:
    life = SignOfLife(bank, kind, "some@host")
    life.sign()
    change = "UPDATE idempotency.processes SET seen_at = clock_timestamp() - make_interval(secs => :ago)"
    connection.execute(text(change), {"ago": 55})
    assert look(bank, connection) == 0
    connection.execute(text(change), {"ago": 65})
    assert look(bank, connection) == 1
    assert re.search(f"bank: {kind} some@host: silent for (6[5-9]|7[0-9]) s", sent[0])  # the look itself takes time
    assert any(f"{kind} some@host" == finding.subject for finding in doctor(bank))
    life.sign()
    assert look(bank, connection) == 1
    assert sent[1].startswith(f"bank: over: silent/{kind}/some@host")


@pytest.mark.parametrize(("letters", "operations"), [(1, "1 operation"), (3, "3 operations")])
def test_unknown_effects_are_an_alarm_until_their_letters_are_closed(
    bank: Celery, connection: Connection, sent: list[str], letters: int, operations: str
) -> None:
    letter = """INSERT INTO idempotency.dead_letters (source, task, reason, payload)
                VALUES ('operation', 'o', '{}', '')"""
    connection.execute(text(letter.format("no_account")))
    assert look(bank, connection) == 0
    for _ in range(letters):
        connection.execute(text(letter.format("effect_unknown")))
    assert look(bank, connection) == 1
    listed = "ended as effect_unknown: idempotency dead-letters list --error effect_unknown"
    assert sent == [f"bank: effects: {operations} {listed}"]
    close = "UPDATE idempotency.dead_letters SET status = 'replayed', closed_at = clock_timestamp()"
    connection.execute(text(close))
    assert look(bank, connection) == 1


# ---------------------------------------------------------------- how they are sent


def test_an_alarm_is_repeated_every_hour_and_not_before(
    bank: Celery, queue: str, connection: Connection, sent: list[str]
) -> None:
    enqueue(connection, 1)
    look(bank, connection)
    counter = metrics.alerts.labels("bank", "no_consumers")._value
    before = counter.get()
    assert look(bank, connection, later=61) == 1
    assert look(bank, connection, later=3500) == 0
    assert look(bank, connection, later=101) == 1
    assert counter.get() == before + 2


def test_an_alarm_that_its_receiver_did_not_take_is_sent_again(
    bank: Celery, queue: str, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(bank.conf, "idempotency_alert_webhook_url", "https://alerts.bank.example/")
    enqueue(connection, 1)
    taken = [False, True, True]
    monkeypatch.setattr(alarms, "post", lambda *_: taken.pop(0))
    look(bank, connection)
    assert look(bank, connection, later=61) == 0
    assert look(bank, connection) == 1
    assert look(bank, connection) == 0


def test_an_alarm_that_its_receiver_does_not_take_is_logged_once(
    bank: Celery, queue: str, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(bank.conf, "idempotency_alert_webhook_url", "https://alerts.bank.example/")
    enqueue(connection, 1)
    monkeypatch.setattr(alarms, "post", lambda *_: False)
    counter = metrics.alerts.labels("bank", "no_consumers")._value
    before = counter.get()
    look(bank, connection)
    for later in (61, 15, 15, 15):
        assert look(bank, connection, later=later) == 0
    assert counter.get() == before + 1


def test_an_alarm_is_sent_while_another_process_sends_alerts(
    bank: Celery, queue: str, connection: Connection, sent: list[str], engine: Engine
) -> None:
    """It has one turn in a while, which a receiver that is slow for alerts must not use up."""
    enqueue(connection, 1)
    look(bank, connection)
    with engine.execution_options(isolation_level="READ COMMITTED").begin() as other:
        assert stored.try_lock(other, "webhook")
        assert (look(bank, connection, later=61), len(sent)) == (1, 1)


def test_an_alarm_is_logged_while_another_process_tells_the_webhook(
    bank: Celery, queue: str, connection: Connection, sent: list[str], engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    enqueue(connection, 1)
    look(bank, connection)
    with engine.execution_options(isolation_level="READ COMMITTED").begin() as other:
        assert stored.try_lock(other, "alarms")
        assert look(bank, connection, later=61) == 0
        assert [f'subject="queue {queue}"' in message for message in caplog.messages] == [True]
    assert (look(bank, connection), len(sent), len(caplog.messages)) == (1, 1, 1)


def test_what_one_process_cannot_send_is_sent_by_another(
    bank: Celery, queue: str, connection: Connection, sent: list[str]
) -> None:
    """The first has no address: it logs the alarm and its end, and the second sends both."""
    address = bank.conf.pop("idempotency_alert_webhook_url")

    def without_address(later: float = 0.0) -> int:
        return look(bank, connection, later=later)

    def with_address() -> int:
        bank.conf.idempotency_alert_webhook_url = address
        close_runtime(bank)
        try:
            return alarms.run_once(bank)
        finally:
            bank.conf.pop("idempotency_alert_webhook_url")
            close_runtime(bank)

    enqueue(connection, 1)
    without_address()
    assert (without_address(61), without_address(), sent) == (1, 0, [])  # logged once
    assert with_address() == 1  # although the other has just checked
    assert ["no consumers" in line for line in sent] == [True]
    connection.execute(text("UPDATE idempotency.outbox SET settled_at = clock_timestamp()"))
    assert (without_address(), len(sent)) == (0, 1)
    assert with_address() == 1
    assert sent[1:] == [f"bank: over: no_consumers/{queue}"]
    assert connection.execute(text("SELECT count(*) FROM idempotency.alarms")).scalar_one() == 0


def test_an_alarm_is_forgotten_where_no_process_can_send_its_end(
    bank: Celery, queue: str, connection: Connection
) -> None:
    connection.execute(
        text("INSERT INTO idempotency.alarms (service, name, since, sent_at) VALUES ('bank', 'x', now(), now())")
    )
    look(bank, connection, later=86_000)
    assert connection.execute(text("SELECT name FROM idempotency.alarms")).scalars().all() == ["x"]
    look(bank, connection, later=500)
    assert connection.execute(text("SELECT name FROM idempotency.alarms")).scalars().all() == []


def test_processes_at_once_look_and_send_once(
    bank: Celery, queue: str, connection: Connection, sent: list[str]
) -> None:
    enqueue(connection, 1)
    look(bank, connection)
    connection.execute(text("UPDATE idempotency.alarms SET since = since - interval '1 h'"))
    connection.execute(text("UPDATE idempotency.alerts SET sent_at = sent_at - interval '1 min'"))
    assert sum(op.at_once(4, lambda _: alarms.run_once(bank))) == 1
    assert len(sent) == 1
    assert alarms.run_once(bank) == 0  # no look within the pace
