"""Run the fault matrix and keep what was seen.

    python -m tests.faults                 the whole matrix, kept in docs/faults.md
    python -m tests.faults -k F1-P2        some of it: printed, not kept
    python -m tests.faults --json FILE     also as JSON; everything else goes to pytest

Exit status 1 if a cell failed or has no test.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.faults import report

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "faults.md"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", add_help=False, allow_abbrev=False)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given, rest = parser.parse_known_args()
    collected = report.Collector()
    # `report` has imported the library, which pytest would like to see first where an egg-info lies in the checkout
    imported = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    status = pytest.main(["-m", "faults", "-q", "-W", imported, str(Path(__file__).parent), *rest], plugins=[collected])
    if not any(seen.tests for seen in collected.cells.values()):
        return int(status) or 1

    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(report.table(collected))
    for cell, reason in collected.reasons():
        console.print(f"not run  {cell.name}: {reason}")
    for cell in collected.wrong:
        for failed in collected.cells[cell.fault, cell.phase].failed:
            console.print(f"{report.FAILED}  {cell.name}: {failed}", markup=False)
    if missing := [cell.name for cell in collected.wrong if collected.word(cell) == report.MISSING]:
        console.print(f"{report.MISSING} (no test)  {', '.join(missing)}")
    for stray in collected.stray:
        console.print(f"not in the matrix  {stray}", markup=False)
    if given.json:
        given.json.write_text(json.dumps(report.as_json(collected), indent=1) + "\n")
    # An interrupted run has cells without an outcome, too: they are "not selected".
    if collected.is_complete:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(report.markdown(collected))
        console.print(f"kept in {PAGE.relative_to(ROOT)}")
    console.print(report.summary(collected), highlight=False)
    return 1 if status not in (0,) or collected.wrong or collected.stray else 0


if __name__ == "__main__":
    raise SystemExit(main())
