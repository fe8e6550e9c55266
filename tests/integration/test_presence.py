"""Signs of life of real workers, relays and beats, and of one whose loop hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, make_url, text

from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.store import processes
from idempotency.upkeep import alarms, loops, presence
from idempotency.upkeep.presence import LONGEST_TURN, SignOfLife, WorkerSign, sign_as_worker
from tests.support import bank as b
from tests.support import operations as op
from tests.support.dead_messages import die
from tests.support.processes import Processes, eventually


def seen(connection: Connection, kind: str) -> list[Any]:
    return [row for row in processes.processes(connection) if row.kind == kind]


def silent(connection: Connection, seconds: float) -> None:
    """Every process was last seen so many seconds ago."""
    connection.execute(
        text("UPDATE idempotency.processes SET seen_at = clock_timestamp() - make_interval(secs => :seconds)"),
        {"seconds": seconds},
    )


@pytest.mark.long
def test_a_worker_signs_with_its_queues_and_leaves_in_order(
    bank: Celery, processes: Processes, connection: Connection
) -> None:
    worker = processes.worker(SIGN_OF_LIFE="0.2")
    (row,) = eventually(lambda: seen(connection, "worker"), what="a sign of the worker")
    assert row.queues == [bank.conf.task_default_queue]
    assert (row.pid, row.service, "@" in row.name) == (worker.process.pid, "bank", True)
    assert row.command[:6] == ["python", "-m", "celery", "-A", "tests.support.bank", "worker"]
    silent(connection, 100)
    eventually(lambda: seen(connection, "worker")[0].silent_seconds < 50, what="another sign")
    worker.terminate()
    assert worker.process.wait(30) == 0
    assert seen(connection, "worker") == []


@pytest.mark.long
def test_a_killed_worker_leaves_its_row_until_a_successor_comes(
    bank: Celery, processes: Processes, connection: Connection
) -> None:
    killed = processes.worker()
    (left,) = eventually(lambda: seen(connection, "worker"), what="a sign of the worker")
    killed.kill()
    assert [row.pid for row in seen(connection, "worker")] == [left.pid]
    processes.worker("--concurrency", "1", "--hostname", left.name)  # the last --hostname counts
    # the old row goes in one commit, and the new one comes in the next
    (successor,) = eventually(
        lambda: [row for row in seen(connection, "worker") if row.pid != left.pid], what="the successor's sign"
    )
    assert (successor.name, len(seen(connection, "worker"))) == (left.name, 1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "end"),
    [
        ("relay", signal.SIGTERM),
        ("beat", signal.SIGKILL),
        pytest.param("relay", signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("beat", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_a_relay_or_beat_leaves_only_when_it_ends_in_order(
    bank: Celery, environment: dict[str, str], connection: Connection, kind: str, end: signal.Signals
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        schedule = str(Path(directory) / "schedule")
        command = {
            "relay": ["-m", "idempotency.cli", "relay", "-A", "tests.support.bank"],
            "beat": [
                "-m",
                "celery",
                "-A",
                "tests.support.bank",
                "beat",
                "--schedule",
                schedule,
                "--scheduler",
                "celery.beat.PersistentScheduler",
                "--pidfile=",
            ],
        }[kind]
        process = subprocess.Popen([sys.executable, *command], env=environment, stderr=subprocess.PIPE)
        try:
            (row,) = eventually(lambda: seen(connection, kind), what=f"a sign of the {kind}")
            assert row.pid == process.pid
            # also beat's own options: it would find another schedule without
            assert (row.command, row.directory) == (["python", *command], os.getcwd())
            process.send_signal(end)
            process.wait(30)
        finally:
            process.kill()
            process.communicate(timeout=30)
        assert len(seen(connection, kind)) == (0 if end is signal.SIGTERM else 1)


def test_a_process_whose_loop_hangs_falls_silent(bank: Celery, connection: Connection) -> None:
    life = SignOfLife(bank, "relay")
    life.progressed()
    assert life.sign()
    silent(connection, 100)
    life.progressed(-LONGEST_TURN - 1)  # its last turn was longer ago than any takes
    assert not life.sign()
    assert seen(connection, "relay")[0].silent_seconds >= 100
    life.progressed()
    assert life.sign()
    assert seen(connection, "relay")[0].silent_seconds < 50


def test_a_process_of_which_one_loop_hangs_falls_silent(bank: Celery, caplog: pytest.LogCaptureFixture) -> None:
    life = SignOfLife(bank, "relay")
    life.progressed(loop="letters")
    life.progressed(loop="upkeep")
    assert life.sign()
    life.progressed(-LONGEST_TURN - 1, loop="letters")
    life.progressed(loop="upkeep")
    assert (life.sign(), life.sign(), life.hung_loops()) == (False, False, ["letters"])
    assert caplog.text.count("loop_hangs") == 1
    life.progressed(loop="letters")
    assert life.sign()


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> list[SignOfLife]:
    """The signs of life of the relays that run in this process."""
    made: list[SignOfLife] = []

    class Kept(SignOfLife):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(loops, "SignOfLife", Kept)
    return made


def test_a_hung_on_failed_stops_no_upkeep_and_silences_its_relay(
    bank: Celery, connection: Connection, lives: list[SignOfLife], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "PURGE_WATCH", 0.0)
    monkeypatch.setattr(loops, "ALERT_WATCH", 0.0)
    monkeypatch.setattr(alarms, "WATCH", 0.0)
    monkeypatch.setattr(presence, "LONGEST_TURN", 2.0)
    hung, released, stop = threading.Event(), threading.Event(), threading.Event()

    def on_failed(*_: Any) -> None:
        hung.set()
        released.wait(60)

    monkeypatch.setattr(bank.tasks[b.deposit.name], "on_failed", on_failed)
    consumer = DeadLetterConsumer(bank)
    die(bank, consumer)
    consumer.close()
    relay = threading.Thread(target=loops.run_relay, args=(bank, stop))
    relay.start()
    try:
        assert hung.wait(30)
        old = op.new_id()
        op.completed(connection, old)
        op.age(connection, old, expires_at=-1e6, completed_at=-1e6)
        connection.execute(text("UPDATE idempotency.outbox SET settled_at = clock_timestamp() - interval '1 year'"))
        SignOfLife(bank, "worker", "gone@host").sign()
        connection.execute(
            text("UPDATE idempotency.processes SET seen_at = seen_at - interval '2 min' WHERE name = 'gone@host'")
        )
        eventually(lambda: op.record(connection, old) is None, what="the purge")
        eventually(
            lambda: connection.execute(
                text("SELECT FROM idempotency.alarms WHERE name LIKE 'silent/worker/gone%'")
            ).all()
        )
        eventually(lambda: lives[0].hung_loops() == ["letters"] and not lives[0].sign(), what="the relay's silence")
        assert op.dead_letters(connection) == []
        released.set()
        eventually(lambda: op.dead_letters(connection))
        eventually(lives[0].sign, what="the relay's sign")
    finally:
        released.set()
        stop.set()
        relay.join(30)


def test_a_postgres_that_is_away_costs_a_sign_and_nothing_else(bank: Celery, connection: Connection) -> None:
    address = bank.conf.idempotency_database_url
    bank.conf.idempotency_database_url = make_url(address).set(port=1).render_as_string(hide_password=False)
    life = SignOfLife(bank, "relay")
    assert not life.sign()
    life.start()
    life.end()
    bank.conf.idempotency_database_url = address
    assert seen(connection, "relay") == []


@pytest.mark.long
def test_a_locked_row_does_not_hold_up_a_sign(bank: Celery, engine: Engine) -> None:
    life = SignOfLife(bank, "relay")
    assert life.sign()
    with engine.execution_options(isolation_level="READ COMMITTED").begin() as connection:
        connection.execute(text("SELECT FROM idempotency.processes FOR UPDATE"))
        assert not life.sign()
    assert life.sign()


def test_a_silent_process_is_forgotten_after_its_retention(bank: Celery, connection: Connection) -> None:
    day = bank.conf.get("idempotency_retention_processes", 86400.0)
    for name, ago in (("old@host", day + 1), ("young@host", day - 60)):
        assert SignOfLife(bank, "worker", name).sign()
        connection.execute(
            text("""UPDATE idempotency.processes SET seen_at = clock_timestamp() - make_interval(secs => :ago)
                    WHERE name = :name"""),
            {"ago": ago, "name": name},
        )
    SignOfLife(bank, "relay").sign()
    assert [row.name for row in seen(connection, "worker")] == ["young@host"]


def test_an_application_without_idempotent_tasks_is_left_alone(bank: Celery) -> None:
    plain = Celery("plain", set_as_current=False)
    plain.tasks.clear()  # Celery shares the tasks of one application with all
    sign_as_worker(SimpleNamespace(app=plain))
    assert WorkerSign not in plain.steps["worker"]
    sign_as_worker(SimpleNamespace(app=bank))
    assert WorkerSign in bank.steps["worker"]
