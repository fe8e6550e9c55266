"""Addresses of several servers, of which some are away: Postgres with a standby, Redis behind Sentinel, several brokers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import psutil
import psycopg
import pytest
from celery import Celery
from redis import Redis
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session

import services
from idempotency.application import runtime_of, settings_of
from idempotency.attempt.hints import Hint, Hints
from idempotency.broker.batch import Published
from idempotency.broker.channel import BrokerChannel
from idempotency.broker.publisher import Publisher
from idempotency.broker.queues import InQueue
from idempotency.checks.broker import check_broker
from idempotency.checks.findings import Level
from idempotency.checks.redis import _sentinels, check_redis
from idempotency.checks.standbys import check_counts, check_hosts, check_standbys
from idempotency.errors import BrokerUnavailable
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.relay.relay import Relay
from idempotency.sentinel import Watch
from idempotency.settings import Settings
from idempotency.store.overview import Snapshot
from idempotency.upkeep.overview import ask_broker
from idempotency.wire.keys import OperationId
from idempotency.wire.message import Message
from services import cluster
from services.cluster_postgres import PostgresPair
from services.cluster_redis import PRIMARY, SentinelSet
from tests.support import bank as bank_module
from tests.support.deliveries import Deliveries
from tests.support.failover import fail_over, fixture_database, fixture_pair, fixture_template  # noqa: F401
from tests.support.operations import Entries, Record
from tests.support.processes import Processes, eventually

# a pooler leads to one server
pytestmark = pytest.mark.direct

# ---------------------------------------------------------------- Postgres


def test_the_same_process_goes_on_at_the_promoted_standby_and_repeats_nothing(
    pair: PostgresPair, deliveries: Deliveries, entries: Entries, record: Record, engine: Engine
) -> None:
    assert deliveries.deliver(bank_module.deposit, "before").state == "SUCCESS"
    before = record("before")
    assert before is not None
    fail_over(pair)
    engine.dispose()
    # its pools have connections to the former primary
    assert deliveries.deliver(bank_module.deposit, "after").state == "SUCCESS"
    deliveries.deliver(bank_module.deposit, "before")
    assert entries("before") == entries("after") == 1
    after = record("after")
    assert after is not None
    assert after.fence > before.fence


def test_a_session_at_either_host_is_at_home(pair: PostgresPair, bank: Celery, database: str) -> None:
    home = runtime_of(bank).home
    name = make_url(database).database
    for node in pair.nodes:
        assert home.knows(("127.0.0.1", node.port, name))
    assert not home.knows(("127.0.0.1", 1, name))


def test_one_database_has_one_name_whatever_host_comes_first(pair: PostgresPair, database: str) -> None:
    ports = [node.port for node in pair.nodes]
    name = str(make_url(database).database)
    names = {Settings.read({"database_url": pair.url(name, ports=each)}).database_name for each in (ports, ports[::-1])}
    assert names == {f"127.0.0.1:{min(map(str, ports))},127.0.0.1:{max(map(str, ports))}/{name}"}


def found(pair: PostgresPair, bank: Celery) -> set[str]:
    with runtime_of(bank).engine.connect() as connection:
        standbys = check_standbys(connection)
    return {str(each) for each in [*standbys, *check_hosts(settings_of(bank))]}


@pytest.mark.long
def test_the_doctor_says_what_a_failover_would_lose(pair: PostgresPair, bank: Celery) -> None:
    whole = {
        f"database standbys: 1 connected, synchronous: {pair.standby.standby_name}",
        "database hosts: 2 answer, one takes writes",
    }
    assert found(pair, bank) == whole
    pair.require_standby(False)
    pair.wait_for_standby()
    lost = "database: 1 standbys, none synchronous; a failover can lose committed data; set synchronous_standby_names"
    assert eventually(lambda: lost in found(pair, bank))
    pair.require_standby(True)
    pair.wait_for_standby()
    pair.standby.kill()
    waits = "commits wait until one is connected: nothing is finished, and nothing that was answered is lost"
    expected = {
        f"database standbys: none synchronous, of 0 connected; {waits}",
        "database hosts: 1 of 2 answer; nothing can take over from the others; check it",
    }
    eventually(lambda: found(pair, bank) == expected, what=f"{expected}")


@pytest.mark.long
def test_the_doctor_says_that_a_promotion_has_reset_what_autovacuum_counts(
    pair: PostgresPair, deliveries: Deliveries, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("idempotency.checks.standbys.MANY", 1)
    deliveries.deliver(bank_module.deposit, "one")

    def counts() -> list[str]:
        with engine.connect() as connection:
            return [f"{each.subject}: {each.found}" for each in check_counts(connection)]

    def analyze() -> None:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("ANALYZE"))

    analyze()
    assert counts() == []
    fail_over(pair)
    engine.dispose()
    assert counts() == ["database statistics: none since a promotion or a crash"]
    analyze()
    assert counts() == []


@pytest.mark.parametrize(
    ("value", "loses"),
    [
        ("off", "nothing: a crash of the primary alone may lose it"),
        ("local", "the primary's disk: a failover may lose it"),
        ("remote_write", "the standby's memory: a crash of both machines at once may lose it"),
        ("on", None),
        ("remote_apply", None),
    ],
)
def test_the_doctor_says_what_an_answered_commit_has_reached(
    pair: PostgresPair, database: str, value: str, loses: str | None
) -> None:
    engine = create_engine(database, connect_args={"options": f"-c synchronous_commit={value}"})
    with engine.connect() as connection:
        about = [each for each in check_standbys(connection) if each.subject == "database synchronous_commit"]
    engine.dispose()
    assert [each.level for each in about] == ([] if loses is None else [Level.WARNING])
    assert loses is None or f"answered by {loses};" in str(about[0])


def test_a_login_that_may_not_see_the_standbys_is_told_so(pair: PostgresPair, database: str) -> None:
    pair.primary.execute(f"CREATE ROLE plain LOGIN PASSWORD '{pair.primary.password}'")
    engine = create_engine(make_url(database).set(username="plain"))
    with engine.connect() as connection:
        assert "may not see" in str(check_standbys(connection)[0])
    engine.dispose()
    pair.primary.execute("DROP ROLE plain")


@pytest.mark.long
def test_two_primaries_of_one_address_are_refused_with_their_timelines(pair: PostgresPair, bank: Celery) -> None:
    former = pair.primary
    fail_over(pair)
    former.start()  # and believes that it is one still
    later = int(str(pair.primary.execute("SELECT left(pg_walfile_name(pg_current_wal_lsn()), 8)")[0][0]), 16)
    found = [(each.level, each.found) for each in check_hosts(settings_of(bank))]
    assert found == [(Level.REFUSAL, f"2 take writes, on the timelines {later - 1}, {later}")]


@pytest.mark.long
def test_hosts_of_which_none_takes_writes_are_a_warning(pair: PostgresPair, bank: Celery) -> None:
    pair.primary.kill()
    said = {f"{each.subject}: {each.found}" for each in check_hosts(settings_of(bank))}
    assert said == {"database hosts: 1 of 2 answer", "database hosts: none takes writes"}


def test_hosts_of_different_clusters_are_refused(pair: PostgresPair, servers: services.Services, database: str) -> None:
    # both let it in
    with psycopg.connect(servers.postgres.superuser_url().replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f"CREATE ROLE twin LOGIN PASSWORD '{pair.primary.password}'")
    pair.primary.execute(f"CREATE ROLE twin LOGIN PASSWORD '{pair.primary.password}'")
    url = make_url(pair.url("postgres", ports=[pair.primary.port, servers.postgres.port])).set(username="twin")
    try:
        settings = Settings.read({"database_url": url.render_as_string(hide_password=False)})
        assert "database hosts: they are of different clusters" in {
            f"{each.subject}: {each.found}" for each in check_hosts(settings)
        }
    finally:
        with psycopg.connect(servers.postgres.superuser_url().replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute("DROP ROLE twin")
        pair.primary.execute("DROP ROLE twin")


# ---------------------------------------------------------------- Redis


@pytest.fixture(scope="module")
def trio() -> Iterator[SentinelSet]:
    with cluster.running(needs=("redis",)) as running:
        yield running.redis


@pytest.fixture
def hints(trio: SentinelSet) -> Hints:
    return Hints(trio.url, owner=uuid4().hex, lease=60, timeout=1.0, pause=0.0)


def works(hints: Hints) -> bool:
    """Whether a hint is left and found: without Redis, every operation seems free."""
    id, fingerprint = OperationId("default", "task", uuid4().hex), "v1:00"
    return hints.take(id, "a" * 32, fingerprint) is Hint.FREE and hints.take(id, "b" * 32, fingerprint) is Hint.HELD


@pytest.mark.long
def test_hints_follow_the_primary_and_the_doctor_counts_the_sentinels(trio: SentinelSet, hints: Hints) -> None:
    settings = Settings.read({"database_url": "postgresql+psycopg://127.0.0.1/shop", "redis_url": trio.url})
    assert settings.redis_url is not None
    assert "redis sentinels: 3, of which 2 must agree; 1 replicas" in map(str, check_redis(settings.redis_url))
    assert works(hints)
    former = trio.primary
    with Redis.from_url(trio.sentinels[0].url) as sentinel:
        sentinel.execute_command("SENTINEL", "FAILOVER", PRIMARY)
    promoted = trio.wait_for_failover(former)
    with Redis.from_url(former.url) as client:  # as a Sentinel tells it some seconds later
        client.execute_command("REPLICAOF", "127.0.0.1", promoted.port)
    # it answers still, and refuses writes on the connections that are open
    assert not former.is_primary
    eventually(lambda: works(hints), what="hints at the new primary")
    eventually(lambda: works(hints.with_own_connections()), what="and on new connections")
    for each in trio.sentinels[1:]:
        each.kill()
    eventually(
        lambda: any("1, need at least 3; if one is away" in str(each) for each in check_redis(settings.redis_url)),  # type: ignore[arg-type]
        what="one Sentinel is too few",
    )
    assert works(hints)
    for each in trio.sentinels[1:]:
        each.start()


@pytest.mark.long
def test_no_connection_to_a_sentinel_outlives_its_answer(trio: SentinelSet, hints: Hints) -> None:
    """While the first ones do not know, the next is asked: a process would keep one more to each with every failover."""
    assert works(hints)
    ports = {each.port for each in trio.sentinels}
    mine = psutil.Process().net_connections(kind="tcp")
    assert trio.primary.port in {each.raddr.port for each in mine if each.raddr}
    assert not [each for each in mine if each.raddr and each.raddr.port in ports]


@pytest.mark.long
def test_the_doctor_counts_the_sentinels_of_the_address_that_answer(trio: SentinelSet) -> None:
    login, _, rest = trio.url.partition("://")[2].rpartition("@")
    hosts, _, name = rest.partition("/")
    address = f"sentinel://{login}@{hosts.split(',')[0]},127.0.0.1:1,127.0.0.1:2/{name}"
    settings = Settings.read({"database_url": "postgresql+psycopg://127.0.0.1/shop", "redis_url": address})
    assert settings.redis_url is not None
    url, expected = settings.redis_url, [(Level.WARNING, "1 of 3 answer")]

    def said() -> bool:
        return [(each.level, each.found) for each in check_redis(url) if each.subject == "redis sentinels"] == expected

    eventually(said, what="also where another test has just started some")


def test_the_doctor_wants_a_majority_of_the_sentinels_to_be_up() -> None:
    watched = Watch(sentinels=7, up=3, quorum=2, replicas=1, answer=3, named=3)
    assert [(each.level, each.found) for each in _sentinels(watched)] == [(Level.WARNING, "3 of 7 are up")]
    assert [each.level for each in _sentinels(watched._replace(up=4))] == [Level.OK]


@pytest.mark.long
def test_hints_come_back_after_the_primary_was_killed(trio: SentinelSet, hints: Hints) -> None:
    assert works(hints)
    former = trio.primary
    former.kill()
    assert not works(hints)
    trio.wait_for_failover(former)
    eventually(lambda: works(hints), what="hints at the new primary")
    former.start()


# ---------------------------------------------------------------- brokers


@pytest.fixture
def behind_two(environment: dict[str, str], servers: services.Services) -> Iterator[dict[str, str]]:
    """The environment with two brokers before the real one, that refuse every connection, under a password of their own."""
    if servers.broker != "rabbitmq":
        pytest.skip("needs RabbitMQ")
    closed = [socket.socket() for _ in range(2)]
    for each in closed:
        each.bind(("127.0.0.1", 0))  # and never listens
    path = urlsplit(environment["BROKER_URL"]).path
    away = [f"amqp://shop:wrong-{SECRET}@127.0.0.1:{each.getsockname()[1]}{path}" for each in closed]
    environment["BROKER_URL"] = ";".join([*away, environment["BROKER_URL"]])
    yield environment
    for each in closed:
        each.close()


SECRET = "hush-hush"


@pytest.fixture
def queue(behind_two: dict[str, str]) -> str:
    return behind_two["BANK_QUEUE"]


def test_what_the_library_opens_goes_to_the_broker_that_answers(
    queue: str, bank: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    channel = BrokerChannel(bank, timeout=5)
    assert channel.in_queue(queue) == InQueue(0, 0)
    channel.close()
    consumer = DeadLetterConsumer(bank)
    assert consumer.run_once() == 0
    consumer.close()
    snapshot: Any = Snapshot()
    ask_broker(bank, settings_of(bank), snapshot)
    assert snapshot.broker_answered
    relay = Relay(bank)
    with Session(runtime_of(bank).engine) as session, session.begin():
        bank_module.deposit.enqueue(session, account="a")
    assert relay.run_once().published == 1
    relay.close()
    assert "broker_passed_over" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.long
def test_a_worker_works_and_callers_publish_past_brokers_that_are_away(
    behind_two: dict[str, str], bank: Celery, processes: Processes, entries: Entries
) -> None:
    worker = processes.worker()
    bank_module.deposit.delay(account="a")
    eventually(lambda: entries("a") == 1, what="the deposit")
    assert SECRET not in worker.log


def test_no_broker_that_answers_is_no_broker(queue: str, bank: Celery) -> None:
    every = bank.conf.broker_url
    bank.conf.broker_url = every.rpartition(";")[0]
    try:
        with pytest.raises(BrokerUnavailable):
            BrokerChannel(bank, timeout=5).in_queue(queue)
    finally:
        bank.conf.broker_url = every


def test_the_doctor_says_how_many_brokers_answer(queue: str, bank: Celery) -> None:
    said = {f"{each.subject}: {each.found}" for each in check_broker(bank)}
    assert "brokers: 1 of 3 answer" in said


def test_after_a_refusal_the_next_message_goes_over_a_new_channel(
    environment: dict[str, str], bank: Celery, servers: services.Services
) -> None:
    """RabbitMQ 3.10 refuses all further messages of a channel whose queue had no leader at the first one."""
    if servers.broker != "rabbitmq":
        pytest.skip("needs RabbitMQ")
    (queue,) = bank.amqp.queues.values()
    queue.queue_arguments["x-max-length"] = 1
    publisher = Publisher(bank, confirm_timeout=30)
    route = {"exchange": "", "routing_key": environment["BANK_QUEUE"]}

    def publish() -> Published:
        task = Message.composed(bank, "celery.accumulate", (), {}, task_id=uuid4().hex, headers={}, ignore_result=True)
        result = Published()
        publisher.publish([("a", Message(task.headers, task.body, route, {}))], result)
        return result

    assert publish().confirmed == ["a"]
    used = publisher._channel
    assert publish().refused or publish().refused or publish().refused  # a quorum queue may take a few more
    assert used is not None
    assert publisher._channel is None
    publish()
    assert publisher._channel is not used
    publisher.close()
