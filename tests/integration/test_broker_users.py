"""Users with the least rights: what each kind of process needs works, and RabbitMQ and Redis refuse the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
import redis
from amqp import Channel
from amqp.exceptions import AccessRefused, NotAllowed, NotFound
from celery import Celery
from kombu.transport.native_delayed_delivery import (
    MAX_LEVEL,
    declare_native_delayed_delivery_exchanges_and_queues,
    level_name,
)
from pydantic import SecretStr
from redis.exceptions import NoPermissionError, ResponseError
from sqlalchemy import Engine
from sqlalchemy.orm import Session

import services
from idempotency import OperationId
from idempotency.application import runtime_of
from idempotency.attempt.hints import Hint, Hints
from idempotency.broker.queues import declare_queues
from idempotency.checks.findings import Level
from idempotency.checks.redis import check_redis
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.observe.unreachable import reason
from idempotency.queues import dead_letter_queues
from idempotency.relay.relay import Relay
from idempotency.store.overview import Snapshot
from idempotency.upkeep.overview import ask_broker, take_snapshot
from tests.support import bank as b
from tests.support import operations as op
from tests.support.broker_users import Users, make_users, virtual_host
from tests.support.commands import Run, runner
from tests.support.dead_messages import headers
from tests.support.operations import Entries
from tests.support.processes import Processes, eventually
from tests.support.tasks import transactional


@pytest.fixture
def vhost(servers: services.Services) -> Iterator[str]:
    with virtual_host(servers) as url:
        yield url


@pytest.fixture
def environment(environment: dict[str, str], vhost: str) -> dict[str, str]:
    return environment | {"BROKER_URL": vhost, "REMOTE_CONTROL": ""}


@pytest.fixture
def run(bank: Celery, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys)


@pytest.fixture
def users(
    run: Run, servers: services.Services, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Users:
    """The users; this process is a relay from here on."""
    made = make_users(run, servers, environment, tmp_path, monkeypatch)
    b.configure(environment | {"BROKER_URL": made.url("relay"), "REDIS_URL": made.hints_url})
    return made


# ---------------------------------------------------------------- what works


@pytest.mark.long
def test_a_whole_run_needs_no_more(
    bank: Celery,
    users: Users,
    processes: Processes,
    servers: services.Services,
    environment: dict[str, str],
    engine: Engine,
    entries: Entries,
) -> None:
    with users.connected(bank, "relay") as connection:  # a relay is first on an empty broker
        declare_queues(connection, all_queues(bank))
    with bank.connection_for_write(environment["BROKER_URL"]) as connection:  # and a worker is first on this one
        for queue in all_queues(bank):
            connection.default_channel.queue_delete(queue.name)
        connection.default_channel.exchange_delete(queue.exchange.name)
    worker = processes.worker("--concurrency", "1", BROKER_URL=users.url("worker"), REDIS_URL=users.hints_url)
    assert not any(word in worker.log for word in ("ACCESS_REFUSED", "queue_differs", "redis_unavailable"))

    with Session(transactional(engine)) as session, session.begin():
        b.deposit.enqueue(session, "enqueued")
    relay = Relay(bank)
    relay.run_once()
    for kind in ("application", "beat"):
        with users.connected(bank, kind) as connection:
            b.deposit.apply_async(kwargs={"account": f"of {kind}"}, connection=connection)
            b.deposit.apply_async(kwargs={"account": f"later of {kind}"}, connection=connection, countdown=1)
    with users.connected(bank, "application") as connection:
        queue = bank.amqp.queues[bank.conf.task_default_queue]
        connection.Producer().publish(
            "[[], {}, {}]",
            exchange=queue.exchange.name,
            routing_key=queue.routing_key,
            headers=headers(task="unknown"),
            content_type="application/json",
            content_encoding="utf-8",
        )
    dead = DeadLetterConsumer(bank)
    accounts = ("enqueued", "of application", "of beat", "later of application", "later of beat")
    with engine.connect() as looking:
        eventually(lambda: dead.run_once() or op.dead_letters(looking), what="the dead letter")
        for account in accounts:
            eventually(lambda account=account: (relay.run_once() and False) or entries(account), what=account)
        assert [letter.reason for letter in op.dead_letters(looking)] == ["unknown_task"]
        seen = take_snapshot(looking, bank, runtime_of(bank).settings)
    assert seen.broker_answered
    assert [entries(account) for account in accounts] == [1] * len(accounts)
    dead.close()
    relay.close()


def test_a_web_server_waits_for_a_queue_that_only_others_may_declare(bank: Celery, users: Users) -> None:
    with users.connected(bank, "application") as connection:
        with pytest.raises(NotFound, match="no queue"):
            b.deposit.apply_async(kwargs={"account": "early"}, connection=connection, retry=False)
        with users.connected(bank, "worker") as other:
            declare_queues(other, all_queues(bank))
        b.deposit.apply_async(kwargs={"account": "later"}, connection=connection)
        assert connection.default_channel.queue_declare(bank.conf.task_default_queue, passive=True).message_count == 1


@pytest.mark.long
def test_remote_control_is_for_those_who_ask_if_it_is_asked_for(
    bank: Celery,
    run: Run,
    servers: services.Services,
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    processes: Processes,
) -> None:
    b.configure(environment | {"REMOTE_CONTROL": "1"})
    users = make_users(run, servers, environment, tmp_path, monkeypatch)
    processes.worker("--concurrency", "1", BROKER_URL=users.url("worker"), REMOTE_CONTROL="1")
    for kind in ("flower", "relay"):
        with users.connected(bank, kind) as connection:
            assert bank.control.inspect(connection=connection, timeout=10, limit=1).ping()
    with users.connected(bank, "application") as connection:
        for exchange in ("celery.pidbox", "reply.celery.pidbox"):
            refused(connection.channel(), publishing(exchange))


# ---------------------------------------------------------------- what RabbitMQ refuses

Try = Callable[[Channel, str], object]


def publishing(exchange: str, key: str | None = None) -> Try:
    """Publish to an exchange; {} is the queue, and the exchange of its name."""

    def act(channel: Channel, queue: str) -> None:
        channel.confirm_select()
        message = channel.prepare_message(b"{}")
        name, target = (text.replace("{}", queue) for text in (exchange, "{}" if key is None else key))
        channel.basic_publish_confirm(message, exchange=name, routing_key=target, confirm_timeout=5)

    return act


def reading(queue: str) -> Try:
    return lambda channel, own: channel.basic_get(queue.replace("{}", own))


def declaring(queue: str) -> Try:
    return lambda channel, own: channel.queue_declare(queue.replace("{}", own), durable=True, auto_delete=False)


def an_exchange(name: str) -> Try:
    return lambda channel, own: channel.exchange_declare(name, "fanout", durable=False, auto_delete=False)


def deleting(queue: str) -> Try:
    return lambda channel, own: channel.queue_delete(queue.replace("{}", own))


def binding(queue: str, exchange: str) -> Try:
    return lambda channel, own: channel.queue_bind(queue.replace("{}", own), exchange.replace("{}", own), "#")


MAILBOX, REPLIES = "celery.pidbox", "reply.celery.pidbox"
# What anyone but workers and relays may not do with queues.
QUEUES: dict[str, Try] = {
    "read a queue": reading("{}"),
    "empty a queue": lambda channel, own: channel.queue_purge(own),
    "consume": lambda channel, own: channel.basic_consume(own),
    "read dead letters": reading("{}-dead"),
    "declare a queue": declaring("{}"),
    "declare another one": declaring("mine"),
    "delete a queue": deleting("{}"),
    "copy what is published": binding("{}", "{}"),
    "publish a dead letter": publishing("", "{}-dead"),
    "publish to a queue by its name": publishing("", "{}"),
    "answer for a worker": publishing(REPLIES),
}
REFUSED: dict[str, dict[str, Try]] = {
    "application": QUEUES
    | {
        "publish for no queue": publishing("{}", "other"),
        "publish to another exchange": publishing("amq.topic"),
        "publish later for no queue": publishing("celery_delayed_27", "0." * 28 + "other"),
        "send an event": publishing("celeryev", "task.sent"),
        "control workers": publishing(MAILBOX),
    },
    "beat": QUEUES | {"publish for no queue": publishing("{}", "other"), "control workers": publishing(MAILBOX)},
    "worker": {
        "control workers": publishing(MAILBOX),
        "answer": publishing(REPLIES),
        "make the mailbox": an_exchange(MAILBOX),
        "be controlled": declaring(f"someone.{MAILBOX}"),
        "read dead letters": reading("{}-dead"),
        "empty them": lambda channel, own: channel.queue_purge(f"{own}-dead"),
        "declare another one": declaring("mine"),
        "read events": declaring("celeryev.mine"),
        "publish to another exchange": publishing("amq.topic"),
    },
    "relay": {
        "control workers": publishing(MAILBOX),
        "declare another one": declaring("mine"),
        "publish later": publishing("celery_delayed_27"),
        "publish to another exchange": publishing("amq.topic"),
        "send an event": publishing("celeryev", "task.sent"),
        "read events": declaring("celeryev.mine"),
    },
    "flower": QUEUES
    | {
        "publish to a queue": publishing("{}"),
        "publish later": publishing("celery_delayed_27"),
        "send an event": publishing("celeryev", "task.sent"),
        "be answered": declaring(f"mine.{REPLIES}"),
    },
    "monitor": QUEUES
    | {"publish to a queue": publishing("{}"), "publish later": publishing("celery_delayed_27")}
    | {"send an event": publishing("celeryev", "task.sent"), "control workers": publishing(MAILBOX)},
}


def refused(channel: Channel, act: Try, queue: str = "") -> None:
    with pytest.raises(AccessRefused):
        act(channel, queue)


@pytest.mark.parametrize("kind", REFUSED)
def test_rabbitmq_refuses_what_a_user_does_not_need(bank: Celery, users: Users, kind: str) -> None:
    with users.connected(bank, "worker") as connection:
        channel = declare_queues(connection, all_queues(bank))
        channel.exchange_declare(level_name(MAX_LEVEL), "topic", durable=True, auto_delete=False)
    allowed = []
    with users.connected(bank, kind) as connection:
        for what, act in REFUSED[kind].items():
            try:
                act(connection.channel(), bank.conf.task_default_queue)
            except AccessRefused:
                continue
            except Exception as error:
                allowed.append(f"{what}: {error!r}")
            else:
                allowed.append(what)
    assert allowed == []


def test_who_only_looks_learns_how_long_a_queue_is_and_who_consumes_it(
    bank: Celery, users: Users, environment: dict[str, str]
) -> None:
    with users.connected(bank, "worker") as connection:
        declare_queues(connection, all_queues(bank))
        b.deposit.apply_async(kwargs={"account": "a"}, connection=connection)
    b.configure(environment | {"BROKER_URL": users.url("monitor")})
    found = Snapshot()
    ask_broker(bank, runtime_of(bank).settings, found)
    b.configure(environment | {"BROKER_URL": users.url("relay")})
    state = found.queue(bank.conf.task_default_queue)
    assert (found.broker_answered, state.ready, state.consumers) == (True, 1, 0)


def test_a_wrong_password_and_a_missing_right_are_told_apart(bank: Celery, users: Users) -> None:
    def refused_to(url: str) -> str:
        with pytest.raises(AccessRefused) as refusal, bank.connection_for_write(url) as connection:
            publishing("amq.topic")(connection.channel(), "")
        return reason(refusal.value)

    relay = users.url("relay")
    assert refused_to(relay) == "the user of the address has no right to this"
    wrong = urlsplit(relay)
    assert (
        refused_to(wrong._replace(netloc=f"{wrong.username}:no@{wrong.netloc.rpartition('@')[2]}").geturl())
        == "wrong password"
    )


def copying(exchange: str, key: str, to: str) -> Try:
    """Publish for a key with the headers that name another one."""

    def act(channel: Channel, queue: str) -> None:
        channel.confirm_select()
        name, target = (text.replace("{}", queue) for text in (exchange, key))
        for header in ("CC", "BCC"):
            message = channel.prepare_message(b"{}", headers={header: [to]})
            channel.basic_publish_confirm(message, exchange=name, routing_key=target, confirm_timeout=5)

    return act


# What no right of RabbitMQ's refuses: docs/rights.md says so.
ALLOWED: dict[str, tuple[str, Try]] = {
    "a copy": ("application", copying("{}", "{}", "of-another")),
    "a copy later": ("beat", copying("celery_delayed_27", "0." * 28 + "{}", "0." * 28 + "of-another")),
    "deletes dead letters": ("worker", deleting("{}-dead")),
    "makes a mailbox": ("flower", an_exchange(MAILBOX)),
}


def test_rabbitmq_does_not_refuse_what_the_page_says_it_does_not(
    bank: Celery, users: Users, environment: dict[str, str]
) -> None:
    own, later = bank.amqp.queues[bank.conf.task_default_queue], "celery_delayed_delivery"
    others = {"copied": (own.exchange.name, "of-another"), "copied-later": (later, "#.of-another")}
    with bank.connection_for_write(environment["BROKER_URL"]) as connection:
        declare_native_delayed_delivery_exchanges_and_queues(connection, "quorum")
        channel = declare_queues(connection, all_queues(bank))
        channel.queue_bind(own.name, later, f"#.{own.routing_key}")
        for name, (exchange, key) in others.items():
            channel.queue_declare(name, durable=True, auto_delete=False)
            channel.queue_bind(name, exchange, key)
        for kind, act in ALLOWED.values():
            with users.connected(bank, kind) as as_user:
                act(as_user.channel(), own.name)
        assert [channel.queue_declare(name, passive=True).message_count for name in others] == [2, 2]


def test_the_users_are_in_their_virtual_host_only(bank: Celery, users: Users) -> None:
    for kind in REFUSED:
        elsewhere = bank.connection_for_write(users.url(kind).rpartition("/")[0] + "//")
        with elsewhere as connection, pytest.raises(NotAllowed):
            connection.connect()


# ---------------------------------------------------------------- Redis


def test_redis_user_keeps_hints_and_does_nothing_else(bank: Celery, users: Users, engine: Engine) -> None:
    owner = runtime_of(bank).settings.owner
    hints = Hints(users.hints_url, owner=owner, lease=60, timeout=5, pause=60)
    one = OperationId("default", "task", uuid4().hex)
    assert [hints.take(one, "t", "f") for _ in range(2)] == [Hint.FREE, Hint.FREE]
    assert hints.take(one, "other", "f") is Hint.HELD
    hints.count(one, "t", "f")
    hints.hold([(one, "t", "f")])
    assert hints.take(one, "other", "f") is Hint.COUNTED
    hints.drop(one, "t", "f")
    hints.flush()
    assert hints.take(one, "other", "f") is Hint.FREE
    assert {finding.level for finding in check_redis(SecretStr(users.hints_url))} == {Level.OK}

    refusals: dict[str, tuple[Any, ...]] = {
        "another key": ("GET", "another"),
        "a hint of another application": ("GET", "idempotency:hint:00000000:x"),
        "writing one": ("SET", "another", "1"),
        "one by a script": ("EVAL", "return redis.call('GET', 'another')", 0),
        "all keys": ("KEYS", "*"),
        "a scan": ("SCAN", 0),
        "emptying it": ("FLUSHALL",),
        "emptying the database": ("FLUSHDB",),
        "configuration": ("CONFIG", "GET", "*"),
        "users": ("ACL", "LIST"),
        "the end": ("SHUTDOWN",),
        "messages": ("PUBLISH", "channel", "1"),
    }
    with redis.Redis.from_url(users.hints_url) as client:
        assert client.ping()
        for what, command in refusals.items():
            with pytest.raises((NoPermissionError, ResponseError), match=r"permissions|can't access"):
                pytest.fail(f"{what}: {client.execute_command(*command)!r}")


# ---------------------------------------------------------------- the command


def test_a_user_without_a_password_is_left_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IDEMPOTENCY_BROKER_RELAY_PASSWORD", "secret")
    document = run("broker-users", "--rabbitmq", "-", "--event-exchange", "orders.v1").document
    assert [user["name"] for user in document["users"]] == ["idempotency_relay"]
    assert [each["user"] for each in document["permissions"]] == ["idempotency_relay"]
    assert r"|orders\.v1)$" in document["permissions"][0]["write"]


def test_without_any_password_the_variables_are_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = run("broker-users", "--rabbitmq", "-")
    assert answer.status != 0
    assert "IDEMPOTENCY_BROKER_WORKER_PASSWORD" in answer.error
    answer = run("broker-users", "--redis", "-")
    assert "IDEMPOTENCY_REDIS_HINTS_PASSWORD" in answer.error
    assert "--rabbitmq" in run("broker-users").error


def all_queues(app: Celery) -> list[Any]:
    queues = list(app.amqp.queues.values())
    return [*dead_letter_queues(queues), *queues]
