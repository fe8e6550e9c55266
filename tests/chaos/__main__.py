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

from services import ServiceError
from tests.chaos import cluster_faults
from tests.chaos.plan import WEIGHTS
from tests.chaos.run import NotHere, Options, run

RECORD = Path(__file__).parent.parent.parent / "docs" / "chaos-runs.jsonl"


def main(arguments: list[str] | None = None) -> int:
    """Run, show, and return the exit status."""
    given = _parser().parse_args(arguments)
    console, complaints = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    # However this process is asked to end, everything it started ends with it.
    signal.signal(signal.SIGTERM, _interrupt)
    options = Options(
        given.seconds,
        given.seed,
        workers=given.workers,
        rate=given.rate,
        only=given.only,
        is_cluster=given.cluster,
        is_asynchronous=given.asynchronous,
    )
    try:
        report = run(options, console)
    except (NotHere, ServiceError, TimeoutError) as error:
        complaints.print(f"chaos: {error}")
        return 3
    except KeyboardInterrupt:
        complaints.print("chaos: interrupted; everything it started has been stopped")
        return 130
    report.show(console)
    if given.record:
        RECORD.parent.mkdir(exist_ok=True)
        with RECORD.open("a") as runs:
            runs.write(report.as_json() + "\n")
    console.print(report.line, highlight=False, markup=False)
    return report.status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=_positive, default=60.0, help="how long things go wrong")
    parser.add_argument("--seed", type=int, default=1, help="the same seed replays the same plan")
    parser.add_argument("--workers", type=int, choices=range(2, 33), default=4, metavar="2..32")
    parser.add_argument("--rate", type=_positive, default=30.0, help="accepted operations per second")
    parser.add_argument("--only", type=_kinds, default=(), help="some kinds of faults, to look into what they do")
    parser.add_argument("--cluster", action="store_true", help="three RabbitMQ nodes, a standby, Sentinels, two zones")
    parser.add_argument(
        "--asynchronous", action="store_true", help="with --cluster: a control, whose promotions lose what was answered"
    )
    parser.add_argument("--record", action="store_true", help=f"append the run to {RECORD.parent.name}/{RECORD.name}")
    return parser


def _positive(value: str) -> float:
    number = float(value)
    if not 0 < number < 86_400:
        raise argparse.ArgumentTypeError(f"must be between 0 and 86400, got {value}")
    return number


def _kinds(value: str) -> tuple[str, ...]:
    kinds = tuple(value.split(","))
    if unknown := [kind for kind in kinds if kind not in WEIGHTS | cluster_faults.WEIGHTS]:
        raise argparse.ArgumentTypeError(f"unknown kind {unknown[0]!r}, use some of {', '.join(WEIGHTS)}")
    return kinds


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
