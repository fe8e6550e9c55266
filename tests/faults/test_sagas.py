"""Sagas: a worker, a broker or Postgres is lost while one records a step, lets go, decides a wait or begins to be undone."""

from __future__ import annotations

import datetime
import os
import signal
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

import services
from idempotency.store.recover import SPARE_CLAIMS
from idempotency.upkeep import maintenance
from tests.faults import clocks
from tests.faults.conftest import SeenCell
from tests.faults.marks import each
from tests.faults.own_postgres import Writes, fixture_database, fixture_postgres, fixture_template, fixture_writes  # noqa: F401
from tests.faults.saga_scene import SagaScene
from tests.faults.scene import PATIENCE, POINTS
from tests.support import crashing
from tests.support.outside import OutsideWorld
from tests.support.processes import Processes, eventually

ALL = ("S0", "S1", "S2", "S3")
# as psycopg sends it; "BEGIN ISOLATION LEVEL READ COMMITTED" is something else
COMMIT = b"\x0bCOMMIT\x00"
DAY = 86400
# What an operation has by default.
ATTEMPTS = 5


@pytest.fixture
def scene(
    bank: Celery, environment: dict[str, str], processes: Processes, outside: OutsideWorld, database: str
) -> Iterator[SagaScene]:
    scene = SagaScene(bank, environment, processes, outside, database)
    yield scene
    scene.close()


@pytest.fixture(autouse=True)
def checked_accounts() -> None:
    """A saga's books are those of `SagaScene.violations`, which every outcome looks at."""


def seen(scene: SagaScene, phase: str) -> str:
    return scene.outcome_at(phase, "FAILED" if phase == "S3" else "COMPLETED")


def ends(scene: SagaScene, phase: str, *, stands: Container[str] = ("S3",), lost: bool = False) -> None:
    """Wait for the end after a saga's process has ended. In the phases of `stands` it has not let its claim go: a process
    that ends by itself lets it go, but not while it begins to undo. `lost`: at S1, what was called is lost with it.
    """
    if phase in stands:
        eventually(lambda: scene.record().duplicates == 1, timeout=PATIENCE, what="the redelivery was counted")
        scene.sweep()
    if phase == "S1" and lost:
        scene.swept_to_the_end(scene.last_fence())
    scene.ended()
    if phase == "S1":
        found_nothing = lambda: scene.outcome_at(phase, "COMPLETED").startswith("D")  # noqa: E731
        eventually(found_nothing, timeout=PATIENCE, what="the redelivery found nothing to do")


# ---------------------------------------------------------------- the worker


@pytest.mark.parametrize("phase", each("F1", *ALL))
def test_the_child_that_has_a_saga_is_killed(phase: str, scene: SagaScene, cell: SeenCell) -> None:
    scene.worker()
    scene.bring_to(phase)
    os.kill(scene.held(phase), signal.SIGKILL)
    ends(scene, phase, stands=("S0", "S2", "S3"))
    cell.saw(seen(scene, phase))


@pytest.mark.parametrize("phase", each("F2", *ALL))
def test_the_worker_that_has_a_saga_is_killed(phase: str, scene: SagaScene, cell: SeenCell) -> None:
    worker = scene.worker()
    scene.bring_to(phase)
    worker.kill()
    scene.worker()
    ends(scene, phase, stands=("S0", "S2", "S3"), lost=True)
    cell.saw(seen(scene, phase))


@pytest.mark.parametrize("phase", each("F3", *ALL))
def test_a_worker_frozen_in_a_saga_changes_nothing_when_it_goes_on(
    phase: str, scene: SagaScene, cell: SeenCell
) -> None:
    broker = scene.broker_proxy()
    # a process frozen before COMMIT is evicted after half its lease
    frozen = scene.worker(LEASE="60" if phase == "S1" else "4")
    scene.bring_to(phase)
    child = scene.held(phase)
    frozen.signal(signal.SIGSTOP)
    if phase != "S1":
        idle = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'"
        eventually(lambda: not scene.rows(idle), timeout=PATIENCE, what="evicted")
    scene.age()
    broker.reset()  # what the broker does with a peer whose heartbeats have stopped
    scene.worker()
    ends(scene, phase, stands=(), lost=True)
    done = (scene.record(), scene.rows("SELECT * FROM idempotency.saga_steps ORDER BY position"))

    scene.let_go(phase)
    os.kill(child, signal.SIGCONT)
    if phase != "S1":
        asks = lambda: [e for e in scene.trace("hint.left") if e.pid == child][1:]  # noqa: E731
        eventually(asks, timeout=PATIENCE, what="the stale attempt asks again")
    frozen.signal(signal.SIGCONT)
    eventually(lambda: "Connection to broker lost" in frozen.log, timeout=PATIENCE, what="the worker goes on")
    assert (scene.record(), scene.rows("SELECT * FROM idempotency.saga_steps ORDER BY position")) == done
    cell.saw(seen(scene, phase))


@pytest.mark.parametrize("phase", each("F4", *ALL))
def test_a_worker_that_has_a_saga_is_told_to_stop_at_once(phase: str, scene: SagaScene, cell: SeenCell) -> None:
    worker = scene.worker()
    scene.bring_to(phase)
    worker.process.send_signal(signal.SIGTERM)
    eventually(lambda: "Warm shutdown" in worker.log, timeout=PATIENCE)
    worker.process.send_signal(signal.SIGQUIT)
    worker.process.wait(PATIENCE)
    scene.worker()
    ends(scene, phase)
    cell.saw(seen(scene, phase))


@pytest.mark.parametrize("phase", each("F17", "S0", "S2", "S3"))
def test_a_saga_whose_processes_die_each_time_is_undone(phase: str, scene: SagaScene, cell: SeenCell) -> None:
    scene.fails = phase == "S3"
    crashing.plan(scene.directory, POINTS[phase], crashing.KILL_EVERY_CHILD)
    worker = scene.worker()
    scene.relay()
    scene.accept()
    # the last claims find the attempts used up: only beginning to undo can kill them, and most are counted without that
    deaths = ATTEMPTS + (2 if phase == "S3" else 0)
    for death in range(1, deaths + 1):
        eventually(
            lambda death=death: len(scene.trace(POINTS[phase])) >= death, timeout=PATIENCE, what=f"death {death}"
        )
        if phase == "S3" and death == ATTEMPTS:
            scene.execute(
                "UPDATE idempotency.records SET attempts = attempts + :more, spent_at = attempts + 1 WHERE key = :key",
                more=SPARE_CLAIMS - 2,
                key=scene.account,
            )
        eventually(lambda: maintenance.recover(scene.app) == 1, timeout=PATIENCE, what="recovered")
    scene.ended()
    assert worker.process.poll() is None
    assert scene.violations("FAILED") == []
    assert len(scene.trace(POINTS[phase])) == deaths
    cell.saw("Q")


@pytest.mark.parametrize("phase", each("F18", "S0", "S2"))
def test_an_error_in_a_saga_is_another_attempt(phase: str, scene: SagaScene, cell: SeenCell) -> None:
    crashing.plan(scene.directory, POINTS[phase], crashing.RAISE_ERROR)
    scene.worker()
    scene.relay()
    scene.accept()
    scene.ended()
    assert scene.record().first_error is not None
    assert seen(scene, phase) == "R"
    cell.saw("retry")


@pytest.mark.parametrize("phase", each("F18", "S0", "S2"))
def test_a_permanent_error_in_a_saga_undoes_it(phase: str, scene: SagaScene, cell: SeenCell) -> None:
    crashing.plan(scene.directory, POINTS[phase], crashing.RAISE_PERMANENT)
    scene.worker()
    scene.relay()
    scene.accept()
    scene.ended()
    assert scene.violations("FAILED") == []
    undone = [row.account for row in scene.rows("SELECT account FROM entries WHERE account LIKE '%/undone'")]
    assert len(undone) == {"S0": 0, "S2": 4}[phase]
    cell.saw("failed")


# ---------------------------------------------------------------- broker and Redis


def held_alone(phase: str) -> int:
    """How many processes the pool has. At S1 a second one might run what was called, and be ended with a claim that stands."""
    return 1 if phase == "S1" else 2


@pytest.mark.parametrize("phase", each("F5", *ALL))
def test_the_worker_of_a_saga_loses_its_broker(phase: str, scene: SagaScene, cell: SeenCell) -> None:
    broker = scene.broker_proxy()
    scene.worker(held_alone(phase))
    scene.bring_to(phase)
    broker.reset()
    scene.cancelled(phase)  # what it cannot acknowledge any more it ends
    ends(scene, phase)
    assert broker.resets
    cell.saw(seen(scene, phase))


@pytest.mark.parametrize("phase", each("F6", *ALL))
def test_the_broker_is_killed_while_a_saga_runs(
    phase: str, scene: SagaScene, servers: services.Services, cell: SeenCell
) -> None:
    scene.declare_queues()
    scene.worker(held_alone(phase))
    scene.bring_to(phase)
    try:
        servers.rabbitmq.kill()
        scene.cancelled(phase)
    finally:
        servers.rabbitmq.start()
    ends(scene, phase)
    cell.saw(seen(scene, phase))


@pytest.mark.parametrize("phase", each("F8", *ALL))
def test_what_a_wiped_broker_had_of_a_saga_is_sent_again(phase: str, scene: SagaScene, cell: SeenCell) -> None:
    scene.worker()
    scene.bring_to(phase)
    fence = scene.fence()
    scene.delete_queues()
    scene.cancelled(phase)
    scene.swept_to_the_end(fence)
    cell.saw(seen(scene, phase))


@pytest.mark.parametrize("phase", each("F16", "S1"))
def test_copies_of_a_saga_that_waits_find_nothing_to_do(phase: str, scene: SagaScene, cell: SeenCell) -> None:
    scene.worker()
    scene.bring_to(phase)
    for _ in range(8):
        scene.duplicate()
    scene.ended()
    scene.let_go(phase)
    eventually(lambda: scene.messages() == 0, what="all copies taken")
    cell.saw(seen(scene, phase))


@pytest.mark.parametrize("phase", each("F9", *ALL))
def test_redis_loses_everything_while_a_saga_runs(phase: str, scene: SagaScene, cell: SeenCell) -> None:
    scene.worker()
    scene.bring_to(phase)
    with redis.Redis.from_url(scene.environment["REDIS_URL"]) as client:
        client.flushall()
    if phase != "S1":
        scene.duplicate()
        waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        came = lambda: scene.rows(waiting) or scene.record().duplicates  # noqa: E731
        eventually(came, timeout=PATIENCE, what="the duplicate waits for the row, or is counted")
    scene.let_go(phase)
    scene.ended()
    cell.saw(seen(scene, phase))


# ---------------------------------------------------------------- Postgres and clocks


@pytest.mark.parametrize("phase", each("F12", *ALL))
def test_a_saga_goes_on_after_postgres_was_killed(phase: str, scene: SagaScene, postgres: Any, cell: SeenCell) -> None:
    scene.worker()
    scene.bring_to(phase)
    postgres.kill()
    scene.let_go(phase)
    if phase != "S1":
        eventually(lambda: scene.logged("event=claim_waits") > 0, what="it waits for Postgres")
    postgres.start()
    scene.ended()
    cell.saw(seen(scene, phase))


@pytest.mark.parametrize("phase", each("F13", "S0", "S2", "S3"))
def test_a_saga_that_never_hears_of_its_commit_asks_what_became_of_it(
    phase: str, scene: SagaScene, cell: SeenCell
) -> None:
    proxy = scene.postgres_proxy()
    scene.worker(children=1)
    scene.bring_to(phase)
    proxy.cut_reply_to(COMMIT)
    scene.let_go(phase)
    scene.ended()
    assert proxy.cuts == 1
    cell.saw(seen(scene, phase))


@pytest.mark.parametrize("phase", each("F14", "S0", "S2"))
def test_a_saga_waits_while_postgres_takes_no_writes(
    phase: str, scene: SagaScene, postgres: Any, writes: Writes, cell: SeenCell
) -> None:
    scene.worker()
    scene.bring_to(phase)
    writes.stop()
    # its transaction has begun: only the next one may not write
    scene.let_go(phase)
    eventually(lambda: scene.logged("event=claim_waits") > 0, timeout=PATIENCE, what="it waits for Postgres")
    writes.allow()
    scene.ended()
    cell.saw(seen(scene, phase))


@pytest.mark.parametrize("days", [1, -1])
@pytest.mark.cell("F15", "S1")
def test_a_saga_waits_by_the_clock_of_postgres(days: int, scene: SagaScene, tmp_path: Path, cell: SeenCell) -> None:
    if not clocks.can_be_built():
        cell.not_run("no C compiler")
    environment: dict[str, Any] = clocks.Clock(tmp_path, seconds=days * DAY).environment
    worker = scene.worker(**environment)
    there = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    assert f"[{there:%Y-%m-%d} " in worker.log, "its clock is not off"
    scene.is_confirmed = False
    scene.bring_to("S1")
    scene.let_go("S1")
    waits = """SELECT extract(epoch FROM s.due_at - clock_timestamp()) AS left,
                      extract(epoch FROM r.available_at - clock_timestamp()) AS sleeps
               FROM idempotency.saga_steps s, idempotency.records r
               WHERE s.kind = 'wait' AND r.key = :key AND r.status = 'released'"""
    (row,) = eventually(lambda: scene.rows(waits), timeout=PATIENCE, what="it waits for its event")
    assert 500 < row.left <= 600
    assert 500 < row.sleeps <= 600
    scene.confirm()
    scene.ended()
    cell.saw(seen(scene, "S1"))
