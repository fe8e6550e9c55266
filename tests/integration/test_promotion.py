"""What the promotion of a standby keeps, and what it loses where the standby was not synchronous; and a former primary that comes back."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from celery import Celery
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.engine import make_url

from idempotency import IdempotentTask
from idempotency.application import close_runtime, runtime_of
from idempotency.store import claims
from idempotency.wire.keys import OperationId
from services.cluster_postgres import PostgresPair
from services.server import ServiceError
from tests.support import bank as bank_module
from tests.support.batches import accounts, many, put_one, run
from tests.support.deliveries import Deliveries
from tests.support.failover import fail_over, fixture_database, fixture_pair, fixture_template  # noqa: F401
from tests.support.operations import Entries, Record
from tests.support.outside import OutsideWorld
from tests.support.processes import eventually
from tests.support.tasks import ROW, make_task

pytestmark = [pytest.mark.direct, pytest.mark.long]
# Postgres writes 32 numbers of a sequence ahead to its log (SEQ_LOG_VALS).
AHEAD = 32


def plain(url: str) -> str:
    return url.replace("+psycopg", "")


@pytest.fixture
def submitting(database: str) -> Iterator[Engine]:
    """An application's own engine on both hosts."""
    engine = create_engine(database, pool_pre_ping=True, connect_args={"connect_timeout": 2})
    yield engine
    engine.dispose()


def at(node: Any, database: str, **options: Any) -> psycopg.Connection[Any]:
    """A connection to one node, in whatever role it is."""
    return psycopg.connect(plain(node.database_url(str(make_url(database).database))), autocommit=True, **options)


def test_what_was_answered_is_there_after_the_promotion(
    pair: PostgresPair,
    deliveries: Deliveries,
    submitting: Engine,
    entries: Entries,
    outside: OutsideWorld,
    engine: Engine,
) -> None:
    """Claims, effects, finishes and accepted operations: the primary dies right behind each answer."""
    assert deliveries.deliver(bank_module.transfer, "done", outside.url).state == "SUCCESS"
    acts = outside.calls.total()
    with submitting.begin() as connection:
        bank_module.deposit.enqueue(connection, account="accepted")
    fail_over(pair)
    engine.dispose()
    again = deliveries.deliver(bank_module.transfer, "done", outside.url)
    assert again.state != "FAILURE"
    assert outside.calls.total() == acts  # its result was on the standby
    assert entries("done") == entries("done/step") == 1
    with engine.connect() as connection:
        waiting = (
            connection.execute(text("SELECT key FROM idempotency.outbox WHERE settled_at IS NULL")).scalars().all()
        )
    assert waiting == ["accepted"]


def test_no_fence_of_what_has_ended_is_given_again_after_a_promotion(
    pair: PostgresPair, deliveries: Deliveries, record: Record, engine: Engine
) -> None:
    """Of what has ended the highest fence is on the standby with it, and the sequence begins at most `AHEAD` behind it."""
    for number in range(3):
        deliveries.deliver(bank_module.deposit, f"before-{number}")
    fences = [row.fence for number in range(3) if (row := record(f"before-{number}")) is not None]
    fail_over(pair)
    engine.dispose()
    deliveries.deliver(bank_module.deposit, "after")
    after = record("after")
    assert after is not None
    assert max(fences) < after.fence <= max(fences) + AHEAD + 1


def test_a_number_that_no_commit_waited_for_may_come_again_and_nothing_that_has_ended_has_it(
    pair: PostgresPair, database: str, record: Record, deliveries: Deliveries, engine: Engine
) -> None:
    """`nextval` alone waits for no standby, nor does a first claim: their numbers may be drawn again."""
    deliveries.deliver(bank_module.deposit, "first")
    pair.standby.kill()
    drawn = []
    with at(pair.primary, database) as connection:
        connection.execute("SET synchronous_commit = off")
        for _ in range(2 * AHEAD):
            row = connection.execute("SELECT nextval('idempotency.fence')").fetchone()
            assert row is not None
            drawn.append(row[0])
    pair.primary.kill()
    pair.standby.start()  # and has nothing to copy from
    pair.promote()
    pair.require_standby(False)
    engine.dispose()
    with at(pair.primary, database) as connection:
        row = connection.execute("SELECT nextval('idempotency.fence')").fetchone()
    assert row is not None
    assert row[0] < max(drawn), "the standby had all of them: this test has shown nothing"
    first = record("first")
    assert first is not None
    assert row[0] > first.fence


def test_a_first_claim_that_no_standby_has_is_made_anew_under_a_lower_fence_and_commits_once(
    pair: PostgresPair,
    bank: Celery,
    database: str,
    deliveries: Deliveries,
    entries: Entries,
    record: Record,
    engine: Engine,
) -> None:
    fences: list[int] = []
    go_on, begun = threading.Event(), threading.Event()

    def body(self: IdempotentTask) -> str:
        with at(pair.primary, database) as connection:
            row = connection.execute("SELECT fence FROM idempotency.records WHERE key = 'k'").fetchone()
        assert row is not None
        fences.append(row[0])
        self.session.execute(ROW)
        if len(fences) == 1:
            begun.set()
            go_on.wait(60)
        return "paid"

    task = make_task(bank, body)
    pair.standby.kill()
    with at(pair.primary, database) as connection:
        connection.execute("SET synchronous_commit = off")
        connection.execute("SELECT nextval('idempotency.fence') FROM generate_series(1, %s)", [2 * AHEAD])
    first = threading.Thread(target=deliveries.deliver, args=(task,), kwargs={"key": "k"}, daemon=True)
    first.start()
    assert begun.wait(20)
    pair.primary.kill()
    pair.standby.start()
    pair.promote()
    pair.require_standby(False)
    engine.dispose()
    deliveries.deliver(task, key="k")
    go_on.set()
    first.join(60)
    assert not first.is_alive()
    assert fences[1] < fences[0], "the standby had the numbers: this test has shown nothing"
    ended = record("k")
    assert ended is not None
    assert (ended.status, ended.fence) == ("completed", fences[1])
    with engine.connect() as after:
        assert after.execute(text("SELECT count(*) FROM entries")).scalar_one() == 1


def test_a_former_primary_that_runs_on_answers_no_commit(
    pair: PostgresPair, bank: Celery, database: str, deliveries: Deliveries, entries: Entries, engine: Engine
) -> None:
    """It was cut off, not killed. Its commits wait for a standby that is now the primary, so no attempt there ever ends."""
    deliveries.deliver(bank_module.deposit, "before")
    former = pair.primary
    former.pause()
    pair.promote()
    pair.require_standby(False)
    former.resume()
    committed = threading.Event()

    def write() -> None:
        with contextlib.suppress(psycopg.Error), at(former, database) as connection:
            connection.execute("INSERT INTO entries (account, amount) VALUES ('split', 1)")
            committed.set()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    assert not committed.wait(2.0)
    with at(pair.primary, database) as connection:
        assert connection.execute("SELECT count(*) FROM entries WHERE account = 'split'").fetchone() == (0,)
    former.kill()
    writer.join(10)
    close_runtime(bank)
    deliveries.deliver(bank_module.deposit, "after")
    assert entries("before") == entries("after") == 1
    pair.require_standby(True)
    pair.rebuild()
    with at(former, database) as connection:
        # what it alone had written is gone with its timeline
        assert connection.execute("SELECT count(*) FROM entries WHERE account = 'split'").fetchone() == (0,)


def test_a_commit_that_no_standby_has_confirmed_counts_as_unanswered(
    pair: PostgresPair, bank: Celery, database: str, engine: Engine
) -> None:
    """An administrator who cancels the wait gets the client a COMMIT with a WARNING, which is not believed."""
    pair.standby.kill()
    with runtime_of(bank).engine.connect() as connection:
        connection.exec_driver_sql("INSERT INTO entries (account, amount) VALUES ('alone', 1)")
        pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()

        def cancel() -> None:
            waiting = f"SELECT count(*) FROM pg_stat_activity WHERE pid = {pid} AND wait_event = 'SyncRep'"
            eventually(lambda: pair.primary.execute(waiting) == [(1,)], what="it waits for the standby")
            pair.primary.execute(f"SELECT pg_cancel_backend({pid})")

        canceller = threading.Thread(target=cancel)
        canceller.start()
        with pytest.raises(Exception, match="not confirmed by a synchronous standby"):
            connection.commit()
        canceller.join()


def test_an_asynchronous_standby_loses_what_it_had_not_yet_got(
    pair: PostgresPair, bank: Celery, submitting: Engine, engine: Engine
) -> None:
    """The negative control: the same promotion, and an accepted operation is gone."""
    pair.require_standby(False)
    eventually(lambda: pair.primary.execute("SHOW synchronous_standby_names") == [("",)])
    pair.standby.kill()
    with submitting.begin() as connection:
        bank_module.deposit.enqueue(connection, account="lost")
    pair.primary.kill()
    pair.standby.start()  # and has nothing to copy from
    pair.promote()
    engine.dispose()
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM idempotency.outbox")).scalar_one() == 0


@pytest.mark.parametrize("how", ["alone", "in a batch", "looked at"])
def test_what_a_primary_shows_after_a_crash_is_answered_once_a_standby_has_it(
    pair: PostgresPair, bank: Celery, database: str, deliveries: Deliveries, engine: Engine, how: str
) -> None:
    """A commit that waits for a standby is visible after a restart. A duplicate that was acknowledged for it would be lost by a promotion."""
    task = make_task(bank, put_one, key="{account}", batch=10)
    pair.standby.kill()
    first = threading.Thread(target=deliveries.deliver, args=(task, "e0"), daemon=True)
    first.start()
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    eventually(lambda: pair.primary.execute(waits) == [(1,)], what="its end waits for the standby")
    pair.primary.kill()
    pair.primary.start()
    engine.dispose()
    close_runtime(bank)
    with at(pair.primary, database) as connection:
        ((status, fingerprint),) = connection.execute("SELECT status, fingerprint FROM idempotency.records").fetchall()
        # the first number after a restart is written to the log, and what draws it waits for that alone
        connection.execute("SET synchronous_commit = off")
        connection.execute("SELECT nextval('idempotency.fence')")
    assert status == "completed"
    answered: list[Any] = []

    def ask() -> None:
        if how == "alone":
            answered.append(deliveries.deliver(task, "e0"))
        elif how == "in a batch":
            answered.append(run(bank, task, *many(bank, task, 1)))
        else:
            id = OperationId("default", task.name, "e0")
            with runtime_of(bank).autocommit() as connection:
                answered.append(claims.peek(connection, id, service="bank", fingerprint=fingerprint))

    again = threading.Thread(target=ask, daemon=True)
    again.start()
    again.join(2.0)
    assert not answered
    pair.standby.start()
    again.join(60)
    first.join(60)
    assert answered
    assert accounts(engine) == {"e0": [1]}


@pytest.mark.parametrize(("after", "grows"), [("ANALYZE", True), ("VACUUM (ANALYZE)", False)])
def test_a_promoted_server_finds_free_space_after_a_vacuum(
    pair: PostgresPair, database: str, after: str, grows: bool
) -> None:
    """Why docs/cluster.md asks for one: the map of free space is not replicated, and without it tables grow by what is written."""
    with at(pair.primary, database) as connection:
        connection.execute(
            "CREATE TABLE filled (n int, text text STORAGE PLAIN) WITH (autovacuum_enabled = off);"
            "INSERT INTO filled SELECT n, repeat('x', 1000) FROM generate_series(1, 5000) n;"
            "DELETE FROM filled WHERE n < 4990"
        )
        connection.execute("VACUUM filled")  # the last rows keep it as long as it is
    size = "SELECT pg_relation_size('filled')"
    with at(pair.primary, database) as connection:
        before = connection.execute(size).fetchone()
    pair.primary.kill()
    pair.promote()
    pair.require_standby(False)
    with at(pair.primary, database) as connection:
        connection.execute(after)
        for _ in range(10):
            connection.execute("INSERT INTO filled SELECT n, repeat('x', 1000) FROM generate_series(1, 100) n")
        found = connection.execute(size).fetchone()
    assert before is not None
    assert found is not None
    assert (found[0] > before[0] + 500_000) is grows


def test_while_no_standby_is_there_nothing_is_answered_and_all_goes_on_with_the_next(
    pair: PostgresPair, deliveries: Deliveries, entries: Entries, engine: Engine
) -> None:
    pair.primary.kill()
    pair.promote()  # and it waits for a standby itself, which is strict
    engine.dispose()
    delivery = threading.Thread(target=lambda: deliveries.deliver(bank_module.deposit, "strict"), daemon=True)
    delivery.start()
    time.sleep(1.0)
    assert delivery.is_alive()
    pair.rebuild()
    delivery.join(30)
    assert entries("strict") == 1


def test_nobody_becomes_a_standby_of_a_primary_that_is_away(pair: PostgresPair, database: str) -> None:
    pair.primary.kill()
    with pytest.raises(ServiceError, match="pg_basebackup failed") as error:
        pair.rebuild()
    assert pair.primary.password not in str(error.value)
    pair.primary.start()
    pair.rebuild()
