"""F15 and F19: workers whose clock is a day off, and a beat that is doubled, was away, or starts from an old schedule."""

from __future__ import annotations

import datetime
import json
import os
import re
import shelve
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults import clocks
from tests.faults.conftest import SeenCell
from tests.faults.scene import PATIENCE, Scene
from tests.support.processes import eventually

DAY = 86400

# ---------------------------------------------------------------- F15: the worker's clock


@pytest.mark.cell("F15", "P2")
@pytest.mark.parametrize("days", [1, -1])
def test_a_worker_with_a_clock_a_day_off_holds_renews_and_finishes(
    days: int, scene: Scene, tmp_path: Path, cell: SeenCell
) -> None:
    if not clocks.can_be_built():
        cell.not_run("no C compiler")
    environment: dict[str, Any] = clocks.Clock(tmp_path, seconds=days * DAY).environment
    worker = scene.worker(LEASE="4", **environment)
    there = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    assert f"[{there:%Y-%m-%d} " in worker.log, "its clock is not off"
    scene.bring_to("P2")
    left = scene.rows(
        "SELECT extract(epoch FROM locked_until - clock_timestamp()) AS left FROM idempotency.records WHERE key = :key"
    )[0].left
    assert 0 < left <= 4
    first = scene.record()
    scene.duplicate()
    eventually(lambda: scene.record().duplicates == 1, what="the duplicate was counted")
    eventually(lambda: scene.record().locked_until > first.locked_until, what="renewed")
    scene.let_go("P2")
    scene.completed()
    cell.saw(scene.outcome())


# ---------------------------------------------------------------- F19: beat


class Beats:
    """Real `celery beat` processes of the application in tasks/, ticking every second, and a worker that does the work.

    Under the name of the scene's application: each recovers only its own.
    """

    def __init__(self, scene: Scene, directory: Path, **environment: str) -> None:
        own = {"IDEMPOTENCY_SWEEP": "1", "IDEMPOTENCY_SERVICE": "bank", **environment}
        self._environment = scene.environment | own
        self._directory = directory
        self._running: list[subprocess.Popen[bytes]] = []
        self._logs: list[Path] = []
        self.worker = scene._processes.worker("--queues", "maintenance", "--concurrency", "2", app="tasks", **own)

    def start(self, name: str) -> Path:
        """Start one with a schedule file of this name; returns its log."""
        log = self._directory / f"{name}.log"
        command = [sys.executable, "-m", "celery", "-A", "tasks", "beat", "--loglevel", "INFO", "--pidfile="]
        command += ["--schedule", str(self._directory / name)]
        with log.open("wb") as file:
            self._running.append(
                subprocess.Popen(command, env=self._environment, stdout=file, stderr=subprocess.STDOUT)
            )
        self._logs.append(log)
        return log

    def stop(self) -> None:
        """Stop all of them in order; they leave their schedule files."""
        for beat, log in zip(self._running, self._logs, strict=True):
            self._wait_for_a_pause(log)
            beat.terminate()
        for beat in self._running:
            try:
                beat.wait(30)
            except subprocess.TimeoutExpired:
                beat.kill()
                beat.wait(60)
        self._running.clear()
        self._logs.clear()

    @staticmethod
    def _wait_for_a_pause(log: Path) -> None:
        """Until beat is between two ticks: its signal handler closes the connection, which waits forever in a publish."""
        eventually(lambda: time.time() - log.stat().st_mtime > 0.3, what="beat sends nothing")

    def ticks(self, task: str) -> int:
        """How often a maintenance task has been done."""
        return len(re.findall(rf"Task maintenance\.{task}\[\S+\] succeeded", self.worker.log))


@pytest.fixture
def beats(scene: Scene, tmp_path: Path) -> Iterator[Callable[..., Beats]]:
    started: list[Beats] = []

    def start(**environment: str) -> Beats:
        started.append(Beats(scene, tmp_path, **environment))
        return started[-1]

    yield start
    for each in started:
        each.stop()


def orphan(scene: Scene, phase: str) -> None:
    """Hold the operation in a phase, and kill its process; what the broker sends again is counted and gone."""
    scene.worker()
    scene.bring_to(phase)
    os.kill(scene.held(phase), signal.SIGKILL)
    eventually(lambda: scene.record().duplicates == 1, what="the redelivery was counted")
    eventually(lambda: scene.messages() == 0)


@pytest.mark.cell("F19", "P0")
@pytest.mark.parametrize(("remote_control", "resends"), [("1", 0), ("0", 1)])
def test_two_beats_send_what_a_worker_holds_at_most_once_more(
    remote_control: str, resends: int, scene: Scene, beats: Callable[..., Beats], cell: SeenCell
) -> None:
    """Once, however often they look, and never if workers may be asked what they hold."""
    scene.worker()
    scene.bring_to("P0")
    scene.age()  # published long ago, and unacknowledged: it waits and is not lost
    doubled = beats(REMOTE_CONTROL=remote_control)
    logs = [doubled.start(name) for name in ("one", "two")]
    eventually(
        lambda: all(log.read_text().count("Sending due task resend") >= 3 for log in logs),
        timeout=PATIENCE,
        what="both tick",
    )
    eventually(lambda: doubled.ticks("resend") >= 6, timeout=PATIENCE, what="their ticks are done")
    assert [row.resends for row in scene.outbox()] == [resends]
    scene.let_go("P0")
    scene.completed()
    assert len(scene.trace("body.entered")) == 1
    cell.saw("–" if not resends else scene.outcome())


@pytest.mark.cell("F19", "P1")
def test_what_was_orphaned_without_beat_is_done_after_its_first_tick(
    scene: Scene, beats: Callable[[], Beats], cell: SeenCell
) -> None:
    orphan(scene, "P1")
    scene.age(hours=1)
    beats().start("late")
    scene.completed()
    cell.saw(scene.outcome())


@pytest.mark.cell("F19", "P2")
def test_recoveries_of_several_processes_at_once_release_an_orphan_once(scene: Scene, cell: SeenCell) -> None:
    orphan(scene, "P2")
    scene.age()
    command = [sys.executable, "-m", "idempotency.cli", "recover", "-A", "tests.support.bank", "--json"]
    running = [
        subprocess.Popen(command, env=scene.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for _ in range(3)
    ]
    counts = [json.loads(process.communicate(timeout=PATIENCE)[0])["recovered"] for process in running]
    assert sorted(counts) == [0, 0, 1]
    assert [row.origin for row in scene.outbox()] == ["enqueue", "recover"]
    scene.completed()
    cell.saw(scene.outcome())


@pytest.mark.cell("F19", "P3")
def test_a_beat_with_an_old_schedule_file_sends_each_task_once(
    scene: Scene, beats: Callable[[], Beats], tmp_path: Path, cell: SeenCell
) -> None:
    orphan(scene, "P3")
    started = beats()
    first = started.start("schedule")
    eventually(lambda: "Sending due task recover" in first.read_text(), timeout=PATIENCE)
    started.stop()
    with shelve.open(str(tmp_path / "schedule"), writeback=True) as schedule:
        entries = schedule["entries"]
        for entry in entries.values():
            entry.last_run_at -= datetime.timedelta(days=1)
        assert {"recover", "purge", "report"} <= set(entries)
    scene.age()
    second = started.start("schedule")
    eventually(lambda: second.read_text().count("Sending due task recover") >= 3, timeout=PATIENCE)
    assert [second.read_text().count(f"Sending due task {name}") for name in ("purge", "report")] == [1, 1]
    scene.completed()
    cell.saw(scene.outcome())
