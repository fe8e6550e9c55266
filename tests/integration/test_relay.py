"""The relay: exactly the committed rows, marked once the broker has confirmed them, whatever breaks in between."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from prometheus_client import REGISTRY
from sqlalchemy import Connection, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from idempotency.application import runtime_of
from idempotency.errors import BrokerUnavailable
from idempotency.observe import crash_points
from idempotency.queues import quorum_queue
from idempotency.relay.relay import BACKOFF_CAP, OWN_ERRORS, Relay, Relayed
from idempotency.store import dead_letters, outbox
from idempotency.wire.headers import KEY_HEADER, ORIGIN_HEADER, OUTBOX_HEADER
from idempotency.wire.keys import OperationId
from idempotency.wire.message import Message
from tests.support import bank as b
from tests.support import operations as op
from tests.support.operations import at_once
from tests.support.plans import rows_read
from tests.support.queues import drained, keys
from tests.support.relaying import cut, make_due, states
from tests.support.tasks import enqueued

IDLE = Relayed(0, 0)


@pytest.fixture
def at_point() -> Iterator[Callable[[str, Callable[[], None]], None]]:
    """Does something, once, when the relay reaches a point."""
    planned: dict[str, Callable[[], None]] = {}

    def reached(name: str) -> None:
        if (action := planned.pop(name, None)) is not None:
            action()

    crash_points.install(reached)
    yield planned.__setitem__
    crash_points.install(None)


def write(connection: Connection, key: str, *, route: dict[str, Any] | None = None, **properties: Any) -> str:
    """A row with its own message; without a route to the queue of the test."""
    composed = Message.composed(
        b.app, b.deposit.name, (key,), {}, task_id=f"t-{key}", headers={KEY_HEADER: key}, queue=None
    )
    message = Message(composed.headers, composed.body, route or composed.route, composed.properties | properties)
    return outbox.insert(connection, OperationId("default", b.deposit.name, key), "v1:f", message, service=op.SERVICE)


# ---------------------------------------------------------------- what is published


def test_a_committed_row_is_published_once_and_marked(
    bank: Celery, relays: Callable[..., Relay], connection: Connection
) -> None:
    enqueued(connection, b.deposit, account="a1", amount=5, task_id="t-1")
    relay = relays()
    assert relay.run_once() == Relayed(1, 0)
    assert relay.run_once() == IDLE
    (message,) = drained(bank)
    (row,) = op.outbox(connection)
    assert (row.status, row.relayed_until, row.last_error) == ("published", None, None)
    assert row.published_at is not None
    assert message.headers["id"] == message.properties["correlation_id"] == "t-1"
    assert message.headers[KEY_HEADER] == "a1"
    assert message.headers[OUTBOX_HEADER] == row.message_id
    assert ORIGIN_HEADER not in message.headers
    assert message.payload[1] == {"account": "a1", "amount": 5}
    assert (message.content_type, message.content_encoding) == ("application/json", "utf-8")
    assert message.properties["delivery_mode"] == 2


def test_a_later_delivery_is_marked_with_its_origin(
    bank: Celery, relays: Callable[..., Relay], connection: Connection
) -> None:
    enqueued(connection, b.deposit, account="a1")
    connection.execute(text("UPDATE idempotency.outbox SET origin = 'recover'"))
    relays().run_once()
    (message,) = drained(bank)
    assert message.headers[ORIGIN_HEADER] == "recover"


def test_a_rolled_back_row_is_never_published(
    bank: Celery, relays: Callable[..., Relay], connection: Connection
) -> None:
    relay = relays()
    with Session(runtime_of(bank).engine) as session:
        b.deposit.enqueue(session, account="rolled back")
        session.flush()
        assert relay.run_once() == IDLE
        session.rollback()
    with Session(runtime_of(bank).engine) as session, session.begin():
        b.deposit.enqueue(session, account="committed")
        with session.begin_nested() as savepoint:
            b.deposit.enqueue(session, account="to the savepoint")
            savepoint.rollback()
    assert relay.run_once() == Relayed(1, 0)
    assert relay.run_once() == IDLE
    assert keys(drained(bank)) == ["committed"]
    assert states(connection) == ["published"]


def test_a_row_committed_late_with_a_small_id_is_not_skipped(
    bank: Celery, relays: Callable[..., Relay], connection: Connection
) -> None:
    relay = relays()
    with runtime_of(bank).engine.connect() as slow:
        b.deposit.enqueue(slow, account="early id")
        enqueued(connection, b.deposit, account="late id")
        assert relay.run_once() == Relayed(1, 0)
        assert keys(drained(bank)) == ["late id"]
        slow.commit()
    first, second = op.outbox(connection)
    assert (first.key, second.key) == ("early id", "late id")
    assert relay.run_once() == Relayed(1, 0)
    assert keys(drained(bank)) == ["early id"]


def test_a_row_is_published_when_it_is_due_and_not_before(
    bank: Celery, relays: Callable[..., Relay], connection: Connection
) -> None:
    relay = relays()
    enqueued(connection, b.deposit, account="later", countdown=600)
    enqueued(connection, b.deposit, account="now")
    assert relay.run_once() == Relayed(1, 0)
    assert relay.run_once() == IDLE
    assert keys(drained(bank)) == ["now"]
    make_due(connection)
    assert relay.run_once() == Relayed(1, 0)
    assert keys(drained(bank)) == ["later"]


def test_a_pass_takes_one_batch_oldest_first(
    bank: Celery, relays: Callable[..., Relay], connection: Connection
) -> None:
    relay = relays(batch=3)
    for number in range(5):
        write(connection, str(number))
    assert relay.run_once() == Relayed(3, 0)
    assert states(connection) == ["published"] * 3 + ["pending"] * 2
    assert relay.run_once() == Relayed(2, 0)
    assert keys(drained(bank)) == ["0", "1", "2", "3", "4"]


# ---------------------------------------------------------------- rows that cannot be published


@pytest.mark.parametrize(
    ("route", "error"),
    [
        (lambda queue: {"exchange": queue, "routing_key": "nowhere"}, "NO_ROUTE"),
        (lambda queue: {"exchange": "missing", "routing_key": queue}, "NOT_FOUND"),
        (lambda _: {"queue": "unknown"}, "unknown"),
        (lambda _: {"delayed": "unknown"}, "unknown"),
    ],
    ids=["unroutable", "no such exchange", "no such queue", "delayed to no such queue"],
)
def test_a_row_without_a_queue_is_kept_and_backs_off_while_the_others_flow(
    bank: Celery,
    relays: Callable[..., Relay],
    connection: Connection,
    route: Callable[[str], dict[str, Any]],
    error: str,
) -> None:
    relay = relays()
    write(connection, "before")
    write(connection, "astray", route=route(bank.conf.task_default_queue))
    write(connection, "after")
    assert relay.run_once() == Relayed(2, 1)
    # a missing exchange closes the channel, and what was not confirmed on it is published once more
    assert sorted(set(keys(drained(bank)))) == ["after", "before"]
    assert states(connection) == ["published", "pending", "published"]
    delays = []
    for attempts in range(1, 4):
        (row,) = [row for row in op.outbox(connection) if row.status == "pending"]
        assert (row.attempts, row.relayed_until, row.published_at) == (attempts, None, None)
        assert error in row.last_error
        delays.append(
            connection.execute(
                text(
                    "SELECT extract(epoch FROM available_at - clock_timestamp()) FROM idempotency.outbox WHERE id = :id"
                ),
                {"id": row.id},
            ).scalar_one()
        )
        assert relay.run_once() == IDLE
        make_due(connection)
        assert relay.run_once() == Relayed(0, 1)
    assert 0 < delays[0] < delays[1] < delays[2]
    write(connection, "later")
    assert relay.run_once() == Relayed(1, 0)


def test_the_back_off_of_a_row_has_a_limit(bank: Celery, relays: Callable[..., Relay], connection: Connection) -> None:
    write(connection, "astray", route={"exchange": bank.conf.task_default_queue, "routing_key": "nowhere"})
    connection.execute(text("UPDATE idempotency.outbox SET attempts = 100000"))
    assert relays().run_once() == Relayed(0, 1)
    waits = text("SELECT extract(epoch FROM available_at - clock_timestamp()) FROM idempotency.outbox")
    assert 50 < connection.execute(waits).scalar_one() <= BACKOFF_CAP


def test_a_refused_row_is_counted_from_the_fifth_try_and_tried_on(
    bank: Celery, relays: Callable[..., Relay], connection: Connection
) -> None:
    write(connection, "astray", route={"exchange": bank.conf.task_default_queue, "routing_key": "nowhere"})
    relay, before = relays(), REGISTRY.get_sample_value("idempotency_outbox_stuck_total")
    assert before is not None
    counted = []
    for _ in range(7):
        make_due(connection)
        assert relay.run_once() == Relayed(0, 1)
        counted.append((REGISTRY.get_sample_value("idempotency_outbox_stuck_total") or 0.0) - before)
    assert counted == [0, 0, 0, 0, 1, 2, 3]
    assert states(connection) == ["pending"]
    assert op.dead_letters(connection) == []


def test_a_pass_reads_no_row_that_is_not_due(bank: Celery, connection: Connection) -> None:
    connection.execute(
        text("""
            INSERT INTO idempotency.outbox (message_id, tenant, task, key, fingerprint, message, origin, available_at,
                                            service)
            SELECT 'e' || n, 'default', 'o', 'k' || n, 'f', '{}', 'retry', clock_timestamp() + interval '1 hour', 'bank'
            FROM generate_series(1, 3000) n
        """)
    )
    write(connection, "due")
    connection.execute(text("VACUUM ANALYZE idempotency.outbox"))
    assert rows_read(bank, outbox._RESERVE_ROWS, service=op.SERVICE, batch=2, seconds=0.0, silent=[]) < 20


def test_a_row_whose_queue_comes_back_is_published(
    bank: Celery, relays: Callable[..., Relay], connection: Connection
) -> None:
    write(connection, "astray", route={"exchange": bank.conf.task_default_queue, "routing_key": "nowhere"})
    relay = relays()
    assert relay.run_once() == Relayed(0, 1)
    queue = bank.conf.task_default_queue
    with bank.connection_for_write() as broker:
        broker.default_channel.queue_bind(queue, queue, "nowhere")
    make_due(connection)
    assert relay.run_once() == Relayed(1, 0)
    (row,) = op.outbox(connection)
    assert (row.status, row.last_error) == ("published", None)
    assert keys(drained(bank)) == ["astray"]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "broken",
    [
        {"properties": {"priority": 1000}},
        {"properties": {"correlation_id": "t" * 300}},
        {"properties": {"correlation_id": 7}},
        {"route": {"exchange": "x" * 300, "routing_key": "y"}},
        {"route": {}},
        {"route": None},
        {"properties": None},
        {"headers": "text"},
        "{",
        "[" * 10_000,
    ],
    ids=lambda broken: str(broken)[:50],
)
def test_a_row_that_can_never_be_published_does_not_stop_the_others(
    bank: Celery, relays: Callable[..., Relay], connection: Connection, broken: dict[str, Any] | str
) -> None:
    write(connection, "before")
    message_id = write(connection, "broken")
    write(connection, "after")
    (good,) = [row.message for row in op.outbox(connection) if row.message_id == message_id]
    message = broken if isinstance(broken, str) else json.dumps(json.loads(good) | broken)
    connection.execute(
        text("UPDATE idempotency.outbox SET message = :message WHERE message_id = :id"),
        {"message": message, "id": message_id},
    )
    relay = relays()
    assert relay.run_once() == Relayed(2, 1)
    for _ in range(OWN_ERRORS - 1):
        make_due(connection)
        assert relay.run_once() == Relayed(0, 1)
    # each of the others once, but for one that was on its way when the bad one broke the channel
    assert list(dict.fromkeys(keys(drained(bank)))) == ["before", "after"]
    assert states(connection) == ["published", "failed", "published"]
    assert [letter.reason for letter in op.dead_letters(connection)] == ["unpublishable"]


# ---------------------------------------------------------------- a broker that goes away


def test_rows_wait_unmarked_while_the_broker_is_away(
    bank: Celery, relays: Callable[..., Relay], connection: Connection
) -> None:
    relay = relays()
    address = bank.conf.broker_url
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: every connection is refused
        bank.conf.broker_url = f"amqp://127.0.0.1:{closed.getsockname()[1]}//"
        write(connection, "a1")
        write(connection, "a2")
        assert relay.run_once() == Relayed(0, 0, broker_unavailable=True)
    bank.conf.broker_url = address
    for row in op.outbox(connection):
        # the rows are not to blame: no attempt, no back-off, no error
        assert (row.status, row.attempts, row.last_error, row.relayed_until) == ("pending", 0, None, None)
    assert relay.run_once() == Relayed(2, 0)
    assert keys(drained(bank)) == ["a1", "a2"]


def test_the_relay_survives_its_connection_being_closed_under_it(
    bank: Celery, relays: Callable[..., Relay], connection: Connection
) -> None:
    relay = relays()
    write(connection, "before")
    assert relay.run_once() == Relayed(1, 0)
    write(connection, "after")
    cut(relay)
    assert relay.run_once() == Relayed(0, 0, broker_unavailable=True)
    assert states(connection) == ["published", "pending"]
    assert relay.run_once() == Relayed(1, 0)
    assert keys(drained(bank)) == ["before", "after"]


def test_only_confirmed_rows_are_marked_when_a_batch_is_cut(
    bank: Celery,
    relays: Callable[..., Relay],
    connection: Connection,
    at_point: Callable[[str, Callable[[], None]], None],
) -> None:
    relay = relays()
    for key in ("a1", "a2", "a3"):
        write(connection, key)
    at_point("relay.published", lambda: cut(relay))  # all are on their way; the last one cannot be confirmed yet
    relayed = relay.run_once()
    assert (relayed.refused, relayed.broker_unavailable) == (0, True)
    # the first ones' confirms may have come while the next were sent
    assert relayed.published < 3
    assert states(connection) == ["published"] * relayed.published + ["pending"] * (3 - relayed.published)
    assert [row.relayed_until for row in op.outbox(connection)] == [None] * 3
    assert relay.run_once() == Relayed(3 - relayed.published, 0)
    # what was not confirmed may be there twice, what was confirmed is there
    assert set(keys(drained(bank))) == {"a1", "a2", "a3"}


# ---------------------------------------------------------------- a relay that dies, and several


def die() -> None:
    raise SystemExit(1)


def test_rows_of_a_relay_that_died_unpublished_are_published_by_another(
    bank: Celery,
    relays: Callable[..., Relay],
    connection: Connection,
    at_point: Callable[[str, Callable[[], None]], None],
) -> None:
    write(connection, "a1")
    at_point("relay.selected", die)
    with pytest.raises(SystemExit):
        relays().run_once()
    other = relays()
    assert other.run_once() == IDLE  # reserved: perhaps it is only slow
    make_due(connection)
    assert other.run_once() == Relayed(1, 0)
    assert keys(drained(bank)) == ["a1"]


def test_a_row_published_but_not_marked_is_published_again_under_its_id(
    bank: Celery,
    relays: Callable[..., Relay],
    connection: Connection,
    at_point: Callable[[str, Callable[[], None]], None],
) -> None:
    message_id = write(connection, "a1")
    at_point("relay.confirmed", die)
    with pytest.raises(SystemExit):
        relays().run_once()
    assert states(connection) == ["pending"]
    make_due(connection)
    assert relays().run_once() == Relayed(1, 0)
    messages = drained(bank)
    assert [message.headers[OUTBOX_HEADER] for message in messages] == [message_id, message_id]
    assert [message.headers["id"] for message in messages] == ["t-a1", "t-a1"]


def test_no_row_is_published_without_the_name_of_its_queue(
    bank: Celery, relays: Callable[..., Relay], connection: Connection
) -> None:
    """What a broker has lost is looked for by queue: a relay that ends between the two statements leaves the row due."""
    write(connection, "a1")
    connection.exec_driver_sql("""
        CREATE FUNCTION no_name() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no name'; END $$;
        CREATE TRIGGER no_name BEFORE UPDATE OF queue ON idempotency.outbox EXECUTE FUNCTION no_name()
    """)
    try:
        with pytest.raises(DBAPIError, match="no name"):
            relays().run_once()
    finally:
        connection.exec_driver_sql("DROP FUNCTION no_name CASCADE")
    assert states(connection) == ["pending"]
    make_due(connection)
    assert relays().run_once() == Relayed(1, 0)
    (row,) = op.outbox(connection)
    assert (row.status, row.queue) == ("published", bank.conf.task_default_queue)


def test_relays_at_once_publish_each_row_once(
    bank: Celery, relays: Callable[..., Relay], connection: Connection
) -> None:
    expected = [f"a{number}" for number in range(60)]
    for key in expected:
        write(connection, key)
    racing = [relays(batch=5) for _ in range(3)]

    def run(index: int) -> int:
        published = 0
        # rows that another relay has locked in this moment are skipped, so an idle pass is not the end
        while relayed := racing[index].run_once().published:
            published += relayed
        return published

    assert sum(at_once(len(racing), run)) + relays().run_once().published == len(expected)
    assert Counter(keys(drained(bank))) == Counter(expected)
    assert set(states(connection)) == {"published"}


def test_headers_beyond_a_frame_are_refused_before_they_break_anything(
    bank: Celery, relays: Callable[..., Relay], connection: Connection
) -> None:
    for key, size in (("before", 0), ("as large as they may be", 126_000), ("too large", 140_000), ("after", 0)):
        headers = {KEY_HEADER: key, "padding": "é" * (size // 2)}
        message = Message.composed(b.app, b.deposit.name, (key,), {}, task_id=f"t-{key}", headers=headers)
        outbox.insert(connection, OperationId("default", b.deposit.name, key), "v1:f", message, service=op.SERVICE)
    relay = relays()
    assert relay.run_once() == Relayed(3, 1)
    assert keys(drained(bank)) == ["before", "as large as they may be", "after"]
    for _ in range(4):
        make_due(connection)
        assert relay.run_once() == Relayed(0, 1)
    (letter,) = op.dead_letters(connection)
    assert (letter.key, letter.reason, letter.attempts) == ("too large", "unpublishable", 5)
    assert letter.last_error.startswith("ValueError: headers: at most 126976 bytes, got 140")


def test_a_released_operation_without_a_delivery_is_sent_by_a_replay(
    bank: Celery, relays: Callable[..., Relay], connection: Connection
) -> None:
    held = op.early(connection, OperationId("default", b.deposit.name, "k"))
    headers = {KEY_HEADER: "k", "padding": "é" * 70_000}
    message = Message.composed(b.app, b.deposit.name, ("k",), {}, task_id="t", headers=headers)
    outbox.insert(connection, held.id, "v1:f", message, service=op.SERVICE, origin="retry")
    connection.execute(
        text("UPDATE idempotency.outbox SET attempts = 4, fingerprint = (SELECT fingerprint FROM idempotency.records)")
    )
    relay = relays()
    assert relay.run_once() == Relayed(0, 1)
    (letter,) = op.dead_letters(connection)
    smaller = Message.composed(b.app, b.deposit.name, ("k",), {}, task_id="t", headers={KEY_HEADER: "k"})
    connection.execute(text("UPDATE idempotency.outbox SET message = :message"), {"message": smaller.to_text()})
    assert dead_letters.replay(connection, letter.id) == held.id
    assert relay.run_once() == Relayed(1, 0)
    assert op.record(connection, held.id).status == "released"


def test_a_refused_login_is_a_broker_that_is_away_and_blames_no_row(
    bank: Celery, relays: Callable[..., Relay], connection: Connection
) -> None:
    if not bank.conf.broker_url.startswith("amqp"):
        pytest.skip("needs RabbitMQ")
    for key in ("a1", "a2"):
        write(connection, key)
    address = make_url(bank.conf.broker_url)
    relay = relays()
    bank.conf.broker_url = address.set(password="wrong").render_as_string(hide_password=False)
    try:
        assert relay.run_once() == Relayed(0, 0, broker_unavailable=True)
        with pytest.raises(BrokerUnavailable):  # an empty queue would be filled again
            relay.publisher.in_queue(bank.conf.task_default_queue)
    finally:
        bank.conf.broker_url = address.render_as_string(hide_password=False)
    assert [(row.status, row.attempts, row.relayed_until) for row in op.outbox(connection)] == [
        ("pending", 0, None)
    ] * 2
    assert relay.run_once() == Relayed(2, 0)


def test_rows_go_to_a_queue_that_was_declared_otherwise(
    bank: Celery, relays: Callable[..., Relay], connection: Connection
) -> None:
    if not bank.conf.broker_url.startswith("amqp"):
        pytest.skip("needs RabbitMQ")
    name = bank.conf.task_default_queue
    with bank.connection_for_write() as broker:
        # as during a deploy that changes an argument
        quorum_queue(name, exchange=name, dead_letter_queue=f"{name}-dead", limit=50)(broker.default_channel).declare()
    write(connection, "a1")
    assert relays().run_once() == Relayed(1, 0)
    with bank.connection_for_write() as broker:
        assert broker.default_channel.basic_get(name, no_ack=True).headers[KEY_HEADER] == "a1"
