"""A long run: what a worker, a relay, the servers and our tables hold, over the operations done. `make soak OPERATIONS=1000000`

Operations are accepted, relayed and carried out, some with a retry, an effect, a failure, a second message; what has ended
is purged a minute later. Every hundredth part of the run is a sample. The slope of each quantity over the last two thirds is
printed with its standard error, in units per million operations. One rises if its slope is beyond three errors, and what
it would add in that time is more than a twentieth of it: then the exit status is 1, as it is if an operation was lost or
done twice.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from statistics import linear_regression, mean
from typing import Annotated

import psutil
import redis
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.orm import Session

import services
from idempotency.store import dead_letters, discards, schema

console = Console()
SAMPLES = 100
# Accepted and not carried out, at most; accepted by one commit.
IN_FLIGHT, ACCEPTED = 4000, 500
# Seconds without a new row.
STUCK = 180.0
# The share of the run that is not looked at: caches fill, and the first purge is yet to come.
WARM = 1 / 3
# What counts as a rise.
ERRORS, SHARE = 3.0, 0.05
MB = 1024 * 1024

NOTHING_WRONG = "lost=0 doubled=0"

_TABLES = text("""
SELECT sum(pg_total_relation_size(c.oid))::float8 FROM pg_class c
WHERE c.relnamespace = 'idempotency'::regnamespace AND c.relkind = 'r'""")
_DEAD = text("SELECT sum(n_dead_tup)::float8 FROM pg_stat_user_tables WHERE schemaname = 'idempotency'")
_CONNECTIONS = text("SELECT count(*)::float8 FROM pg_stat_activity WHERE datname = current_database()")
_ROWS = text("SELECT last_value FROM jobs_id_seq")


@dataclass
class Series:
    """One quantity, over operations in millions."""

    unit: str
    done: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, done: int, value: float) -> None:
        self.done.append(done / 1e6)
        self.values.append(value)

    def slope(self) -> tuple[float, float]:
        """By least squares, after the warm-up, and its standard error: units per million operations."""
        done, values = self._counted()
        if len(done) < 4:
            return 0.0, float("inf")
        slope, intercept = linear_regression(done, values)
        residual = sum((y - slope * x - intercept) ** 2 for x, y in zip(done, values, strict=True))
        spread = sum((x - mean(done)) ** 2 for x in done)
        return slope, sqrt(residual / (len(done) - 2) / spread)

    def rises(self) -> bool:
        done, values = self._counted()
        slope, error = self.slope()
        return slope > ERRORS * error and slope * (done[-1] - done[0]) > SHARE * max(mean(values), 1.0)

    def _counted(self) -> tuple[list[float], list[float]]:
        first = int(len(self.done) * WARM)
        return self.done[first:], self.values[first:]


class Soak:
    """The processes of a run, and what is measured of them."""

    def __init__(self, connection: Connection, directory: Path, concurrency: int) -> None:
        from .soaked import app

        self._connection = connection
        self._redis = redis.Redis.from_url(os.environ["REDIS_URL"])
        self._broker = app.connection_for_read()
        command = [sys.executable, "-m", "celery", "-A", "benchmarks.soaked", "worker", "-Q", "unique"]
        command += ["--concurrency", str(concurrency), "--loglevel", "ERROR", "--without-mingle", "--without-gossip"]
        relay = [sys.executable, "-m", "idempotency.cli", "relay", "-A", "benchmarks.soaked"]
        self.processes = {
            name: _started(started, directory / f"{name}.log")
            for name, started in (("worker", command), ("relay", relay))
        }
        self.series = {
            **{f"{name}_mb": Series("MiB") for name in self.processes},
            **{f"{name}_files": Series("open files") for name in self.processes},
            "connections": Series("connections"),
            "tables_mb": Series("MiB"),
            "dead_rows": Series("rows"),
            "queued": Series("messages"),
            "redis_keys": Series("keys"),
            "redis_mb": Series("MiB"),
        }

    def sample(self, done: int) -> None:
        """Note what is held now."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                raise SystemExit(f"the {name} has ended with status {process.returncode}")
            root = psutil.Process(process.pid)
            family = [root, *root.children(recursive=True)]
            self.series[f"{name}_mb"].add(done, sum(each.memory_info().rss for each in family) / MB)
            self.series[f"{name}_files"].add(done, sum(each.num_fds() for each in family))
        self.series["connections"].add(done, self._asked(_CONNECTIONS))
        self.series["tables_mb"].add(done, self._asked(_TABLES) / MB)
        self.series["dead_rows"].add(done, self._asked(_DEAD))
        declared = self._broker.default_channel.queue_declare("unique", passive=True)
        self.series["queued"].add(done, declared.message_count)
        self.series["redis_keys"].add(done, self._redis.dbsize())
        self.series["redis_mb"].add(done, self._redis.info("memory")["used_memory"] / MB)

    def _asked(self, query: object) -> float:
        return float(self._connection.execute(query).scalar_one() or 0)  # type: ignore[call-overload]

    def discard(self) -> None:
        """As people do with what has failed; open letters stay for good."""
        for letter in dead_letters.list_letters(self._connection, limit=10_000):
            discards.discard(self._connection, letter.id)

    def close(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)
        self._broker.release()
        self._redis.close()


def main(
    operations: Annotated[int, typer.Option(min=1000, max=100_000_000)] = 1_000_000,
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="Pool children of the worker.")] = 4,
) -> None:
    """Run so many operations, and print the slope of each quantity."""
    with services.running() as running, tempfile.TemporaryDirectory() as directory:
        os.environ.update(running.environment())
        engine = create_engine(running.database_url, isolation_level="AUTOCOMMIT")
        schema.migrate(engine)
        with engine.connect() as connection:
            connection.execute(text("CREATE TABLE jobs (id bigserial PRIMARY KEY, job text, number bigint)"))
            soak, began = Soak(connection, Path(directory), concurrency), time.monotonic()
            try:
                _carry_out(soak, connection, operations)
                wrong = _checked(connection, operations)
            finally:
                soak.close()
            seconds = time.monotonic() - began
        engine.dispose()
    rising = _show(soak.series)
    slopes = " ".join(f"{name}={slope:+.4g}±{error:.2g}" for name, slope, error in rising.slopes)
    print(
        f"RESULT operations={operations} seconds={seconds:.0f} per_second={operations / seconds:.0f} {wrong} "
        f"rising={len(rising.names)} {slopes}",
        flush=True,
    )
    if rising.names or wrong != NOTHING_WRONG:
        raise SystemExit(1)


def _carry_out(soak: Soak, connection: Connection, operations: int) -> None:
    from .soaked import is_failed, is_sent_twice, soaked

    transactional = connection.engine.execution_options(isolation_level="READ COMMITTED")
    accepted = rows = failed = samples = 0
    last = time.monotonic()
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("operations", total=operations)
        while rows + failed < operations:
            if accepted < operations and accepted - rows - failed < IN_FLIGHT:
                numbers = range(accepted, min(accepted + ACCEPTED, operations))
                with Session(transactional) as session, session.begin():
                    for number in numbers:
                        soaked.enqueue(session, number)
                for number in filter(is_sent_twice, numbers):
                    soaked.delay(number)
                accepted, failed = numbers.stop, failed + sum(map(is_failed, numbers))
            else:
                time.sleep(0.05)
            seen = connection.execute(_ROWS).scalar_one()
            last = time.monotonic() if seen > rows else last
            rows = seen
            if time.monotonic() - last > STUCK:
                raise SystemExit(f"no new row for {STUCK:.0f} s: {rows} rows, {failed} failed of {accepted}")
            progress.update(bar, completed=rows + failed)
            if (rows + failed) * SAMPLES >= operations * (samples + 1):
                samples += 1
                soak.sample(rows + failed)
                soak.discard()


def _checked(connection: Connection, operations: int) -> str:
    """Look until the last rows are committed: a number of the sequence is taken before."""
    deadline = time.monotonic() + STUCK
    while (wrong := _wrong(connection, operations)) != NOTHING_WRONG and time.monotonic() < deadline:
        time.sleep(2)
    return wrong


def _wrong(connection: Connection, operations: int) -> str:
    """Compare the rows with the operations: by number, and not by how many there are."""
    from .soaked import FAILED

    row = connection.execute(
        text("""SELECT count(*) FILTER (WHERE rows = 0) AS lost, count(*) FILTER (WHERE rows > 1) AS doubled
                FROM (SELECT n, count(j.id) AS rows FROM generate_series(0, :most) n LEFT JOIN jobs j ON j.number = n
                      WHERE n % 100 >= :failed GROUP BY n) found"""),
        {"most": operations - 1, "failed": FAILED},
    ).one()
    return f"lost={row.lost} doubled={row.doubled}"


@dataclass(frozen=True)
class Rising:
    """Those that rise, and of all of them name, slope and standard error."""

    names: list[str]
    slopes: list[tuple[str, float, float]]


def _show(series: dict[str, Series]) -> Rising:
    table = Table("", "first counted", "last", "slope per million", "standard error", "")
    slopes, names = [], []
    for name, each in series.items():
        slope, error = each.slope()
        slopes.append((name, slope, error))
        if each.rises():
            names.append(name)
        first = each.values[int(len(each.values) * WARM)]
        shown = f"{slope:+.4g} {each.unit}", f"{error:.2g}", "rises" if name in names else "flat"
        table.add_row(name, f"{first:.1f}", f"{each.values[-1]:.1f}", *shown)
    console.print(table)
    return Rising(names, slopes)


def _started(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)


if __name__ == "__main__":
    typer.run(main)
