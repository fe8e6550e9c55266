"""Worker processes of contenders that poll: stopped by SIGSTOP between turns, and continued at time zero.

Nothing of theirs is open in Postgres while they are stopped, where it would hold locks and keep rows from being cleaned up.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
from sqlalchemy import Engine, text

_OPEN = text("SELECT count(*) FROM pg_stat_activity WHERE client_port = ANY(:ports) AND state <> 'idle'")

# A stopped process would outlive a run that is killed: the kernel ends it with the thread that has started it.
WITH_US = ("setpriv", "--pdeathsig", "KILL")


class StoppedProcesses:
    """Some processes of our own, in sessions of their own."""

    def __init__(self, database: Engine, log: Path, command: list[str], count: int) -> None:
        self._database = database
        self._log = log
        with log.open("wb") as output:
            self._processes = [
                psutil.Popen(
                    [*WITH_US, *command], stdout=output, stderr=output, start_new_session=True, env=os.environ | {"WORKER": str(n)}
                )
                for n in range(count)
            ]

    def check(self) -> None:
        """Raise if one has ended."""
        if any(process.poll() is not None for process in self._processes):
            raise SystemExit(f"a worker ended: {self._log.read_text()[-800:]}")

    def pause(self) -> None:
        """Stop all of them at a moment at which none of them has a transaction open."""
        deadline = time.monotonic() + 30
        while True:
            self._signal(signal.SIGSTOP)
            if not self._in_transaction():
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._log.stem}: a worker that has nothing to do keeps a transaction open")
            self.resume()
            time.sleep(0.01)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def processor_seconds(self) -> float:
        """What they have used since they were started."""
        times = [process.cpu_times() for process in self._processes]
        return float(sum(each.user + each.system for each in times))

    def close(self) -> None:
        """End them: each by its pid."""
        self._signal(signal.SIGTERM)
        self.resume()
        for process in self._processes:
            try:
                process.wait(15)
            except (subprocess.TimeoutExpired, psutil.TimeoutExpired):
                process.kill()
                process.wait(15)

    def _in_transaction(self) -> bool:
        # those of Postgres and, harmlessly, all others; none if Postgres is reached by a Unix socket
        ports = [
            each.laddr.port for process in self._processes for each in process.net_connections("tcp") if each.laddr
        ]
        with self._database.connect() as connection:
            return bool(connection.execute(_OPEN, {"ports": ports}).scalar_one())

    def _signal(self, which: signal.Signals) -> None:
        self.check()
        for process in self._processes:
            process.send_signal(which)
