"""The sweep of large results deletes nothing that a commit to come refers to, whichever clock is wrong and whatever the commit waits for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine, make_url

from idempotency import lookup
from idempotency.application import close_runtime
from idempotency.objects import files
from idempotency.objects import s3 as buckets
from idempotency.store import objects as stored
from idempotency.upkeep import maintenance, objects
from idempotency.wire.references import new_reference
from services.cluster_postgres import PostgresNode, PostgresPair
from tests.support import operations as op
from tests.support.deliveries import Deliveries
from tests.support.failover import fixture_database, fixture_pair, fixture_template  # noqa: F401
from tests.support.large_results import DAY, Place, body, large, place_of
from tests.support.processes import eventually
from tests.support.tasks import make_task

WAITS = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"


def put_long_ago(directory: Path) -> None:
    """What is there was."""
    past = time.time() - 2 * DAY
    for path in directory.glob("*/*"):
        os.utime(path, (past, past))


@pytest.fixture
def results(bank: Celery, directory: Place) -> Path:
    return Path(directory.address.removeprefix("file://"))


@pytest.fixture
def sweeping(bank: Celery, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Future[int]]:
    """Begins a sweep."""
    monkeypatch.setattr(objects, "PAUSE", 0.1)
    return lambda: ThreadPoolExecutor(1).submit(objects.sweep, bank)


def test_a_clock_that_is_a_day_ahead_deletes_nothing_that_was_put_just_now(
    bank: Celery, kept: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweeping process's: that of the place counts."""
    now = time.time() + DAY + 60.0

    class Ahead(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.fromtimestamp(now, tz)

    place_of(bank).put("ab/" + "ab" * 16, b"1")
    monkeypatch.setattr(buckets, "datetime", Ahead)
    monkeypatch.setattr(files, "time", SimpleNamespace(time=lambda: now), raising=False)
    assert objects.sweep(bank) == 0
    assert len(kept.names) == 1


@pytest.mark.parametrize("commits", [True, False])
def test_what_is_open_ends_before_anything_is_deleted(
    bank: Celery, engine: Engine, results: Path, sweeping: Any, monkeypatch: pytest.MonkeyPatch, commits: bool
) -> None:
    looked, have_ended = Event(), stored.have_ended

    def noted(*args: Any) -> bool:
        ended = have_ended(*args)
        looked.set()
        return ended

    monkeypatch.setattr(stored, "have_ended", noted)
    reference = new_reference(b"1")
    place_of(bank).put(reference.name, b"1")
    put_long_ago(results)
    id = op.operation(make_task(bank, body, key="{account}"), "e0")
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as connection:
        transaction = connection.begin()
        op.completed(connection, id, result=str(reference))
        swept = sweeping()
        assert looked.wait(30)
        assert not swept.done()
        transaction.commit() if commits else transaction.rollback()
    assert swept.result(30) == (not commits)
    assert (results / reference.name).exists() == commits


def test_a_sweep_waits_no_longer_than_an_attempt_may_take_and_the_next_one_goes_on(
    bank: Celery, engine: Engine, results: Path, sweeping: Any, configure: Any
) -> None:
    configure(lease=0.5, heartbeat=0.1, max_run=1.0)
    place_of(bank).put("ab/" + "ab" * 16, b"1")
    put_long_ago(results)
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as open_for_days, open_for_days.begin():
        open_for_days.exec_driver_sql("CREATE TEMP TABLE anything ()")
        assert sweeping().result(30) == 0
    assert sweeping().result(30) == 1


# ---------------------------------------------------------------- a standby that is away, and a former primary


@pytest.mark.direct
@pytest.mark.long
def test_what_a_commit_refers_to_that_waits_for_its_standby_is_not_deleted(
    pair: PostgresPair, bank: Celery, deliveries: Deliveries, results: Path, sweeping: Any
) -> None:
    """For days."""
    task = make_task(bank, body, key="{account}")
    pair.standby.kill()
    with ThreadPoolExecutor(1) as worker:
        delivered = worker.submit(deliveries.deliver, task, "e0")
        eventually(lambda: pair.primary.execute(WAITS) == [(1,)], what="its end waits for the standby")
        put_long_ago(results)
        swept = sweeping()
        eventually(lambda: pair.primary.execute(WAITS) == [(2,)], what="so does the sweep")
        pair.standby.start()
        assert delivered.result(60).state == "SUCCESS"
    assert swept.result(60) == 0
    assert lookup(bank, task.name, "e0").result == large()


@pytest.mark.direct
@pytest.mark.long
def test_what_a_purge_has_freed_that_no_standby_has_confirmed_is_not_deleted(
    pair: PostgresPair, bank: Celery, engine: Engine, deliveries: Deliveries, results: Path, sweeping: Any
) -> None:
    """After a restart Postgres shows that purge, and the next failover undoes it."""
    task = make_task(bank, body, key="{account}")
    assert deliveries.deliver(task, "e0").state == "SUCCESS"
    put_long_ago(results)
    with engine.connect() as connection:
        op.age(connection, op.operation(task, "e0"), expires_at=-1.0)
    pair.standby.kill()
    with ThreadPoolExecutor(1) as upkeep:
        purged = upkeep.submit(maintenance.purge, bank)
        eventually(lambda: pair.primary.execute(WAITS) == [(1,)], what="the purge waits for the standby")
        pair.primary.kill()
        pair.primary.start()
        assert purged.exception(60) is not None
    engine.dispose()
    close_runtime(bank)
    assert pair.primary.execute("SELECT 1") == [(1,)]
    swept = sweeping()
    eventually(lambda: pair.primary.execute(WAITS) == [(1,)], what="the sweep waits for the standby")
    pair.primary.kill()
    assert swept.exception(60) is not None
    pair.standby.start()
    pair.promote()
    pair.require_standby(False)
    close_runtime(bank)
    assert lookup(bank, task.name, "e0").result == large()


@pytest.mark.direct
@pytest.mark.long
def test_a_former_primary_deletes_nothing_that_the_new_one_refers_to(
    pair: PostgresPair, bank: Celery, database: str, deliveries: Deliveries, results: Path, sweeping: Any
) -> None:
    task, name = make_task(bank, body, key="{account}"), str(make_url(database).database)
    former = pair.primary
    former.pause()
    pair.promote()
    pair.require_standby(False)
    former.resume()

    def use(node: PostgresNode) -> None:
        close_runtime(bank)
        bank.conf.idempotency_database_url = node.database_url(name)

    use(pair.primary)
    assert deliveries.deliver(task, "e0").state == "SUCCESS"
    put_long_ago(results)
    use(former)
    swept = sweeping()
    eventually(lambda: former.execute(WAITS) == [(1,)], what="the sweep waits for a standby")
    former.kill()
    assert swept.exception(60) is not None
    use(pair.primary)
    assert lookup(bank, task.name, "e0").result == large()
