"""Names for processes, and whether one on this host is provably dead."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def process_identity() -> str:
    """Name this process so that another on the same host can prove it dead: host, boot, pid namespace, pid, start.

    Without Linux's /proc the boot id is empty and nothing can be proven: recovery waits for the lease instead.
    """
    boot = _read("/proc/sys/kernel/random/boot_id")
    namespace = os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else ""
    return "|".join([socket.gethostname(), boot, namespace, str(os.getpid()), start_time(os.getpid())])


def is_provably_dead(holder: str) -> bool:
    """Whether the process of this name is gone: same host, boot and pid namespace, and no such process any more.

    A process on another host is never proven dead, and a closed connection proves nothing. Nor does /proc alone: mounted
    with `hidepid` it hides the processes of other users.
    """
    try:
        host, boot, namespace, number, started = holder.split("|")
        pid = int(number)
    except ValueError:  # not a name as our processes write it
        return False
    mine = process_identity().split("|")
    if not boot or [host, boot, namespace] != mine[:3]:
        return False
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass  # it exists and belongs to another user; or this is not a pid
    state, start = _state_and_start(pid)
    return state in ("Z", "X") or ("" not in (start, started) and start != started)


def start_time(pid: int) -> str:
    """When a process started, in clock ticks since boot; empty when it is gone, a zombie, or cannot be seen."""
    state, start = _state_and_start(pid)
    return "" if state in ("Z", "X") else start


def _state_and_start(pid: int) -> tuple[str, str]:
    """A process's state in one letter, and when it started; both empty if they cannot be read."""
    stat = _read(f"/proc/{pid}/stat")
    # The command in parentheses may hold anything; the fields after the last one are fixed (proc(5): 3 state, 22 start).
    fields = stat.rpartition(")")[2].split()
    return (fields[0], fields[19]) if len(fields) >= 20 else ("", "")


def _read(path: str) -> str:
    try:
        # a process's name is bytes, and cut after fifteen of them, perhaps in the middle of a character
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""
