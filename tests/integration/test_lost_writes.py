"""What does not wait for the disk: a first claim, the beginning of a saga, and the relay's notes. A crash that undoes them costs a repetition."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from sqlalchemy import create_engine, text
from sqlalchemy.engine import Engine

from idempotency.application import close_runtime
from idempotency.observe import crash_points
from idempotency.relay.relay import Relay
from idempotency.sagas import saga
from idempotency.wire.headers import KEY_HEADER
from services.postgres import Postgres, create_database
from tests.support.bank import app, deposit, prepare, transfer
from tests.support.deliveries import Deliveries
from tests.support.operations import Entries, Record
from tests.support.outside import OutsideWorld
from tests.support.queues import drained
from tests.support.tasks import ROW, make_task, transactional


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    server = Postgres(tmp_path_factory.mktemp("postgres") / "own")
    server.start()
    yield server
    server.discard()


def _keep_unwritten(server: Postgres) -> None:
    """From now on nothing writes what a commit has not written: the crash undoes it every time, not sometimes."""
    engine = create_engine(server.superuser_url(), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        # Its commits would write those before them, too.
        connection.execute(text("ALTER SYSTEM SET autovacuum = off"))
        connection.execute(text("SELECT pg_reload_conf()"))
        # It wakes every ten seconds at the least, whatever its settings. The server started after the crash has another.
        writer = connection.execute(text("SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'"))
        os.kill(writer.scalar_one(), signal.SIGSTOP)
    engine.dispose()


@pytest.fixture
def database(postgres: Postgres) -> Iterator[str]:
    name = f"lost_{uuid4().hex[:8]}"
    url = create_database(postgres.url, name)
    prepare(url)
    yield url
    close_runtime(app)


@pytest.fixture
def crash(postgres: Postgres, engine: Engine) -> Iterator[Callable[..., None]]:
    """Arrange a crash of Postgres, and its recovery, at the first passing of a point; `before` runs just ahead of it."""
    seen: list[str] = []

    def at(point: str, before: Callable[[], object] = lambda: None) -> list[str]:
        def hook(name: str) -> None:
            if name == point and not seen:
                seen.append(name)
                before()
                postgres.kill()
                postgres.start()
                engine.dispose()

        _keep_unwritten(postgres)
        crash_points.install(hook)
        return seen

    yield at
    crash_points.install(None)


def test_a_claim_undone_by_a_crash_is_made_again_with_effects_once(
    crash: Callable[..., None], deliveries: Deliveries, engine: Engine, entries: Entries, record: Record
) -> None:
    left: list[Any] = []

    def body(self: Any) -> Any:
        left.append(record("k"))
        self.session.execute(ROW)
        return len(left)

    task = make_task(deliveries.app, body)
    crashed = crash("body.entered")
    outcome = deliveries.deliver(task, key="k")

    assert crashed == ["body.entered"]
    # the crash has undone the claim, or this test would show nothing; the finish matched nothing, so the body ran again
    assert [row and row.status for row in left] == [None, "started"]
    assert outcome.state == "SUCCESS"
    assert (entries("row"), record("k").status, record("k").attempts) == (1, "completed", 1)


def test_no_call_goes_outside_under_a_claim_that_a_crash_has_undone(
    crash: Callable[..., None], deliveries: Deliveries, outside: OutsideWorld, entries: Entries, record: Record
) -> None:
    crashed = crash("body.entered")
    outcome = deliveries.deliver(transfer, "a", outside.url)

    assert crashed == ["body.entered"]
    assert outcome.state == "SUCCESS"
    assert (entries("a"), entries("a/step")) == (1, 1)
    assert len(outside.calls) == 1


@pytest.mark.long
def test_a_saga_whose_beginning_a_crash_has_undone_begins_again(
    crash: Callable[..., None], deliveries: Deliveries, engine: Engine, entries: Entries, record: Record
) -> None:
    begun: list[int] = []

    @saga("test.begun", key="{thing}", app=deliveries.app)
    def begins(saga: Any, thing: str) -> Any:
        with engine.connect() as connection:
            begun.append(connection.execute(text("SELECT count(*) FROM idempotency.sagas")).scalar_one())
        return saga.step("row", lambda session: session.execute(ROW).rowcount)

    crashed = crash("body.entered")
    outcome = deliveries.deliver(begins, "k")
    deliveries.app.tasks.pop("test.begun")

    assert crashed == ["body.entered"]
    # the crash has undone it, or this test would show nothing; its first step matched nothing, so it began again
    assert begun == [0, 1]
    assert (outcome.state, entries("row"), record("k").status) == ("SUCCESS", 1, "completed")


@pytest.mark.long
def test_a_claim_under_which_a_duplicate_was_counted_survives_the_crash(
    crash: Callable[..., None], deliveries: Deliveries, entries: Entries, record: Record, redis_url: str
) -> None:
    found: list[object] = []

    def body(self: Any) -> Any:
        found.append(record("k").status)
        self.session.execute(ROW)
        return 1

    task = make_task(deliveries.app, body)
    answers: list[str] = []
    crashed = crash("body.entered", before=lambda: answers.append(deliveries.deliver(task, key="k").state))
    outcome = deliveries.deliver(task, key="k")

    assert crashed == ["body.entered"]
    assert answers == ["IGNORED"]  # acknowledged, and so the record had to outlive the crash
    assert found == ["started"]
    assert (outcome.state, entries("row")) == ("SUCCESS", 1)


@pytest.mark.long
def test_a_mark_undone_by_a_crash_is_made_again_and_the_work_done_once(
    postgres: Postgres, bank: Celery, engine: Engine, deliveries: Deliveries, entries: Entries
) -> None:
    with transactional(engine).begin() as connection:
        handle = deposit.enqueue(connection, account="a1", amount=5)
    _keep_unwritten(postgres)
    relay = Relay(bank)
    assert relay.run_once().published == 1
    postgres.kill()
    postgres.start()
    engine.dispose()
    close_runtime(bank)

    with engine.connect() as connection:
        left = connection.execute(text("SELECT status, relayed_until FROM idempotency.outbox")).one()
    # neither the reservation nor the mark has survived, or this test would show nothing
    assert tuple(left) == ("pending", None)
    assert relay.run_once().published == 1
    relay.close()
    messages = drained(bank)
    assert [message.headers["id"] for message in messages] == [handle.task_id] * 2
    for message in messages:
        key = message.headers[KEY_HEADER]
        assert deliveries.deliver(deposit, key=key, **message.payload[1]).state == "SUCCESS"
    assert entries("a1") == 1
