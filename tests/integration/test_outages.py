"""What is said when Postgres is away, lacks our tables, or grants no right on them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, create_engine, make_url, text
from sqlalchemy.pool import NullPool

from idempotency import SettingsError, publish
from idempotency.application import close_runtime
from tests.support import bank as b
from tests.support.processes import Processes, eventually
from tests.support.proxy import Proxy
from tests.support.tasks import enqueued


@pytest.fixture
def proxy(database: str, environment: dict[str, str], bank: Celery) -> Iterator[Proxy]:
    url = make_url(database)
    with Proxy(str(url.host), int(url.port or 0)) as proxy:
        environment["DATABASE_URL"] = url.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
        yield proxy


@pytest.fixture
def poor(engine: Engine, database: str) -> Iterator[Connection]:
    """A connection of a role that may do nothing with our tables."""
    role = f"poor_{uuid4().hex[:8]}"
    with engine.connect() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD 'p'"))
        connection.execute(text(f"GRANT {role} TO CURRENT_USER"))  # to drop what it owns
    mine = create_engine(make_url(database).set(username=role, password="p"), poolclass=NullPool)
    with mine.connect() as connection:
        yield connection
    with engine.connect() as connection:
        connection.execute(text(f"DROP OWNED BY {role}"))
        connection.execute(text(f"DROP ROLE {role}"))


def published(connection: Connection) -> int:
    query = text("SELECT count(*) FROM idempotency.outbox WHERE status = 'published'")
    return int(connection.execute(query).scalar_one())


@pytest.mark.long
def test_a_relay_logs_one_line_for_an_outage(
    proxy: Proxy, environment: dict[str, str], connection: Connection, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "idempotency.cli", "relay", "-A", "tests.support.bank"]
    with log.open("wb") as stderr:
        relay = subprocess.Popen(command, env=environment | {"SIGN_OF_LIFE": "0.5"}, stderr=stderr)
    try:
        eventually(lambda: "relay_started" in log.read_text() or relay.poll() is not None, timeout=60)
        for number in (1, 2):  # the second begins within a minute of the first: still the same outage
            refused = proxy.refusals
            proxy.refuse()
            proxy.reset()
            # three loops and the signs of life, each several times
            eventually(lambda before=refused: proxy.refusals >= before + 12, timeout=60)
            proxy.heal()
            enqueued(connection, b.deposit, f"a{number}")
            eventually(lambda wanted=number: published(connection) == wanted)
    finally:
        relay.terminate()
        assert relay.wait(30) == 0
    away = [line for line in log.read_text().splitlines() if "unavailable" in line or "not_written" in line]
    assert len(away) == 1, log.read_text()


def test_a_worker_logs_one_line_for_the_deliveries_of_an_outage(
    proxy: Proxy, bank: Celery, processes: Processes
) -> None:
    worker = processes.worker(
        "--pool", "threads", "--concurrency", "4", DATABASE_URL=processes.environment["DATABASE_URL"]
    )
    proxy.refuse()
    proxy.reset()
    refused = proxy.refusals
    for account in "abcd":
        b.deposit.delay(account)
    eventually(lambda: proxy.refusals >= refused + 8, timeout=60)
    assert worker.log.count("event=claim_waits") + worker.log.count("event=sign_of_life_not_written") == 1


def test_enqueue_without_the_tables_names_the_command(configured: Celery, empty_database: str) -> None:
    configured.conf.idempotency_database_url = empty_database
    close_runtime(configured)
    engine = create_engine(empty_database, poolclass=NullPool)
    with engine.connect() as connection, pytest.raises(SettingsError) as refused:
        b.deposit.enqueue(connection, "a")
    assert str(refused.value).startswith("the database does not have the tables of this version (UndefinedTable: ")
    assert str(refused.value).endswith("; run `idempotency migrate`")
    close_runtime(configured)


def test_enqueue_and_publish_without_a_right_name_it_and_its_table(
    bank: Celery, poor: Connection, engine: Engine
) -> None:
    def refusal() -> str:
        with pytest.raises(SettingsError) as refused:
            b.deposit.enqueue(poor, "a")
        poor.rollback()
        return str(refused.value)

    needed = "; this role needs USAGE on schema idempotency; SELECT, INSERT, UPDATE, DELETE on idempotency.outbox"
    assert refusal().startswith("a right is missing (InsufficientPrivilege: permission denied for schema idempotency)")
    with engine.connect() as connection:
        connection.execute(text(f"GRANT USAGE ON SCHEMA idempotency TO {poor.engine.url.username}"))
    said = refusal()
    assert said.startswith("a right is missing (InsufficientPrivilege: permission denied for table outbox)" + needed)
    with pytest.raises(SettingsError, match=r"on idempotency\.outbox"):
        publish(poor, "order.paid", {}, exchange="orders", app=bank)
