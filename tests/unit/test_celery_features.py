"""The table of Celery's features names tests and modules that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "celery-features.md").read_text()


def rows() -> list[list[str]]:
    """The cells of every row, without the heads of the tables."""
    found = [re.split(r"(?<!\\)\|", line)[1:-1] for line in PAGE.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in found if row[0].strip() != "feature"]


def test_every_row_names_a_test_or_a_module_that_exists() -> None:
    tests = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert len(rows()) > 40
    unknown = {
        f"{row[0]}: {name}"
        for row in rows()
        for name in re.findall(r"`([^`]*)`", row[-1]) or ["nothing"]
        if name not in tests and name != "celery" and not (ROOT / name).is_file()
    }
    assert unknown == set()
    assert set(re.findall(r"`(test_\w+)`", PAGE)) <= tests


def test_every_feature_has_one_row() -> None:
    names = [row[0] for row in rows()]
    assert sorted(names) == sorted(set(names))
