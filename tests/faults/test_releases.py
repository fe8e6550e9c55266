"""F21: workers of an old and of a new release share the queues."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from idempotency.letters.consumer import DeadLetterConsumer
from tests.faults.conftest import SeenCell
from tests.faults.scene import PATIENCE, Scene
from tests.support.processes import Processes, Worker, eventually

OLD, NEW = "tests.support.bank", "tests.faults.new_code"
# what the final row of each says
WRITTEN_BY = {7: OLD, 8: NEW}
OPEN = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'"


def takeovers(first: str, second: str, *phases: str) -> list[Any]:
    return [
        pytest.param(phase, first, second, marks=pytest.mark.cell("F21", phase), id=f"F21-{phase}-{first}-first")
        for phase in phases
    ]


@pytest.fixture
def release(scene: Scene, processes: Processes) -> Callable[..., Any]:
    """Starts a worker of a release."""

    def start(app: str, **environment: str) -> Worker:
        # one child: while it is held, whatever comes goes to the other release
        scene.workers.append(processes.worker("--concurrency", "1", app=app, **environment))
        return scene.workers[-1]

    return start


def writer(scene: Scene) -> str:
    """Whose row is there."""
    (row,) = scene.rows("SELECT amount FROM entries WHERE account = :key")
    return WRITTEN_BY[row.amount]


@pytest.mark.cell("F21", "P0")
def test_a_task_that_a_worker_does_not_know_comes_back_until_one_does(
    scene: Scene, release: Callable[..., Any], cell: SeenCell
) -> None:
    scene.app.conf.idempotency_unknown_task_grace = 3600
    older = release("tests.faults.older_code")
    scene.relay()
    scene.accept()
    consumer = DeadLetterConsumer(scene.app)
    eventually(lambda: consumer.run_once() == 1, timeout=PATIENCE, what="refused by the worker, and put back")
    assert scene.entries() == (0, 0)
    older.kill()
    release(NEW)
    scene.completed()
    assert scene.rows("SELECT 1 FROM idempotency.dead_letters WHERE key = :key") == []
    assert scene.rows("SELECT refusals FROM idempotency.outbox WHERE key = :key")[0].refusals == 1
    assert writer(scene) == NEW
    consumer.close()
    cell.saw("put back")


@pytest.mark.parametrize(
    ("phase", "first", "second"),
    [
        *takeovers(OLD, NEW, "P1", "P2", "P3", "P5"),
        *takeovers(NEW, OLD, "P2", "P4"),
    ],
)
def test_an_attempt_of_one_release_and_its_takeover_by_another(
    first: Any, second: Any, phase: Any, scene: Scene, release: Callable[..., Any], cell: SeenCell
) -> None:
    postgres = scene.postgres_proxy() if phase == "P5" else None
    # an attempt frozen before COMMIT is evicted after half its lease
    holder = release(first, LEASE="4" if phase == "P4" else "60")
    scene.bring_to(phase, postgres)
    child = scene.held(phase)
    os.kill(child, signal.SIGSTOP)
    if phase == "P4":
        eventually(lambda: not scene.rows(OPEN), timeout=PATIENCE, what="evicted")
    if postgres is not None:
        postgres.heal()  # it resets the connection whose reply it has swallowed: that one never comes
    scene.age()
    other = release(second)
    scene.duplicate()
    scene.completed()
    eventually(lambda: " succeeded" in other.log, timeout=PATIENCE, what="the other release has answered")
    done = scene.record()

    scene.let_go(phase)
    os.kill(child, signal.SIGCONT)
    eventually(lambda: " succeeded" in holder.log or " ignored" in holder.log, timeout=PATIENCE, what="handled")
    assert scene.record() == done
    # at P5 the first had committed, unknown to all
    assert writer(scene) == (first if phase == "P5" else second)
    cell.saw(scene.outcome())


@pytest.mark.parametrize(("phase", "first", "second"), takeovers(OLD, NEW, "P6"))
def test_one_release_answers_with_the_result_of_another(
    first: Any, second: Any, phase: Any, scene: Scene, release: Callable[..., Any], cell: SeenCell
) -> None:
    holder = release(first)
    scene.bring_to(phase)
    other = release(second)
    scene.duplicate()
    eventually(lambda: " succeeded" in other.log, timeout=PATIENCE, what="the other release has answered")
    scene.let_go(phase)
    eventually(lambda: " succeeded" in holder.log, timeout=PATIENCE, what="handled")
    assert writer(scene) == first
    cell.saw(scene.outcome())
