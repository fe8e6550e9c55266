"""Worker processes of contenders that poll: stopped by SIGSTOP between turns, and continued at time zero.

Nothing of theirs is open in Postgres while they are stopped, where it would hold locks and keep rows from being cleaned up.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import psutil
from sqlalchemy import Engine, text

# Not the transaction in which DBOS holds nearly always an advisory lock, for one of its processes to do what is to be done
# once: it has read nothing, and DBOS takes another one if Postgres has ended it meanwhile.
_OPEN = text("""
SELECT count(*) FROM pg_stat_activity
WHERE application_name = :name AND state <> 'idle' AND query NOT LIKE 'SELECT pg_try_advisory_xact_lock%'
""")
# A stopped process would outlive a run that is killed: the kernel ends it with the thread that has started it.
WITH_US = ("setpriv", "--pdeathsig", "KILL")


class StoppedProcesses:
    """Some processes of our own, in sessions of their own. Each has to use `PGAPPNAME`, as libpq does, in Postgres."""

    def __init__(self, database: Engine, log: Path, command: list[str], count: int) -> None:
        self._database = database
        self._log = log
        self._processes = {}
        with log.open("wb") as output:
            for number in range(count):
                name = f"{log.stem}-{os.getpid()}-{number}"
                self._processes[name] = psutil.Popen(
                    [*WITH_US, *command],
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    env=os.environ | {"PGAPPNAME": name},
                )

    def check(self) -> None:
        """Raise if one has ended."""
        if any(process.poll() is not None for process in self._processes.values()):
            raise SystemExit(f"a worker ended: {self._log.read_text()[-800:]}")

    def pause(self) -> None:
        """Stop each of them at a moment at which it has no transaction open."""
        self.check()
        deadline = time.monotonic() + 30
        for name, process in self._processes.items():
            process.send_signal(signal.SIGSTOP)
            while self._in_transaction(name):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{name} has nothing to do, and keeps a transaction open")
                process.send_signal(signal.SIGCONT)
                # long enough to catch up with its timers, after which it waits most of the time
                time.sleep(random.uniform(0.1, 0.5))
                process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.check()
        self._signal(signal.SIGCONT)

    def processor_seconds(self) -> float:
        """What they have used since they were started."""
        times = [process.cpu_times() for process in self._processes.values()]
        return float(sum(each.user + each.system for each in times))

    def close(self) -> None:
        """End them, each by its pid."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)
        for process in self._processes.values():
            try:
                process.wait(15)
            except psutil.TimeoutExpired:
                process.kill()
                process.wait(15)

    def _in_transaction(self, name: str) -> bool:
        time.sleep(0.01)  # for a statement under way to end
        with self._database.connect() as connection:
            return bool(connection.execute(_OPEN, {"name": name}).scalar_one())

    def _signal(self, which: signal.Signals) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(which)
