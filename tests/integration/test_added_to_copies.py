"""What somebody adds to a copy of a signed message, where no signature covers it, belongs to no operation and stays with none."""

# ruff: noqa: F811  fixtures of another module

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import amqp
import kombu
import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text

from idempotency.application import close_runtime
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.letters.examine import examine
from idempotency.operate import discard
from idempotency.operate.people import Person
from idempotency.relay.relay import Relay
from idempotency.upkeep import maintenance
from idempotency.wire.limits import HEADERS_COUNT
from tests.integration.test_signed_copies import resent, taken, task  # noqa: F401
from tests.integration.test_signed_messages import bank, environment, letters, signed  # noqa: F401
from tests.support import bank as b
from tests.support import operations as op
from tests.support.dead_messages import body_of, publish, take
from tests.support.operators import act
from tests.support.processes import Processes, eventually
from tests.support.tasks import transactional


def unread_copy(bank: Celery, taken: Any, name: str, value: bytes | str = b"caf\xe9") -> None:
    """The same message with the same signature, and another property that is not signed, in the ordinary queue."""
    given = {"content_type": "application/json", "content_encoding": "utf-8", "correlation_id": "c1", "reply_to": ""}
    sent = amqp.Message(
        taken.body, **{**given, "application_headers": taken.properties["application_headers"], name: value}
    )
    queue = bank.amqp.queues[bank.conf.task_default_queue]
    with bank.connection_for_write() as broker:
        broker.default_channel.basic_publish(sent, exchange=queue.exchange.name, routing_key=queue.routing_key)


@pytest.mark.few(1)
@pytest.mark.parametrize("task", [b.waited_deposit], indirect=True)
@pytest.mark.parametrize("name", ["correlation_id", "reply_to", "type"])
def test_a_copy_that_cannot_be_read_keeps_a_lost_message_from_nothing(
    bank: Celery,
    taken: Any,
    processes: Processes,
    connection: Connection,
    letters: Callable[[int], Any],
    entries: Callable[[str], int],
    name: str,
) -> None:
    """Whoever may read the queue and publish to it takes the message away and puts a copy there that no one can read."""
    processes.worker()
    unread_copy(bank, taken, name)
    (letter,) = letters(1)
    assert (letter.reason, letter.task, letter.key, letter.outbox_id) == ("altered", None, None, None)
    act(bank, discard.request, Person("ann", "operator"), letter.id, "a message that nobody can read")
    act(bank, discard.approve, Person("ben", "approver"), letter.id)
    (row,) = op.outbox(connection)
    assert row.settled_at is None  # the accepted operation is not given up
    assert resent(bank, connection) == 1


@pytest.mark.long
def test_a_copy_that_cannot_be_read_keeps_no_record(
    bank: Celery,
    taken: Any,
    processes: Processes,
    connection: Connection,
    letters: Callable[[int], Any],
    entries: Callable[[str], int],
) -> None:
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
    assert connection.execute(text("SELECT count(*) FROM idempotency.records")).scalar_one() == 0


@pytest.mark.parametrize(("encoding", "reason"), [("utf-8", None), ("utf-7", "altered"), ("unheard-of", "altered")])
def test_a_copy_that_is_read_in_another_encoding_is_altered(bank: Celery, encoding: str, reason: str | None) -> None:
    """The bytes are as they were signed, and their text is not: in UTF-7, this account is `aab`."""
    arrived = kombu.Message(
        body=body_of("a+AGE-b").encode(),
        headers=signed("a+AGE-b"),
        content_type="application/json",
        content_encoding=encoding,
        accept={"application/json"},
    )
    assert examine(bank, arrived).reason == reason


@pytest.mark.parametrize(
    ("signed_as", "added", "reason"),
    [
        ({"id": "a\u00a0b"}, {}, "invalid_header"),
        ({}, {"shadow": "a\u00a0b"}, "altered"),
        ({}, {"stamps": 1}, "altered"),
    ],
    ids=str,
)
def test_what_is_signed_and_unfit_is_not_altered_and_what_is_added_is(
    bank: Celery, signed_as: dict[str, Any], added: dict[str, Any], reason: str
) -> None:
    """Code of before has signed ids that no worker takes. Their letter is their operation's, as without secrets."""
    arrived = kombu.Message(
        body=body_of("a1").encode(),
        headers=signed("a1", **signed_as) | added,
        content_type="application/json",
        content_encoding="utf-8",
        accept={"application/json"},
    )
    assert examine(bank, arrived).reason == reason


@pytest.mark.parametrize("task", [b.waited_deposit], indirect=True)
def test_copies_that_expire_are_no_refusals_by_workers_that_do_not_know_the_task_yet(
    bank: Celery, taken: Any, task: Any, connection: Connection
) -> None:
    """In a deploy: newer code has accepted it, this relay's is older. No worker has seen any of these copies."""
    known = bank.tasks.pop(task.name)
    bank.conf.idempotency_unknown_task_grace = 3600.0
    close_runtime(bank)
    consumer = DeadLetterConsumer(bank)
    given = taken.properties["application_headers"]
    try:
        consumer.run_once()
        publish(bank, taken.body, headers=given, expiration=0.001)
        publish(bank, body_of("other"), headers=signed("other"), expiration=0.001)  # comes after it
        eventually(lambda: consumer.run_once() or op.dead_letters(connection))
    finally:
        bank.tasks[task.name] = known
        bank.conf.idempotency_unknown_task_grace = 0.0
        consumer.close()
        close_runtime(bank)
    (letter,) = op.dead_letters(connection)
    assert (letter.reason, letter.key, letter.outbox_id) == ("expired_early", None, None)
    assert op.outbox(connection)[0].refusals == 0
    assert resent(bank, connection) == 1


# ---------------------------------------------------------------- headers that are kept


def counted(headers: dict[str, Any]) -> int:
    """As `wire/limits.py` counts."""
    level, count = [headers], 0
    while level:
        count += sum(map(len, level))
        values = [value for each in level for value in (each.values() if isinstance(each, dict) else each)]
        level = [value for value in values if isinstance(value, dict | list | tuple)]
    return count


def long_one(_: dict[str, Any]) -> dict[str, Any]:
    return {"tracestate": "x" * 127_000}


def many(sent: dict[str, Any]) -> dict[str, Any]:
    """As many as may arrive."""
    return {f"x{number}": 1 for number in range(HEADERS_COUNT - counted(sent))}


def bytes_that_are_no_text(_: dict[str, Any]) -> dict[str, Any]:
    """40 KB on the wire, as little as anybody's header may be; as the text of a record it is `b'\\xff\\xff…'`, four times that."""
    return {"junk": b"\xff" * 40_000}


def times(_: dict[str, Any]) -> dict[str, Any]:
    """8 bytes each where they are counted, and 19 characters in the record."""
    return {f"x{number:053}": datetime(2026, 1, 1, tzinfo=UTC) for number in range(1700)}


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("added", [bytes_that_are_no_text, times, long_one, many])
def test_what_somebody_adds_to_the_headers_of_a_copy_stays_with_no_record_that_could_not_be_sent_again(
    bank: Celery,
    relay: Relay,
    processes: Processes,
    engine: Engine,
    connection: Connection,
    added: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    """The copy is what runs first, and its next attempts are sent."""
    with transactional(engine).begin() as caller:
        b.failing.enqueue(caller, "a1", "defer")
    first = take(bank)
    # as good, signed: `ignore_result` is not covered, and a worker makes it anew
    given = first.properties["application_headers"]
    sent = {name: value for name, value in given.items() if value is not None and name != "ignore_result"}
    publish(bank, first.body, headers=sent | added(sent))
    processes.worker()
    seen: set[int] = set()  # a release deletes the row whose message it answers
    retries = text("SELECT id FROM idempotency.outbox WHERE origin = 'retry'")
    eventually(
        lambda: seen.update(connection.execute(retries).scalars()) or len(seen) >= 3,
        what="what the retry of a retry has left, once it was sent",
    )
    assert op.dead_letters(connection) == []
