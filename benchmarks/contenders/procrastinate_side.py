"""Procrastinate as a contender: workers of its own command line, woken by LISTEN and NOTIFY as they are by default.

Its pages say that a worker runs sync tasks in threads, as many at once as `--concurrency` says, and that more than one
worker may run: both are tried. Finished jobs are kept, as by default and as ours are.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import Engine, text

from . import procrastinate_app
from .contender import Contender, Layout
from .stopped import StoppedProcesses

_STATES = text("SELECT status::text, count(*) FROM procrastinate_jobs WHERE status <> 'succeeded' GROUP BY 1")
_REGISTERED = text("SELECT count(*) FROM procrastinate_workers")
_SCHEMA = text("SELECT to_regclass('procrastinate_jobs') IS NOT NULL")


class Procrastinate(Contender):
    """A sync task."""

    name = "procrastinate"
    layouts = (Layout(2, 4), Layout(1, 4), Layout(4, 2))

    def __init__(self, database: Engine, directory: Path) -> None:
        self._database = database
        self._directory = directory
        self.app = procrastinate_app.app
        self.app.open()
        with database.connect() as connection:
            if not connection.execute(_SCHEMA).scalar_one():
                self.app.schema_manager.apply_schema()

    @property
    def settings(self) -> dict[str, object]:
        return {"delete_jobs": "never", "listen_notify": True, "task": "sync, in threads"}

    def start(self, layout: Layout) -> None:
        self.layout = layout
        before = self._registered()
        command = [sys.executable, "-m", "procrastinate", f"--app={procrastinate_app.__name__}.app", "worker"]
        command += ["--queues", procrastinate_app.QUEUE, "--concurrency", str(layout.concurrency)]
        log = self._directory / "procrastinate.log"
        self._processes = StoppedProcesses(self._database, log, command, layout.processes)
        deadline = time.monotonic() + 60
        while self._registered() < before + layout.processes:
            self._processes.check()
            if time.monotonic() > deadline:
                raise TimeoutError("the workers of Procrastinate did not start within 60 s")
            time.sleep(0.05)
        self._processes.pause()

    def send(self, numbers: Sequence[int]) -> None:
        procrastinate_app.insert.batch_defer(*({"number": number} for number in numbers))

    def begin(self) -> None:
        self._processes.resume()

    def end(self) -> None:
        deadline = time.monotonic() + 30
        while left := self._left():
            if "failed" in left or time.monotonic() > deadline:
                raise RuntimeError(f"jobs of Procrastinate have not succeeded: {left}")
            time.sleep(0.02)
        self._processes.pause()

    def stop(self) -> None:
        self._processes.close()

    def close(self) -> None:
        """Close the connection that jobs are deferred by."""
        self.app.close()

    def processor_seconds(self) -> float:
        return self._processes.processor_seconds()

    def _left(self) -> dict[str, int]:
        with self._database.connect() as connection:
            return {row[0]: row[1] for row in connection.execute(_STATES)}

    def _registered(self) -> int:
        with self._database.connect() as connection:
            return int(connection.execute(_REGISTERED).scalar_one())
