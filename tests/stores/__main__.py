"""Run what shows the promises of each store, and print what was shown: `make stores`.

Exit status 1: a test has failed. 2: a promise was not shown for a store that is said to keep it.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict

import pytest

from tests.stores.promises import KEPT, PROMISES, STORES, Promise


def write(line: str) -> None:
    sys.stdout.write(f"{line}\n")


class Shown:
    """Notes for each promise and store what its tests have shown."""

    def __init__(self) -> None:
        self.passed: dict[tuple[str, str], int] = defaultdict(int)
        self.failed: dict[tuple[str, str], int] = defaultdict(int)
        self._about: dict[str, list[tuple[str, str]]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            about = []
            for mark in item.iter_markers("promise"):
                stores = [mark.kwargs["of"]] if mark.kwargs.get("of") else STORES
                inside = item.nodeid.partition("[")[2].rstrip("]").split("-")
                about += [(mark.args[0], store) for store in stores if mark.kwargs.get("of") or store in inside]
            self._about[item.nodeid] = about

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for cell in self._about.get(report.nodeid, ()):
            if report.failed:
                self.failed[cell] += 1
            elif report.when == "call" and report.passed:
                self.passed[cell] += 1

    def cell(self, promise: Promise, store: str) -> str:
        """What was shown of a promise for a store, in a word."""
        if self.failed[promise.words, store]:
            return "FAILED"
        verdict = promise.verdicts[store].partition(":")[0]
        if not verdict.startswith(("kept", "weaker")) or store in promise.untested:
            return "not offered" if verdict.startswith("not") else "not shown here"
        if self.passed[promise.words, store]:
            return verdict
        return f"{verdict}, elsewhere" if store in promise.elsewhere else "NOT SHOWN"


def main(arguments: list[str]) -> int:
    shown = Shown()
    status = pytest.main(["-q", "-m", "not ecosystem", "tests/stores", *arguments], plugins=[shown])
    width = max(len(each.words) for each in PROMISES)
    write(f"\n{'promise':{width}}  {'postgres':20} {'redis':20} {'dynamodb':20}")
    cells: Counter[str] = Counter()
    for each in PROMISES:
        found = [shown.cell(each, store) for store in STORES]
        cells.update(found)
        write(f"{each.words:{width}}  {found[0]:20} {found[1]:20} {found[2]:20}")
    kept = sum(count for cell, count in cells.items() if cell.startswith(KEPT))
    write(
        f"RESULT stores={len(STORES)} promises={len(PROMISES)} kept={kept} weaker={cells['weaker']} "
        f"not_offered={cells['not offered']} not_shown={cells['NOT SHOWN']} failed={cells['FAILED']}"
    )
    return 1 if status or cells["FAILED"] else 2 if cells["NOT SHOWN"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
