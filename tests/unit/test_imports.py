"""Imports go one way: the library knows no application, the application no test bench."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = {
    "idempotency": {"tasks", "services", "sandbox", "demo", "tests", "celeryconfig"},
    "tasks": {"services", "sandbox", "demo", "tests"},
}


def imported(source: str) -> Iterator[str]:
    """The top-level packages that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").partition(".")[0]


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_go_one_way(package: str) -> None:
    modules = list((ROOT / package).rglob("*.py"))
    assert modules
    wrong = {
        (str(module.relative_to(ROOT)), name)
        for module in modules
        for name in set(imported(module.read_text())) & FORBIDDEN[package]
    }
    assert not wrong


def test_an_import_the_wrong_way_is_noticed_wherever_it_stands() -> None:
    source = (
        "import os\ndef f():\n    from sandbox.mail import M\n    import demo.input as d\n    from .tests import x\n"
    )
    assert set(imported(source)) == {"os", "sandbox", "demo"}
