"""What a second reader suspects of signed messages: each test passes while the fault is there."""

# ruff: noqa: F811  fixtures of another module

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import amqp
import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text

from idempotency.application import close_runtime
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.operate import discard
from idempotency.operate.people import Person
from idempotency.operate.replay import replay
from idempotency.relay.relay import Relay
from idempotency.relay.resend import resend_lost
from idempotency.upkeep import maintenance
from idempotency.wire.limits import HEADERS_COUNT
from tests.integration.test_signed_copies import taken, task  # noqa: F401
from tests.integration.test_signed_messages import bank, environment, letters  # noqa: F401
from tests.support import bank as b
from tests.support import operations as op
from tests.support.dead_messages import publish
from tests.support.operators import ANN, act
from tests.support.processes import Processes, eventually
from tests.support.tasks import transactional

# a space that does not break, as names of customers have it: `str.isprintable` says no
UNFIT = "refund\u00a0of ann"


def resent(bank: Celery, connection: Connection) -> int:
    connection.execute(text("UPDATE idempotency.outbox SET published_at = published_at - interval '1 day'"))
    return resend_lost(bank, lambda _: 0).resent


@pytest.mark.parametrize("options", [{"task_id": UNFIT}, {"headers": {"headers": "text"}}], ids=["task_id", "headers"])
def test_what_the_application_has_signed_itself_is_altered_and_sent_again_for_ever(
    bank: Celery,
    relay: Relay,
    processes: Processes,
    engine: Engine,
    connection: Connection,
    letters: Callable[[int], Any],
    options: dict[str, Any],
) -> None:
    """Its task id is unfit, which `enqueue` takes. Nobody has touched the message."""
    processes.worker()
    with transactional(engine).begin() as caller:
        b.deposit.enqueue(caller, "a1", **options)
    found = letters(1)
    for number in (2, 3):
        assert resent(bank, connection) == 1  # nothing has ended, and no letter names it
        found = letters(number)
    assert {letter.reason for letter in found} == {"altered"}
    assert {(letter.task, letter.key, letter.outbox_id) for letter in found} == {(None, None, None)}
    (row,) = op.outbox(connection)
    assert row.settled_at is None
    assert connection.execute(text("SELECT count(*) FROM idempotency.records")).scalar_one() == 0


@pytest.mark.parametrize("options", [{"shadow": UNFIT}, {"task_id": UNFIT}, {"time_limit": "soon"}], ids=str)
def test_what_a_caller_has_sent_is_called_altered(
    bank: Celery, processes: Processes, letters: Callable[[int], Any], options: dict[str, Any]
) -> None:
    processes.worker()
    b.deposit.apply_async(("a1",), **options)
    (letter,) = letters(1)
    assert letter.reason == "altered"



def unread_copy(bank: Celery, taken: Any, name: str) -> None:
    """The same message with the same signature, and one unsigned property that is not UTF-8, in the ordinary queue."""
    given = {"content_type": "application/json", "content_encoding": "utf-8", "correlation_id": "c1", "reply_to": ""}
    sent = amqp.Message(
        taken.body, **{**given, "application_headers": taken.properties["application_headers"], name: b"caf\xe9"}
    )
    queue = bank.amqp.queues[bank.conf.task_default_queue]
    with bank.connection_for_write() as broker:
        broker.default_channel.basic_publish(sent, exchange=queue.exchange.name, routing_key=queue.routing_key)


@pytest.mark.parametrize("task", [b.waited_deposit], indirect=True)
@pytest.mark.parametrize("name", ["correlation_id", "reply_to", "type"])
def test_a_copy_with_an_unsigned_property_attaches_a_letter_and_keeps_a_lost_message_from_being_sent(
    bank: Celery,
    taken: Any,
    processes: Processes,
    connection: Connection,
    letters: Callable[[int], Any],
    entries: Callable[[str], int],
    name: str,
) -> None:
    """Whoever may read the queue and publish to it: the message is taken away, and a copy with a bad property put there."""
    processes.worker()
    unread_copy(bank, taken, name)
    (letter,) = letters(1)
    assert letter.reason == "undecodable"
    assert (letter.key, letter.outbox_id) == ("a1", op.outbox(connection)[0].id)  # it belongs to the operation
    assert resent(bank, connection) == 0  # what was lost is not sent again
    act(bank, discard.request, Person("ann", "operator"), letter.id, "a message that nobody can read")
    act(bank, discard.approve, Person("ben", "approver"), letter.id)
    (row,) = op.outbox(connection)
    assert row.settled_at is not None  # the accepted operation is given up
    assert resent(bank, connection) == 0
    assert entries("a1") == 0
    assert connection.execute(text("SELECT count(*) FROM idempotency.records")).scalar_one() == 0


def test_a_copy_with_an_unsigned_property_keeps_the_record_and_blocks_an_edit(
    bank: Celery, taken: Any, processes: Processes, connection: Connection, letters: Callable[[int], Any], entries: Callable[[str], int]
) -> None:
    """The original runs as well; the letter stays attached to an operation that has completed."""
    processes.worker()
    unread_copy(bank, taken, "correlation_id")
    letters(1)
    publish(bank, taken.body, headers=taken.properties["application_headers"])
    eventually(lambda: entries("a1") == 1)
    for change in (
        "UPDATE idempotency.outbox SET settled_at = now() - interval '1 year', published_at = now() - interval '1 year'",
        "UPDATE idempotency.records SET completed_at = now() - interval '2 years', expires_at = now() - interval '1 year'",
    ):
        connection.execute(text(change))
    maintenance.purge(bank)
    assert connection.execute(text("SELECT count(*) FROM idempotency.records")).scalar_one() == 1


@pytest.mark.parametrize("task", [b.waited_deposit], indirect=True)
def test_copies_that_expire_early_attach_a_letter_where_a_relay_does_not_know_the_task_yet(
    bank: Celery, taken: Any, task: Any, connection: Connection
) -> None:
    """In a deploy: newer code has accepted it, this relay's is older. No worker has seen any of these copies."""
    known = bank.tasks.pop(task.name)
    bank.conf.idempotency_unknown_task_grace = 3600.0
    close_runtime(bank)
    consumer = DeadLetterConsumer(bank)
    try:
        consumer.run_once()
        publish(bank, taken.body, headers=taken.properties["application_headers"], expiration=0.001)
        eventually(lambda: consumer.run_once() or op.outbox(connection)[0].refusals == 1)
        assert op.dead_letters(connection) == []
        connection.execute(
            text(
                "UPDATE idempotency.outbox SET first_refused_at = now() - interval '2 hours', status = 'published',"
                " published_at = now(), available_at = now()"
            )
        )
        publish(bank, taken.body, headers=taken.properties["application_headers"], expiration=0.001)
        eventually(lambda: consumer.run_once() or len(op.dead_letters(connection)) == 1)
    finally:
        bank.tasks[task.name] = known
        bank.conf.idempotency_unknown_task_grace = 0.0
        consumer.close()
        close_runtime(bank)
    (letter,) = op.dead_letters(connection)
    assert (letter.reason, letter.key, letter.outbox_id) == ("unknown_task", "a1", op.outbox(connection)[0].id)
    assert resent(bank, connection) == 0


def test_a_copy_with_a_long_unsigned_header_that_arrives_leaves_an_operation_that_cannot_be_sent_again(
    bank: Celery, relay: Relay, processes: Processes, engine: Engine, connection: Connection
) -> None:
    """It arrives, since RabbitMQ's frame is larger than what a relay sends. The record keeps its headers, and so does a replay."""
    with transactional(engine).begin() as caller:
        b.failing.enqueue(caller, "a1", "defer")
    name = bank.conf.task_default_queue
    with bank.connection_for_write() as broker:
        channel = broker.channel()
        bank.amqp.queues[name](channel).declare()
        taken = eventually(lambda: channel.basic_get(name, no_ack=True))
    long = {"tracestate": "x" * 127_000}
    publish(bank, taken.body, headers=taken.properties["application_headers"] | long)
    processes.worker()
    (letter,) = eventually(lambda: op.dead_letters(connection))
    assert (letter.reason, letter.key) == ("unpublishable", "a1")
    assert "headers: at most" in letter.last_error
    replay(bank, letter.id, ANN)
    again = eventually(lambda: [each for each in op.dead_letters(connection) if each.status == "open"])
    assert [each.reason for each in again] == ["unpublishable"]


def counted(headers: dict[str, Any]) -> int:
    """As `wire/limits.py` counts."""
    level, count = [headers], 0
    while level:
        count += sum(map(len, level))
        values = [value for each in level for value in (each.values() if isinstance(each, dict) else each)]
        level = [value for value in values if isinstance(value, dict | list | tuple)]
    return count


def test_a_copy_with_as_many_unsigned_headers_as_may_arrive_makes_letters_for_ever(
    bank: Celery, relay: Relay, processes: Processes, engine: Engine, connection: Connection, letters: Callable[[int], Any]
) -> None:
    """Its retry has one header more, our own mark, so no worker takes it; its letter names nothing, so it is sent again."""
    with transactional(engine).begin() as caller:
        b.failing.enqueue(caller, "a1", "defer")
    name = bank.conf.task_default_queue
    with bank.connection_for_write() as broker:
        channel = broker.channel()
        bank.amqp.queues[name](channel).declare()
        taken = eventually(lambda: channel.basic_get(name, no_ack=True))
    # as good, signed: `ignore_result` is not covered, and a worker makes it anew
    given = taken.properties["application_headers"]
    sent = {name: value for name, value in given.items() if value is not None and name != "ignore_result"}
    many = {f"x{number}": 1 for number in range(HEADERS_COUNT - counted(sent))}
    publish(bank, taken.body, headers=sent | many)
    processes.worker()
    found = letters(1)
    for number in (2, 3):
        assert resent(bank, connection) == 1
        found = letters(number)
    assert {letter.reason for letter in found} == {"beyond_limit"}
    assert {(letter.task, letter.key, letter.outbox_id) for letter in found} == {(None, None, None)}
    assert connection.execute(text("SELECT status FROM idempotency.records")).scalar_one() == "released"
