"""A primary whose standby does not confirm: no such commit is believed, and the doctor says what commits wait for."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError

import services.postgres
from idempotency import IdempotentTask
from idempotency.application import close_runtime, runtime_of
from idempotency.checks.findings import Level
from idempotency.checks.standbys import check_hosts, check_standbys
from idempotency.settings import Settings
from services.cluster_postgres import PostgresPair
from services.postgres import ACCOUNT, _as_unprivileged
from tests.support.deliveries import Deliveries
from tests.support.failover import fixture_database, fixture_pair, fixture_template  # noqa: F401
from tests.support.processes import eventually
from tests.support.tasks import ROW, make_task

pytestmark = [pytest.mark.direct, pytest.mark.long]

INSERT = "INSERT INTO entries (account, amount) VALUES ('alone', 1)"


def said(bank: Celery) -> list[str]:
    """What the doctor says of standbys, without advice."""
    with runtime_of(bank).engine.connect() as connection:
        found = check_standbys(connection)
    return [f"{each.level.name}: {each.found}" for each in found]


def of_hosts(address: str) -> list[tuple[Level, str]]:
    return [(each.level, each.found) for each in check_hosts(Settings.read({"database_url": address}))]


@contextmanager
def names(pair: PostgresPair, value: str) -> Iterator[None]:
    """With other synchronous_standby_names."""
    pair.primary.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{value}'")
    pair.primary.execute("SELECT pg_reload_conf()")
    eventually(lambda: pair.primary.execute("SHOW synchronous_standby_names") == [(value,)], what=value)
    try:
        yield
    finally:
        pair.require_standby(True)


# ---------------------------------------------------------------- a wait that is cancelled


@contextmanager
def waits_are_cancelled(pair: PostgresPair) -> Iterator[None]:
    """As by a person: who waits for the standby goes on."""
    done = threading.Event()

    def cancel() -> None:
        while not done.wait(0.1):
            pair.primary.execute("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")

    thread = threading.Thread(target=cancel)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def write(opened: Callable[[], AbstractContextManager[Connection]]) -> None:
    with opened() as connection:
        connection.exec_driver_sql(INSERT)
        connection.commit()


def believes_nothing(pair: PostgresPair, bank: Celery) -> None:
    close_runtime(bank)
    pair.standby.kill()
    runtime = runtime_of(bank)
    for opened in (runtime.engine.connect, runtime.autocommit):
        with waits_are_cancelled(pair), pytest.raises(OperationalError, match="not confirmed"):
            write(opened)
    close_runtime(bank)


def test_no_commit_without_a_standby_is_believed_whatever_warnings_the_role_wants(
    pair: PostgresPair, bank: Celery
) -> None:
    pair.primary.execute("ALTER ROLE deployer SET client_min_messages = error")
    try:
        believes_nothing(pair, bank)
    finally:
        pair.primary.execute("ALTER ROLE deployer RESET client_min_messages")


def test_no_commit_without_a_standby_is_believed_whatever_warnings_the_address_wants(
    pair: PostgresPair, bank: Celery, database: str
) -> None:
    bank.conf.idempotency_database_url = f"{database}&options=-c%20client_min_messages%3Derror"
    believes_nothing(pair, bank)


def test_no_end_without_a_standby_is_believed_whatever_warnings_a_body_wants(
    pair: PostgresPair, bank: Celery, deliveries: Deliveries
) -> None:
    def body(self: IdempotentTask) -> str:
        self.session.execute(text("SET LOCAL client_min_messages = error"))
        self.session.execute(ROW)
        pair.standby.kill()
        return "paid"

    task = make_task(bank, body)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(deliveries.deliver(task, key="k")), daemon=True)
    with waits_are_cancelled(pair):
        thread.start()
        thread.join(8)
    assert [each for each in answers if each.state == "SUCCESS"] == []
    pair.standby.start()
    pair.wait_for_standby()
    thread.join(30)


# ---------------------------------------------------------------- what the doctor says of standbys


@pytest.mark.parametrize("names_two", ["FIRST 2 (postgres_a, postgres_b, postgres_c)", "any 2 (*)", "2(postgres_b, x)"])
def test_fewer_synchronous_standbys_than_asked_for_are_a_warning(
    pair: PostgresPair, bank: Celery, engine: Engine, names_two: str
) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection, names(pair, names_two):
        connection.exec_driver_sql("SET statement_timeout = '2s'")
        found = "WARNING: 1 synchronous, of 1 connected, need 2"
        eventually(lambda: found in said(bank), what=found)
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        writer = threading.Thread(target=lambda: connection.exec_driver_sql(INSERT), daemon=True)
        writer.start()
        assert eventually(lambda: pair.primary.execute(waiting) == [(1,)], what="every commit waits")
    writer.join(20)


@pytest.mark.parametrize("names_one", ["postgres_b, postgres_a", "ANY 1 (postgres_a, postgres_b)", '"postgres_b"'])
def test_as_many_as_asked_for_are_named(pair: PostgresPair, bank: Celery, database: str, names_one: str) -> None:
    with names(pair, names_one):
        found = ["OK: 1 connected, synchronous: postgres_b"]
        eventually(lambda: said(bank) == found, what=f"{found}")


@contextmanager
def receiver(pair: PostgresPair) -> Iterator[None]:
    """pg_receivewal, which copies the log and can never be promoted."""
    directory = Path(f"/tmp/receiver-{os.getpid()}")
    directory.mkdir()
    if os.geteuid() == 0:
        account = pwd.getpwnam(ACCOUNT)
        os.chown(directory, account.pw_uid, account.pw_gid)
    program = pair.primary._programs() / "pg_receivewal"
    address = f"host=127.0.0.1 port={pair.primary.port} user=postgres application_name=archive"
    process = subprocess.Popen(
        [*_as_unprivileged(), program, "-D", directory, "--synchronous", "-d", address],
        env={**os.environ, "PGPASSWORD": pair.primary.password},
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(directory)


def test_what_can_never_be_promoted_is_no_synchronous_standby(pair: PostgresPair, bank: Celery, database: str) -> None:
    pair.standby.kill()
    with receiver(pair), names(pair, "*"):
        expected = ["WARNING: archive is synchronous and no standby", "WARNING: synchronous_standby_names is *"]
        eventually(lambda: said(bank) == expected, what=f"{expected}")
        pair.standby.start()
        eventually(lambda: len(pair._streaming()) == 2, what="both")
        assert said(bank) == expected


def test_a_logical_subscriber_is_no_synchronous_standby(pair: PostgresPair, bank: Celery, database: str) -> None:
    name, run = str(make_url(database).database), pair.primary.execute
    run("ALTER SYSTEM SET wal_level = logical")
    pair.primary.stop()
    pair.primary.start()
    pair.wait_for_standby()
    close_runtime(bank)
    run("CREATE PUBLICATION entries FOR TABLE entries", name)
    run("SELECT pg_create_logical_replication_slot('copy', 'pgoutput')", name)
    # in another database of the same server, which needs a slot that is there already
    address = f"host=127.0.0.1 port={pair.primary.port} user=postgres password={pair.primary.password} dbname={name}"
    run("CREATE TABLE entries (id bigint PRIMARY KEY, account text, amount numeric)")
    run(
        f"CREATE SUBSCRIPTION copy CONNECTION '{address}' PUBLICATION entries "
        "WITH (create_slot = false, slot_name = copy, copy_data = false)"
    )
    try:
        with names(pair, "copy"):
            expected = ["WARNING: copy is synchronous and no standby"]
            eventually(lambda: said(bank) == expected, what=f"{expected}")
    finally:
        run("ALTER SUBSCRIPTION copy DISABLE")
        run("ALTER SUBSCRIPTION copy SET (slot_name = NONE)")
        run("DROP SUBSCRIPTION copy")
        run("DROP TABLE entries")
        active = "SELECT count(*) FROM pg_replication_slots WHERE active_pid IS NOT NULL AND slot_type = 'logical'"
        eventually(lambda: run(active) == [(0,)], what="its walsender is gone")
        run("SELECT pg_drop_replication_slot('copy')")
        run("ALTER SYSTEM RESET wal_level")


# ---------------------------------------------------------------- what the doctor says of hosts


@pytest.mark.parametrize("again", ["127.0.0.1", "localhost"])
def test_one_server_that_is_named_twice_is_one_primary(pair: PostgresPair, database: str, again: str) -> None:
    name, port = make_url(database).database, pair.primary.port
    login = f"deployer:{pair.primary.password}"
    hosts = f"host=127.0.0.1:{port}&host={again}:{port}&target_session_attrs=read-write"
    found = of_hosts(f"postgresql+psycopg://{login}@/{name}?{hosts}")
    assert found == [(Level.WARNING, "one server is named twice")]


def test_a_standby_that_receives_nothing_is_a_warning(pair: PostgresPair, bank: Celery, database: str) -> None:
    pair.require_standby(False)
    pair.wait_for_standby()
    assert of_hosts(database) == [(Level.OK, "2 answer, one takes writes")]
    pair.standby.execute("ALTER SYSTEM SET primary_conninfo = ''")
    try:
        pair.standby.execute("SELECT pg_reload_conf()")
        found = [(Level.WARNING, f"127.0.0.1:{pair.standby.port} is a standby that receives nothing")]
        eventually(lambda: of_hosts(database) == found, what=f"{found}")
    finally:
        pair.standby.execute("ALTER SYSTEM RESET primary_conninfo")
        pair.standby.execute("SELECT pg_reload_conf()")


def test_a_synchronous_standby_that_confirms_what_no_disk_has_is_refused(
    pair: PostgresPair, bank: Celery, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    standby = pair.standby
    with monkeypatch.context() as patch:
        patch.setitem(services.postgres._SETTINGS, "fsync", "off")
        standby.stop()
        standby.start()
    try:
        pair.wait_for_standby()
        assert of_hosts(database) == [(Level.REFUSAL, f"127.0.0.1:{standby.port} is a standby with fsync off, need on")]
    finally:
        standby.stop()
        standby.start()
        pair.wait_for_standby()


def test_a_standby_that_is_not_among_the_synchronous_is_a_warning(
    pair: PostgresPair, bank: Celery, database: str
) -> None:
    with receiver(pair), names(pair, "archive"):
        found = [(Level.WARNING, f"127.0.0.1:{pair.standby.port} (postgres_b) is not among the synchronous")]
        eventually(lambda: of_hosts(database) == found, what=f"{found}")
