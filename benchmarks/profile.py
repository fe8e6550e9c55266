"""The cost of one attempt: function calls, CPU, round trips, and time per phase, compared with a plain task. `make profile`.

Beside them, the parts of a purchase of the demo, whose own statements and calls outside are counted, too.

The least CPU of several rounds is what other processes of a shared machine disturb least.
"""

from __future__ import annotations

import cProfile
import itertools
import os
import pstats
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import redis
import typer
from opentelemetry.sdk.trace import TracerProvider
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sqlalchemy import create_engine

import services
from idempotency.application import close_runtime, runtime_of
from idempotency.observe import metrics, traces
from idempotency.store import schema

from . import purchase
from .attempts import Delivered, carry_out
from .round_trips import Connect, counted

Run = Callable[[int], object]

# Rounds in which CPU is measured; attempts that are profiled and counted, after them; attempts before all, to warm up.
ROUNDS, TRACED, WARM = 12, 200, 50
PYTHON = "Python"

_numbers = itertools.count()


def main(attempts: Annotated[int, typer.Option(min=120, max=100_000)] = 4800) -> None:
    """Run attempts in this process as a pool process does, without a broker."""
    with services.running(needs=("postgres", "redis")) as running:
        os.environ.update(running.environment(), BROKER_URL="memory://")

        from . import jobs

        engine = create_engine(running.database_url, isolation_level="AUTOCOMMIT")
        schema.migrate(engine)
        with engine.connect() as connection:
            connection.execute(jobs.TABLE)
        engine.dispose()
        jobs.app.finalize()
        client = redis.Redis.from_url(running.redis_url)
        runtime = runtime_of(jobs.app)
        table = Table(
            "", "function calls", "CPU ms, least", "wall ms", "Postgres round trips", "Redis commands, in scripts too"
        )
        ours: list[Connect] = [runtime.engine.connect, runtime.autocommit]
        plain: list[Connect] = [jobs.engine(os.getpid()).connect]
        by_package: dict[str, Counter[str]] = {}

        def measure(name: str, run: Run, connects: Sequence[Connect], each: int) -> None:
            run(WARM)  # connections, prepared statements, caches
            rounds = [_timed(run, each) for _ in track(range(ROUNDS), description=name)]
            by_package[name] = calls = _calls(run, TRACED)
            with counted(connects) as trips:
                commands = _commands(client)
                run(TRACED)
                commands = _commands(client) - commands - 1  # INFO itself
            detail = ", ".join(f"{name} {count / TRACED:.1f}" for name, count in trips.items())
            table.add_row(
                name,
                f"{sum(calls.values()):.0f}",
                f"{1e3 * min(cpu for cpu, _ in rounds):.2f}",
                f"{1e3 * median(wall for _, wall in rounds):.2f}",
                f"{sum(trips.values()) / TRACED:.1f} ({detail})",
                f"{commands / TRACED:.1f}",
            )

        measure("plain", partial(_run, jobs.plain), plain, attempts // ROUNDS)
        measure("unique", partial(_run, jobs.unique), ours, attempts // ROUNDS)
        of_ours = _phases(jobs.unique.name)
        runtime.traces = traces.begin(_provider)
        measure("unique, traced", partial(_run, jobs.unique), ours, attempts // ROUNDS)
        many = WARM + 2 * TRACED + ROUNDS * (each := attempts // ROUNDS // 10)
        with (
            tempfile.TemporaryDirectory() as directory,
            purchase.accepted(running.database_url, Path(directory), many) as (shop, deliveries),
        ):
            shops = runtime_of(shop)
            for delivered in deliveries:
                measure(delivered.name, delivered.run, [shops.engine.connect, shops.autocommit], each)
        Console().print(table)
        packages = Table("function calls of one attempt, in", *by_package)
        for package, _ in sum(by_package.values(), Counter[str]()).most_common():
            if any(calls[package] >= 1 for calls in by_package.values()):
                packages.add_row(package, *(f"{calls[package]:.0f}" for calls in by_package.values()))
        Console().print(packages)
        phases = Table("phase of ours", "wall ms")
        for name, seconds in of_ours.items():
            phases.add_row(name, f"{1e3 * seconds:.2f}")
        Console().print(phases)
        client.close()
        close_runtime(jobs.app)


def _provider() -> TracerProvider:
    """Spans as they are made for an exporter in the background, which is given none of them here."""
    return TracerProvider()


def _timed(run: Run, attempts: int) -> tuple[float, float]:
    """Seconds per attempt: CPU of this process, and wall."""
    cpu, wall = time.process_time(), time.perf_counter()
    run(attempts)
    return (time.process_time() - cpu) / attempts, (time.perf_counter() - wall) / attempts


def _calls(run: Run, attempts: int) -> Counter[str]:
    """Calls of one attempt in each package. What Python itself offers is counted where it is called."""
    with cProfile.Profile() as profiled:
        run(attempts)
    calls: Counter[str] = Counter()
    functions = pstats.Stats(profiled).stats  # type: ignore[attr-defined]
    for (file, _, _), (_, number, _, _, callers) in functions.items():
        if (package := _package(file)) != PYTHON:
            calls[package] += number
            continue
        for (caller, _, _), (_, called, *_) in callers.items():
            calls[_package(caller)] += called
    return Counter({package: number / attempts for package, number in calls.items()})


def _package(file: str) -> str:
    """The package of a file, as a profile names it."""
    if "site-packages/" in file:
        return file.rpartition("site-packages/")[2].partition("/")[0]
    if file.startswith("<sqlalchemy"):  # methods that it writes
        return "sqlalchemy"
    return next((name for name in ("idempotency", "tasks", "benchmarks") if f"/{name}/" in file), PYTHON)


def _run(task: Any, attempts: int) -> None:
    def delivered(number: int) -> Delivered:
        id = str(number)
        headers = {"id": id, "task": task.name, "root_id": id, "correlation_id": id, "idempotency-key": id}
        return Delivered(headers, [number], {})

    carry_out(task, map(delivered, itertools.islice(_numbers, attempts)))


def _commands(client: redis.Redis) -> int:
    return int(client.info("stats")["total_commands_processed"])


def _phases(task: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    for metric in metrics.phase_seconds.collect():
        for sample in metric.samples:
            if sample.labels.get("task") == task:
                (sums if sample.name.endswith("_sum") else counts if sample.name.endswith("_count") else {})[
                    sample.labels["phase"]
                ] = sample.value
    return {phase: sums[phase] / counts[phase] for phase in sums}


if __name__ == "__main__":
    typer.run(main)
