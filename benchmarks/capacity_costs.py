"""What an operation costs each process: CPU from /proc, WAL, commits, rows, Redis commands, bytes on disk, connections.

Real processes: a worker, a relay, a beat, and the servers. What they use while nothing happens is measured first, and taken
off by the second.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import redis
from rich.progress import track
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

import services

from .wal import written

# What is measured: a task of jobs.py for each.
KINDS = {"plain": "unique", "effect": "outside", "batch": "batch"}
COMPONENTS = ("caller", "worker", "relay", "beat", "postgres", "redis", "rabbitmq")
# Operations of one commit of the caller, and before anything is measured: imports, connections, prepared statements.
ACCEPTED, WARM = 500, 500
# Seconds of nothing to do, without an operation that ends, and from one question to the next.
IDLE, STUCK, LOOK = 30.0, 300.0, 0.5

_COMMITS = text("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()")
_SENT = text(
    "SELECT count(*) + coalesce(sum(resends), 0)::bigint FROM idempotency.outbox WHERE published_at IS NOT NULL"
)
_ENDED = text("SELECT count(*) FROM idempotency.records WHERE status = 'completed'")
_UNSETTLED = text("SELECT count(*) FROM idempotency.outbox WHERE settled_at IS NULL")
_BYTES = text("SELECT pg_total_relation_size('idempotency.records') + pg_total_relation_size('idempotency.outbox')")
_MESSAGE = text("SELECT round(avg(length(message))) FROM idempotency.outbox")


@dataclass(frozen=True)
class Cost:
    """Of one operation of a kind. `cpu`: seconds, by component; `bytes`: on disk, with indexes, until it is purged."""

    operations: int
    seconds: float
    cpu: dict[str, float]
    wal: float
    commits: float
    messages: float
    redis_commands: float
    bytes: float
    message_length: float
    # of a worker with so many pool processes, and of a relay: to Postgres, Redis and the broker
    concurrency: int
    connections: dict[str, dict[str, int]]


@dataclass(frozen=True)
class Counts:
    """What has been used so far."""

    at: float
    cpu: dict[str, float]
    wal: int
    commits: int
    messages: int
    redis_commands: int
    bytes: int


class Machine:
    """The processes of a run."""

    def __init__(
        self, running: services.Services, connection: Connection, processes: Mapping[str, psutil.Process]
    ) -> None:
        self._connection = connection
        self._redis: Any = redis.Redis.from_url(running.redis_url)
        self.ports = {"postgres": running.postgres.port, "redis": running.redis.port, "rabbitmq": running.rabbitmq.port}
        self._processes = {"caller": psutil.Process(), **processes}
        for name in ("postgres", "redis", "rabbitmq"):
            self._processes[name] = _listener(self.ports[name])

    def count(self) -> Counts:
        # a backend reports what it has done about once a second, and at once if it is idle
        self._connection.execute(text("SELECT pg_stat_force_next_flush()"))
        return Counts(
            time.monotonic(),
            {name: _cpu(process, alone=name == "caller") for name, process in self._processes.items()},
            written(self._connection),
            int(self._asked(_COMMITS)),
            int(self._asked(_SENT)),
            int(self._redis.info("stats")["total_commands_processed"]),
            int(self._asked(_BYTES)),
        )

    def connections(self) -> dict[str, dict[str, int]]:
        """How many the worker and the relay have open, by server."""
        found = {}
        for name in ("worker", "relay"):
            root = self._processes[name]
            open_ = [
                each.raddr.port
                for process in [root, *root.children(recursive=True)]
                for each in process.net_connections("tcp")
                if each.raddr and each.status == psutil.CONN_ESTABLISHED
            ]
            found[name] = {server: open_.count(port) for server, port in self.ports.items()}
        return found

    def _asked(self, query: Any) -> Any:
        return self._connection.execute(query).scalar_one()

    def close(self) -> None:
        self._redis.close()


def measure(
    running: services.Services, engine: Engine, directory: Path, *, operations: int, concurrency: int
) -> dict[str, Cost]:
    """The cost of each kind of operation; what is used while nothing happens is taken off."""
    return {
        kind: _measure(running, engine, directory, task, operations=operations, concurrency=concurrency)
        for kind, task in track(KINDS.items(), description="costs")
    }


def _measure(
    running: services.Services, engine: Engine, directory: Path, task: str, *, operations: int, concurrency: int
) -> Cost:
    from . import jobs

    queue = jobs.app.conf.task_routes.get(f"benchmarks.jobs.{task}", {"queue": "unique"})["queue"]
    commands = {
        "relay": ["idempotency.cli", "relay", "-A", "benchmarks.jobs"],
        "beat": ["celery", "-A", "benchmarks.jobs", "beat", "--schedule", str(directory / f"{task}.beat")],
        "worker": [
            *("celery", "-A", "benchmarks.jobs", "worker", "-Q", queue, "--concurrency", str(concurrency)),
            *("--loglevel", "ERROR", "--without-mingle", "--without-gossip"),
        ],
    }
    with ExitStack() as stack, engine.connect() as connection:
        # what an earlier kind has left would be purged, settled and measured with this one
        connection.execute(text("TRUNCATE idempotency.records, idempotency.outbox, jobs"))
        processes = {
            name: stack.enter_context(_started(command, directory / f"{task}-{name}.log"))
            for name, command in commands.items()
        }
        machine = Machine(running, connection, processes)
        stack.callback(machine.close)
        first = _carry_out(engine, connection, jobs.app.tasks[f"benchmarks.jobs.{task}"], 1, WARM)
        before = machine.count()
        _wait_idle(connection)
        idle = machine.count()
        _carry_out(engine, connection, jobs.app.tasks[f"benchmarks.jobs.{task}"], first, operations)
        after = machine.count()
        rows = int(connection.execute(text("SELECT count(*) FROM jobs")).scalar_one())
        if rows != WARM + operations:
            raise RuntimeError(f"{task}: {rows} rows of {WARM + operations} operations")
        connections = machine.connections()
        length = float(connection.execute(_MESSAGE).scalar_one())
    seconds = after.at - idle.at

    def each(name: str) -> float:
        """Of one operation, without what is used anyway."""
        anyway = (getattr(idle, name) - getattr(before, name)) / (idle.at - before.at)
        return max(0.0, float(getattr(after, name) - getattr(idle, name) - anyway * seconds)) / operations

    cpu = {
        name: max(
            0.0,
            after.cpu[name] - idle.cpu[name] - (idle.cpu[name] - before.cpu[name]) / (idle.at - before.at) * seconds,
        )
        / operations
        for name in COMPONENTS
    }
    return Cost(
        operations,
        seconds,
        cpu,
        each("wal"),
        each("commits"),
        each("messages"),
        each("redis_commands"),
        each("bytes"),
        length,
        concurrency,
        connections,
    )


def _carry_out(engine: Engine, connection: Connection, task: Any, first: int, operations: int) -> int:
    """Have so many operations accepted, carried out and settled. Returns the next number."""
    transactional = engine.execution_options(isolation_level="READ COMMITTED")
    target = int(connection.execute(_ENDED).scalar_one()) + operations
    for begin in range(first, first + operations, ACCEPTED):
        with Session(transactional) as session, session.begin():
            for number in range(begin, min(begin + ACCEPTED, first + operations)):
                task.enqueue(session, number)
    seen, last = 0, time.monotonic()
    while (ended := int(connection.execute(_ENDED).scalar_one())) < target or connection.execute(
        _UNSETTLED
    ).scalar_one():
        if ended > seen:
            seen, last = ended, time.monotonic()
        if time.monotonic() - last > STUCK:
            raise RuntimeError(f"{task.name}: {ended} of {target} have ended, and for {STUCK:.0f} s no other")
        time.sleep(LOOK)
    return first + operations


def _wait_idle(connection: Connection) -> None:
    """Nothing to do, and the questions of `_carry_out` all the same: what they cost is no operation's."""
    deadline = time.monotonic() + IDLE
    while time.monotonic() < deadline:
        connection.execute(_ENDED)
        connection.execute(_UNSETTLED)
        time.sleep(LOOK)


@contextmanager
def _started(command: list[str], log_file: Path) -> Iterator[psutil.Process]:
    with log_file.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-m", *command], stdout=out, stderr=out, env=dict(os.environ))
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        if process.poll() is None:
            process.kill()
            process.wait(30)


def _listener(port: int) -> psutil.Process:
    """The process that listens there, the first of its family."""
    found = {
        each.pid
        for each in psutil.net_connections("tcp")
        if each.laddr and each.laddr.port == port and each.status == psutil.CONN_LISTEN
    }
    if len(found) != 1 or (pid := found.pop()) is None:
        raise RuntimeError(
            f"port {port}: whose it is cannot be seen; run this as the user that has started the servers, or as root"
        )
    return psutil.Process(pid)


def _cpu(root: psutil.Process, *, alone: bool) -> float:
    """Seconds of CPU, user and system, of a process with its children; those that have ended are in their parent's."""
    total = 0.0
    for process in [root] if alone else [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
            if not alone:
                total += times.children_user + times.children_system
    return total
