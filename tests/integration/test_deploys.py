"""Old code beside new: what one of them does not know waits for the other, and ends only after a time of grace."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, text
from sqlalchemy.orm import Session

from idempotency.application import runtime_of
from idempotency.broker.batch import Published, Refusal
from idempotency.letters import consumer as consuming
from idempotency.letters import storing
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.observe import crash_points
from idempotency.operate.replay import replay
from idempotency.relay.relay import Relay
from idempotency.relay.resend import resend_lost
from idempotency.store import dead_letters, outbox
from idempotency.wire import keys
from idempotency.wire.headers import FINGERPRINT_HEADER, KEY_HEADER, VERSION_HEADER
from idempotency.wire.keys import OperationId
from idempotency.wire.message import Message
from tests.support import bank as b
from tests.support import operations as op
from tests.support.bank import enqueue_deposit
from tests.support.dead_messages import die, headers, publish, reject
from tests.support.deliveries import Deliveries
from tests.support.operators import ANN
from tests.support.processes import Processes, eventually
from tests.support.relaying import make_due

ID = OperationId("default", b.deposit.name, "a1")
FINGERPRINT = keys.fingerprint({"account": "a1"})
DELAY = "SELECT extract(epoch FROM available_at - clock_timestamp())::float8 FROM idempotency.outbox ORDER BY id DESC"


@pytest.fixture
def environment(environment: dict[str, str]) -> dict[str, str]:
    """With an hour of grace, as by default."""
    return environment | {"UNKNOWN_TASK_GRACE": "3600"}


@contextmanager
def without(app: Celery, name: str) -> Iterator[None]:
    """The application before it had this task."""
    task = app.tasks.pop(name)
    try:
        yield
    finally:
        app.tasks[name] = task


def stored_message(connection: Connection) -> Message:
    return Message.from_text(op.outbox(connection, ID)[-1].message)


def dies(app: Celery, consumer: DeadLetterConsumer, connection: Connection) -> None:
    """The newest row's message is published, refused by a worker, and found by the consumer."""
    message = stored_message(connection)
    die(app, consumer, message.body, headers=message.headers | op.sent(connection, ID))
    assert consumer.run_once() == 1


def past_the_grace(connection: Connection) -> None:
    connection.execute(text("UPDATE idempotency.outbox SET refusals = 66"))  # an hour of pauses


# ---------------------------------------------------------------- a task that only newer code knows


@pytest.mark.parametrize("known", [True, False], ids=["newer relay", "older relay"])
def test_a_task_that_a_worker_does_not_know_comes_back_and_runs_once(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, known: bool
) -> None:
    enqueue_deposit()
    with without(bank, "tests.support.bank.failing" if known else ID.task):
        dies(bank, consumer, connection)
    (row,) = op.outbox(connection, ID)
    assert (row.status, row.origin, row.refusals, row.generation) == ("pending", "retry", 1, 1)
    assert op.record(connection, ID) is None
    assert op.dead_letters(connection) == []
    connection.execute(text("UPDATE idempotency.outbox SET available_at = clock_timestamp()"))
    relay = Relay(bank)
    assert relay.run_once().published == 1
    relay.close()
    outcome = Deliveries(bank).deliver(b.deposit, "a1", origin="retry", headers=stored_message(connection).headers)
    assert outcome.state == "SUCCESS"
    assert resend_lost(bank, lambda _: 0).settled == 1


def test_what_came_back_is_looked_for_in_its_queue_again(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    enqueue_deposit()
    connection.execute(text("UPDATE idempotency.outbox SET taken = true"))
    dies(bank, consumer, connection)
    (row,) = op.outbox(connection, ID)
    assert (row.status, row.taken) == ("pending", False)


def test_it_comes_back_less_and_less_often_until_the_grace_is_over(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    enqueue_deposit()
    delays = []
    for _ in range(8):
        dies(bank, consumer, connection)
        delays.append(connection.execute(text(DELAY)).scalar_one())
    assert [round(delay) for delay in delays] == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60], abs=1)
    past_the_grace(connection)
    dies(bank, consumer, connection)
    row = op.record(connection, ID)
    assert row is not None
    assert row.status == "failed"
    assert [(letter.reason, letter.generation) for letter in op.dead_letters(connection)] == [("rejected", 1)]
    assert connection.execute(text("SELECT code FROM failures")).scalars().all() == ["rejected"]


def test_what_a_message_has_waited_for_in_a_backlog_counts_as_no_grace(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    """Refused in a deploy, then among others for two hours, and refused again in a rollback."""
    enqueue_deposit()
    dies(bank, consumer, connection)
    connection.execute(text("UPDATE idempotency.outbox SET first_refused_at = first_refused_at - interval '2 hours'"))
    dies(bank, consumer, connection)
    (row,) = op.outbox(connection, ID)
    assert (row.status, row.refusals) == ("pending", 2)
    assert op.dead_letters(connection) == []


@pytest.mark.parametrize(("refusals", "is_over"), [(64, False), (65, True)])
def test_the_grace_is_the_sum_of_the_pauses(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, refusals: int, is_over: bool
) -> None:
    """1 + 2 + 4 + 8 + 16 + 32 s and 59 minutes."""
    enqueue_deposit()
    connection.execute(text("UPDATE idempotency.outbox SET refusals = :refusals"), {"refusals": refusals})
    dies(bank, consumer, connection)
    assert (op.record(connection, ID) is not None) == is_over


def test_after_the_grace_an_older_relay_keeps_the_message_as_a_letter(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    enqueue_deposit()
    with without(bank, ID.task):
        dies(bank, consumer, connection)
        past_the_grace(connection)
        dies(bank, consumer, connection)
    (letter,) = op.dead_letters(connection)
    assert (letter.reason, letter.task, letter.key) == ("unknown_task", ID.task, "a1")
    assert op.record(connection, ID) is None
    with runtime_of(bank).engine.begin() as transaction:
        assert dead_letters.replay(transaction, letter.id, app=bank) == ID


def test_a_message_that_was_sent_without_the_outbox_comes_back_by_a_row(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    _, sent = b.deposit._checked(("a1",), {}, None, None)
    die(bank, consumer, headers=headers(**sent))
    with without(bank, ID.task):
        crash_points.install(lambda point: _die() if point == "dead_letter.stored" else None)
        try:
            with pytest.raises(KeyboardInterrupt):  # between the commit and the acknowledgement
                consumer.run_once()
        finally:
            crash_points.install(None)
        consumer.close()
        assert eventually(consumer.run_once) == 1
    (row,) = op.outbox(connection, ID)
    assert (row.status, row.refusals, row.fingerprint) == ("pending", 1, FINGERPRINT)
    assert op.dead_letters(connection) == []
    for _ in range(2):  # from now on by that row
        dies(bank, consumer, connection)
    assert [row.refusals for row in op.outbox(connection, ID)] == [3]


def _die() -> None:
    raise KeyboardInterrupt


def test_an_ordered_message_does_not_hold_up_those_behind_it(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    enqueue_deposit(ordering_key="account")
    dies(bank, consumer, connection)
    ordered, again = op.outbox(connection, ID)
    assert (ordered.status, ordered.ordering_key) == ("published", "account")
    assert (again.status, again.ordering_key, again.refusals) == ("pending", None, 1)


@pytest.mark.parametrize("state", [op.early, op.due])
def test_a_later_delivery_that_is_refused_comes_back_too(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, state: Callable[..., Any]
) -> None:
    state(connection, ID, fingerprint=FINGERPRINT)
    die(bank, consumer, headers=headers(**op.sent(connection, ID)))
    assert consumer.run_once() == 1
    assert [(row.status, row.refusals) for row in op.outbox(connection, ID)] == [("pending", 1)]
    assert op.record(connection, ID).status == "released"


@pytest.mark.few(3)
@pytest.mark.parametrize("state", [op.started, op.expired, op.completed, op.failed])
@pytest.mark.parametrize("known", [True, False])
def test_a_copy_of_what_is_started_or_has_ended_does_not_come_back(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, state: Callable[..., Any], known: bool
) -> None:
    enqueue_deposit()
    state(connection, ID, fingerprint=FINGERPRINT)
    with without(bank, "tests.support.bank.failing" if known else ID.task):
        dies(bank, consumer, connection)
    assert [row.status for row in op.outbox(connection, ID)] == ["published"]
    assert op.dead_letters(connection) == []


def test_another_request_under_a_used_key_does_not_come_back(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    enqueue_deposit()
    op.due(connection, ID, fingerprint="v1:another")
    connection.execute(text("DELETE FROM idempotency.outbox WHERE fingerprint = 'v1:another'"))
    dies(bank, consumer, connection)
    assert [letter.reason for letter in op.dead_letters(connection)] == ["fingerprint_mismatch"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"task": "plain.task"}, "unknown_task"),
        ({"task": "plain.task", FINGERPRINT_HEADER: "none", "idempotency-key": "a1"}, "unknown_task"),
        ({"expires": "2020-01-01T00:00:00Z"}, "expired"),
        ({VERSION_HEADER: "one"}, "invalid_header"),
        ({VERSION_HEADER: 2}, "unknown_version"),
    ],
)
def test_what_names_no_operation_or_has_a_defect_is_a_letter_at_once(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, change: dict[str, Any], reason: str
) -> None:
    die(bank, consumer, headers=headers(**change))
    consumer.run_once()
    assert [letter.reason for letter in op.dead_letters(connection)] == [reason]
    assert op.outbox(connection) == []


def test_a_row_that_comes_back_says_why_it_was_refused(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    """The names of the parameters, and no values. Publishing it again does not hide it."""
    consumer.run_once()
    reject(bank, '[["a1"], {"colour": "blue"}, {}]', headers=headers(**{KEY_HEADER: "a1", FINGERPRINT_HEADER: "v1:f"}))
    consumer.run_once()
    relay = Relay(bank)
    for _ in range(2):
        (row,) = op.outbox(connection)
        why = json.loads(row.last_error)
        assert why["code"] == "invalid_arguments"
        assert "'colour'" in why["message"]
        assert "blue" not in why["message"]
        make_due(connection)
        relay.run_once()
    relay.close()
    assert op.outbox(connection)[0].status == "published"


def test_what_was_delivered_too_often_does_not_come_back(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    consumer.run_once()  # declares the queue
    dead = f"{bank.conf.task_default_queue}-dead"
    publish(
        bank,
        queue=dead,
        headers=headers(**{"x-death": [{"queue": bank.conf.task_default_queue, "reason": "delivery_limit"}]}),
    )
    assert eventually(consumer.run_once) == 1
    assert [letter.reason for letter in op.dead_letters(connection)] == ["delivery_limit"]


# ---------------------------------------------------------------- a message of a newer version


def test_a_message_of_a_newer_version_waits_for_newer_code(
    bank: Celery, processes: Processes, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    worker = processes.worker()
    enqueue_deposit()
    connection.execute(
        text("UPDATE idempotency.outbox SET message = replace(message, :old, :new)"),
        {"old": f'"{VERSION_HEADER}": 1', "new": f'"{VERSION_HEADER}": 2'},
    )
    consumer.run_once()
    relay = Relay(bank)
    relay.run_once()
    relay.close()
    eventually(lambda: consumer.run_once() == 1, what="refused by the worker")
    (row,) = op.outbox(connection, ID)
    assert (row.status, row.refusals) == ("pending", 1)
    assert op.dead_letters(connection) == []
    assert "reason=unknown_version" in worker.log


def test_every_message_says_its_version_and_its_fingerprint(bank: Celery, connection: Connection) -> None:
    enqueue_deposit()
    sent = stored_message(connection).headers
    assert (sent[VERSION_HEADER], sent[FINGERPRINT_HEADER]) == (1, FINGERPRINT)
    Deliveries(bank).deliver(b.deposit, "a1", headers=sent)
    row = op.record(connection, ID)
    assert row is not None
    assert (
        Message.from_text(row.message).headers.items() >= {VERSION_HEADER: 1, FINGERPRINT_HEADER: FINGERPRINT}.items()
    )


# ---------------------------------------------------------------- fingerprints by a newer rule


@pytest.fixture
def newer_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code after a deploy: it makes fingerprints by its own rule and knows the one before."""
    monkeypatch.setitem(keys.FINGERPRINT_RULES, "v2", lambda arguments: f"v2:{keys.canonical_json(arguments)[::-1]}")
    assert keys.fingerprint({"account": "a1"}).startswith("v2:")


@pytest.mark.parametrize(
    ("state", "answer"),
    [(op.completed, "SUCCESS"), (op.failed, "FAILURE"), (op.due, "SUCCESS"), (op.started, "IGNORED")],
)
def test_a_record_of_an_older_rule_is_compared_by_it(
    deliveries: Deliveries, connection: Connection, newer_rule: None, state: Callable[..., Any], answer: str
) -> None:
    state(connection, ID, fingerprint=FINGERPRINT)
    assert deliveries.deliver(b.deposit, "a1").state == answer
    row = op.record(connection, ID)
    assert row is not None
    assert row.fingerprint == FINGERPRINT
    assert op.dead_letters(connection) == []
    assert deliveries.deliver(b.deposit, "a1", 2).state == "FAILURE"  # its twin: other arguments
    assert [letter.reason for letter in op.dead_letters(connection)] == ["fingerprint_mismatch"]


def test_a_message_of_an_older_rule_keeps_it_so_that_its_row_is_settled(
    bank: Celery, deliveries: Deliveries, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue_deposit()
    monkeypatch.setitem(keys.FINGERPRINT_RULES, "v2", lambda arguments: "v2:newer")
    assert deliveries.deliver(b.deposit, "a1", headers=stored_message(connection).headers).state == "SUCCESS"
    assert op.record(connection, ID).fingerprint == FINGERPRINT
    enqueue_deposit()  # the same request by newer code
    assert [row.fingerprint for row in op.outbox(connection, ID)] == [FINGERPRINT, "v2:newer"]
    connection.execute(
        text("UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp() - interval '1 day'")
    )
    assert resend_lost(bank, lambda _: 0).settled == 2
    assert op.dead_letters(connection) == []


def test_what_failed_under_an_older_rule_is_replayed_under_it(
    bank: Celery, deliveries: Deliveries, connection: Connection, newer_rule: None
) -> None:
    id = OperationId("default", b.failing.name, "a1")
    op.due(connection, id, fingerprint=keys.FINGERPRINT_RULES["v1"]({"account": "a1", "how": "permanent"}))
    assert deliveries.deliver(b.failing, "a1", "permanent").state == "FAILURE"
    (letter,) = op.dead_letters(connection)
    with runtime_of(bank).engine.begin() as transaction:
        dead_letters.replay(transaction, letter.id)
    assert op.record(connection, id).generation == 2


def test_a_dead_message_of_a_newer_rule_ends_a_record_of_an_older_one(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, newer_rule: None
) -> None:
    op.due(connection, ID, fingerprint=FINGERPRINT)
    marks = op.sent(connection, ID)
    die(bank, consumer, headers=headers(**marks))
    consumer.run_once()
    past_the_grace(connection)
    op.sent(connection, ID)
    die(bank, consumer, headers=headers(**marks))
    consumer.run_once()
    assert [(letter.reason, letter.fingerprint) for letter in op.dead_letters(connection)] == [
        ("rejected", FINGERPRINT)
    ]


def test_older_code_leaves_a_record_of_a_newer_rule_to_newer_code(
    bank: Celery, deliveries: Deliveries, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    enqueue_deposit()
    op.due(connection, ID, fingerprint="v2:newer")
    connection.execute(text("DELETE FROM idempotency.outbox WHERE fingerprint = 'v2:newer'"))
    assert deliveries.deliver(b.deposit, "a1").state == "REJECTED"
    dies(bank, consumer, connection)
    assert [(row.status, row.refusals) for row in op.outbox(connection, ID)] == [("pending", 1)]
    past_the_grace(connection)
    dies(bank, consumer, connection)
    assert [letter.reason for letter in op.dead_letters(connection)] == ["rejected"]
    assert op.record(connection, ID).status == "released"


# ---------------------------------------------------------------- answers of the broker that come late


@contextmanager
def at_point(point: str, action: Callable[[], None]) -> Iterator[None]:
    """Do something, once, when the relay of this process reaches a point."""
    planned = {point: action}

    def reached(name: str) -> None:
        if name in planned:
            planned.pop(name)()

    crash_points.install(reached)
    try:
        yield
    finally:
        crash_points.install(None)
    assert not planned


def test_a_message_put_back_before_its_confirm_was_noted_is_published_again(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    """A worker is quick: it refuses the message while the relay still writes down that it was published."""
    enqueue_deposit()
    relay = Relay(bank)
    with at_point("relay.confirmed", lambda: dies(bank, consumer, connection)):
        assert relay.run_once().published == 1
    (row,) = op.outbox(connection, ID)
    assert (row.status, row.origin, row.refusals, row.relayed_until) == ("pending", "retry", 1, None)
    connection.execute(text("UPDATE idempotency.outbox SET available_at = clock_timestamp()"))
    assert relay.run_once().published == 1
    assert [row.status for row in op.outbox(connection, ID)] == ["published"]
    relay.close()


@pytest.mark.parametrize("answer", ["confirmed", "unroutable", "nothing"])
def test_a_late_answer_says_nothing_about_a_row_that_was_sent_again_since(
    bank: Celery, connection: Connection, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay stops after the broker's answer. Another publishes the row, the broker loses it, and it is due again."""
    enqueue_deposit()
    slow, quick = Relay(bank), Relay(bank)

    def overtaken() -> None:
        connection.execute(text("UPDATE idempotency.outbox SET relayed_until = clock_timestamp()"))
        assert quick.run_once().published == 1
        with bank.connection_for_write() as broker:
            bank.amqp.queues[bank.conf.task_default_queue](broker.default_channel).purge()
        past = "UPDATE idempotency.outbox SET published_at = published_at - interval '2 hours'"
        connection.execute(text(past))
        assert resend_lost(bank, lambda _: 0).resent == 1

    publish_all = slow.publisher.publish

    def publish_and_hear(batch: list[tuple[str, Message]], result: Published) -> None:
        publish_all(batch, result)
        if answer != "confirmed":
            result.confirmed.clear()
        if answer == "unroutable":
            result.refuse(batch[0][0], Refusal("no queue is bound", own=False))

    monkeypatch.setattr(slow.publisher, "publish", publish_and_hear)
    with at_point("relay.confirmed", overtaken):
        slow.run_once()
    (row,) = op.outbox(connection, ID)
    assert (row.status, row.resends, row.attempts, row.last_error) == ("pending", 1, 0, None)
    slow.close(), quick.close()


@pytest.mark.parametrize("answer", ["refused", "confirmed"])
def test_a_late_answer_says_nothing_about_a_row_that_was_replayed_since(
    bank: Celery, connection: Connection, answer: str
) -> None:
    b.enqueue_deposit()
    connection.execute(text("UPDATE idempotency.outbox SET attempts = 4"))
    (sent,) = outbox.reserve_rows(connection, op.SERVICE, batch=10, seconds=30)  # a relay that is paused from here on
    make_due(connection)
    (again,) = outbox.reserve_rows(connection, op.SERVICE, batch=10, seconds=30)
    outbox.give_up(connection, again, "too long", service="bank")  # another one gives up
    (letter,) = op.dead_letters(connection)
    replay(bank, letter.id, ANN)  # a person has repaired the cause
    (row,) = op.outbox(connection)
    assert (row.status, row.origin) == ("pending", "replay")
    if answer == "refused":  # the paused relay goes on
        outbox.give_up(connection, sent, "too long", service="bank")
    else:
        outbox.mark_published(connection, [sent])
    (row,) = op.outbox(connection)
    assert (row.status, row.origin) == ("pending", "replay")
    assert [each.status for each in op.dead_letters(connection)] == ["replayed"]


# ---------------------------------------------------------------- real workers


@pytest.mark.long
def test_workers_of_two_releases_share_a_queue_and_all_operations_complete(
    bank: Celery,
    processes: Processes,
    connection: Connection,
    entries: Callable[[str], int],
    monkeypatch: pytest.MonkeyPatch,
    outside: Any,
) -> None:
    """The older worker knows no `transfer`, and while the newer one works it gets, and refuses, most of them."""
    monkeypatch.setattr(storing, "PUT_BACK_PAUSE", 0.05)
    monkeypatch.setattr(storing, "PUT_BACK_CAP", 0.2)
    monkeypatch.setattr(consuming, "POLL", 0.05)
    accounts = [f"a{number}" for number in range(12)]
    older = processes.start("--concurrency", "1", app="tests.faults.older_code")
    newer = processes.start("--concurrency", "1")
    older.wait_until_ready(), newer.wait_until_ready()
    with Session(runtime_of(bank).engine) as session:
        for account in accounts:
            b.transfer.enqueue(session, account, outside.url)
            b.deposit.enqueue(session, f"{account}/deposit")
        session.commit()
    stop = threading.Event()
    relay, consumer = Relay(bank), DeadLetterConsumer(bank)
    threads = [threading.Thread(target=each.run, args=(stop,), daemon=True) for each in (relay, consumer)]
    for thread in threads:
        thread.start()
    try:
        completed = text("SELECT count(*) FROM idempotency.records WHERE status = 'completed'")
        eventually(lambda: connection.execute(completed).scalar_one() == 2 * len(accounts), timeout=60)
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)
    assert "reason=unknown_task" in older.log
    assert op.dead_letters(connection) == []
    assert connection.execute(text("SELECT count(*) FROM failures")).scalar_one() == 0
    assert [entries(account) for account in accounts] == [1] * len(accounts)
