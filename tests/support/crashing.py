"""Kills, stops or holds a worker process at a named moment, once for each plan.

A plan is a file `<point>` in $CRASH_DIRECTORY whose text says what to do. The process that removes the file acts on it, so
that exactly one process does, however many reach the point; a plan of EVERY stays, and everybody acts on it. The file
`trace` there says who reached what, for which key: the witness for how often a body ran.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from celery import current_task

from idempotency import PermanentError
from idempotency.observe import crash_points
from idempotency.wire.headers import KEY_HEADER

KILL_CHILD = "kill child"  # F1: the pool child alone
KILL_WORKER = "kill worker"  # F2: the whole worker, parent first
STOP = "stop"  # F3: SIGSTOP; its pid is left in `<point>.stopped`
HOLD = "hold"  # waits for `<point>.go`; its pid is left in `<point>.held`
RAISE_EXIT = "exit"  # SystemExit, as a shutdown raises it
RAISE_ERROR = "error"  # F18: an error that another attempt may not meet
RAISE_PERMANENT = "permanent error"  # F18: one that every attempt would meet
KILL_EVERY_CHILD = "kill every child"  # F17: each one that reaches it, again and again
HOLD_EVERYBODY = "hold everybody"  # F16: each waits for `<point>.go`; its pid is in the name of `<point>.<pid>.held`
EVERY = (KILL_EVERY_CHILD, HOLD_EVERYBODY)


def install() -> None:
    crash_points.install(reach)


def plan(directory: str | Path, point: str, action: str) -> Path:
    """Arm a point; the returned path disappears when it is reached."""
    path = Path(directory) / point
    path.with_name(f"{point}.new").write_text(action)
    return path.with_name(f"{point}.new").rename(path)


def reach(point: str) -> None:
    directory = os.environ.get("CRASH_DIRECTORY")
    if directory is None:
        return
    if point != "working":  # a body says that fifty times a second
        _note(directory, point)
    path = Path(directory) / point
    mine = Path(directory) / f"{point}.{os.getpid()}"
    try:
        action = path.read_text()
        if action not in EVERY:
            path.rename(mine)
    except FileNotFoundError:
        return
    if action == KILL_CHILD:
        mine.rename(Path(directory) / f"{point}.reached")
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == KILL_WORKER:
        mine.rename(Path(directory) / f"{point}.reached")
        os.killpg(os.getpgrp(), signal.SIGKILL)
    elif action == STOP:
        (Path(directory) / f"{point}.stopping").write_text(str(os.getpid()))
        (Path(directory) / f"{point}.stopping").rename(Path(directory) / f"{point}.stopped")
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == HOLD:
        (Path(directory) / f"{point}.holding").write_text(str(os.getpid()))
        (Path(directory) / f"{point}.holding").rename(Path(directory) / f"{point}.held")
        _wait_for(Path(directory) / f"{point}.go")
    elif action == HOLD_EVERYBODY:
        (Path(directory) / f"{point}.{os.getpid()}.held").touch()
        _wait_for(Path(directory) / f"{point}.go")
    elif action == KILL_EVERY_CHILD:
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == RAISE_EXIT:
        raise SystemExit(0)
    elif action == RAISE_ERROR:
        raise RuntimeError("planned")
    elif action == RAISE_PERMANENT:
        raise PermanentError("planned", "planned")


def _wait_for(go: Path) -> None:
    deadline = time.monotonic() + 60
    while not go.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


@dataclass(frozen=True, slots=True)
class Reached:
    """One line of the trace: a process was at a point, with an idempotency key when it ran a task."""

    point: str
    pid: int
    key: str


def trace(directory: str | Path) -> list[Reached]:
    """Everything that was reached so far, in order."""
    try:
        lines = (Path(directory) / "trace").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [Reached(point, int(pid), key) for point, pid, key in (line.split("\t") for line in lines)]


def _note(directory: str, point: str) -> None:
    key = (current_task.request.headers or {}).get(KEY_HEADER, "") if current_task else ""
    # one write per line, so that the lines of several processes do not mix
    file = os.open(Path(directory) / "trace", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(file, f"{point}\t{os.getpid()}\t{key}\n".encode())
    os.close(file)
