"""The application's processes: workers, relay, beat and servers, each in its own session and stopped by its pid."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from services import process
from services.server import free_port

ROOT = Path(__file__).parent.parent
QUEUES = ("payments", "refunds", "orders", "notifications", "webhooks")
# Of every tenant's operations, and so with the rights of a relay.
MAINTENANCE = "maintenance"
# Pool processes per worker; external calls mostly wait.
CONCURRENCY = 4
STOP_SECONDS = 20.0
COMMAND_LINE = "from idempotency.cli import main; main()"


class ProcessError(RuntimeError):
    """A process of the application ended unexpectedly; the message includes the end of its log."""


class Processes:
    """The application's processes. Each has its pid file and its log in a subdirectory of `directory`.

    `logins`: the addresses of the servers for a kind of process. With the servers' directory, the watchdog ends these processes too if their owner is killed.
    """

    def __init__(
        self, directory: Path, environment: Mapping[str, str], logins: Callable[[str], Mapping[str, str]]
    ) -> None:
        self._directory = directory
        self._environment = {**os.environ, **environment}
        self._logins = logins
        self._running: list[str] = []
        self._workers = self._servers = 0

    def start_worker(self) -> str:
        """Start a Celery worker on the queues of operations; returns its name."""
        self._workers += 1
        name = f"worker-{self._workers}"
        self._start(name, *_worker(name, ",".join(QUEUES), CONCURRENCY), login=self._logins("worker"))
        return name

    def start_relay(self) -> None:
        """Start the relay from the outbox to the broker, and the worker of the scheduled maintenance."""
        login = self._logins("relay")
        self._start("relay", "-c", COMMAND_LINE, "relay", "-A", "tasks", login=login)
        name, of_worker = "worker-maintenance", {**self._logins("worker"), "DATABASE_URL": login["DATABASE_URL"]}
        self._start(name, *_worker(name, MAINTENANCE, 1), login=of_worker)

    def start_beat(self) -> None:
        """Start Celery beat, with its schedule in the directory."""
        schedule = self._directory / "beat-schedule"
        options = ["--schedule", str(schedule), "--pidfile", ""]
        self._start("beat", "-m", "celery", "-A", "tasks", "beat", *options, login=self._logins("beat"))

    def start_server(self, port: int | None = None) -> str:
        """Start the application over HTTP, by default on a free port; returns its address. It may not accept requests yet."""
        self._servers += 1
        port = port or free_port()
        options = ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
        server = ["-m", "uvicorn", "--factory", "api.application:create_app", *options]
        self._start(f"server-{self._servers}", *server, login=self._logins("application"))
        return f"http://127.0.0.1:{port}"

    def pid(self, name: str) -> int | None:
        """The pid of a process; None if it has ended."""
        found = process.find(self._record(name))
        return None if found is None else found.pid

    def kill(self, name: str) -> None:
        """SIGKILL a process and all its children, like a crash. Raises `ProcessError` if it has ended already."""
        found = process.find(self._record(name))
        if found is None:
            raise ProcessError(f"{name} ended before it was killed")
        # Each process has its own session, so its pid is also its group's.
        os.killpg(found.pid, signal.SIGKILL)
        process.end(found, signal.SIGKILL, timeout=10)
        self._running.remove(name)

    def check(self) -> None:
        """Raise `ProcessError` if a process has ended unexpectedly."""
        for name in self._running:
            if self.pid(name) is None:
                raise ProcessError(f"{name} ended unexpectedly; the end of its log:\n{self._log_tail(name)}")

    def stop(self) -> None:
        """Stop all processes gracefully; kill them after 20 s."""
        names, self._running = self._running, []
        if names:
            with ThreadPoolExecutor(len(names)) as threads:
                list(threads.map(self._stop, names))

    def keep_logs(self) -> Path:
        """Copy the logs of all processes and servers to a directory that is kept."""
        kept = Path(tempfile.mkdtemp(prefix="demo-logs-"))
        for log in [*self._directory.glob("*/log"), *self._directory.glob("*/*.log")]:
            shutil.copyfile(log, kept / f"{log.parent.name}.log")
        return kept

    def _start(self, name: str, *arguments: str, login: Mapping[str, str]) -> None:
        directory = self._directory / name
        directory.mkdir()
        process.launch(
            [sys.executable, *arguments],
            record=self._record(name),
            log=directory / "log",
            directory=ROOT,
            environment={**self._environment, **login},
        )
        # The process writes its pid file itself, and cannot be found without it.
        deadline = time.monotonic() + 10
        while not self._record(name).exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        self._running.append(name)

    def _stop(self, name: str) -> None:
        if (found := process.find(self._record(name))) is not None:
            process.end(found, signal.SIGTERM, timeout=STOP_SECONDS)

    def _record(self, name: str) -> Path:
        return self._directory / name / "pid"

    def _log_tail(self, name: str, lines: int = 15) -> str:
        log = self._directory / name / "log"
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _worker(name: str, queues: str, concurrency: int) -> list[str]:
    options = ["--hostname", f"{name}@%h", "--queues", queues, "--concurrency", str(concurrency)]
    options += ["--pool", "prefork", "--without-mingle", "--without-gossip", "--loglevel", "WARNING"]
    return ["-m", "celery", "-A", "tasks", "worker", *options]
