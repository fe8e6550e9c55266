"""PgBouncer in transaction mode: each transaction may reach another backend, which also serves other clients."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from celery import Celery
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError

from idempotency import IdempotentTask, SettingsError
from idempotency.application import close_runtime, runtime_of, settings_of
from idempotency.attempt.heartbeat import Holding
from idempotency.checks.doctor import doctor
from idempotency.checks.findings import Level
from idempotency.relay.relay import Relay
from idempotency.store import connections, overview, schema
from idempotency.store.sweeps import statements_within, sweep_settings
from idempotency.upkeep import maintenance
from idempotency.upkeep.presence import SignOfLife
from tests.support import bank as b
from tests.support import operations as op
from tests.support.deliveries import Deliveries
from tests.support.operations import Entries, at_once
from tests.support.pooler import Pooler
from tests.support.processes import eventually
from tests.support.tasks import make_task

BACKENDS = 3
SHOWN = """
SELECT current_setting('synchronous_commit'), current_setting('lock_timeout'), current_setting('statement_timeout'),
       current_setting('idle_in_transaction_session_timeout')
"""
SWEEPS = "SELECT current_setting('lock_timeout'), current_setting('enable_sort'), current_setting('statement_timeout')"
# What a backend has that nobody has set anything on; the bank's lease is 60 s, and a run may take 600 s.
DEFAULTS = ("on", "0", "0", "0")


@pytest.fixture(params=[True, False], ids=["options ignored", "options refused"])
def pooler(database: str, request: pytest.FixtureRequest) -> Iterator[Pooler]:
    with Pooler(database, ignores_options=request.param, backends=BACKENDS) as pooler:
        yield pooler


@pytest.fixture
def pooled(pooler: Pooler, bank: Celery, environment: dict[str, str]) -> Iterator[Celery]:
    b.configure(environment | {"DATABASE_URL": pooler.url})
    yield bank
    close_runtime(bank)


def backends(pooler: Pooler, shown: str = SHOWN) -> list[tuple[str, ...]]:
    """What another client of the pooler finds set on each of its backends."""
    url = make_url(pooler.url).set(drivername="postgresql").render_as_string(hide_password=False)
    clients = [psycopg.connect(url, prepare_threshold=None) for _ in range(BACKENDS)]
    found = {}
    for client in clients:  # all in transactions at once, so each has another backend
        pid, *values = client.execute(f"SELECT pg_backend_pid(), found.* FROM ({shown}) found").fetchone() or ()
        found[pid] = tuple(values)
    for client in clients:
        client.close()
    assert len(found) == BACKENDS
    return list(found.values())


def test_attempts_behind_a_pooler_leave_nothing_on_its_backends(
    pooled: Celery, pooler: Pooler, database: str, deliveries: Deliveries, entries: Entries
) -> None:
    def some(worker: int) -> list[str]:
        return [deliveries.deliver(b.deposit, f"{worker}/{number}").state for number in range(12)]

    with ThreadPoolExecutor(4) as threads:
        states = [state for each in threads.map(some, range(4)) for state in each]
    assert states == ["SUCCESS"] * 48
    assert sum(entries(f"{worker}/{number}") for worker in range(4) for number in range(12)) == 48
    assert backends(pooler) == [DEFAULTS] * BACKENDS


def test_sweeps_behind_a_pooler_have_their_settings_and_leave_none_on_its_backends(
    pooled: Celery, pooler: Pooler, deliveries: Deliveries
) -> None:
    """A plan without sorts, or a lock time-out of 200 ms, would be other clients' on the same backend."""
    assert deliveries.deliver(b.deposit, "a").state == "SUCCESS"
    maintenance.recover(pooled)
    maintenance.purge(pooled)
    with runtime_of(pooled).autocommit() as connection, statements_within(connection, 7.0), sweep_settings(connection):
        for _ in range(2):
            assert connection.exec_driver_sql(SWEEPS).one() == ("200ms", "off", "7s")
    plain = ("0", "on", "0")
    assert backends(pooler, SWEEPS) == [plain] * BACKENDS


def test_every_transaction_behind_a_pooler_has_our_settings(
    pooled: Celery, deliveries: Deliveries, engine: Engine, database: str
) -> None:
    with engine.connect() as connection:
        connection.execute(text(f"ALTER DATABASE {make_url(database).database} SET synchronous_commit = off"))

    def body(self: IdempotentTask) -> Any:
        first = list(self.session.execute(text(SHOWN)).one())
        self.session.rollback()
        return [first, list(self.session.execute(text(SHOWN)).one())]

    attempt = ["on", "1min", "10min", "10min"]
    assert deliveries.deliver(make_task(pooled, body), key="k").value == [attempt, attempt]
    runtime = runtime_of(pooled)
    for own, limit in ((runtime.autocommit, "0"), (runtime._heartbeat_engine.connect, "15s")):
        with own() as connection:
            for _ in range(2):
                assert connection.exec_driver_sql(SHOWN).one() == ("on", "1min", limit, "0")


def test_the_options_of_the_address_hold_behind_a_pooler(
    pooler: Pooler, bank: Celery, environment: dict[str, str], deliveries: Deliveries
) -> None:
    address = make_url(pooler.url).update_query_dict({"options": r"-c search_path=shop,public --TimeZone=Etc/UTC"})
    b.configure(environment | {"DATABASE_URL": address.render_as_string(hide_password=False)})
    shown = "SELECT current_setting('search_path'), current_setting('timezone')"
    task = make_task(bank, lambda self: list(self.session.execute(text(shown)).one()))
    assert deliveries.deliver(task, key="k").value == ["shop,public", "Etc/UTC"]
    with runtime_of(bank).autocommit() as connection:
        assert tuple(connection.exec_driver_sql(shown).one()) == ("shop,public", "Etc/UTC")
    assert [each for each in doctor(bank) if each.subject == "database" and each.level is not Level.OK] == []
    close_runtime(bank)


def test_an_option_of_the_address_that_is_no_setting_is_refused(bank: Celery, environment: dict[str, str]) -> None:
    address = make_url(environment["DATABASE_URL"]).update_query_dict({"options": "-E"})
    b.configure(environment | {"DATABASE_URL": address.render_as_string(hide_password=False)})
    with pytest.raises(SettingsError, match=r"^idempotency_database_url: options: must be settings"):
        runtime_of(bank)


def test_a_statement_of_ours_behind_a_pooler_is_its_own_transaction(pooled: Celery, engine: Engine) -> None:
    with runtime_of(pooled).autocommit() as connection, engine.connect() as other:
        holder = op.started(connection)
        found = text("SELECT status FROM idempotency.records WHERE key = :key")
        assert other.execute(found, {"key": holder.id.key}).scalar_one() == "started"
        driver: Any = connection.connection.driver_connection
        assert driver.info.transaction_status.name == "IDLE"


def test_our_lock_timeout_holds_behind_a_pooler(pooled: Celery, engine: Engine) -> None:
    settings = settings_of(pooled).model_copy(update={"lease": 0.1})
    with runtime_of(pooled).autocommit() as connection:
        held = op.started(connection)
        op.age(connection, held.id, locked_until=-1)  # in partitions, a claim does not wait to hear that it is held
    waiting = connections.make_engine(settings, isolation_level="AUTOCOMMIT")
    with (
        engine.connect().execution_options(isolation_level="READ COMMITTED") as holder,
        waiting.connect() as connection,
    ):
        holder.execute(text("SELECT FROM idempotency.records FOR UPDATE"))
        with pytest.raises(OperationalError, match="lock timeout"):
            op.claim(connection, held.id)
    waiting.dispose()


def test_a_heartbeat_renews_behind_a_pooler(pooled: Celery) -> None:
    runtime = runtime_of(pooled)
    with runtime.autocommit() as connection:
        holding = Holding(op.started(connection), op.FINGERPRINT, 60.0)
    runtime.heartbeat._holdings[holding.claim.token] = holding
    before = holding.renewed_at
    runtime.heartbeat.run_once()
    runtime.heartbeat.drop(holding.claim.token)
    assert holding.renewed_at > before


@pytest.mark.few(1)
def test_a_relay_behind_a_pooler_polls_and_listens_on_no_backend(pooled: Celery, engine: Engine) -> None:
    relay, stop, begun = Relay(pooled), threading.Event(), threading.Event()
    thread = threading.Thread(target=relay.run, args=(stop, begun.set))
    thread.start()
    waiting = text("SELECT count(*) FROM idempotency.outbox WHERE status <> 'published'")
    try:
        assert begun.wait(30)
        with engine.connect() as connection:
            for _ in range(2):
                b.enqueue_deposit()
                eventually(lambda: connection.execute(waiting).scalar_one() == 0, what="published")
            assert relay._listener is None
            listening = text("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'")
            assert connection.execute(listening).scalar_one() == 0
    finally:
        stop.set()
        thread.join(30)


def test_signs_of_life_and_status_go_through_a_pooler(pooled: Celery) -> None:
    life = SignOfLife(pooled, "relay", "r1")
    assert life.sign()
    with overview.monitoring_connection(settings_of(pooled)) as connection:
        assert [process.name for process in overview.take_snapshot(connection, settings_of(pooled)).processes] == ["r1"]


def test_migrations_through_a_pooler_run_once_and_leave_no_lock(
    empty_database: str, bank: Celery, environment: dict[str, str]
) -> None:
    with Pooler(empty_database, ignores_options=False, backends=8) as pooler:
        b.configure(environment | {"DATABASE_URL": pooler.url})
        settings = settings_of(bank)
        revisions = at_once(4, lambda _: schema.migrate(connections.make_migrations_engine(settings)))
        assert len(set(revisions)) == 1
        direct = create_engine(empty_database)
        with direct.connect() as connection:
            schema.require_compatible(connection)
            locks = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")
            eventually(lambda: connection.execute(locks).scalar_one() == 0, what="no lock is left")
        direct.dispose()
