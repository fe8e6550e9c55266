"""The three connections over TLS, against servers that speak nothing else, with the certificates of docker-compose.yml."""

from __future__ import annotations

import os
import shutil
import ssl
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import kombu.pools
import pytest
from celery import Celery
from pydantic import SecretStr
from redis import Redis
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from idempotency.application import close_runtime
from idempotency.broker.channel import BrokerChannel
from idempotency.broker.connections import verifying
from idempotency.checks.broker import check_broker
from idempotency.checks.doctor import doctor
from idempotency.checks.findings import Finding, Level
from idempotency.checks.postgres import check_database
from idempotency.checks.redis import check_redis
from idempotency.checks.unreachable import check_server
from idempotency.errors import BrokerUnavailable
from idempotency.relay.relay import Relay
from idempotency.settings import Settings
from services.postgres import create_database
from tests.support import bank
from tests.support.encrypted import (
    HOST,
    OTHER_HOST,
    TlsPostgres,
    TlsRabbitMQ,
    TlsRedis,
    authority,
    make_certificates,
)
from tests.support.processes import PYTHONPATH, Processes

pytestmark = pytest.mark.direct
QUEUE = f"bank-{uuid4().hex[:8]}"


@dataclass(frozen=True)
class Encrypted:
    """The servers, and the files of their authority and of another one."""

    postgres: TlsPostgres
    redis: TlsRedis
    rabbitmq: TlsRabbitMQ
    authority: str
    other_authority: str

    @property
    def passwords(self) -> list[str]:
        return [server.password for server in (self.postgres, self.redis, self.rabbitmq)]


@pytest.fixture(scope="module")
def encrypted() -> Iterator[Encrypted]:
    directory = Path(tempfile.mkdtemp(prefix="tls-"))
    own, other = make_certificates(directory / "own"), make_certificates(directory / "other")
    servers = (
        TlsRabbitMQ(directory / "rabbitmq", own),  # takes longest
        TlsPostgres(directory / "postgres", own),
        TlsRedis(directory / "redis", own),
    )
    try:
        for server in servers:
            server.launch()
        for server in servers:
            server.wait_until_ready()
        rabbitmq, postgres, redis = servers
        yield Encrypted(postgres, redis, rabbitmq, authority(own), authority(other))
    finally:
        for server in servers:
            server.discard()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def environment(encrypted: Encrypted) -> dict[str, str]:
    return {
        **os.environ,
        "DATABASE_URL": create_database(encrypted.postgres.url, f"test_{uuid4().hex[:12]}"),
        "REDIS_URL": encrypted.redis.url,
        "BROKER_URL": encrypted.rabbitmq.url,
        "BROKER_CA_FILE": encrypted.authority,
        "BANK_QUEUE": QUEUE,
        "PYTHONPATH": PYTHONPATH,
    }


@pytest.fixture
def application(environment: dict[str, str]) -> Iterator[Celery]:
    bank.prepare(environment["DATABASE_URL"])
    bank.configure(environment)
    yield bank.app
    close_runtime(bank.app)
    kombu.pools.reset()
    bank.app.conf.broker_use_ssl = None


@pytest.mark.long
def test_a_task_is_enqueued_relayed_and_run_over_tls_alone(
    application: Celery, environment: dict[str, str], encrypted: Encrypted
) -> None:
    stop, processes = threading.Event(), Processes(environment)
    relay = threading.Thread(target=Relay(application).run, args=(stop,), daemon=True)
    engine = create_engine(environment["DATABASE_URL"])
    try:
        relay.start()
        processes.worker("--concurrency", "1")
        with Session(engine) as session, session.begin():
            handle = bank.deposit.enqueue(session, account="a1", amount=5)
        assert handle.result(timeout=60) == {"account": "a1", "amount": 5}
        with engine.connect() as connection:
            seen = "SELECT ssl, count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE datname = current_database()"
            ((is_encrypted, connections),) = connection.execute(text(f"{seen} GROUP BY ssl")).all()
            assert is_encrypted
            assert connections > 2  # this one, the relay's and the worker's
            assert connection.execute(text("SELECT account, amount FROM entries")).all() == [("a1", 5)]
        with Redis.from_url(encrypted.redis.url) as client:
            assert client.info("commandstats")["cmdstat_eval"]["calls"] > 0  # the worker's hint
        findings = doctor(application)
        assert [str(finding) for finding in findings if finding.level is Level.REFUSAL] == []
        assert not any("unreachable" in finding.found for finding in findings)
    finally:
        stop.set()
        relay.join(10)
        processes.kill_all()
        engine.dispose()


def database(encrypted: Encrypted, host: str, authority: str) -> list[Finding]:
    url = encrypted.postgres.database_url("postgres", sslrootcert=authority).replace(f"@{HOST}", f"@{host}")
    return check_database(Settings.read({"database_url": url}))


def hints(encrypted: Encrypted, host: str, authority: str) -> list[Finding]:
    return check_redis(SecretStr(encrypted.redis.address(host, ssl_ca_certs=authority)))


def messages(encrypted: Encrypted, host: str, authority: str) -> list[Finding]:
    return check_broker(client(encrypted, host, {"ca_certs": authority, "server_hostname": None}))


def client(encrypted: Encrypted, host: str, options: Any) -> Celery:
    app = Celery("shop", broker=encrypted.rabbitmq.url.replace(f"@{HOST}", f"@{host}"), set_as_current=False)
    app.conf.update(broker_use_ssl=options, task_queues=[])
    return app


Ask = Callable[[Encrypted, str, str], list[Finding]]


@pytest.mark.parametrize("ask", [database, hints, messages])
def test_a_server_is_trusted_by_its_authority_and_its_name_alone(encrypted: Encrypted, ask: Ask) -> None:
    def found(host: str, authority: str) -> str:
        (first, *_) = check_server("server", "url", lambda: ask(encrypted, host, authority))
        return str(first)

    assert "unreachable" not in found(HOST, encrypted.authority)
    other_host, other_authority = found(OTHER_HOST, encrypted.authority), found(HOST, encrypted.other_authority)
    assert other_host == "server: unreachable: its certificate is for another host; check url and the server"
    assert "unreachable: its certificate is of an authority that is not known here" in other_authority


@pytest.mark.parametrize("ask", [database, hints, messages])
@pytest.mark.parametrize("host", [HOST, OTHER_HOST])
def test_an_error_about_a_certificate_shows_no_password(encrypted: Encrypted, ask: Ask, host: str) -> None:
    with pytest.raises(Exception, match=r"(?i)certificate") as caught:
        ask(encrypted, host, encrypted.other_authority if host == HOST else encrypted.authority)
    shown = "".join(traceback.format_exception(caught.value))
    assert not any(password in shown for password in encrypted.passwords)


def test_none_of_the_servers_takes_plain_text(encrypted: Encrypted) -> None:
    postgres = encrypted.postgres.database_url("postgres", sslmode="disable")
    redis = f"redis://:{encrypted.redis.password}@{HOST}:{encrypted.redis.port}/0"
    rabbitmq = Celery("shop", broker=encrypted.rabbitmq.url.replace("amqps:", "amqp:"), set_as_current=False)
    asked: list[Callable[[], list[Finding]]] = [
        lambda: check_database(Settings.read({"database_url": postgres})),
        lambda: check_redis(SecretStr(redis)),
        lambda: check_broker(rabbitmq),
    ]
    found = [str(finding) for ask in asked for finding in check_server("server", "url", ask)]
    assert len(found) == 3
    assert all("unreachable" in each for each in found)
    assert "unreachable: no TLS between it and this process, or only TLS" in found[0]


def test_the_librarys_connections_compare_names_where_py_amqp_does_not(encrypted: Encrypted) -> None:
    app = client(encrypted, OTHER_HOST, {"ca_certs": encrypted.authority})
    with app.connection_for_write() as careless:
        careless.connect()  # which is why the doctor refuses it
    with pytest.raises(BrokerUnavailable, match="its certificate is for another host"):
        BrokerChannel(app, timeout=5).is_fifo()
    with verifying(client(encrypted, HOST, {"ca_certs": encrypted.authority}).connection_for_write()) as right:
        right.connect()


def test_a_workers_own_connection_is_refused_as_the_doctor_says(encrypted: Encrypted) -> None:
    options = {"ca_certs": encrypted.authority, "server_hostname": None}
    connection = client(encrypted, OTHER_HOST, options).connection_for_read()
    with connection, pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        connection.transport.establish_connection()


def test_without_its_authority_redis_gives_no_hints_and_the_task_runs(
    application: Celery, encrypted: Encrypted, caplog: pytest.LogCaptureFixture
) -> None:
    application.conf.idempotency_redis_url = encrypted.redis.address(ssl_ca_certs=encrypted.other_authority)
    assert bank.deposit.apply(kwargs={"account": "a2"}).get() == {"account": "a2", "amount": 1}
    assert "redis_unavailable" in caplog.text
    assert encrypted.redis.password not in caplog.text
