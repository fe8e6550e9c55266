"""Batches: a worker is lost, frozen or not answered while it has claimed three operations by one statement."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from tests.faults.batch_scene import BatchScene
from tests.faults.conftest import SeenCell
from tests.faults.marks import each
from tests.faults.own_postgres import fixture_database, fixture_postgres, fixture_template  # noqa: F401
from tests.faults.scene import PATIENCE
from tests.faults.test_workers import told_to_stop_at_once
from tests.support.outside import OutsideWorld
from tests.support.processes import Processes, eventually

ALL = ("B0", "B1", "B2", "B3", "B4")
# Where some of the three are claimed and have not ended.
UNFINISHED = ("B0", "B1", "B2")


@pytest.fixture
def scene(
    bank: Celery, environment: dict[str, str], processes: Processes, outside: OutsideWorld, database: str
) -> Iterator[BatchScene]:
    scene = BatchScene(bank, environment, processes, outside, database)
    yield scene
    scene.close()


def ends(scene: BatchScene, phase: str) -> None:
    """Wait for the end after a worker's process has died: its claims stand until their leases are over."""
    open_ones = {"B0": 3, "B1": 2, "B2": 3}.get(phase, 0)

    def counted() -> bool:
        return [row.duplicates for row in scene.records()].count(1) == open_ones

    eventually(counted, timeout=PATIENCE, what="each redelivery of what is claimed was counted")
    if phase in UNFINISHED:
        scene.sweep()
    scene.ended()


def see(scene: BatchScene, cell: SeenCell) -> None:
    for letter in sorted(scene.outcomes()):
        cell.saw(letter)


@pytest.mark.parametrize("phase", each("F1", *ALL))
def test_the_child_that_has_a_batch_is_killed(phase: str, scene: BatchScene, cell: SeenCell) -> None:
    postgres = scene.postgres_proxy() if phase == "B3" else None
    scene.bring_to(phase, postgres)
    os.kill(scene.held(phase), signal.SIGKILL)
    if postgres is not None:
        postgres.heal()
    ends(scene, phase)
    see(scene, cell)


@pytest.mark.parametrize("phase", each("F2", *ALL))
def test_the_worker_that_has_a_batch_is_killed(phase: str, scene: BatchScene, cell: SeenCell) -> None:
    postgres = scene.postgres_proxy() if phase == "B3" else None
    scene.bring_to(phase, postgres)
    scene.workers[0].kill()
    if postgres is not None:
        postgres.heal()
    scene.worker()
    ends(scene, phase)
    see(scene, cell)


@pytest.mark.parametrize("phase", each("F3", "B0", "B1", "B2", "B4"))
def test_a_worker_frozen_in_a_batch_changes_nothing_when_it_goes_on(
    phase: str, scene: BatchScene, cell: SeenCell
) -> None:
    broker = scene.broker_proxy()
    # a process frozen before COMMIT is evicted after half its lease
    scene.bring_to(phase, LEASE="4" if phase == "B2" else "60")
    (frozen,) = scene.workers
    child = scene.held(phase)
    frozen.signal(signal.SIGSTOP)
    if phase == "B2":
        idle = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'"
        eventually(lambda: not scene.rows(idle), timeout=PATIENCE, what="evicted")
    scene.age()
    broker.reset()  # what the broker does with a peer whose heartbeats have stopped
    scene.worker()
    scene.ended()
    done = scene.records()

    scene.let_go(phase)
    os.kill(child, signal.SIGCONT)
    frozen.signal(signal.SIGCONT)
    eventually(lambda: "Connection to broker lost" in frozen.log, timeout=PATIENCE, what="the worker goes on")
    assert scene.records() == done
    see(scene, cell)


@pytest.mark.parametrize("phase", each("F4", *ALL))
def test_a_worker_that_has_a_batch_is_told_to_stop_and_then_to_stop_at_once(
    phase: str, scene: BatchScene, cell: SeenCell
) -> None:
    postgres = scene.postgres_proxy() if phase == "B3" else None
    scene.bring_to(phase, postgres)
    told_to_stop_at_once(scene.workers[0], postgres)
    scene.worker()
    scene.ended()
    see(scene, cell)


@pytest.mark.parametrize("phase", each("F5", *ALL))
def test_the_worker_that_has_a_batch_loses_its_broker(phase: str, scene: BatchScene, cell: SeenCell) -> None:
    broker = scene.broker_proxy()
    postgres = scene.postgres_proxy() if phase == "B3" else None
    scene.bring_to(phase, postgres)
    broker.reset()
    scene.cancelled(phase)
    scene.ended()
    see(scene, cell)


@pytest.mark.parametrize("phase", each("F12", *ALL))
def test_a_batch_goes_on_after_postgres_was_killed(
    phase: str, scene: BatchScene, postgres: Any, cell: SeenCell
) -> None:
    proxy = scene.postgres_proxy() if phase == "B3" else None
    scene.bring_to(phase, proxy)
    postgres.kill()
    if proxy is not None:
        proxy.heal()
    scene.let_go(phase)
    postgres.start()
    eventually(scene.all_completed, timeout=PATIENCE, what="all three completed")
    eventually(lambda: scene.messages() == 0 and not scene.active(), timeout=PATIENCE, what="acknowledged")
    see(scene, cell)


@pytest.mark.parametrize("phase", each("F13", "B3"))
def test_the_answer_to_a_batchs_commit_is_lost(phase: str, scene: BatchScene, cell: SeenCell) -> None:
    postgres = scene.postgres_proxy()
    scene.bring_to(phase, postgres)
    postgres.heal()
    eventually(lambda: scene.messages() == 0 and scene.logged(" succeeded") >= 3, timeout=PATIENCE, what="acknowledged")
    scene.ended()
    see(scene, cell)
