"""`python -m tests.chaos.many --runs 10 --seconds 300`: runs with random seeds, one after another, and a table of them.

It does not stop at a failure. Exit status 0: every run kept every promise. 1: one did not. 2: none broke one, and some proved
nothing. 3: this machine lacks what a run needs.
"""

from __future__ import annotations

import argparse
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

# Short enough to be typed again.
SEEDS = 100_000
SHOWN = (
    "faults",
    "kinds",
    "accepted",
    "completed",
    "failed",
    "dead",
    "takeovers",
    "fenced",
    "lost",
    "doubled",
    "violations",
)
MEANINGS = {0: "kept", 1: "VIOLATED", 2: "proves nothing", 3: "not run"}


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its exit status, its last line's figures, and where its output is."""

    seed: int
    status: int
    figures: dict[str, str]
    output: Path


def verdict(runs: Iterable[Run]) -> int:
    """The exit status of all runs together: a violation outweighs a run that proves nothing."""
    statuses = {run.status for run in runs}
    for status in (1, 3, 2):
        if status in statuses:
            return status
    return 1 if statuses - {0} else 0  # a run that ended in another way has kept nothing


def main(arguments: list[str] | None = None) -> int:
    """Run all, and show the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.many", description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=300.0)
    given, more = parser.parse_known_args(arguments)
    # wide enough for the table also where the output is a file
    console = Console(width=180, soft_wrap=True, highlight=False)
    directory = Path(tempfile.mkdtemp(prefix="chaos-many-"))
    runs: list[Run] = []
    for number in range(given.runs):
        run = _run(secrets.randbelow(SEEDS), given.seconds, directory, more)
        runs.append(run)
        figures = " ".join(f"{name}={value}" for name, value in run.figures.items())
        console.print(f"{number + 1}/{given.runs} seed {run.seed}: {MEANINGS.get(run.status, run.status)}; {figures}")
    table = Table("seed", "result", *SHOWN, "output", title=f"{len(runs)} runs of {given.seconds:g} s")
    for run in runs:
        cells = (run.figures.get(name, "") for name in SHOWN)
        table.add_row(str(run.seed), str(MEANINGS.get(run.status, run.status)), *cells, str(run.output))
    console.print(table)
    return verdict(runs)


def _run(seed: int, seconds: float, directory: Path, more: list[str]) -> Run:
    output = directory / f"{seed}.txt"
    command = [sys.executable, "-m", "tests.chaos", "--record", "--seconds", f"{seconds:g}", "--seed", str(seed), *more]
    with output.open("w") as file:
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode
    return Run(seed, status, figures(output.read_text(errors="replace")), output)


def figures(output: str) -> dict[str, str]:
    """The figures of a run's last line."""
    results = [line for line in output.splitlines() if line.startswith("RESULT ")]
    found = dict(re.findall(r"(\w+)=(\S+)", results[-1])) if results else {}
    return {name: found[name] for name in SHOWN if name in found}


if __name__ == "__main__":
    sys.exit(main())
