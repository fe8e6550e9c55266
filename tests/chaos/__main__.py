"""`python -m tests.chaos --seconds 60 --seed 1`: real processes and servers, faults from a seeded plan, the ledgers.

Exit status 0: nothing lost, nothing doubled, no invariant broken. 1: one was. 2: the run has proved nothing, or a
wrong option. 3: this machine lacks what the run needs.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.table import Table

from services import ServiceError
from tests.chaos.run import NotHere, Options, Report, run

RECORD = Path(__file__).parent.parent.parent / "docs" / "chaos-runs.jsonl"
# Of the histories shown; all of them are in the database, which is gone by then, and in the kept file.
SHOWN = 5


def main(arguments: list[str] | None = None) -> int:
    """Run, show, and return the exit status."""
    given = _parser().parse_args(arguments)
    console, complaints = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    # However this process is asked to end, everything it started ends with it.
    signal.signal(signal.SIGTERM, _interrupt)
    options = Options(given.seconds, given.seed, workers=given.workers, rate=given.rate)
    try:
        report = run(options, console)
    except (NotHere, ServiceError, TimeoutError) as error:
        complaints.print(f"chaos: {error}")
        return 3
    except KeyboardInterrupt:
        complaints.print("chaos: interrupted; everything it started has been stopped")
        return 130
    _show(report, console)
    if given.record:
        RECORD.parent.mkdir(exist_ok=True)
        with RECORD.open("a") as runs:
            runs.write(report.as_line() + "\n")
    console.print(report.line, highlight=False, markup=False)
    return report.status


def _show(report: Report, console: Console) -> None:
    table = Table("fault", "took place", "missed", title=f"{report.faults} faults of {report.kinds} kinds")
    for kind in sorted({*report.by_kind, *report.missed}):
        table.add_row(kind, str(report.by_kind.get(kind, 0)), str(report.missed.get(kind, 0) or ""))
    console.print(table)
    console.print("counted: " + ", ".join(f"{name.removeprefix('idempotency_').removesuffix('_total')} {value}"
                                          for name, value in report.counters.items() if value))  # fmt: skip
    console.print("traffic: " + ", ".join(f"{name} {value}" for name, value in report.traffic.items()))
    console.print("seconds: " + ", ".join(f"{name} {value}" for name, value in report.phases.items()))
    for name, status in report.ended_by_themselves:
        console.print(f"{name} ended by itself with status {status}", highlight=False)
    for problem in report.problems:
        console.print(f"proves nothing: {problem}", highlight=False, markup=False)
    lines = [f"{each['invariant']} {each['key']}: {each['what']}" for each in report.violations]
    for line in lines:
        console.print(f"VIOLATION {line}", highlight=False, markup=False)
    for key, history in list(report.histories.items())[:SHOWN]:
        console.print(f"history of {key}", highlight=False, markup=False)
        for entry in history:
            console.print(f"  {entry}", highlight=False, markup=False)
    if report.logs is not None:
        everything = [*lines, *(line for key, h in report.histories.items() for line in (f"history of {key}", *h))]
        (Path(report.logs) / "violations.txt").write_text("\n".join(everything) + "\n")
        console.print(f"logs: {report.logs}", highlight=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=_positive, default=60.0, help="how long things go wrong")
    parser.add_argument("--seed", type=int, default=1, help="the same seed replays the same plan")
    parser.add_argument("--workers", type=int, choices=range(2, 33), default=4, metavar="2..32")
    parser.add_argument("--rate", type=_positive, default=30.0, help="accepted operations per second")
    parser.add_argument("--record", action="store_true", help=f"append the run to {RECORD.parent.name}/{RECORD.name}")
    return parser


def _positive(value: str) -> float:
    number = float(value)
    if not 0 < number < 86_400:
        raise argparse.ArgumentTypeError(f"must be between 0 and 86400, got {value}")
    return number


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
