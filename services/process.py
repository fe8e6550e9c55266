"""Long-running programs in their own sessions, found again by the record each writes about itself."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

# The process writes its own /proc/self/stat line before it becomes the program, so it never runs unrecorded. The start
# time in that line distinguishes it from a later process with the same pid.
_LAUNCH = 'read -r line < /proc/$$/stat && echo "$line" > "$1" && cd "$2" && shift 2 && exec "$@"'
_STATE, _THREADS, _STARTED = 0, 17, 19  # fields of /proc/<pid>/stat, counted after the program's name


def launch(
    command: Sequence[str | Path], *, record: Path, log: Path, directory: Path, environment: Mapping[str, str]
) -> int:
    """Start a program in the background, append its output to `log`, and return its pid.

    It runs in its own session, so that Ctrl-C in the terminal does not reach it before its owner has finished.
    """
    record.unlink(missing_ok=True)
    record.touch()
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    pid = os.posix_spawn(
        "/bin/sh",
        ("sh", "-c", _LAUNCH, "sh", record, directory, *command),
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, append, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )
    # The process cannot be found before the line is there. It is written in one piece.
    deadline = time.monotonic() + 10
    while record.stat().st_size == 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    return pid


def find(record: Path) -> psutil.Process | None:
    """The process that wrote `record`; None if it has ended, even if its pid was reused."""
    try:
        pid, started = _identity(record.read_text())
        stat = Path(f"/proc/{pid}/stat").read_text()
        return psutil.Process(pid) if started == _fields(stat)[_STARTED] and not _has_ended(stat) else None
    except (OSError, IndexError, ValueError, psutil.NoSuchProcess):
        return None


def end(process: psutil.Process, how: signal.Signals, timeout: float) -> None:
    """Send the signal `how`, wait, and after `timeout` seconds kill what is left of the process and its children."""
    members = family(process)
    # The parent first, so that it cannot replace its children.
    signal_all(members if how is signal.SIGKILL else [process], how)
    # A stopped process handles a signal only once it is continued.
    signal_all(members, signal.SIGCONT)
    if not _wait(members, timeout):
        signal_all(members, signal.SIGKILL)
        _wait(members, timeout=10)


def signal_all(family: Sequence[psutil.Process], which: signal.Signals) -> None:
    """Send a signal to each process that still exists."""
    for member in family:
        _send(member, which)


def family(process: psutil.Process) -> list[psutil.Process]:
    """The process and all its descendants, parents first."""
    return [process, *_children(process)]


def _identity(line: str) -> tuple[int, str]:
    return int(line.split(maxsplit=1)[0]), _fields(line)[_STARTED]


def _fields(line: str) -> list[str]:
    return line.rpartition(")")[2].split()


def _has_ended(line: str) -> bool:
    """Whether this is the line of a zombie whose files and ports are free.

    The first thread may be a zombie before the others have ended, which keep them until then.
    """
    fields = _fields(line)
    return fields[_STATE] in "ZX" and int(fields[_THREADS]) <= 1


def _wait(members: Sequence[psutil.Process], timeout: float) -> bool:
    """Whether all ended in time. A zombie counts as ended, since another process may have to reap it."""
    deadline = time.monotonic() + timeout
    while any(_runs(member) for member in members):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _runs(process: psutil.Process) -> bool:
    try:
        if process.is_running() and not _has_ended(Path(f"/proc/{process.pid}/stat").read_text()):
            return True
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
    except (psutil.NoSuchProcess, OSError):
        pass
    return False


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _send(process: psutil.Process, which: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(which)
