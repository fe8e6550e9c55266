"""`python -m benchmarks --only unique`: ratios, side by side in one run."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from sqlalchemy import create_engine, text

import services
from idempotency import schema

console = Console()


def main(
    only: Annotated[str, typer.Option(help="Which benchmarks, comma separated: unique")] = "unique",
    rounds: Annotated[int, typer.Option(min=1, max=50)] = 5,
    messages: Annotated[int, typer.Option(min=20, max=100_000, help="Jobs per round.")] = 1000,
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="Pool children of the worker.")] = 4,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure, print a table and RESULT lines."""
    unknown = set(only.split(",")) - {"unique"}
    if unknown:
        raise SystemExit(f"--only: unknown benchmark {', '.join(sorted(unknown))}; there is: unique")
    with services.running() as running, tempfile.TemporaryDirectory() as directory:
        os.environ.update(running.environment())
        from . import unique  # the application reads the environment when it is imported

        engine = create_engine(running.database_url, isolation_level="AUTOCOMMIT")
        schema.migrate(engine)
        with engine.connect() as connection:
            connection.execute(text("CREATE TABLE jobs (id bigserial PRIMARY KEY, job text, number bigint)"))
        with worker(Path(directory) / "worker.log", concurrency):
            throughput = unique.measure(engine, rounds=rounds, messages=messages)
        engine.dispose()
    table = Table("job", "median jobs/s", "min", "max")
    for name, rates in (("plain", throughput.plain), ("unique", throughput.unique)):
        table.add_row(name, *(f"{figure:.0f}" for figure in (statistics.median(rates), min(rates), max(rates))))
    if as_json:
        print(json.dumps({"plain": throughput.plain, "unique": throughput.unique, "ratio": throughput.ratio}))
    else:
        console.print(table)
    print(f"RESULT unique_vs_plain={throughput.ratio:.3f}")


class worker:  # noqa: N801 - reads as a verb where it is used
    """A prefork worker that consumes nothing until it is told to."""

    def __init__(self, log: Path, concurrency: int) -> None:
        self._log = log
        self._concurrency = concurrency

    def __enter__(self) -> None:
        command = [sys.executable, "-m", "celery", "-A", "benchmarks.jobs", "worker", "-Q", "idle"]
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
        self._process.wait(30)


if __name__ == "__main__":
    typer.run(main)
