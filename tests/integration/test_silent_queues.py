"""One queue does not answer, though its broker does: what is for others is published, found again if lost, and kept as letters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from amqp.exceptions import NotFound
from celery import Celery
from sqlalchemy import Connection, text

import services
from idempotency.broker import silence
from idempotency.broker.batch import Published
from idempotency.broker.channel import BrokerChannel
from idempotency.broker.publisher import Publisher
from idempotency.broker.silence import SilentQueues
from idempotency.errors import BrokerUnavailable
from idempotency.letters import consumer
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.queues import quorum_queue
from idempotency.relay.relay import Relay
from idempotency.relay.resend import resend_lost
from idempotency.wire.message import Message
from services.rabbitmq import RabbitMQ
from tests.support import bank as bank_module
from tests.support import operations as op
from tests.support.bank import forget_queues
from tests.support.dead_messages import publish
from tests.support.processes import eventually
from tests.support.tasks import enqueued, transactional

# Seconds.
CONFIRM_TIMEOUT = 2.0

_LEADER = """
[begin
     {{ok, Queue}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, Name)), sys:{verb}(amqqueue:get_pid(Queue))
 end || Name <- [{names}]].
"""


def leaders(broker: RabbitMQ, verb: str, *queues: str) -> None:
    """Suspend or resume the leaders of queues: their node goes on, and nobody else stands for election."""
    broker.control("eval", _LEADER.format(names=", ".join(f'<<"{queue}">>' for queue in queues), verb=verb))


@pytest.fixture
def broker(servers: services.Services) -> RabbitMQ:
    if not isinstance(servers.rabbitmq, RabbitMQ):
        pytest.skip("needs a RabbitMQ of its own")
    return servers.rabbitmq


@pytest.fixture
def silent(configured: Celery, environment: dict[str, str], broker: RabbitMQ) -> Iterator[str]:
    """The name of a second queue, which does not answer until the test is over; its dead letters go to a queue of its own."""
    name = f"a-{environment['BANK_QUEUE']}"
    before = list(configured.conf.task_queues)
    configured.conf.task_queues = [*before, quorum_queue(name, exchange=name, dead_letter_queue=f"{name}-dead")]
    forget_queues(configured)
    publisher = Publisher(configured, confirm_timeout=30)
    publisher.is_fifo()  # which declares them
    publisher.close()
    both = (name, f"{name}-dead")
    yield name
    leaders(broker, "resume", *both)  # one that goes on already does not mind
    with configured.connection_for_write() as connection:
        for each in both:
            connection.default_channel.queue_delete(each)
    configured.conf.task_queues = before
    forget_queues(configured)


@pytest.fixture
def relay(configured: Celery) -> Iterator[Relay]:
    relay = Relay(configured, confirm_timeout=CONFIRM_TIMEOUT, batch=5)
    yield relay
    relay.close()


def waiting(app: Celery, queue: str) -> int:
    channel = BrokerChannel(app, timeout=10)
    try:
        found = channel.in_queue(queue)
        return 0 if found is None else found.ready
    finally:
        channel.close()


def statuses(connection: Connection) -> dict[str, str]:
    return {row.key: row.status for row in op.outbox(connection)}


def published(connection: Connection, relay: Relay, key: str) -> Callable[[], bool]:
    def relayed() -> bool:
        relay.run_once()
        return statuses(connection)[key] == "published"

    return relayed


def test_what_is_for_others_is_published_meanwhile(
    configured: Celery, silent: str, broker: RabbitMQ, relay: Relay, connection: Connection
) -> None:
    """As many as a pass takes, and more, wait for the silent queue before them."""
    leaders(broker, "suspend", silent)
    for number in range(7):
        enqueued(connection, bank_module.deposit, f"silent {number}", queue=silent)
    enqueued(connection, bank_module.deposit, "other 0")
    passes = [relay.run_once(), relay.run_once()]
    assert [each.published for each in passes] == [0, 1]
    assert not any(each.broker_unavailable for each in passes)
    enqueued(connection, bank_module.deposit, "other 1")
    began = time.monotonic()
    assert relay.run_once().published == 1  # it is left alone
    assert time.monotonic() - began < CONFIRM_TIMEOUT
    assert [row.attempts for row in op.outbox(connection)] == [0] * 9
    leaders(broker, "resume", silent)
    eventually(published(connection, relay, "silent 6"), what="all are published, once it answers")
    assert set(statuses(connection).values()) == {"published"}


def is_left_alone(relay: Relay, queue: str) -> bool:
    return relay.publisher.unconfirming.left_alone() == [queue]


@pytest.mark.long
def test_one_message_tries_it_and_no_other_waits_for_long(
    configured: Celery,
    silent: str,
    broker: RabbitMQ,
    relay: Relay,
    connection: Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leaders(broker, "suspend", silent)
    for number in range(3):
        enqueued(connection, bank_module.deposit, f"silent {number}", queue=silent)
    relay.run_once()
    assert is_left_alone(relay, silent)
    monkeypatch.setattr(silence, "LEAST_PATIENCE", 0.2)
    monkeypatch.setattr(silence, "SHARE", 0.05)
    eventually(lambda: not is_left_alone(relay, silent), what="its pause is over")
    enqueued(connection, bank_module.deposit, "other")
    began = time.monotonic()
    assert relay.run_once().published == 1
    assert time.monotonic() - began < CONFIRM_TIMEOUT
    assert is_left_alone(relay, silent)  # again
    leaders(broker, "resume", silent)
    eventually(published(connection, relay, "silent 2"), what="all are published, once it answers")
    copies = 3 + 3 + 1  # those of the first pass arrive after all, and the one that has tried
    eventually(lambda: 3 <= waiting(configured, silent) <= copies, what="they arrive")


@pytest.mark.long
def test_a_message_that_cannot_be_sent_is_no_try(
    configured: Celery, silent: str, broker: RabbitMQ, relay: Relay, connection: Connection
) -> None:
    leaders(broker, "suspend", silent)
    for key in ("bad", "good"):
        enqueued(connection, bank_module.deposit, key, queue=silent)
    relay.run_once()
    connection.execute(  # headers beyond a frame, as an earlier version may have stored
        text("""UPDATE idempotency.outbox SET message = jsonb_set(message::jsonb, '{headers,x}',
            to_jsonb(repeat('x', 200000)))::text WHERE key = 'bad'""")
    )
    eventually(lambda: not is_left_alone(relay, silent), what="its pause is over")
    assert relay.run_once().refused == 1
    assert silent in relay.publisher.unconfirming
    relay.run_once()
    assert is_left_alone(relay, silent)


@pytest.mark.long
def test_a_lane_waits_for_its_silent_queue_in_its_order_and_holds_up_no_other_lane(
    configured: Celery, silent: str, broker: RabbitMQ, relay: Relay, connection: Connection
) -> None:
    leaders(broker, "suspend", silent)
    for number in range(7):
        lane = f"lane {number % 6}"
        enqueued(connection, bank_module.deposit, f"silent {number}", queue=silent, ordering_key=lane)
    enqueued(connection, bank_module.deposit, "behind it", ordering_key="lane 0")
    enqueued(connection, bank_module.deposit, "other", ordering_key="z")
    for _ in range(3):
        relay.run_once()
    found = statuses(connection)
    assert found.pop("other") == "published"
    assert set(found.values()) == {"pending"}
    leaders(broker, "resume", silent)
    eventually(published(connection, relay, "behind it"), what="its lane goes on, once it answers")
    at = {row.key: row.published_at for row in op.outbox(connection)}
    assert at["silent 0"] < at["behind it"]
    assert at["silent 6"] < at["behind it"]


@pytest.mark.long
def test_what_is_before_it_in_a_lane_is_sent_to_its_own_queue(
    configured: Celery, silent: str, broker: RabbitMQ, relay: Relay, connection: Connection
) -> None:
    leaders(broker, "suspend", silent)
    enqueued(connection, bank_module.deposit, "any", queue=silent)
    relay.run_once()
    assert is_left_alone(relay, silent)
    with transactional(connection.engine).begin() as own:
        bank_module.deposit.enqueue(own, "head", ordering_key="l")
        bank_module.deposit.enqueue(own, "behind it", queue=silent, ordering_key="l")
        bank_module.deposit.enqueue(own, "last", ordering_key="l")
    assert relay.run_once().published == 1
    assert statuses(connection) == {
        "any": "pending",
        "head": "published",
        "behind it": "pending",
        "last": "pending",
    }
    leaders(broker, "resume", silent)
    eventually(published(connection, relay, "last"), what="the lane goes on, once it answers")


@pytest.mark.long
def test_a_queue_that_only_resend_has_found_silent_is_published_to(
    configured: Celery, silent: str, broker: RabbitMQ, relay: Relay, connection: Connection
) -> None:
    enqueued(connection, bank_module.deposit, "before", queue=silent)
    assert relay.run_once().published == 1
    connection.execute(text("UPDATE idempotency.outbox SET published_at = published_at - interval '1 hour'"))
    leaders(broker, "suspend", silent)
    assert resend_lost(configured, publisher=relay.publisher).resent == 0
    leaders(broker, "resume", silent)
    with transactional(connection.engine).begin() as own:
        bank_module.deposit.enqueue(own, "head", ordering_key="l")
        bank_module.deposit.enqueue(own, "behind it", queue=silent, ordering_key="l")
    eventually(published(connection, relay, "behind it"), what="its lane is published")


@pytest.mark.long
@pytest.mark.parametrize("written", ["", "former-name"])
def test_a_row_that_was_written_without_its_queue_or_with_a_former_name_is_left_alone_too(
    configured: Celery, silent: str, broker: RabbitMQ, relay: Relay, connection: Connection, written: str
) -> None:
    leaders(broker, "suspend", silent)
    for number in range(6):
        enqueued(connection, bank_module.deposit, f"silent {number}", queue=silent)
    connection.execute(
        text("""UPDATE idempotency.outbox SET queue = :written, message = jsonb_set(message::jsonb, '{route}',
            jsonb_build_object('exchange', cast(:queue AS text), 'routing_key', cast(:queue AS text)))::text"""),
        {"queue": silent, "written": written},
    )
    enqueued(connection, bank_module.deposit, "other")
    passes = [relay.run_once().published for _ in range(3)]
    assert sum(passes) == 1
    assert statuses(connection)["other"] == "published"


def test_what_others_have_lost_is_found_meanwhile(
    configured: Celery, silent: str, broker: RabbitMQ, relay: Relay, connection: Connection
) -> None:
    enqueued(connection, bank_module.deposit, "silent", queue=silent)
    enqueued(connection, bank_module.deposit, "lost")
    assert relay.run_once().published == 2
    with configured.connection_for_write() as purging:
        for each in (silent, configured.conf.task_default_queue):
            purging.default_channel.queue_purge(each)
    connection.execute(text("UPDATE idempotency.outbox SET published_at = published_at - interval '1 hour'"))
    leaders(broker, "suspend", silent)
    done = [resend_lost(configured, publisher=relay.publisher).resent for _ in range(2)]
    assert (sum(done), statuses(connection)) == (1, {"silent": "published", "lost": "pending"})
    leaders(broker, "resume", silent)
    eventually(
        lambda: resend_lost(configured, publisher=relay.publisher).resent, what="and its own, once its leader answers"
    )


def test_letters_of_other_queues_are_stored_meanwhile(
    configured: Celery, silent: str, broker: RabbitMQ, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "TIMEOUT", CONFIRM_TIMEOUT)
    letters = DeadLetterConsumer(configured)
    letters.run_once()
    for queue in (silent, configured.conf.task_default_queue):
        publish(configured, queue=f"{queue}-dead", body="no JSON {")
    leaders(broker, "suspend", f"{silent}-dead")

    def stored() -> list[str]:
        try:
            letters.run_once()
        except OSError:  # as its loop does
            letters.close()
        return [letter.queue for letter in op.dead_letters(connection)]

    assert eventually(stored, what="the other letter") == [f"{configured.conf.task_default_queue}-dead"]
    leaders(broker, "resume", f"{silent}-dead")
    eventually(lambda: len(stored()) == 2, what="and its own, once its queue answers")
    letters.close()


@pytest.mark.long
def test_a_marker_that_is_not_confirmed_is_an_error(configured: Celery, silent: str, broker: RabbitMQ) -> None:
    publisher = Publisher(configured, confirm_timeout=CONFIRM_TIMEOUT)
    leaders(broker, "suspend", silent)
    with pytest.raises(BrokerUnavailable, match="no confirm"):
        publisher.mark(silent, "m1", priority=0)
    publisher.close()


def test_a_broker_that_has_gone_is_no_silent_queue(
    configured: Celery, broker: RabbitMQ, environment: dict[str, str]
) -> None:
    publisher = Publisher(configured, confirm_timeout=CONFIRM_TIMEOUT)
    task = Message.composed(configured, "celery.accumulate", (), {}, task_id="t", headers={}, ignore_result=True)
    message = Message(task.headers, task.body, {"exchange": "", "routing_key": environment["BANK_QUEUE"]}, {})
    result = Published()
    assert publisher.is_fifo()
    broker.pause()
    try:
        with pytest.raises(BrokerUnavailable):
            publisher.publish([("m1", message)], result)
    finally:
        broker.resume()
        publisher.close()
    assert result == Published()


def test_there_is_one_pause_for_all_which_doubles_up_to_a_minute() -> None:
    found = SilentQueues()
    assert [found.note("a") for _ in range(3)] == [2.0, 4.0, 8.0]
    assert found.note("b") == 2.0  # a new one
    assert [found.note("b", "a") for _ in range(6)] == [4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert (found.left_alone(), found.patience(usual=30.0), found.patience(usual=5.0)) == (["b", "a"], 10.0, 5.0)
    found.answered("a")
    assert (found.left_alone(), "a" in found, "b" in found) == (["b"], False, True)
    found.answered("b")
    assert (found.left_alone(), found.note("a")) == ([], 2.0)


def test_silent_ones_are_asked_last_and_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    found, queues = SilentQueues(), ["a", "b", "c", "d"]
    found.note("b", "a", "gone")
    assert found.in_turn(queues) == ["c", "d"]
    monkeypatch.setattr(silence, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(silence, "LONGEST_PAUSE", 0.0)
    found.note("b")
    assert found.in_turn(queues) == ["c", "d", "a", "b"]
    found.note("a")
    assert found.in_turn(queues) == ["c", "d", "b", "a"]
    with pytest.raises(NotFound), found.noting("b"):
        raise NotFound  # which is an answer
    assert found.in_turn(queues) == ["b", "c", "d", "a"]
