"""DBOS as a contender: workflows that a client enqueues under their keys, run by processes that listen to the queue.

A process looks into its queue at intervals, a second by default. Its pages recommend `worker_concurrency` for most uses,
and a queue without a limit gives all that waits to the process that looks first. So one process takes everything at once
and runs it in a bounded number of threads, or two take so many at a time that they never wait for the next look, which is
made much sooner than by default.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dbos import DBOSClient, run_dbos_database_migrations
from sqlalchemy import Engine, text

from . import dbos_worker
from .contender import Contender, Layout
from .stopped import StoppedProcesses

_STATES = text("SELECT status, count(*) FROM dbos.workflow_status WHERE status <> 'SUCCESS' GROUP BY 1")


class Dbos(Contender):
    """A workflow of one step, which is a transaction of a datasource."""

    name = "dbos"
    layouts = (
        Layout(1, 8, (("polling_interval_sec", 1.0),)),
        Layout(2, 4, (("worker_concurrency", 100), ("polling_interval_sec", 0.1))),
        Layout(1, 4, (("polling_interval_sec", 1.0),)),
    )

    def __init__(self, database: Engine, directory: Path) -> None:
        self._database = database
        self._directory = directory
        address = database.url.render_as_string(hide_password=False)
        run_dbos_database_migrations(address)
        self.client = DBOSClient(system_database_url=address, application_name=dbos_worker.NAME)
        self.options = {"workflow_name": dbos_worker.WORKFLOW, "queue_name": dbos_worker.QUEUE}

    @property
    def settings(self) -> dict[str, object]:
        return {"isolation_level": "READ COMMITTED", "step": "datasource transaction", "workflow_id": "the job's key"}

    def start(self, layout: Layout) -> None:
        self.layout = layout
        options = dict(layout.options)
        numbers = (layout.concurrency, int(options.get("worker_concurrency", 0)), options["polling_interval_sec"])
        command = [sys.executable, "-m", dbos_worker.__name__, *map(str, numbers)]
        log = self._directory / "dbos.log"
        self._processes = StoppedProcesses(self._database, log, command, layout.processes)
        deadline = time.monotonic() + 60
        while log.read_text().count("ready") < layout.processes:
            self._processes.check()
            if time.monotonic() > deadline:
                raise TimeoutError("the processes of DBOS did not start within 60 s")
            time.sleep(0.05)
        self._listen()
        self._processes.pause()

    def send(self, numbers: Sequence[int]) -> None:
        # in one transaction, because this is not measured
        with self._database.execution_options(isolation_level="READ COMMITTED").begin() as connection:
            for number in numbers:
                options = {**self.options, "workflow_id": str(number)}
                self.client.enqueue_in_transaction(connection, options, number)

    def begin(self) -> None:
        self._processes.resume()

    def end(self) -> None:
        deadline = time.monotonic() + 30
        while left := self._left():
            if set(left) - {"ENQUEUED", "PENDING"} or time.monotonic() > deadline:
                raise RuntimeError(f"workflows of DBOS have not succeeded: {left}")
            time.sleep(0.02)
        self._processes.pause()

    def stop(self) -> None:
        self._processes.close()

    def close(self) -> None:
        """Close the connections of the client."""
        self.client.destroy()

    def processor_seconds(self) -> float:
        return self._processes.processor_seconds()

    def _listen(self) -> None:
        """Wait until a process has seen that there is the queue, for which it looks once a second."""
        time.sleep(1.5)

    def _left(self) -> dict[str, int]:
        with self._database.connect() as connection:
            return {row[0]: row[1] for row in connection.execute(_STATES)}
