"""Two faults together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import redis

import services
from idempotency.errors import ReplayRefused
from idempotency.store import dead_letters
from tests.faults.conftest import SeenCell
from tests.faults.own_postgres import fixture_database, fixture_postgres, fixture_template  # noqa: F401
from tests.faults.scene import PATIENCE, POINTS, Scene
from tests.support import crashing
from tests.support.processes import eventually


def flush(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        client.flushall()


@pytest.mark.cell("F3@P2+F9")
def test_a_worker_frozen_while_redis_loses_everything_writes_nothing(scene: Scene, cell: SeenCell) -> None:
    scene.worker()
    scene.bring_to("P2")
    os.kill(frozen := scene.held("P2"), signal.SIGSTOP)
    flush(scene.environment["REDIS_URL"])
    scene.age()
    scene.duplicate()
    done = scene.completed()
    scene.let_go("P2")
    os.kill(frozen, signal.SIGCONT)
    eventually(lambda: scene.logged("event=fenced") or scene.logged("event=lease_lost"), what="it finds out")
    eventually(lambda: scene.logged(" succeeded in ") == 2, timeout=PATIENCE, what="both answered")
    assert scene.record() == done
    cell.saw(scene.outcome())


@pytest.mark.cell("F3@P4+F12")
def test_a_worker_frozen_while_postgres_is_killed_commits_nothing(
    scene: Scene,
    postgres: Any,
    cell: SeenCell,
) -> None:
    scene.worker()
    scene.bring_to("P4")
    os.kill(frozen := scene.held("P4"), signal.SIGSTOP)
    postgres.kill()
    postgres.start()
    assert scene.entries() == (0, 1)
    scene.age()
    scene.duplicate()
    done = scene.completed()
    scene.let_go("P4")
    os.kill(frozen, signal.SIGCONT)
    eventually(lambda: scene.logged(" succeeded in ") == 2, timeout=PATIENCE, what="both answered")
    assert scene.record() == done
    cell.saw(scene.outcome())


@pytest.mark.cell("F5@P5+F13")
def test_a_broker_reset_and_a_lost_commit_reply_leave_one_commit(scene: Scene, cell: SeenCell) -> None:
    broker, postgres = scene.broker_proxy(), scene.postgres_proxy()
    scene.worker()
    scene.bring_to("P5", postgres)
    eventually(lambda: postgres.swallowed > 0, timeout=PATIENCE, what="the reply was lost")
    broker.reset()
    scene.cancelled("P5")
    eventually(lambda: len(scene.trace("hint.left")) == 2, timeout=PATIENCE, what="delivered again")
    eventually(lambda: scene.logged(" succeeded in ") == 1, timeout=PATIENCE, what="answered")
    cell.saw(scene.outcome())


@pytest.mark.cell("F6@P8+F2")
def test_a_broker_and_relay_killed_before_the_confirm_leave_a_copy(
    scene: Scene, servers: services.Services, cell: SeenCell
) -> None:
    if servers.broker != "rabbitmq":
        cell.not_run("needs a RabbitMQ of our own")
    scene.declare_queues()
    crashing.plan(scene.directory, POINTS["P8"], crashing.HOLD)
    scene.accept()
    command = [sys.executable, "-m", "idempotency.cli", "relay", "-A", "tests.support.bank"]
    with subprocess.Popen(command, env=scene.environment, stderr=subprocess.DEVNULL) as relay:
        try:
            scene.held("P8")
            eventually(lambda: scene.messages() == 1, what="published")
            servers.rabbitmq.kill()
        finally:
            relay.kill()
    servers.rabbitmq.start()
    assert scene.outbox()[0].status == "pending"
    # The broker answers before it has read its queues' logs again; until then they count as empty.
    eventually(lambda: scene.messages() == 1, what="the first copy survived")
    scene.age()
    scene.relay()
    eventually(lambda: scene.outbox()[0].status == "published", timeout=PATIENCE)
    eventually(lambda: scene.messages() == 2, what="the second copy")
    scene.worker(children=1)
    scene.completed()
    eventually(lambda: len(scene.trace("hint.left")) == 2, timeout=PATIENCE, what="both copies taken")
    assert scene.outcome() == "D"
    cell.saw("K")


@pytest.mark.parametrize("phase", ["P0", "P2"])
@pytest.mark.cell("F8+F9")
def test_what_a_wiped_broker_and_a_wiped_redis_had_is_done_after_a_sweep(
    phase: str, scene: Scene, cell: SeenCell
) -> None:
    scene.worker()
    scene.bring_to(phase)
    fence = scene.fence()
    scene.delete_queues()
    flush(scene.environment["REDIS_URL"])
    scene.cancelled(phase)
    scene.sweep(up_to=fence)
    scene.completed()
    scene.sweep()
    rows = scene.outbox()
    assert rows
    assert all(row.settled_at for row in rows)
    cell.saw(scene.outcome())


@pytest.mark.cell("replay+F2")
def test_a_replay_whose_worker_is_killed_and_a_second_one_give_one_result(scene: Scene, cell: SeenCell) -> None:
    worker = scene.worker(RETRY_BASE="0.01")
    scene.outside.script = ["fail before"] * 20
    scene.relay()
    scene.accept()
    eventually(lambda: scene.status() == "failed", timeout=PATIENCE, what="attempts used up")
    (letter,) = scene.rows("SELECT id FROM idempotency.dead_letters WHERE key = :key AND status = 'open'")
    scene.outside.script.clear()
    scene.outside.calls.clear()
    before = len(scene.trace("claimed"))

    crashing.plan(scene.directory, POINTS["P2"], crashing.HOLD)
    with scene.engine.execution_options(isolation_level="READ COMMITTED").begin() as connection:
        dead_letters.replay(connection, letter.id, app=scene.app)
    scene.held("P2")
    with (
        pytest.raises(ReplayRefused),
        scene.engine.execution_options(isolation_level="READ COMMITTED").begin() as connection,
    ):
        dead_letters.replay(connection, letter.id, app=scene.app)
    worker.kill()
    scene.worker()
    eventually(lambda: scene.record().duplicates > 0, timeout=PATIENCE, what="the redelivery was counted")
    scene.sweep()
    done = scene.completed()
    assert (done.generation, len(scene.trace("claimed")) - before, sum(scene.outside.calls.values())) == (2, 2, 1)
    cell.saw(scene.outcome())
