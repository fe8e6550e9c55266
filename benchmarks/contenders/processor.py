"""What a turn costs the processor, by kind of process."""

from __future__ import annotations

from collections.abc import Sequence

import psutil

from . import dbos_worker

# What the kernel calls the processes of the servers. The benchmark itself is left out: it only watches.
_SERVERS = {"postgres": "Postgres", "beam.smp": "RabbitMQ", "redis-server": "Redis"}
MAIN, POOL = "worker, main process", "worker, pool"
KINDS = (MAIN, POOL, *_SERVERS.values())


def _is_worker(command: Sequence[str]) -> bool:
    if dbos_worker.__name__ in command:
        return True
    return "worker" in command and not {"celery", "procrastinate"}.isdisjoint(command)


def used() -> dict[str, float]:
    """Seconds that the processes of each kind have used until now. Those of other programs count if they are of a kind."""
    found = dict.fromkeys(KINDS, 0.0)
    parents: dict[int, int] = {}
    workers: dict[int, float] = {}
    for process in psutil.process_iter(["pid", "ppid", "name", "cmdline", "cpu_times"]):
        seen = process.info
        if (times := seen["cpu_times"]) is None:
            continue
        seconds = times.user + times.system
        if (server := _SERVERS.get(seen["name"])) is not None:
            found[server] += seconds
        elif _is_worker(seen["cmdline"] or ()):
            workers[seen["pid"]], parents[seen["pid"]] = seconds, seen["ppid"]
    for pid, seconds in workers.items():
        found[POOL if parents[pid] in workers else MAIN] += seconds
    return found
