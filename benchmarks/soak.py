"""A long run: what a worker, a relay, the servers and our tables hold, over the operations done. `make soak OPERATIONS=1000000`

Operations are accepted, relayed and carried out, four of five in batches that commit together, some with a retry, an
effect, a failure, a second message; what has ended is purged a minute later. Every hundredth part of the run is a sample.
The slope of each quantity over the last two thirds is printed with its standard error, in units per million operations.

Exit status 1: one rises, which is a slope beyond three errors that would add more than a twentieth in that time; or an
operation was lost or done twice. One that succeeds has one row; one that fails has a letter with its code, and no row. Calls
outside reach no server, and are not counted: `make chaos` counts those. 2: so short a run shows nothing.

`CLUSTER=1`: through three RabbitMQ nodes, a Postgres with a standby and Redis behind Sentinel, of which one fails over every
minute or so. Neither the count of dead rows nor the map of free space is in a standby: each promotion is followed by a VACUUM.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import psutil
import redis
import typer
from amqp.exceptions import AMQPError
from kombu.exceptions import OperationalError as BrokerError
from rich.console import Console
from rich.progress import Progress
from sqlalchemy import Engine, TextClause, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

import services
from idempotency.store import dead_letters, discards, schema
from services import ServiceError, cluster

from .failovers import Failovers
from .report import is_installed
from .slopes import COUNTED, WARM, Series, drawn, shown

T = TypeVar("T")
QUEUES, DATABASE = ("unique", "batch"), "soak"
console = Console()
SAMPLES = 100
# Accepted and not carried out, at most; accepted by one commit.
IN_FLIGHT, ACCEPTED = 4000, 500
# Seconds that a run through clusters takes at least: some failovers, and many times what is kept.
LEAST = 600.0
# Seconds without a new row.
STUCK = 180.0
MB = 1024 * 1024

NOTHING_WRONG = "lost=0 doubled=0 misreported=0"

_TABLES = text("""
SELECT sum(pg_total_relation_size(c.oid))::float8 FROM pg_class c
WHERE c.relnamespace = 'idempotency'::regnamespace AND c.relkind = 'r'""")
_DEAD = text("SELECT sum(n_dead_tup)::float8 FROM pg_stat_user_tables WHERE schemaname = 'idempotency'")
_SIZES = text("""
SELECT c.relname, pg_total_relation_size(c.oid) FROM pg_class c
WHERE c.relnamespace = 'idempotency'::regnamespace AND c.relkind = 'r'""")
_CONNECTIONS = text("SELECT count(*)::float8 FROM pg_stat_activity WHERE datname = current_database()")
_ROWS = text("SELECT count(*) FROM jobs")
# Seconds from one count of them to the next: a million are counted in a quarter of a second.
LOOK = 3.0
# Seconds for which a question waits for a server that is being replaced.
PATIENCE = 120.0


class Soak:
    """The processes of a run, and what is measured of them."""

    def __init__(self, engine: Engine, directory: Path, concurrency: int, redis_url: Callable[[], str]) -> None:
        from .soaked import app

        self._engine, self._redis_url, self._app = engine, redis_url, app
        # keys of operations that have failed as their bodies say, by their letters; another reason is another name
        self.failed: set[str] = set()
        command = [sys.executable, "-m", "celery", "-A", "benchmarks.soaked", "worker", "-Q", ",".join(QUEUES)]
        command += ["--concurrency", str(concurrency), "--loglevel", "ERROR", "--without-mingle", "--without-gossip"]
        relay = [sys.executable, "-m", "idempotency.cli", "relay", "-A", "benchmarks.soaked"]
        self.processes = {
            name: _started(started, directory / f"{name}.log")
            for name, started in (("worker", command), ("relay", relay))
        }
        self.series = {
            **{f"{name}_mb": Series("MiB") for name in self.processes},
            **{f"{name}_files": Series("open files", spare=2.0) for name in self.processes},
            "connections": Series("connections", spare=2.0),
            "tables_mb": Series("MiB"),
            "dead_rows": Series("rows"),
            "queued": Series("messages"),
            "redis_keys": Series("keys"),
            # a primary that gets a replica keeps a backlog of a megabyte for it
            "redis_mb": Series("MiB", spare=1.5),
        }

    def sizes(self) -> dict[str, int]:
        """How large each of our tables is, with its indexes, in bytes."""

        def asked() -> dict[str, int]:
            with self._engine.connect() as connection:
                return {row.relname: int(row[1]) for row in connection.execute(_SIZES)}

        return _patiently(asked)

    def sample(self, done: int) -> None:
        """Note what is held now."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                raise SystemExit(f"the {name} has ended with status {process.returncode}")
            root = psutil.Process(process.pid)
            family = [root, *root.children(recursive=True)]
            self.series[f"{name}_mb"].add(done, sum(each.memory_info().rss for each in family) / MB)
            self.series[f"{name}_files"].add(done, sum(each.num_fds() for each in family))
        self.series["connections"].add(done, self.ask(_CONNECTIONS))
        self.series["tables_mb"].add(done, self.ask(_TABLES) / MB)
        self.series["dead_rows"].add(done, self.ask(_DEAD))
        self.series["queued"].add(done, _patiently(self._queued))
        keys, memory = _patiently(self._held_by_redis)
        self.series["redis_keys"].add(done, keys)
        self.series["redis_mb"].add(done, memory / MB)

    def ask(self, query: TextClause) -> float:
        """One number from the database."""

        def asked() -> float:
            with self._engine.connect() as connection:
                return float(connection.execute(query).scalar_one() or 0)

        return _patiently(asked)

    def _queued(self) -> float:
        with self._app.connection_for_read() as broker:
            channel = broker.default_channel
            return float(sum(channel.queue_declare(queue, passive=True).message_count for queue in QUEUES))

    def _held_by_redis(self) -> tuple[float, float]:
        with redis.Redis.from_url(self._redis_url()) as client:
            return float(client.dbsize()), float(client.info("memory")["used_memory"])

    def discard(self) -> None:
        """As people do with what has failed; open letters stay for good."""

        from .soaked import REFUSED

        def discarded() -> None:
            with self._engine.connect() as connection:
                for letter in dead_letters.list_letters(connection, limit=10_000):
                    # before: the answer of a discard may be lost, and the letter is not listed again
                    self.failed.add(letter.key if letter.reason == REFUSED else f"{letter.key} by {letter.reason}")
                    discards.discard(connection, letter.id)

        _patiently(discarded)

    def close(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)


def main(
    operations: Annotated[int, typer.Option(min=1000, max=100_000_000)] = 1_000_000,
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="Pool children of the worker.")] = 4,
    clustered: Annotated[bool, typer.Option("--cluster", help="Against clusters, whose nodes fail over.")] = False,
    pause: Annotated[float, typer.Option(min=1, help="Of a cluster: seconds from one failover to the next.")] = 60.0,
    least: Annotated[
        float | None, typer.Option("--seconds", min=0, help="At least so long. Default: 600 for a cluster, else 0.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="A directory for soak.png, soak.svg and their samples, soak.json."),
    ] = None,
) -> None:
    """Run so many operations, and print the slope of each quantity."""
    if plot is not None and not is_installed("matplotlib"):
        raise typer.BadParameter(
            "needs matplotlib: .venv/bin/python -m pip install --editable '.[bench]'", param_hint="--plot"
        )
    # however this process is asked to end, the worker and the relay end with it
    signal.signal(signal.SIGTERM, _interrupt)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        failovers: Failovers | None = None
        if clustered:
            servers = stack.enter_context(cluster.running())
            failovers = Failovers(servers, QUEUES, DATABASE, pause)
            address = servers.postgres.create_database(DATABASE)
            os.environ.update(servers.environment() | {"DATABASE_URL": address})
            redis_url = failovers.redis_url
        else:
            running = stack.enter_context(services.running())
            address, redis_url = running.database_url, lambda: os.environ["REDIS_URL"]
            os.environ.update(running.environment())
        from .jobs import TABLE  # which reads the environment
        from .soaked import KEPT

        engine = create_engine(address, isolation_level="AUTOCOMMIT", pool_pre_ping=True)
        stack.callback(engine.dispose)
        schema.migrate(engine)
        with engine.connect() as connection:
            connection.execute(TABLE)
        soak, began = Soak(engine, directory, concurrency, redis_url), time.monotonic()
        try:
            if failovers is not None:
                failovers.start()
            if least is None:
                least = LEAST if clustered else 0.0
            warm = _carry_out(soak, engine, operations, least)
            if failovers is not None:
                failovers.stop()
            wrong = _checked(soak, engine, operations)
        finally:
            soak.close()
        seconds = time.monotonic() - began
    rising = shown(soak.series, console)
    if plot is not None:
        drawn(soak.series, plot)
    slopes = " ".join(f"{name}={slope:+.4g}±{error:.2g}" for name, slope, error in rising.slopes)
    of_cluster = ""
    if failovers is not None:
        of_cluster = f"cluster=1 failovers={sum(failovers.done.values())} failovers_failed={len(failovers.failed)} "
        for failed in failovers.failed:
            console.print(f"not mended: {failed}", markup=False)
    print(
        f"RESULT operations={operations} {of_cluster}seconds={seconds:.0f} per_second={operations / seconds:.0f} {wrong} "
        f"rising={len(rising.names)} {slopes}",
        flush=True,
    )
    if rising.names or wrong != NOTHING_WRONG or (failovers is not None and (failovers.failed or failovers.lacking)):
        raise SystemExit(1)
    if problem := too_short(len(soak.series["tables_mb"].done), warm, KEPT):
        console.print(f"proves nothing: {problem}")
        raise SystemExit(2)


def too_short(samples: int, warm: float, kept: float) -> str:
    """Why a run that found no rise has not shown that there is none; empty if it has. `warm`, `kept`: seconds."""
    if samples * (1 - WARM) < COUNTED:
        return f"{samples} samples, and it takes {COUNTED} after the first third"
    if warm < 2 * kept:
        return f"the first third took {warm:.0f} s, and the tables are not full before {2 * kept:.0f} s"
    return ""


def _carry_out(soak: Soak, engine: Engine, operations: int, least: float) -> float:
    """Returns the seconds of the warm-up."""
    from .soaked import is_failed, is_sent_twice, task_of

    transactional = engine.execution_options(isolation_level="READ COMMITTED")
    accepted = rows = failed = samples = 0
    before: dict[str, int] = {}
    warm = 0.0
    looked = last = began = time.monotonic()
    # of one commit: not many seconds' worth, if it is to take its time
    together = min(ACCEPTED, max(round(operations / least), 1)) if least else ACCEPTED
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("operations", total=operations)
        while rows + failed < operations:
            due = operations if not least else operations * (time.monotonic() - began) / least
            if accepted < min(operations, due) and accepted - rows - failed < IN_FLIGHT:
                numbers = range(accepted, min(accepted + together, operations))

                def accept(numbers: range = numbers) -> None:
                    with Session(transactional) as session, session.begin():
                        for number in numbers:
                            task_of(number).enqueue(session, number)

                # a commit whose answer was lost is made again, under the same keys
                _patiently(accept)
                for number in filter(is_sent_twice, numbers):
                    _patiently(partial(task_of(number).delay, number))
                accepted, failed = numbers.stop, failed + sum(map(is_failed, numbers))
            else:
                time.sleep(0.05)
            if time.monotonic() - looked < LOOK:
                continue
            looked, seen = time.monotonic(), int(soak.ask(_ROWS))
            last = looked if seen > rows else last
            rows = seen
            if time.monotonic() - last > STUCK:
                raise SystemExit(f"no new row for {STUCK:.0f} s: {rows} rows, {failed} failed of {accepted}")
            progress.update(bar, completed=rows + failed)
            if (rows + failed) * SAMPLES >= operations * (samples + 1):
                samples += 1
                soak.sample(rows + failed)
                soak.discard()
                if not before and rows + failed >= operations * WARM:
                    before, warm = soak.sizes(), time.monotonic() - began
        grown = {name: size - before.get(name, 0) for name, size in soak.sizes().items()}
        largest = sorted(grown, key=grown.__getitem__, reverse=True)[:3]
        console.print("grown: " + ", ".join(f"{name} {grown[name] / MB:+.1f} MiB" for name in largest))
    return warm


def _patiently(ask: Callable[[], T]) -> T:
    """The answer of a server, as often as it takes while that is being replaced; its last error after `PATIENCE`."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return ask()
        except (DBAPIError, BrokerError, AMQPError, redis.RedisError, ServiceError, OSError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _checked(soak: Soak, engine: Engine, operations: int) -> str:
    """Look until the last rows are committed, and the last letters are there."""
    deadline = time.monotonic() + STUCK
    while (wrong := _wrong(soak, engine, operations)) != NOTHING_WRONG and time.monotonic() < deadline:
        time.sleep(2)
    return wrong


def _wrong(soak: Soak, engine: Engine, operations: int) -> str:
    from .soaked import is_failed

    soak.discard()
    failing = {number for number in range(operations) if is_failed(number)}

    def asked() -> tuple[set[int], int]:
        with engine.connect() as connection:
            once = set(connection.execute(text("SELECT DISTINCT number FROM jobs")).scalars())
            twice = connection.execute(
                text("SELECT count(*) FROM (SELECT FROM jobs GROUP BY number HAVING count(*) > 1) found")
            ).scalar_one()
        return once, int(twice)

    return compared(operations, failing, *_patiently(asked), soak.failed)


def compared(operations: int, failing: set[int], with_rows: set[int], twice: int, letters: set[str]) -> str:
    """Rows and letters beside the operations, by number, and not by how many there are."""
    expected = {str(number) for number in failing}
    asked = set(range(operations))
    lost = len(asked - failing - with_rows) + len(expected - letters)
    # a letter of an operation that had to succeed, or a row of a number that was never accepted
    misreported = len(letters - expected) + len(with_rows - asked)
    return f"lost={lost} doubled={twice + len(failing & with_rows)} misreported={misreported}"


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _started(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)


if __name__ == "__main__":
    typer.run(main)
