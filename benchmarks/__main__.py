"""Compare with plain Celery and with what else people would use, side by side: `python -m benchmarks --only unique`."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from sqlalchemy import Engine, create_engine, text

import services
from idempotency.store import schema

from .report import Report, describe

if TYPE_CHECKING:
    from . import life, saga_length, saga_waits
    from .contenders.contest import Rates

console = Console()

# With contenders that the extra `bench` installs.
CONTESTS = ("unique", "duplicates", "storm", "outside", "enqueue", "batch")
# Claims and ends beside what else is in the tables.
BESIDE = ("scale", "waiting", "purge", "held")
BENCHMARKS = (*CONTESTS, "relay", "http", "latency", "ordering", "resend", "backlog", *BESIDE)
# Long, and not a comparison with plain Celery: only on request.
LIFE = "life"
# Needs no servers, and an idle machine: only on request.
START = "start"
# Beside DBOS, which `make bench ONLY=sagas` installs, and two about many steps and many sagas: only on request.
SAGAS, SAGA_LENGTH, SAGA_WAITS = "sagas", "saga_length", "saga_waits"
# Beside a plain table: only on request.
PARTITIONS = "partitions"
# Records elsewhere, beside Postgres: only on request.
STORES = "stores"
# Beside a plain consumer of Kafka: only on request.
STREAM = "stream"
ON_REQUEST = (LIFE, START, SAGAS, SAGA_LENGTH, SAGA_WAITS, PARTITIONS, STORES, STREAM)


def main(
    only: Annotated[
        str, typer.Option(help=f"Which benchmarks, comma-separated: {', '.join((*BENCHMARKS, *ON_REQUEST))}")
    ] = ",".join(BENCHMARKS),
    rounds: Annotated[int, typer.Option(min=1, max=50)] = 5,
    messages: Annotated[int, typer.Option(min=20, max=100_000, help="Jobs per round.")] = 1000,
    concurrency: Annotated[
        int, typer.Option(min=1, max=64, help="Pool children of the worker: latency, life. Contests try several.")
    ] = 4,
    operations: Annotated[
        int, typer.Option(min=10_000, max=10_000_000, help="Operations after the first 10,000: life.")
    ] = 100_000,
    waiting: Annotated[int, typer.Option(min=1000, max=10_000_000, help="Waiting operations: backlog.")] = 1_000_000,
    records: Annotated[
        int, typer.Option(min=20_000, max=100_000_000, help="Completed operations: scale. Half as many expired: purge.")
    ] = 10_000_000,
    steps: Annotated[int, typer.Option(min=20, max=10_000, help="Steps of the longer saga: saga_length.")] = 1000,
    sagas: Annotated[
        int, typer.Option(min=100, max=1_000_000, help="Waiting sagas, of which each round wakes a tenth: saga_waits.")
    ] = 100_000,
    as_json: Annotated[
        bool, typer.Option("--json", help="Documents instead of tables; the last has versions.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="A directory for a chart of the ratios, as PNG and as SVG.")] = None,
) -> None:
    """Compare with plain Celery and others, side by side in one run; print tables and RESULT lines."""
    chosen = only.split(",")
    if unknown := set(chosen) - {*BENCHMARKS, *ON_REQUEST}:
        raise SystemExit(
            f"--only: unknown benchmark {', '.join(sorted(unknown))}; there are: {', '.join((*BENCHMARKS, *ON_REQUEST))}"
        )
    if START in chosen:
        from . import start

        started = start.measure(rounds=2 * rounds)
        show(as_json, "CPU ms", "help_vs_celery", started.help_ratio, **started.milliseconds)
        print(f"RESULT import_ms={started.added_by_import:.0f}", flush=True)
        chosen.remove(START)
    if not chosen:
        return
    with services.running() as running, tempfile.TemporaryDirectory() as directory:
        os.environ.update(running.environment())
        # importing the application reads the environment
        from . import backlog, http, jobs, latency, life, ordering, relay, resend, saga_length, saga_waits

        report = Report()
        engine = create_engine(running.database_url, isolation_level="AUTOCOMMIT")
        schema.migrate(engine)
        with engine.connect() as connection:
            connection.execute(jobs.TABLE)
            connection.execute(text("CREATE TABLE timed (number bigint PRIMARY KEY, started float8)"))
        if set(BESIDE) & set(chosen):
            look_beside(chosen, running, rounds, messages, waiting, records, as_json, report)
        if PARTITIONS in chosen:
            show_partitions(as_json, running, rounds, messages, records)
        if STORES in chosen:
            from . import stores

            costs = stores.measure(running, rounds=rounds, many=messages)
            ratios = {f"{name}_vs_postgres": over(costs[name], costs["postgres"]) for name in list(costs)[1:]}
            (first, ratio), *others = ratios.items()
            also = "".join(f" {name}={each:.3f}" for name, each in others)
            show(as_json, "ms an attempt", first, ratio, also, **costs)
        if "relay" in chosen:
            rates = relay.measure(engine, rounds=rounds, messages=messages)
            show(as_json, "messages/s", "relay_vs_apply_async", rates.ratio, direct=rates.direct, relay=rates.relay)
            report.add("relay", {"direct": rates.direct, "relay": rates.relay}, relay_vs_apply_async=rates.ratio)
        if set(CONTESTS) & set(chosen):
            compete(chosen, engine, Path(directory), rounds, messages, as_json, report)
        if "http" in chosen:
            by_path = http.measure(rounds=rounds, messages=messages)
            for path, name in (("/async-jobs", "http_async_row"), ("/jobs", "http_row"), ("/orders", "http")):
                answered = by_path[path]
                figures = {"plain": answered.plain, "keyed": answered.keyed, "replay": answered.replay}
                also = f" {name}_replay_vs_plain={answered.replay_ratio:.3f}"
                show(as_json, "requests/s", f"{name}_vs_plain", answered.ratio, also, **figures)
        if STREAM in chosen:
            from . import stream  # imports confluent-kafka

            of_messages = stream.measure(engine, rounds=rounds, messages=5 * messages)
            figures = {"plain": of_messages.plain, "stream": of_messages.stream}
            show(as_json, "messages/s", "stream_vs_plain", of_messages.ratio, **figures)
            report.add("stream", figures, stream_vs_plain=of_messages.ratio)
        if "latency" in chosen:
            with worker(Path(directory) / "worker.log", concurrency, "unique"), relay_process():
                seconds = latency.measure(engine, messages=20 * rounds)
            figures = {"direct": [1e3 * s for s in seconds.direct], "outbox": [1e3 * s for s in seconds.outbox]}
            show(as_json, "ms to start", "latency_vs_delay", seconds.ratio, **figures)
            report.add("latency", figures, latency_vs_delay=seconds.ratio)
        if "ordering" in chosen:
            keyed = ordering.measure(engine, rounds=rounds, messages=messages)
            figures = {"one key": keyed.alone, f"beside {ordering.BLOCKED} blocked rows": keyed.beside_blocked}
            show(as_json, "events/s", "ordered_events_per_second", statistics.median(keyed.beside_blocked), **figures)
        if "resend" in chosen:
            passes = resend.measure(engine, rounds=max(rounds, 5))
            figures = {f"{resend.WAITING} waiting": passes.waiting, f"{passes.resent} resent": passes.after_a_wipe}
            show(as_json, "ms a pass", "resend_pass_ms", max(passes.waiting), **figures)
        if SAGAS in chosen:
            from . import sagas as saga_rates  # imports DBOS

            beside = saga_rates.measure(engine, rounds=rounds, sagas=max(messages // 10, 2))
            show(as_json, "sagas/s", "sagas_vs_dbos", beside.ratio, ours=beside.ours, DBOS=beside.dbos)
        if SAGA_LENGTH in chosen:
            show_length(as_json, saga_length.measure(engine, rounds=rounds, many=steps))
        if SAGA_WAITS in chosen:
            show_waits(as_json, saga_waits.measure(engine, rounds=min(rounds, 9), waiting=sagas, woken=sagas // 10))
        if LIFE in chosen:

            @contextmanager
            def both() -> Iterator[None]:
                with worker(Path(directory) / "worker.log", concurrency, "unique"), relay_process():
                    yield

            show_life(as_json, *life.measure(engine, both, operations=operations))
        if "backlog" in chosen:
            took = backlog.measure(engine, rounds=rounds, waiting=waiting)
            slowest = max(took.look + took.status)
            show(as_json, "s to look", "backlog_seconds", slowest, scrape=took.look, status=took.status)
        if report.ratios:
            report.about = describe(engine, os.environ) | {"rounds": rounds, "messages": messages}
            print(report.document()) if as_json else report.table(console)
            if plot:
                report.plot(plot)
            print(report.line(), flush=True)
        engine.dispose()


def compete(
    chosen: list[str], engine: Engine, directory: Path, rounds: int, messages: int, as_json: bool, report: Report
) -> None:
    """Run the contests, in which the contenders of the extra `bench` take turns."""
    try:
        from . import batch, duplicates, enqueue, outside, storm, unique
        from .contenders.contest import Contest
    except ModuleNotFoundError as missing:
        raise SystemExit(f"{missing.name} is not installed: pip install '.[bench]', or make bench") from missing
    contest = Contest(engine, directory)
    try:
        if "unique" in chosen:
            rates = unique.measure(contest, rounds=rounds, messages=messages)
            compare(as_json, report, "unique", rates, "each", {name: name for name in unique.OTHERS})
            compare(as_json, report, "unique_alone", rates, "unique", {"plain": "plain"})
            show_processor(as_json, report, "unique_processor", contest.processor)
        if "duplicates" in chosen:
            # a message costs less than a job, and a turn has to last
            rates = duplicates.measure(contest, rounds=rounds, messages=3 * messages)
            compare(as_json, report, "duplicates", rates, "each", {"plain": "noop", "powertools": "powertools"})
            compare(as_json, report, "duplicates_alone", rates, "unique", {"plain": "noop"})
        if "storm" in chosen:
            of_one_key = storm.measure(contest, rounds=rounds, messages=messages)
            show(as_json, "messages/s", "storm_per_second", statistics.median(of_one_key), unique=of_one_key)
            report.add("storm", {"unique": of_one_key}, storm_per_second=statistics.median(of_one_key))
        if "outside" in chosen:
            rates = outside.measure(contest, rounds=rounds, messages=messages)
            compare(as_json, report, "outside", rates, "outside", {"plain": "plain_outside"})
        if "enqueue" in chosen:
            rates = enqueue.measure(contest, rounds=rounds, messages=messages)
            others = {name: name for name in rates if name not in ("enqueue", "delay")}
            compare(as_json, report, "enqueue", rates, "enqueue", others)
        if "batch" in chosen:
            rates = batch.measure(contest, rounds=rounds, messages=10 * messages)
            compare(as_json, report, "batch", rates, "batch", {"plain": "plain"})
            show_processor(as_json, report, "batch_processor", contest.processor)
    finally:
        contest.close()
    report.settings |= contest.settings


def look_beside(
    chosen: list[str],
    running: services.Services,
    rounds: int,
    many: int,
    waiting: int,
    records: int,
    as_json: bool,
    report: Report,
) -> None:
    """Time claims and ends on databases of their own, beside what else is in the tables."""
    from . import scale

    def add(name: str, what: str, seconds: scale.Beside, ratio: float, also: str = "", other: str = "without") -> None:
        figures = {
            other: [1e3 * statistics.median(each) for each in seconds.without],
            what: [1e3 * statistics.median(each) for each in seconds.beside],
        }
        show(as_json, "ms", name, ratio, also, **figures)
        report.add(name, figures, **{name: ratio})

    if "scale" in chosen:
        seconds = scale.records(running, rounds=rounds, many=many, rows=records)
        add("scale_claim_ratio", f"{records:,} records", seconds, seconds.ratio(), other=f"{scale.FEW:,} records")
    if "waiting" in chosen:
        seconds = scale.waiting(running, rounds=rounds, many=many, rows=waiting)
        add("backlog_ratio", f"{waiting:,} waiting", seconds, seconds.ratio())
    if "purge" in chosen:
        seconds, rate = scale.purging(running, rounds=rounds, many=many, rows=records // 2)
        add("purge_p99_ratio", "purging", seconds, seconds.ratio(scale.p99), f" purged_per_second={rate:.0f}")
    if "held" in chosen:
        held = scale.held_open(running, rounds=rounds, many=many)
        without, beside = (statistics.median(each for (each,) in of) for of in (held.wal.without, held.wal.beside))
        left = (
            f" dead_rows_per_operation={held.dead_rows:.2f} wal_bytes_per_operation={beside:.0f} without={without:.0f}"
        )
        add("held_ratio", "a transaction held open", held.attempts, held.attempts.ratio(), left)


def over(figures: list[float], others: list[float]) -> float:
    """The median of these over that of the others."""
    return statistics.median(figures) / statistics.median(others)


def show_partitions(as_json: bool, running: services.Services, rounds: int, many: int, records: int) -> None:
    """Print what attempts cost in partitions, beside a plain table, and what it costs to remove half as many records."""
    from . import partitions

    for days, seconds in partitions.claims(running, rounds=rounds, many=many, rows=records).items():
        figures = {
            "plain": [1e3 * statistics.median(each) for each in seconds.without],
            f"{days} partitions": [1e3 * statistics.median(each) for each in seconds.beside],
        }
        show(as_json, "ms", f"partitions_{days}_claim_ratio", seconds.ratio(statistics.median), **figures)
    plain, dropped = partitions.removing(running, rounds=rounds, rows=records // 2)
    for name in ("seconds", "wal", "left"):
        figures = {"deleted": getattr(plain, name), "dropped": getattr(dropped, name)}
        ratio = statistics.median(figures["dropped"]) / statistics.median(figures["deleted"])
        show(as_json, "s" if name == "seconds" else "bytes", f"partitions_{name}_ratio", ratio, **figures)


def compare(as_json: bool, report: Report, name: str, rates: Rates, ours: str, others: dict[str, str]) -> None:
    """Show the rates of a contest, and ours over that of each other, by the other's name in RESULT lines."""
    median = {side: statistics.median(values) for side, values in rates.items()}
    ratios = {f"{name}_vs_{other}": median[ours] / median[side] for other, side in others.items()}
    (first, ratio), *rest = ratios.items()
    show(as_json, "/s", first, ratio, "".join(f" {other}={value:.3f}" for other, value in rest), **rates)
    report.add(name, rates, **ratios)


def show_processor(as_json: bool, report: Report, name: str, spent: dict[str, dict[str, list[float]]]) -> None:
    """Print what a job of each contender costs the processor, by kind of process: medians of the rounds."""
    kinds = list(dict.fromkeys(kind for of_side in spent.values() for kind in of_side))
    figures = {side: [statistics.median(of_side[kind]) for kind in kinds] for side, of_side in spent.items()}
    if as_json:
        print(json.dumps({name: {"kinds": kinds, **figures}}))
    else:
        table = Table("ms of the processor for a job", *kinds, "all")
        for side, of_side in figures.items():
            table.add_row(side, *(f"{spent:.2f}" for spent in (*of_side, sum(of_side))))
        console.print(table)
    report.add(name, figures)


def show(as_json: bool, unit: str, name: str, ratio: float, also: str = "", /, **figures: list[float]) -> None:
    """Print a table or a JSON document, and the line for programs."""
    if as_json:
        print(json.dumps({name: ratio, **figures}))
    else:
        table = Table(name, f"median {unit}", "min", "max")
        for label, values in figures.items():
            table.add_row(label, *(f"{figure:.1f}" for figure in (statistics.median(values), min(values), max(values))))
        console.print(table)
    print(f"RESULT {name}={ratio:.3f}{also}", flush=True)


def show_life(as_json: bool, small: life.Left, large: life.Left) -> None:
    """Print what few and many operations leave behind, and the line for programs."""
    if as_json:
        print(json.dumps([asdict(small), asdict(large)]))
    else:
        table = Table("left in", *(f"after {left.operations:,}" for left in (small, large)))
        for name in small.tables:
            table.add_row(name, *(f"{left.tables[name]:,} bytes, {left.rows[name]} rows" for left in (small, large)))
        table.add_row("queues", *(f"{left.queued} messages" for left in (small, large)))
        table.add_row("Redis", *(f"{left.hints} hints" for left in (small, large)))
        table.add_row("largest on the way", *(f"{left.largest:,} bytes" for left in (small, large)))
        table.add_row("purged", *(f"{left.purged_per_second:,.0f} rows/s" for left in (small, large)))
        console.print(table)
    print(
        f"RESULT life={large.size / small.size:.3f} operations={large.operations} bytes={large.size} "
        f"rows={sum(large.rows.values())} queued={large.queued} hints={large.hints} "
        f"bytes_after_{small.operations}={small.size}",
        flush=True,
    )


def show_length(as_json: bool, costs: saga_length.Costs) -> None:
    """Print what the first and the last steps of a long saga cost, and to resume it."""
    few, many = costs.trips
    resumed = {few: statistics.median(costs.resumed_few), many: statistics.median(costs.resumed_many)}
    also = "".join(
        f" resume_{steps}_ms={resumed[steps]:.1f} resume_{steps}_trips={costs.trips[steps]}" for steps in (few, many)
    )
    figures = {f"step {few}": costs.tenth, f"step {many}": costs.last}
    figures |= {f"resumed with {few}": costs.resumed_few, f"resumed with {many}": costs.resumed_many}
    show(as_json, "ms", "saga_length", costs.ratio, also, **figures)


def show_waits(as_json: bool, costs: saga_waits.Costs) -> None:
    """Print what each pass costs without and beside waiting sagas, and how fast woken ones go on."""
    ratios = {name: costs.ratio(name) for name in costs.alone}
    figures = {f"{name}, {where}": took[name] for name in ratios for where, took in costs.passes}
    also = "".join(f" {name}={ratio:.3f}" for name, ratio in ratios.items())
    also += f" status_ms={statistics.median(costs.beside['status']):.0f}"
    show(as_json, "ms a pass", "saga_waits", max(costs.ratio(name) for name in costs.sweeps), also, **figures)
    paces = {"plain rows": costs.plain, "woken sagas": costs.woken, "events that wake": costs.events}
    show(
        as_json,
        "messages/s",
        "woken_vs_plain",
        costs.pace,
        f" per_second={statistics.median(costs.woken):.0f}",
        **paces,
    )


@contextmanager
def relay_process() -> Iterator[None]:
    """Run a relay in a separate process."""
    command = [sys.executable, "-m", "idempotency.cli", "relay", "-A", "benchmarks.jobs"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


class worker:  # noqa: N801 - reads as a verb where it is used
    """A prefork worker on one queue."""

    def __init__(self, log: Path, concurrency: int, queue: str) -> None:
        self._log = log
        self._queue = queue
        self._concurrency = concurrency

    def __enter__(self) -> None:
        command = [sys.executable, "-m", "celery", "-A", "benchmarks.jobs", "worker", "-Q", self._queue]
        command += [
            "--concurrency",
            str(self._concurrency),
            "--loglevel",
            "WARNING",
            "--without-mingle",
            "--without-gossip",
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        from .jobs import app

        deadline = time.monotonic() + 60
        while not app.control.ping(timeout=0.5):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the worker did not start: {self._log.read_text()[-500:]}")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()  # as in `contenders.celery_side`: of a run that fails there may be much in hand
            self._process.wait(30)


if __name__ == "__main__":
    typer.run(main)
