"""F1–F5: the worker that has an operation is killed, frozen, shut down or cut off from its broker, in every phase."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

import pytest

from tests.faults.conftest import SeenCell
from tests.faults.scene import PATIENCE, Scene
from tests.support.processes import Worker, eventually
from tests.support.proxy import Proxy

# these run with plain pytest, too
QUICK = {("F1", "P3")}


def each(fault: str, *phases: str) -> list[Any]:
    marks = {
        phase: [pytest.mark.cell(fault, phase)] + [pytest.mark.quick] * ((fault, phase) in QUICK) for phase in phases
    }
    return [pytest.param(phase, marks=marks[phase], id=f"{fault}-{phase}") for phase in phases]


@pytest.fixture
def postgres(request: pytest.FixtureRequest, scene: Scene) -> Proxy | None:
    """For P5: the proxy that swallows the reply to COMMIT."""
    return scene.postgres_proxy() if request.node.callspec.params["phase"] == "P5" else None


def redelivered(scene: Scene) -> None:
    """Wait until the message is with a worker again, and has been handled there."""
    eventually(lambda: scene.logged(" received") >= 2, timeout=PATIENCE, what="delivered again")
    eventually(lambda: scene.logged(" succeeded") + scene.logged(" ignored") >= 1, timeout=PATIENCE, what="handled")


def seen(scene: Scene, postgres: Proxy | None) -> str:
    """The letter. Of an attempt that never learned the answer to its COMMIT the record says what became of it."""
    letter = scene.outcome()
    return "U" if letter == "D" and postgres is not None and postgres.swallowed else letter


@pytest.mark.parametrize("phase", each("F1", "P0", "P1", "P2", "P3", "P4", "P5", "P6"))
def test_the_child_is_killed(phase: str, scene: Scene, postgres: Proxy | None, cell: SeenCell) -> None:
    scene.worker()
    scene.bring_to(phase, postgres)
    os.kill(scene.held(phase), signal.SIGKILL)
    if postgres is not None:
        postgres.heal()
    redelivered(scene)
    if phase in ("P1", "P2", "P3", "P4"):
        # the redelivery found the dead holder's hint: counted, and let go
        eventually(lambda: scene.record().duplicates == 1, timeout=PATIENCE, what="counted")
        scene.sweep()
    scene.completed()
    cell.saw(seen(scene, postgres))


@pytest.mark.parametrize("phase", each("F2", "P0", "P1", "P2", "P3", "P4", "P5", "P6"))
def test_the_whole_worker_is_killed(phase: str, scene: Scene, postgres: Proxy | None, cell: SeenCell) -> None:
    worker = scene.worker()
    scene.bring_to(phase, postgres)
    worker.kill()
    if postgres is not None:
        postgres.heal()
    scene.worker()
    redelivered(scene)
    if phase in ("P1", "P2", "P3", "P4"):
        eventually(lambda: scene.record().duplicates == 1, timeout=PATIENCE, what="counted")
        scene.sweep()
    scene.completed()
    cell.saw(seen(scene, postgres))


@pytest.mark.parametrize("phase", each("F3", "P0", "P1", "P2", "P3", "P4", "P5", "P6"))
def test_the_whole_worker_is_frozen_past_its_lease_and_goes_on_later(
    phase: str, scene: Scene, postgres: Proxy | None, cell: SeenCell
) -> None:
    broker = scene.broker_proxy()
    # an attempt frozen before COMMIT is evicted after half its lease
    frozen = scene.worker(LEASE="4" if phase == "P4" else "60")
    scene.bring_to(phase, postgres)
    child = scene.held(phase)
    frozen.signal(signal.SIGSTOP)
    if phase == "P4":
        eventually(lambda: not idle_in_transaction(scene), timeout=PATIENCE, what="evicted")
    scene.age()
    # what the broker does with a peer whose heartbeats have stopped
    broker.reset()
    if postgres is not None:
        postgres.heal()  # it resets the connection whose reply it has swallowed: that one never comes
    other = scene.worker()
    scene.completed()
    eventually(lambda: " succeeded" in other.log, timeout=PATIENCE, what="delivered to the other worker")
    done = scene.record()

    scene.let_go(phase)
    # The child first: its parent, once awake, would end what it cannot acknowledge any more.
    os.kill(child, signal.SIGCONT)
    if phase not in ("P0", "P6"):
        # what it writes matches nothing, or its connection is gone: either way it claims again, to learn from the record
        asked = [("hint.left", child)] * 2
        eventually(
            lambda: [(e.point, e.pid) for e in scene.trace("hint.left") if e.pid == child] == asked,
            timeout=PATIENCE,
            what="the stale attempt asks again",
        )
    frozen.signal(signal.SIGCONT)
    eventually(lambda: goes_on(frozen), timeout=PATIENCE, what="the worker goes on")
    assert scene.record() == done
    cell.saw(seen(scene, postgres))


def idle_in_transaction(scene: Scene) -> bool:
    query = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'"
    return bool(scene.rows(query))


def goes_on(worker: Worker) -> bool:
    return "Connection to broker lost" in worker.log


def told_to_stop_at_once(worker: Worker, postgres: Proxy | None) -> None:
    """Have it told to stop, and then to stop at once, and wait for its end."""
    worker.process.send_signal(signal.SIGTERM)
    eventually(lambda: "Warm shutdown" in worker.log, timeout=PATIENCE)
    worker.process.send_signal(signal.SIGQUIT)
    if postgres is not None:
        postgres.heal()
    ended_at_last(worker)


def ended_at_last(worker: Worker) -> None:
    """Wait for a cold shutdown. If Celery hangs in it, do what a supervisor does.

    Its signal handler may interrupt the reading of a frame. Then what follows is read from the middle of that frame, and the
    worker waits for the broker's answer for good. Or it waits there for its pool, whose lock the interrupted code holds.
    """
    try:
        worker.process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        worker.process.send_signal(signal.SIGABRT)  # it ends, and says where it was
        worker.process.wait(PATIENCE)
        assert "Cold shutdown" in worker.log or "in on_cold_shutdown" in worker.log, worker.log


@pytest.mark.parametrize("phase", each("F4", "P1", "P2", "P3", "P4", "P5", "P6"))
def test_a_worker_asked_to_stop_and_then_to_stop_at_once(
    phase: str, scene: Scene, postgres: Proxy | None, cell: SeenCell
) -> None:
    worker = scene.worker()
    scene.bring_to(phase, postgres)
    told_to_stop_at_once(worker, postgres)
    scene.worker()
    scene.completed()
    if phase in ("P5", "P6"):
        redelivered(scene)
    cell.saw(seen(scene, postgres))


@pytest.mark.parametrize("phase", each("F4", "P2", "P3"))
def test_a_worker_asked_to_stop_is_given_time(phase: str, scene: Scene, cell: SeenCell) -> None:
    worker = scene.worker()
    scene.bring_to(phase)
    worker.process.send_signal(signal.SIGTERM)
    eventually(lambda: "Warm shutdown" in worker.log, timeout=PATIENCE)
    scene.let_go(phase)
    assert worker.process.wait(PATIENCE) == 0
    # there is no other worker
    assert scene.outcome() == "–"
    assert scene.logged(" received") == 1
    cell.saw("finish" if scene.logged(" succeeded") else "nothing")


@pytest.mark.parametrize("phase", each("F5", "P0", "P1", "P2", "P3", "P4", "P5", "P6"))
def test_the_worker_loses_its_connection_to_the_broker(
    phase: str, scene: Scene, postgres: Proxy | None, cell: SeenCell
) -> None:
    broker = scene.broker_proxy()
    scene.worker()
    scene.bring_to(phase, postgres)
    broker.reset()
    # what it cannot acknowledge any more it ends
    scene.cancelled(phase)
    redelivered(scene)
    scene.completed()
    assert broker.resets
    cell.saw(scene.outcome())
