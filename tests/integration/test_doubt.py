"""A COMMIT whose answer is lost: the record decides, under a new fence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import redis
from sqlalchemy import Connection, event, text
from sqlalchemy.engine import Engine, make_url

from idempotency.application import close_runtime, runtime_of
from idempotency.attempt.hints import Hint
from idempotency.store import ends, statements
from idempotency.wire.keys import OperationId
from tests.support import bank
from tests.support.deliveries import Deliveries
from tests.support.operations import Entries, Record
from tests.support.proxy import Proxy
from tests.support.tasks import ROW, make_task

# as psycopg sends it; "BEGIN ISOLATION LEVEL READ COMMITTED" is something else
COMMIT = b"\x0bCOMMIT\x00"


@pytest.fixture
def proxy(database: str, environment: dict[str, str]) -> Iterator[Proxy]:
    """The application reaches Postgres through this; the test's own oracle does not."""
    url = make_url(database)
    assert url.host is not None
    assert url.port is not None
    proxy = Proxy(url.host, url.port)
    through = url.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
    environment["DATABASE_URL"] = through
    yield proxy
    close_runtime(bank.app)
    proxy.close()


@pytest.fixture
def app(proxy: Proxy, environment: dict[str, str], deliveries: Deliveries) -> Any:
    return deliveries.app


def test_a_lost_reply_to_the_finishing_commit_runs_nothing_twice(
    proxy: Proxy, deliveries: Deliveries, entries: Entries, record: Record
) -> None:
    deliveries.deliver(bank.deposit, "warm-up")
    proxy.cut_reply_to(COMMIT)
    outcome = deliveries.deliver(bank.deposit, "a", 5)

    assert proxy.cuts == 1
    assert (outcome.state, outcome.value) == ("SUCCESS", {"account": "a", "amount": 5})
    assert (entries("a"), record("a").status, record("a").attempts) == (1, "completed", 1)


def test_a_lost_reply_to_the_claim_is_claimed_again_as_the_same_attempt(
    proxy: Proxy, deliveries: Deliveries, entries: Entries, record: Record
) -> None:
    deliveries.deliver(bank.deposit, "warm-up")
    proxy.cut_reply_to(b"INSERT INTO idempotency.records")
    outcome = deliveries.deliver(bank.deposit, "a")

    assert proxy.cuts == 1
    assert outcome.state == "SUCCESS"
    assert (entries("a"), record("a").attempts) == (1, 1)


def test_a_lost_reply_to_a_steps_commit_does_the_step_once(
    proxy: Proxy, deliveries: Deliveries, entries: Entries, record: Record, app: Any
) -> None:
    runs = []

    def body(self: Any) -> Any:
        runs.append(1)
        return self.step("one", lambda session: session.execute(ROW).rowcount)

    task = make_task(app, body)
    deliveries.deliver(bank.deposit, "warm-up")
    proxy.cut_reply_to(COMMIT)
    outcome = deliveries.deliver(task, key="k")

    assert proxy.cuts == 1
    assert (outcome.state, outcome.value) == ("SUCCESS", 1)
    assert (len(runs), entries("row"), record("k").attempts) == (2, 1, 1)


def test_an_attempt_in_doubt_does_not_count_itself_as_a_duplicate(
    proxy: Proxy, deliveries: Deliveries, record: Record, app: Any
) -> None:
    """Redis has lost its hint, and has that of a duplicate, which waits for the row."""
    runs = []

    def body(self: Any) -> Any:
        runs.append(1)
        if len(runs) == 1:
            with redis.Redis.from_url(app.conf.idempotency_redis_url) as client:
                client.flushall()
            id = OperationId("default", self.name, "k")
            assert runtime_of(app).hints.take(id, "a duplicate", record("k").fingerprint) is Hint.FREE
        return self.step("one", lambda session: session.execute(ROW).rowcount)

    task = make_task(app, body)
    deliveries.deliver(bank.deposit, "warm-up")
    proxy.cut_reply_to(COMMIT)
    outcome = deliveries.deliver(task, key="k")

    assert proxy.cuts == 1
    assert (outcome.state, len(runs), record("k").status) == ("SUCCESS", 2, "completed")
    assert record("k").duplicates == 0


def test_a_lost_reply_to_a_finish_without_a_session_is_resolved(
    proxy: Proxy, deliveries: Deliveries, record: Record, app: Any
) -> None:
    runs = []

    def body(self: Any) -> Any:
        runs.append(1)
        return len(runs)

    task = make_task(app, body)
    deliveries.deliver(bank.deposit, "warm-up")
    proxy.cut_reply_to(b"'completed', result =")
    outcome = deliveries.deliver(task, key="k")

    assert proxy.cuts == 1
    assert (outcome.state, outcome.value, len(runs)) == ("SUCCESS", 1, 1)


def test_a_lost_reply_to_the_failing_commit_leaves_one_dead_letter(
    proxy: Proxy, deliveries: Deliveries, record: Record, engine: Engine
) -> None:
    deliveries.deliver(bank.deposit, "warm-up")
    proxy.cut_reply_to(COMMIT)
    outcome = deliveries.deliver(bank.failing, "a", "permanent")

    assert proxy.cuts == 1
    assert outcome.state == "FAILURE"
    assert record("a").status == "failed"
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM idempotency.dead_letters")).scalar_one() == 1
        assert connection.execute(text("SELECT count(*) FROM failures")).scalar_one() == 1


def test_a_lost_reply_to_the_release_sends_the_next_delivery_once(
    proxy: Proxy, deliveries: Deliveries, record: Record, engine: Engine
) -> None:
    deliveries.deliver(bank.deposit, "warm-up")
    proxy.cut_reply_to(b"SET status = 'released'")
    outcome = deliveries.deliver(bank.failing, "a", "defer long")

    assert proxy.cuts == 1
    assert record("a").status == "released"
    assert outcome.state in ("IGNORED", "RETRY")
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT origin FROM idempotency.outbox")).scalars().all()
    assert rows == ["retry"]


def test_a_connection_cut_inside_the_body_is_an_ordinary_error(
    proxy: Proxy, deliveries: Deliveries, entries: Entries, record: Record
) -> None:
    deliveries.deliver(bank.deposit, "warm-up")
    proxy.cut_reply_to(b"INSERT INTO entries")
    outcome = deliveries.deliver(bank.deposit, "a")

    assert proxy.cuts == 1
    assert outcome.state == "RETRY"
    assert (entries("a"), record("a").status) == (0, "released")


def test_a_finish_while_the_database_is_away_is_a_doubt_and_no_failure(
    deliveries: Deliveries, record: Record, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []

    def body(self: Any) -> None:
        runs.append(1)

    task = make_task(app, body, max_attempts=1)
    complete = ends.complete

    def break_once(connection: Connection, *args: Any, **kwargs: Any) -> None:
        monkeypatch.setattr(ends, "complete", complete)

        def refuse_once(*_: Any) -> None:
            event.remove(connection.engine, "do_connect", refuse_once)
            raise psycopg.OperationalError("connection refused")

        event.listen(connection.engine, "do_connect", refuse_once)
        statements.execute(connection, "SELECT pg_terminate_backend(pg_backend_pid())")

    monkeypatch.setattr(ends, "complete", break_once)
    outcome = deliveries.deliver(task, key="k")

    assert (outcome.state, len(runs)) == ("SUCCESS", 2)
    assert (record("k").status, record("k").attempts) == ("completed", 1)
