"""Submit two files of purchases and refunds, with duplicates and faults, and compare the ledgers: `python -m demo`.

Exits with 0 only if all ledgers agree and all faults took place, 1 otherwise, 2 for an invalid file or option.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from demo.flows import Options
from demo.input import InputError, Intake
from demo.processes import ProcessError
from demo.run import run
from services import ServiceError

DATA = Path(__file__).parent / "data"
MAX_COPIES, MAX_WORKERS, MAX_MESSAGES = 100, 32, 10_000_000


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"demo: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the demo and return the exit status."""
    began = time.time()
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.flow == "orders" and (given.refunds or given.via == "http"):
        parser.error("flow: orders are returned by rules and submitted without HTTP: no --refunds, no --via http")
    # With --json, stdout is for programs.
    console = Console(stderr=given.json, soft_wrap=True)
    if given.flow == "stream":
        return _stream(given, began, console)
    # SIGTERM also has to end everything that was started.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        refunds = None if given.flow == "orders" else given.refunds or DATA / "refunds.csv"
        intake = Intake(given.purchases, refunds, seed=given.seed)
        options = Options(
            given.copies, given.seed, given.workers, given.started or began, given.via, given.flow, given.webhooks
        )
        report = run(intake, options, console)
        if given.report is not None:
            given.report.write_text(report.as_json() + "\n")
    except InputError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except (ProcessError, ServiceError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; everything it started has been stopped", file=sys.stderr)
        return 130
    report.show(console)
    if given.json:
        print(report.as_json())
    console.print(report.line, highlight=False)
    return 0 if report.agrees else 1


def _stream(given: argparse.Namespace, began: float, console: Console) -> int:
    """Run the flow of a stream, which has neither purchases nor ledgers outside."""
    from demo.stream_run import run_stream  # needs the extra `kafka`

    signal.signal(signal.SIGTERM, _interrupt)
    try:
        report = run_stream(given.source, given.messages, given.started or began, console)
    except (ProcessError, ServiceError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; everything it started has been stopped", file=sys.stderr)
        return 130
    for problem in report.problems:
        console.print(problem)
    console.print(report.line, highlight=False)
    return 0 if report.agrees else 1


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m demo", description=__doc__)
    parser.add_argument("--purchases", type=Path, default=DATA / "purchases.csv", metavar="FILE")
    parser.add_argument("--refunds", type=Path, metavar="FILE")
    parser.add_argument(
        "--flow",
        choices=("payments", "orders", "stream"),
        default="payments",
        help="what becomes of a purchase; or a stream of messages",
    )
    parser.add_argument(
        "--messages", type=_at_most(MAX_MESSAGES), default=20_000, help="of a stream: how many are published"
    )
    parser.add_argument("--source", choices=("rabbitmq", "kafka"), default="rabbitmq", help="of a stream")
    parser.add_argument("--copies", type=_at_most(MAX_COPIES), default=3, help="how often each message is sent")
    parser.add_argument("--seed", type=int, default=1, help="determines the faults and the order of refunds")
    parser.add_argument("--workers", type=_at_most(MAX_WORKERS), default=2)
    parser.add_argument("--via", choices=("enqueue", "http"), default="enqueue", help="how lines are submitted")
    parser.add_argument(
        "--webhooks", action="store_true", help="every charge is decided later, and told by webhook only"
    )
    parser.add_argument("--started", type=float, metavar="EPOCH", help="when the run began (default: now)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the whole report as JSON")
    parser.add_argument("--json", action="store_true", help="print the report as JSON, everything else to stderr")
    return parser


def _at_most(most: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        number = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
        if not 1 <= number <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {most}, got {text[:20]!r}")
        return number

    return whole_number


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
