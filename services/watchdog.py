"""End the servers when their owner dies without doing so: ``python -m services.watchdog PID DIRECTORY``.

PR_SET_PDEATHSIG is not enough: it is sent when the thread that started the server ends, is lost when Postgres changes its
user, does not reach children, and leaves the directory behind.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil

from services import process, rabbitmq_container


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.watchdog", description=__doc__)
    parser.add_argument("owner", type=int, help="pid of the process whose death ends the servers")
    parser.add_argument("directory", type=Path, help="where the servers' directories are")
    parser.add_argument("--remove", action="store_true", help="remove the directory afterwards")
    arguments = parser.parse_args()

    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(arguments.owner).wait()
    end_all(arguments.directory)
    # The owner may have died between starting a server and the server recording itself.
    time.sleep(0.5)
    end_all(arguments.directory)
    if arguments.remove:
        shutil.rmtree(arguments.directory, ignore_errors=True)
    return 0


def end_all(directory: Path) -> None:
    """End every server in the directory, and its container if it has one."""
    for record in sorted(directory.glob("*/*pid")):
        if (found := process.find(record)) is not None:
            # On SIGQUIT, Postgres and its children free their shared memory; the others are killed.
            how = signal.SIGQUIT if record.parent.name.startswith("postgres") else signal.SIGKILL
            process.end(found, how, timeout=5)
    for container in directory.glob(f"*/{rabbitmq_container.CONTAINER}"):
        rabbitmq_container.remove(container.parent)


if __name__ == "__main__":
    sys.exit(main())
