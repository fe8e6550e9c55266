"""Worker processes of the test application: started, awaited, and killed by pid."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

T = TypeVar("T")
# What makes the end of a process cheap, and the checkout.
START = str(Path(__file__).parent / "start")
PYTHONPATH = os.pathsep.join((START, os.getcwd()))
# Seconds: importing an application takes half a minute of a machine that runs several suites.
START_WITHIN = 90.0


def eventually(condition: Callable[[], T | None], *, timeout: float = 60.0, what: str = "") -> T:
    """Poll until the condition holds and return its value; fail with what it was waiting for."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout} s: {what or condition}; last seen {value!r}"
        time.sleep(0.02)


class Worker:
    """One `celery worker` with its pool, in its own process group."""

    def __init__(self, environment: dict[str, str], *options: str, app: str = "tests.support.bank") -> None:
        self._log = Path(tempfile.mkstemp(prefix="worker-", suffix=".log")[1])
        command = [sys.executable, "-m", "celery", "-A", app, "worker", "--loglevel", "INFO"]
        command += ["--hostname", f"{uuid4().hex[:8]}@%h", "--without-mingle", "--without-gossip", *options]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env=environment | {"PYTHONFAULTHANDLER": "1"},  # with SIGABRT it ends, and says where it was
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_until_ready(self) -> Worker:
        eventually(lambda: " ready." in self.log or self.process.poll() is not None, timeout=90, what="worker ready")
        assert self.process.poll() is None, self.log[-3000:]
        return self

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL to the whole worker."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.process.wait(60)

    def terminate(self) -> None:
        """SIGTERM to the parent: a warm shutdown."""
        self.process.terminate()

    def discard(self) -> None:
        self.kill()
        self._log.unlink(missing_ok=True)


class Processes:
    """The worker processes of one test; all end with it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self._workers: list[Worker] = []

    def worker(self, *options: str, app: str = "tests.support.bank", **environment: str) -> Worker:
        return self.start(*options, app=app, **environment).wait_until_ready()

    def start(self, *options: str, app: str = "tests.support.bank", **environment: str) -> Worker:
        worker = Worker(self.environment | environment, *(options or ("--concurrency", "2")), app=app)
        self._workers.append(worker)
        return worker

    def kill_all(self) -> None:
        for worker in self._workers:
            worker.discard()
