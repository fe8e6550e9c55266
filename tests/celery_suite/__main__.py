"""Run Celery's integration tests on plain tasks and on ours, and keep what differs.

    python -m tests.celery_suite                 both sides, kept in docs/celery-suite.md
    python -m tests.celery_suite -k chord        some of it: printed, not kept; other options go to pytest, too
    python -m tests.celery_suite --json FILE     every test's outcome as JSON as well

Exit status 0: each difference has a reason, and they are at most twelve. 1: not so. 3: this machine lacks RabbitMQ.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

import services
from tests.celery_suite import side, source
from tests.celery_suite.report import Comparison
from tests.celery_suite.side import PASSED, ROOT, SIDES, Seen

PAGE = ROOT / "docs" / "celery-suite.md"
PLACE = ROOT / "var" / "celery-suite"
# Each part has its own processes and servers; most tests wait for something.
CANVAS = "t/integration/test_canvas.py"
CHORDS = f"{CANVAS}::test_chord"
PARTS = ((CHORDS,), (CANVAS, f"--deselect={CHORDS}"), ("t/integration", f"--ignore={CANVAS}"))
# Seconds: of each part's run; of one test alone, with its worker; and that a test waits alone once it has timed out.
RUN_LIMIT, ALONE_LIMIT, PATIENCE = 1800.0, 360.0, 240.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.celery_suite", add_help=False, allow_abbrev=False)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given, selection = parser.parse_known_args()
    PLACE.mkdir(parents=True, exist_ok=True)
    for old in [*PLACE.glob("*.log"), *PLACE.glob("*.jsonl")]:
        old.unlink()
    tests = source.unpacked(PLACE)
    console = Console(width=None if sys.stdout.isatty() else 220)
    began = time.monotonic()
    with services.running(needs=["postgres", "rabbitmq"]) as servers:
        if servers.broker != "rabbitmq":
            console.print("needs a RabbitMQ that it may start", style="red")
            return 3
        plain, ours = _run_sides(servers, tests, selection)
        _run_again(plain, ours, servers, tests)
    seen = Comparison(plain, ours, seconds=time.monotonic() - began)
    console.print(seen.table())
    for test in seen.obsolete:
        console.print(f"has a reason and passes  {test}", markup=False)
    if given.json:
        given.json.write_text(json.dumps(seen.as_json(), indent=1) + "\n")
    if not selection:
        PAGE.write_text(seen.markdown())
        console.print(f"kept in {PAGE.relative_to(ROOT)}")
    console.print(seen.summary(), highlight=False)
    return 0 if seen.is_good and any(each.outcome == PASSED for each in plain.values()) else 1


def _run_sides(servers: services.Services, tests: Path, selection: Sequence[str]) -> list[dict[str, Seen]]:
    """What becomes of each test on each side; all parts of both run side by side."""

    def run(name: str, part: Sequence[str]) -> dict[str, Seen]:
        return side.run(name, servers, tests, PLACE, [*part, *selection], limit=RUN_LIMIT)

    with ThreadPoolExecutor(len(SIDES) * len(PARTS)) as pool:
        running = [[pool.submit(run, name, part) for part in PARTS] for name in SIDES]
        return [{test: seen for part in parts for test, seen in part.result().items()} for parts in running]


def _run_again(plain: dict[str, Seen], ours: dict[str, Seen], servers: services.Services, tests: Path) -> None:
    """Run those again, one after the other, whose outcome may be the load's: what has timed out gets more time for it."""

    def again(name: str, test: str, seen: Seen) -> Seen:
        """In a process, a database and a virtual host of its own."""
        patience = PATIENCE if seen.has_timed_out else None
        alone = side.run(name, servers, tests, PLACE, [test], limit=ALONE_LIMIT, patience=patience)
        return alone.get(test, side.NOT_RUN)

    for test in [test for test, seen in plain.items() if seen.has_timed_out]:
        plain[test] = again("plain", test, plain[test])
    for each in [each for each in Comparison(plain, ours, seconds=0).differences if each.may_pass_alone]:
        ours[each.test] = again("ours", each.test, each.ours)


if __name__ == "__main__":
    raise SystemExit(main())
