"""Three RabbitMQ nodes: the leader of a queue dies, a majority dies, members come and go. Accepted operations go on later."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import Celery
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from idempotency.application import runtime_of
from idempotency.broker.channel import BrokerChannel
from idempotency.checks.broker import check_broker
from idempotency.checks.findings import Level
from idempotency.errors import BrokerUnavailable
from idempotency.queues import dead_letter_queues
from idempotency.relay.relay import Relay
from services import cluster, packages
from services.cluster_rabbitmq import RabbitMQTrio
from services.server import ServiceError
from tests.support import bank as bank_module
from tests.support.operations import Entries
from tests.support.processes import Processes, eventually

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(packages.rabbitmq_program() is None, reason="RabbitMQ is not installed on this machine"),
]
# Seconds: an election, and the start of a node on a busy machine.
PATIENCE = 240.0


@pytest.fixture(scope="module")
def trio() -> Iterator[RabbitMQTrio]:
    with cluster.running(needs=("rabbitmq",)) as running:
        yield running.rabbitmq


@pytest.fixture
def queue(trio: RabbitMQTrio, environment: dict[str, str]) -> Iterator[str]:
    """The queue of the application, which comes after this fixture; all nodes are up at the end."""
    environment["BROKER_URL"] = trio.url()
    yield environment["BANK_QUEUE"]
    trio.mend(PATIENCE)


def accept(bank: Celery, account: str) -> None:
    with Session(runtime_of(bank).engine) as session, session.begin():
        bank_module.deposit.enqueue(session, account=account)


def publish(relay: Relay, engine: Engine) -> int:
    """A pass of the relay; returns how many rows have been published in all."""
    relay.run_once()
    with engine.begin() as connection:
        # not after its reservation is over, or its back-off
        connection.execute(
            text("UPDATE idempotency.outbox SET available_at = clock_timestamp() WHERE status = 'pending'")
        )
        return int(
            connection.execute(text("SELECT count(*) FROM idempotency.outbox WHERE status = 'published'")).scalar_one()
        )


def ready(bank: Celery, queue: str) -> int:
    channel = BrokerChannel(bank, timeout=5)
    try:
        found = channel.in_queue(queue)
        return -1 if found is None else found.ready
    except BrokerUnavailable:
        return -1
    finally:
        channel.close()


def test_the_leader_of_a_queue_dies_and_the_next_one_leads(
    queue: str, trio: RabbitMQTrio, bank: Celery, engine: Engine
) -> None:
    relay = Relay(bank)
    accept(bank, "before")
    eventually(lambda: publish(relay, engine) == 1, timeout=PATIENCE, what="published")
    said = [each for each in check_broker(bank) if each.subject == "brokers"]
    assert [(each.level, each.found.partition(";")[0]) for each in said] == [(Level.OK, "3 answer, of one cluster")]
    members = trio.members(queue)
    assert len(members.all) == len(trio.nodes)
    assert members.leader is not None
    trio.node(members.leader).kill()
    accept(bank, "after")
    eventually(lambda: publish(relay, engine) == 2, timeout=PATIENCE, what="published to the new leader")
    eventually(lambda: ready(bank, queue) == 2, timeout=PATIENCE, what="both are in the queue")
    assert trio.members(queue).leader not in (None, members.leader)
    assert "brokers: 2 of 3 answer" in {f"{each.subject}: {each.found}" for each in check_broker(bank)}
    relay.close()


def test_without_a_majority_nothing_is_published_and_nothing_is_lost(
    queue: str, trio: RabbitMQTrio, bank: Celery, engine: Engine, processes: Processes, entries: Entries
) -> None:
    relay = Relay(bank, confirm_timeout=3.0)
    accept(bank, "before")
    eventually(lambda: publish(relay, engine) == 1, timeout=PATIENCE, what="published")
    for node in trio.nodes[1:]:
        node.kill()
    accept(bank, "meanwhile")
    for _ in range(3):
        assert publish(relay, engine) == 1
    trio.mend(PATIENCE)
    eventually(lambda: publish(relay, engine) == 2, timeout=PATIENCE, what="published once a majority is back")
    relay.close()
    processes.worker()
    eventually(lambda: entries("before") == entries("meanwhile") == 1, timeout=PATIENCE, what="both are done")


def test_a_queue_goes_on_while_it_loses_a_member_and_gets_another(
    queue: str, trio: RabbitMQTrio, bank: Celery, engine: Engine
) -> None:
    relay = Relay(bank)
    accept(bank, "before")
    eventually(lambda: publish(relay, engine) == 1, timeout=PATIENCE, what="published")
    leader = trio.members(queue).leader
    assert leader is not None
    trio.shrink(queue, trio.node(leader))
    eventually(lambda: leader not in trio.members(queue).all, timeout=PATIENCE, what="two members")
    accept(bank, "after")
    eventually(lambda: publish(relay, engine) == 2, timeout=PATIENCE, what="published to those that are left")
    trio.grow(queue, trio.node(leader))
    eventually(lambda: leader in trio.members(queue).online, timeout=PATIENCE, what="three members")
    assert ready(bank, queue) == 2
    relay.close()
    with pytest.raises(ServiceError):
        trio.grow("no-such-queue", trio.nodes[0])


def test_a_node_that_is_cut_off_serves_nobody_until_it_finds_the_others(
    queue: str, trio: RabbitMQTrio, bank: Celery, engine: Engine
) -> None:
    relay = Relay(bank)
    try:
        accept(bank, "before")
        eventually(lambda: publish(relay, engine) == 1, timeout=PATIENCE, what="published")
        leader = trio.members(queue).leader
        assert leader is not None
        node = trio.node(leader)
        trio.cut_off(node)
        try:
            # it sees no majority; the others go on with another leader
            eventually(lambda: not node.answers(), timeout=PATIENCE, what="it has stopped serving")
            assert trio.seen_by_others(node) == 2
            accept(bank, "meanwhile")
            eventually(lambda: publish(relay, engine) == 2, timeout=PATIENCE, what="published meanwhile")
            assert trio.members(queue).leader not in (None, leader)
        finally:
            trio.join_again(node)
        trio.mend(PATIENCE)
        assert trio.alive() == 3
        eventually(lambda: ready(bank, queue) == 2, timeout=PATIENCE, what="both are in the queue")
    finally:
        relay.close()


def test_a_leader_that_carries_out_nothing_is_started_anew(
    queue: str, trio: RabbitMQTrio, bank: Celery, engine: Engine
) -> None:
    """Its process is there and its node is up, so that no other member stands for election."""
    relay = Relay(bank, confirm_timeout=3.0)
    try:
        accept(bank, "before")
        eventually(lambda: publish(relay, engine) == 1, timeout=PATIENCE, what="published")
        trio.nodes[0].control(
            "eval",
            f"""{{ok, Queue}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"{queue}">>)),
            sys:suspend(amqqueue:get_pid(Queue)).""",
        )
        accept(bank, "meanwhile")
        assert publish(relay, engine) == 1
        assert trio.alive() == 3
        trio.mend(PATIENCE)
        eventually(lambda: publish(relay, engine) == 2, timeout=PATIENCE, what="published to a leader that works")
    finally:
        relay.close()


def test_the_doctor_says_that_the_leader_of_a_queue_does_not_answer(
    queue: str, trio: RabbitMQTrio, configured: Celery
) -> None:
    """Of one whose only member is on a node that is down; the other nodes answer."""
    declared = configured.amqp.queues[queue]
    declared.queue_arguments["x-quorum-initial-group-size"] = 1
    with configured.connection_for_write() as connection:
        for each in [declared, *dead_letter_queues([declared])]:
            each(connection.default_channel).declare()

    def refused() -> list[tuple[str, str]]:
        return [(each.subject, each.found) for each in check_broker(configured) if each.level is Level.REFUSAL]

    assert refused() == []
    leader = trio.members(queue).leader
    assert leader is not None
    trio.node(leader).kill()
    eventually(lambda: (f"queue {queue}", "its leader does not answer") in refused(), what="it is named")
