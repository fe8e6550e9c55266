"""After a crash Postgres shows what no standby has confirmed. Nothing is concluded from it before one has."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from celery import Celery
from celery.app.task import Context
from sqlalchemy import Connection, create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool

from idempotency.application import close_runtime, settings_of
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.relay.relay import Relay
from idempotency.wire import keys
from idempotency.wire.keys import OperationId
from idempotency.worker import parking
from idempotency.worker.deliveries import delivery_of
from services.cluster_postgres import PostgresPair
from tests.support import operations as op
from tests.support.batches import put_one
from tests.support.dead_messages import bury, waiting
from tests.support.deliveries import Deliveries, request_of
from tests.support.failover import fixture_database, fixture_pair, fixture_template  # noqa: F401
from tests.support.operations import Entries
from tests.support.partitions import put_into_partitions
from tests.support.processes import eventually
from tests.support.queues import depth
from tests.support.tasks import make_task

pytestmark = [pytest.mark.direct, pytest.mark.long]
# Commits that wait for a standby.
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
# Seconds for which something that waits for a standby is watched.
WATCHED = 4.0


@contextmanager
def aside(work: Callable[[], object]) -> Iterator[threading.Thread]:
    """Something that waits for the standby, in a thread."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    yield thread
    thread.join(60)
    assert not thread.is_alive()


def commit_waits(pair: PostgresPair) -> None:
    eventually(lambda: pair.primary.execute(WAITING) != [(0,)], what="a commit waits for the standby")


@pytest.fixture
def crashed(pair: PostgresPair, bank: Celery, database: str) -> Callable[[Callable[[Connection], object]], None]:
    """Changes something while no standby is there, and lets the primary crash before the commit is answered."""

    def crash(change: Callable[[Connection], object]) -> None:
        engine = create_engine(database, poolclass=NullPool)

        def committed() -> None:
            with engine.begin() as connection:
                change(connection)

        pair.standby.kill()
        with aside(committed):
            commit_waits(pair)
            pair.primary.kill()
            pair.primary.start()
        close_runtime(bank)
        # the next numbers of these are written to the log, and that would wait by itself
        with psycopg.connect(
            pair.primary.database_url(str(make_url(database).database)).replace("+psycopg", ""), autocommit=True
        ) as connection:
            connection.execute("SET synchronous_commit = off")
            connection.execute("SELECT nextval('idempotency.fence')")
            connection.execute("SELECT nextval(pg_get_serial_sequence('idempotency.outbox', 'id'))")

    return crash


@pytest.mark.parametrize("lane", [None, "l"])
def test_a_row_is_published_once_a_standby_has_it(
    pair: PostgresPair,
    bank: Celery,
    crashed: Callable[[Callable[[Connection], object]], None],
    lane: str | None,
) -> None:
    task, relay = make_task(bank, put_one, key="{account}"), Relay(bank)
    with bank.connection_for_write() as broker:
        bank.amqp.queues[bank.conf.task_default_queue](broker.default_channel).declare()
    crashed(lambda own: task.enqueue(own, account="e0", ordering_key=lane))
    published: list[int] = []
    with aside(lambda: published.append(relay.run_once().published)):
        commit_waits(pair)
        time.sleep(WATCHED)
        assert (published, depth(bank)) == ([], 0)
        pair.standby.start()
    assert (published, depth(bank)) == ([1], 1)
    relay.close()


@pytest.mark.parametrize("how", ["partitions", "grace", "plain"])
def test_a_dead_letter_is_acknowledged_once_a_standby_has_the_end_that_answers_it(
    pair: PostgresPair,
    bank: Celery,
    database: str,
    crashed: Callable[[Callable[[Connection], object]], None],
    configure: Callable[..., None],
    how: str,
) -> None:
    if how == "partitions":
        put_into_partitions(database)
    if how == "grace":
        configure(unknown_task_grace=3600.0)
    task = make_task(bank, put_one, key="{account}")
    id = OperationId("default", task.name, "e0")
    consumer = DeadLetterConsumer(bank)
    consumer.run_once()
    consumer.close()
    bury(bank, ["e0"], [{"task": task.name, "id": "t1"}])
    fingerprint = keys.fingerprint({"account": "e0"})
    crashed(lambda own: op.completed(own, id, fingerprint=fingerprint, result='"e0"'))
    taken: list[int] = []
    with aside(lambda: taken.append(consumer.run_once())):
        commit_waits(pair)
        time.sleep(WATCHED)
        assert taken == []
        pair.standby.start()
    assert taken == [1]
    consumer.close()
    assert waiting(bank) == 0


def test_a_message_is_given_up_for_its_first_copy_once_a_standby_has_that(
    pair: PostgresPair,
    bank: Celery,
    crashed: Callable[[Callable[[Connection], object]], None],
    deliveries: Deliveries,
    entries: Entries,
) -> None:
    task = make_task(bank, put_one, key=lambda arguments: arguments["account"])
    bank.finalize()
    context = Context(request_of(bank, task, "t1"), args=["e0"], kwargs={}, is_eager=False, called_directly=False)
    delivery, settings = delivery_of(task, context), settings_of(bank)
    crashed(lambda own: parking.park_under_its_key(own, delivery, settings))
    answered: list[Any] = []
    with aside(lambda: answered.append(deliveries.deliver(task, "e0", task_id="t1"))):
        commit_waits(pair)
        time.sleep(WATCHED)
        assert answered == []
        pair.standby.start()
    assert [each.state for each in answered] == ["IGNORED"]
    assert entries("e0") == 0
