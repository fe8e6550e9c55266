"""The processes of the application: workers, relay and beat, each in a session of its own, stopped by its own pid."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from services import process

ROOT = Path(__file__).parent.parent
QUEUES = "payments,refunds,notifications,maintenance"
# Pool processes of a worker: a call outside waits far longer than it computes.
CONCURRENCY = 4
STOP_SECONDS = 20.0
_RELAY = "from idempotency.cli import main; main()"


class ProcessError(RuntimeError):
    """A process of the application ended by itself; the message has its last words."""


class Processes:
    """What runs beside the servers. Each process keeps its record and its log in a directory below `directory`.

    Below the servers' own directory, the processes are ended with them even when their owner is killed.
    """

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._directory = directory
        self._environment = {**os.environ, **environment}
        self._running: list[str] = []
        self._workers = 0

    def start_worker(self) -> str:
        """Start a Celery worker on all queues; returns its name."""
        self._workers += 1
        name = f"worker-{self._workers}"
        options = ["--hostname", f"{name}@%h", "--queues", QUEUES, "--concurrency", str(CONCURRENCY)]
        options += ["--pool", "prefork", "--without-mingle", "--without-gossip", "--loglevel", "WARNING"]
        self._start(name, "-m", "celery", "-A", "tasks", "worker", *options)
        return name

    def start_relay(self) -> None:
        """Start the relay from the outbox to the broker."""
        self._start("relay", "-c", _RELAY, "relay")

    def start_beat(self) -> None:
        """Start Celery beat with its schedule in the private directory."""
        schedule = self._directory / "beat-schedule"
        self._start("beat", "-m", "celery", "-A", "tasks", "beat", "--schedule", str(schedule), "--pidfile", "")

    def pid(self, name: str) -> int | None:
        """The pid of a running process; None when it has ended."""
        found = process.find(self._record(name))
        return None if found is None else found.pid

    def kill(self, name: str) -> None:
        """SIGKILL a process and all its children, as a crash would. `ProcessError` when there is nothing to kill."""
        found = process.find(self._record(name))
        if found is None:
            raise ProcessError(f"{name} had ended before it was killed")
        # A session of its own makes its pid the process group's.
        os.killpg(found.pid, signal.SIGKILL)
        process.end(found, signal.SIGKILL, timeout=10)
        self._running.remove(name)

    def check(self) -> None:
        """Raise `ProcessError` when a process has ended that nobody ended."""
        for name in self._running:
            if self.pid(name) is None:
                raise ProcessError(f"{name} ended by itself; its last words:\n{self._last_words(name)}")

    def stop(self) -> None:
        """Let every process finish what it is doing; kill it after 20 s."""
        names, self._running = self._running, []
        if names:
            with ThreadPoolExecutor(len(names)) as threads:
                list(threads.map(self._stop, names))

    def keep_logs(self) -> Path:
        """Copy the logs of all processes and servers to where they outlive the private directory."""
        kept = Path(tempfile.mkdtemp(prefix="demo-logs-"))
        for log in [*self._directory.glob("*/log"), *self._directory.glob("*/*.log")]:
            shutil.copyfile(log, kept / f"{log.parent.name}.log")
        return kept

    def _start(self, name: str, *arguments: str) -> None:
        place = self._directory / name
        place.mkdir()
        process.launch(
            [sys.executable, *arguments],
            record=self._record(name),
            log=place / "log",
            directory=ROOT,
            environment=self._environment,
        )
        # The record is written by the process itself; without it nobody could find it.
        deadline = time.monotonic() + 10
        while not self._record(name).exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        self._running.append(name)

    def _stop(self, name: str) -> None:
        if (found := process.find(self._record(name))) is not None:
            process.end(found, signal.SIGTERM, timeout=STOP_SECONDS)

    def _record(self, name: str) -> Path:
        return self._directory / name / "pid"

    def _last_words(self, name: str, lines: int = 15) -> str:
        log = self._directory / name / "log"
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
