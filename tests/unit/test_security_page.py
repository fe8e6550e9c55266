"""The page about security names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_protection_names_a_test_that_exists() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    part = page[page.index("## Each protection") : page.index("## What is not")]
    rows = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("| ")][1:]
    tests = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    named = {row[0].strip(): re.findall(r"`(test_\w+)`", row[-1]) for row in rows}
    assert len(named) > 10
    assert [about for about, found in named.items() if not found] == []
    assert {name for found in named.values() for name in found} - tests == set()
