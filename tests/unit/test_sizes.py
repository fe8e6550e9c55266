"""Modules that can be read in one go."""

from __future__ import annotations

from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
# Lines of a module of the library at most, of the library's median module, and of a test module.
LONGEST, MEDIAN, LONGEST_TEST = 350, 150, 600


def lines(folder: str) -> dict[str, int]:
    """The number of lines of every module below a folder that is more than a docstring."""
    root = ROOT / folder
    found = {str(path.relative_to(root)): len(path.read_text().splitlines()) for path in root.rglob("*.py")}
    return {name: count for name, count in found.items() if count > 1}


def test_no_module_of_the_library_is_too_long() -> None:
    counted = lines("idempotency")
    assert len(counted) > 100
    assert {name: count for name, count in counted.items() if count > LONGEST} == {}
    assert median(counted.values()) <= MEDIAN


def test_no_test_module_is_too_long() -> None:
    counted = lines("tests")
    assert len(counted) > 100
    assert {name: count for name, count in counted.items() if count > LONGEST_TEST} == {}
