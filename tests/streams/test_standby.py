"""Streams wait while a standby is behind: a real one, which is paused, frozen and gone."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy import create_engine, make_url, text

from idempotency.attempt.runtime import Runtime
from idempotency.errors import SettingsError
from idempotency.settings import Settings
from idempotency.streams.standby import Standbys
from services.cluster_postgres import PostgresNode
from services.postgres import create_database, plain_address
from tests.streams.conftest import Make
from tests.support import bank
from tests.support.processes import eventually
from tests.support.streaming import Streaming


@pytest.fixture(scope="module")
def primary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresNode]:
    server = PostgresNode(tmp_path_factory.mktemp("primary") / "own")
    server.start()
    yield server
    server.discard()


@pytest.fixture
def replicated(primary: PostgresNode, make_streaming: Make) -> Iterator[Streaming]:
    """A stream whose Postgres may have a standby, and has none yet."""
    url = create_database(primary.url, f"d{time.monotonic_ns()}")
    bank.prepare(url)
    streaming = make_streaming("rabbitmq")
    streaming.engine = create_engine(url, isolation_level="AUTOCOMMIT")
    streaming.environment |= {"DATABASE_URL": url, "STANDBY_LAG": "2"}
    yield streaming
    for process in streaming._processes:
        process.kill()
    streaming.engine.dispose()


def check_that_a_login_without_the_right_is_told_so(primary: PostgresNode, replicated: Streaming) -> None:
    with psycopg.connect(plain_address(primary.superuser_url())) as connection:
        connection.execute("CREATE ROLE plain LOGIN PASSWORD 'plain'")
    url = make_url(replicated.environment["DATABASE_URL"]).set(username="plain", password="plain")
    settings = {"database_url": url.render_as_string(hide_password=False), "stream_standby_lag": 2.0}
    runtime = Runtime(Settings.read(settings))
    try:
        with pytest.raises(SettingsError, match="GRANT pg_read_all_stats"):
            Standbys(runtime).behind()
    finally:
        runtime.close()


def test_a_stream_waits_until_there_is_a_standby(rabbit: Streaming) -> None:
    rabbit.environment["STANDBY_LAG"] = "2"
    rabbit.broker.publish_many(5)
    process = rabbit.start()
    eventually(lambda: "no standby is connected" in process.log, what=process.log)
    assert process.end() == 0
    assert rabbit.entries() == []


@pytest.mark.long
def test_a_stream_waits_for_its_standby_and_goes_on(
    primary: PostgresNode, replicated: Streaming, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("standby") / "own"
    PostgresNode.share_password(place, primary.password)
    follower = PostgresNode(place)
    follower.copy_of(primary)
    accounts = replicated.broker.publish_many(5)
    process = replicated.start(batch=2)
    eventually(lambda: "no standby is connected" in process.log, what=process.log)
    assert replicated.entries() == []
    follower.start()
    try:
        replicated.wait_until_handled()
        check_that_a_login_without_the_right_is_told_so(primary, replicated)
        for stop, go_on in (
            (
                lambda: follower.execute("SELECT pg_wal_replay_pause()"),
                lambda: follower.execute("SELECT pg_wal_replay_resume()"),
            ),
            (follower.pause, follower.resume),
        ):
            warned = process.log.count("a standby is")
            stop()
            with replicated.engine.connect() as connection:
                connection.execute(text("INSERT INTO entries (account, amount) VALUES ('not replayed', 0)"))
            eventually(lambda n=warned: process.log.count("a standby is") > n, what=process.log)
            accounts += replicated.broker.publish_many(5, first=len(accounts) * 10)
            time.sleep(1)
            assert len(set(replicated.entries()) & set(accounts)) == len(accounts) - 5
            go_on()
            replicated.wait_until_handled()
        assert [each for each in replicated.entries() if each != "not replayed"] == accounts
        assert process.end() == 0
    finally:
        follower.discard()
