"""F16–F18, F20: eight copies at once, poison, errors of the body, and a gateway that misbehaves."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from idempotency import Handle, OperationId
from idempotency.application import settings_of
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.queues import DELIVERY_LIMIT
from idempotency.store.recover import SPARE_CLAIMS
from idempotency.upkeep import maintenance
from tests.faults.conftest import SeenCell
from tests.faults.marks import each
from tests.faults.scene import PATIENCE, POINTS, Scene
from tests.support import bank, crashing
from tests.support.processes import Processes, eventually

COPIES = 8


# ---------------------------------------------------------------- F16: eight copies at once


@pytest.fixture
def eight(scene: Scene, processes: Processes) -> None:
    """A worker with eight pool children."""
    scene.workers.append(processes.worker("--concurrency", str(COPIES)))


def send_copies(scene: Scene, cell: Any, number: int) -> None:
    """The same message so many times: one task id, as if the broker had repeated it."""
    cell.accepts(scene.account)
    for _ in range(number):
        bank.transfer.apply_async((scene.account, scene.outside.url), task_id=f"copy-of-{scene.account}")


def handled(scene: Scene, number: int) -> None:
    """Wait until so many copies have an answer, and nothing waits in the queue."""
    answers = (" succeeded", " ignored")
    eventually(lambda: sum(map(scene.logged, answers)) >= number, timeout=PATIENCE, what=f"{number} copies handled")
    assert sum(map(scene.logged, answers)) == number
    assert scene.messages() == 0


@pytest.mark.cell("F16", "P0")
def test_of_eight_copies_at_once_one_runs(scene: Scene, eight: None, cell: SeenCell) -> None:
    crashing.plan(scene.directory, POINTS["P0"], crashing.HOLD_EVERYBODY)
    send_copies(scene, cell, COPIES)
    held = f"{POINTS['P0']}.*.held"
    eventually(lambda: len(list(scene.directory.glob(held))) == COPIES, timeout=PATIENCE, what="eight before the claim")
    scene.let_go("P0")
    scene.completed()
    handled(scene, COPIES)
    assert scene.outcome() in ("–", "D")
    cell.saw(f"{len(scene.trace('body.entered'))} runs")


@pytest.mark.cell("F16", "P3")
def test_one_of_seven_copies_past_the_lease_calls_the_gateway_again(scene: Scene, eight: None, cell: SeenCell) -> None:
    crashing.plan(scene.directory, POINTS["P3"], crashing.HOLD)
    send_copies(scene, cell, 1)
    holder = scene.held("P3")
    os.kill(holder, signal.SIGSTOP)  # so it does not renew either
    first = scene.record()
    scene.age()
    send_copies(scene, cell, COPIES - 1)
    done = scene.completed()
    scene.let_go("P3")
    os.kill(holder, signal.SIGCONT)
    handled(scene, COPIES)
    assert scene.record().fence == done.fence > first.fence
    assert list(scene.outside.calls.values()) == [2]
    cell.saw(scene.outcome())


@pytest.mark.cell("F16", "P4")
def test_seven_copies_wait_for_a_commit_and_find_its_result(scene: Scene, eight: None, cell: SeenCell) -> None:
    crashing.plan(scene.directory, POINTS["P4"], crashing.HOLD)
    send_copies(scene, cell, 1)
    scene.held("P4")
    first = scene.record()
    send_copies(scene, cell, COPIES - 1)
    waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    eventually(lambda: len(scene.rows(waiting)) == COPIES - 1, timeout=PATIENCE, what="seven wait for the row")
    scene.let_go("P4")
    scene.completed()
    handled(scene, COPIES)
    assert scene.outcome() == "D"
    runs = len(scene.trace("body.entered"))
    cell.saw("1 wins" if (runs, scene.record().fence) == (1, first.fence) else f"{runs} runs")


@pytest.mark.cell("F16", "P6")
def test_seven_copies_find_the_result_of_a_commit_that_is_not_acknowledged(
    scene: Scene, eight: None, cell: SeenCell
) -> None:
    crashing.plan(scene.directory, POINTS["P6"], crashing.HOLD)
    send_copies(scene, cell, 1)
    scene.held("P6")
    send_copies(scene, cell, COPIES - 1)
    handled(scene, COPIES - 1)
    scene.let_go("P6")
    handled(scene, COPIES)
    assert scene.record().duplicates == 0
    cell.saw(scene.outcome())


# ---------------------------------------------------------------- F17: poison


def ended(scene: Scene) -> str:
    """Q: the operation has failed, and there is one dead letter."""
    letters = scene.rows("SELECT reason, attempts FROM idempotency.dead_letters WHERE key = :key")
    row = scene.record()
    assert (row.status, len(letters)) == ("failed", 1), (row, letters)
    assert scene.entries()[0] == 0
    assert letters[0].attempts == row.attempts
    return "Q"


# Deliveries that a worker's death has to use up; the others are handed back at once.
DEATHS = 4


@pytest.mark.cell("F17", "P0")
def test_poison_before_the_claim_ends_at_the_brokers_delivery_limit(scene: Scene, cell: SeenCell) -> None:
    scene.relay()
    scene.accept()
    eventually(lambda: scene.messages() == 1, timeout=PATIENCE, what="in its queue")
    hand_back(scene, DELIVERY_LIMIT + 1 - DEATHS)
    crashing.plan(scene.directory, POINTS["P0"], crashing.KILL_EVERY_CHILD)
    worker = scene.worker()
    consumer = DeadLetterConsumer(scene.app)
    eventually(lambda: consumer.run_once() == 1, timeout=PATIENCE, what="given up by the broker, and stored")
    consumer.close()
    assert len(scene.trace("hint.left")) == DEATHS
    assert worker.process.poll() is None
    assert scene.rows("SELECT reason FROM idempotency.dead_letters WHERE key = :key")[0].reason == "delivery_limit"
    cell.saw(ended(scene))


def hand_back(scene: Scene, times: int) -> None:
    """Take the message and give it back unanswered, as a worker does that loses its connection."""
    with scene.app.connection_for_read() as broker:
        channel = broker.default_channel
        for _ in range(times):
            got = eventually(lambda: channel.basic_get(scene.app.conf.task_default_queue), what="the message")
            channel.basic_reject(got.delivery_tag, requeue=True)


# Of the claims beyond the last attempt, all but two are counted without another death.
SKIPPED = SPARE_CLAIMS - 2


@pytest.mark.parametrize("phase", each("F17", "P1", "P2", "P3"))
def test_poison_after_the_claim_ends_when_its_attempts_are_used_up(phase: str, scene: Scene, cell: SeenCell) -> None:
    point = POINTS[phase]
    crashing.plan(scene.directory, point, crashing.KILL_EVERY_CHILD)
    worker = scene.worker()
    scene.relay()
    scene.accept()

    # at P1 it kills the claims that would end the operation, too, until the sweep does so
    last = 7 if phase == "P1" else 5
    for deaths in range(1, last + 1):
        eventually(lambda deaths=deaths: len(scene.trace(point)) == deaths, timeout=PATIENCE, what=f"death {deaths}")
        if phase == "P1" and deaths == 5:
            scene.rows(
                """UPDATE idempotency.records SET attempts = attempts + :more, spent_at = attempts + 1
                   WHERE key = :key RETURNING 1""",
                more=SKIPPED,
            )
        eventually(lambda: maintenance.recover(scene.app) == 1, timeout=PATIENCE, what="recovered")
    eventually(lambda: scene.status() == "failed", timeout=PATIENCE, what="failed")
    assert len(scene.trace(point)) == last
    assert phase != "P1" or scene.record().attempts == 5 + SPARE_CLAIMS
    assert worker.process.poll() is None
    assert set(scene.outside.acts.values()) <= {1}
    cell.saw(ended(scene))


# ---------------------------------------------------------------- F18: errors of the body


@pytest.mark.parametrize("phase", each("F18", "P2", "P3"))
def test_an_error_is_another_attempt_with_back_off(phase: str, scene: Scene, cell: SeenCell) -> None:
    scene.worker(RETRY_BASE="1")
    scene.relay()
    crashing.plan(scene.directory, POINTS[phase], crashing.RAISE_ERROR)
    scene.accept()
    row = scene.completed()
    assert (row.attempts, len(scene.trace("body.entered"))) == (2, 2)
    assert "planned" in row.first_error
    first, retry = scene.outbox()
    assert (retry.origin, retry.available_at > first.available_at) == ("retry", True)
    letter = scene.outcome()
    assert letter == ("R" if phase == "P2" else "G")
    cell.saw("retry" if phase == "P2" else letter)


@pytest.mark.parametrize("phase", each("F18", "P2", "P3"))
def test_a_permanent_error_ends_the_operation(phase: str, scene: Scene, cell: SeenCell) -> None:
    scene.worker()
    scene.relay()
    crashing.plan(scene.directory, POINTS[phase], crashing.RAISE_PERMANENT)
    scene.accept()
    eventually(lambda: scene.status() == "failed", timeout=PATIENCE, what="failed")
    row = scene.record()
    assert (row.attempts, row.error) == (1, row.first_error)
    assert ended(scene) == "Q"
    code = "planned" if phase == "P2" else "effect_unknown"
    assert [tuple(each) for each in scene.rows("SELECT code FROM failures WHERE account = :key")] == [(code,)]
    cell.saw(row.status if phase == "P2" else "unknown")


# ---------------------------------------------------------------- F20: the gateway


@pytest.mark.cell("F20", "P3")
@pytest.mark.parametrize("how", ["fail after", "busy", "hang"])
def test_the_gateway_fails_after_it_has_acted_or_before(how: str, scene: Scene, cell: SeenCell) -> None:
    scene.outside.script = [how]
    scene.worker(CALL_TIMEOUT="1")
    scene.relay()
    scene.accept()
    row = scene.completed()
    assert row.attempts == 2
    assert list(scene.outside.calls.values()) == [2]
    cell.saw(scene.outcome())


@pytest.mark.cell("F20", "P3")
def test_a_gateway_that_drips_is_left_at_the_soft_limit(scene: Scene, cell: SeenCell) -> None:
    scene.outside.script = ["drip"]
    scene.worker(CALL_TIMEOUT="1")
    scene.relay()
    cell.accepts(scene.account)
    bank.transfer.apply_async((scene.account, scene.outside.url), soft_time_limit=2)
    row = scene.completed()
    assert (row.attempts, "SoftTimeLimitExceeded" in row.first_error) == (2, True)
    cell.saw(scene.outcome())


@pytest.mark.cell("F20", "P3")
def test_a_gateway_that_calls_back_three_times_is_asked_once_more(
    scene: Scene, processes: Processes, tmp_path: Path, cell: SeenCell
) -> None:
    decided = tmp_path / "decided"
    worker = processes.worker(app="tests.faults.undecided_code", DECIDED=str(decided))
    scene.workers.append(worker)
    scene.relay()
    scene.accept()
    eventually(lambda: scene.status() == "released", timeout=PATIENCE, what="it waits for the gateway")
    decided.touch()
    id = OperationId(settings_of(scene.app).tenant, bank.transfer.name, scene.account)

    def call_back() -> None:
        with Session(scene.engine.execution_options(isolation_level="READ COMMITTED")) as session, session.begin():
            Handle(scene.app, id).wake(session)

    for _ in range(3):
        call_back()
    row = scene.completed()
    assert list(scene.outside.calls.values()) == [2]
    call_back()  # of what has ended
    assert scene.record() == row
    cell.saw(scene.outcome())
