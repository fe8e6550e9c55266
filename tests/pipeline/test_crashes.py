"""Real workers, killed and stopped at every named moment of an attempt: one effect, nothing lost."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import redis as redis_client
from celery import Celery
from sqlalchemy import text
from sqlalchemy.engine import Engine

from idempotency.relay.relay import Relay
from tests.support import bank as app_module
from tests.support import crashing
from tests.support.operations import Entries, Record
from tests.support.outside import OutsideWorld
from tests.support.processes import Processes, Worker, eventually

POINTS = (
    "hint.left",
    "claimed",
    "body.entered",
    "step.recorded",
    "step.committed",
    "effect.begun",
    "effect.called",
    "effect.recorded",
    "finish.written",
    "finish.committed",
)
# The lease is 60 s: what is finished within this time was found dead, not waited for.
PROVEN = 20.0


@pytest.mark.parametrize(
    ("action", "points"),
    [
        pytest.param(crashing.KILL_CHILD, POINTS[::2], id="child-even", marks=pytest.mark.long),
        pytest.param(crashing.KILL_WORKER, POINTS[1::4], id="worker-some"),
        pytest.param(crashing.KILL_WORKER, POINTS[3::4], id="worker-odd", marks=pytest.mark.long),
        pytest.param(crashing.KILL_CHILD, POINTS[1::2], id="child-odd", marks=pytest.mark.long),
        pytest.param(crashing.KILL_WORKER, POINTS[::2], id="worker-even", marks=pytest.mark.long),
    ],
)
def test_sigkill_at_every_crash_point_leaves_one_effect(
    subtests: pytest.Subtests,
    action: Any,
    points: tuple[str, ...],
    bank: Celery,
    processes: Processes,
    relay: Relay,
    outside: OutsideWorld,
    entries: Entries,
    record: Record,
    environment: dict[str, str],
) -> None:
    directory = Path(environment["CRASH_DIRECTORY"])
    workers = [processes.worker("--concurrency", "1") for _ in range(2)]
    for point in points:
        with subtests.test(point=point):
            account = f"{point}/{action}".replace(" ", "-")
            crashing.plan(directory, point, action)
            app_module.transfer.delay(account, outside.url)
            eventually((directory / f"{point}.reached").exists, what=f"{point} reached")
            if action == crashing.KILL_WORKER:
                dead = eventually(lambda: next((w for w in workers if w.process.poll() is not None), None))
                workers[workers.index(dead)] = processes.start("--concurrency", "1")
            eventually(
                lambda account=account: (row := record(account)) is not None and row.status == "completed",
                timeout=PROVEN,
                what=f"{account} completed",
            )
            (directory / f"{point}.reached").unlink()

            assert (entries(account), entries(f"{account}/step")) == (1, 1)
    assert set(outside.acts.values()) == {1}
    assert len(outside.acts) == len(points)


@pytest.mark.parametrize("point", ["body.entered", pytest.param("finish.written", marks=pytest.mark.long)])
def test_a_worker_stopped_past_its_lease_writes_nothing_when_it_goes_on(
    point: str,
    bank: Celery,
    processes: Processes,
    relay: Relay,
    entries: Entries,
    record: Record,
    environment: dict[str, str],
) -> None:
    directory = Path(environment["CRASH_DIRECTORY"])
    worker = processes.worker("--concurrency", "1", LEASE="2")
    crashing.plan(directory, point, crashing.STOP)
    app_module.deposit.delay("a")
    stopped = eventually((directory / f"{point}.stopped").exists) and int((directory / f"{point}.stopped").read_text())
    first = record("a")
    replacement = processes.worker("--concurrency", "1", LEASE="2")

    done = eventually(lambda: (row := record("a")) and row.status == "completed" and row, what="taken over")
    assert done.fence > first.fence
    assert entries("a") == 1

    os.kill(stopped, signal.SIGCONT)
    # its write matches nothing, its connection is gone, or its heartbeat is first to learn that the lease is lost
    ways = ("event=fenced", "event=released", "event=commit_in_doubt", "event=lease_lost")
    eventually(lambda: any(way in worker.log for way in ways))
    app_module.deposit.delay("b")  # both workers are alive and well
    eventually(lambda: entries("b") == 1)
    assert entries("a") == 1
    assert record("a") == done
    assert replacement.process.poll() is None


@pytest.mark.long
def test_flushing_redis_during_load_doubles_nothing(
    bank: Celery, worker: Worker, relay: Relay, entries: Entries, record: Record, redis_url: str
) -> None:
    accounts = [f"a{number}" for number in range(60)]
    messages = accounts * 3
    random.Random(1).shuffle(messages)
    with redis_client.Redis.from_url(redis_url) as client:
        for number, account in enumerate(messages):
            app_module.deposit.delay(account)
            if number % 20 == 10:
                client.flushall()
        eventually(lambda: all((row := record(a)) and row.status == "completed" for a in accounts), timeout=60)
    assert [entries(account) for account in accounts] == [1] * len(accounts)


@pytest.mark.long
def test_with_redis_down_throughout_everything_is_done_once(
    bank: Celery, processes: Processes, relay: Relay, entries: Entries, record: Record
) -> None:
    processes.worker("--concurrency", "2", REDIS_URL="redis://127.0.0.1:1/0")
    accounts = [f"a{number}" for number in range(20)]
    for account in accounts * 2:
        app_module.deposit.delay(account)
    eventually(lambda: all((row := record(a)) and row.status == "completed" for a in accounts), timeout=60)
    assert [entries(account) for account in accounts] == [1] * len(accounts)


def test_a_poison_message_ends_as_one_dead_letter_and_the_worker_lives(
    bank: Celery, worker: Worker, relay: Relay, engine: Engine, record: Record, entries: Entries
) -> None:
    app_module.failing.delay("p", "poison")
    eventually(lambda: (row := record("p")) and row.status == "failed", timeout=60)
    assert record("p").attempts == 4  # three that died, and the claim that ended it
    with engine.connect() as connection:
        letters = connection.execute(text("SELECT reason, attempts FROM idempotency.dead_letters")).all()
        assert [tuple(letter) for letter in letters] == [("attempts_exhausted", 4)]
        assert connection.execute(text("SELECT account, code FROM failures")).all() == [("p", "attempts_exhausted")]
    app_module.deposit.delay("b")
    eventually(lambda: entries("b") == 1)
    assert entries("p") == 0


@pytest.mark.long
def test_a_warm_shutdown_loses_nothing_and_doubles_nothing(
    bank: Celery, processes: Processes, relay: Relay, entries: Entries, record: Record
) -> None:
    worker = processes.worker("--concurrency", "2")
    accounts = [f"a{number}" for number in range(30)]
    for account in accounts:
        app_module.slow_deposit.delay(account, 0.1)
    eventually(lambda: sum(entries(a) for a in accounts) >= 3)
    worker.terminate()
    processes.worker("--concurrency", "2")
    eventually(lambda: all((row := record(a)) and row.status == "completed" for a in accounts), timeout=60)
    worker.process.wait(30)
    assert [entries(account) for account in accounts] == [1] * len(accounts)


@pytest.mark.long
def test_a_duplicate_that_waits_comes_back_for_the_result(
    bank: Celery, worker: Worker, relay: Relay, entries: Entries, record: Record, environment: dict[str, str]
) -> None:
    directory = Path(environment["CRASH_DIRECTORY"])
    crashing.plan(directory, "working", crashing.HOLD)
    app_module.waited_deposit.delay("a")
    eventually((directory / "working.held").exists)
    duplicate = app_module.waited_deposit.apply_async(("a",), task_id="the-duplicate")
    eventually(
        lambda: (
            "the-duplicate" in worker.log
            and "Task tests.support.bank.waited_deposit[the-duplicate] ignored" in worker.log
        )
    )
    (directory / "working.go").touch()
    eventually(lambda: "Task tests.support.bank.waited_deposit[the-duplicate] succeeded" in worker.log, timeout=40)
    assert duplicate.id == "the-duplicate"
    assert entries("a") == 1


@pytest.mark.long
def test_sixteen_copies_at_once_run_once(
    bank: Celery, processes: Processes, relay: Relay, entries: Entries, record: Record
) -> None:
    processes.worker("--concurrency", "8")
    barrier = threading.Barrier(4)

    def send() -> None:
        barrier.wait()
        for _ in range(4):
            app_module.deposit.delay("a")

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(lambda: (row := record("a")) and row.status == "completed")
    app_module.deposit.delay("b")
    eventually(lambda: entries("b") == 1)
    assert entries("a") == 1
