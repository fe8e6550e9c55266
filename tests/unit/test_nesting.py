"""No function on the main path is nested deeper than three levels."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

LIBRARY = Path(__file__).parents[2] / "idempotency"
MAIN_PATH = ("attempt", "http", "worker", "broker", "testing", "application.py", "handle.py", "installation.py")
DEEPEST = 3

BLOCKS = (ast.If, ast.For, ast.While, ast.Try, ast.With, ast.Match)
SCOPES = (ast.FunctionDef, ast.ClassDef, ast.Lambda)


def children(node: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    """The nodes directly below a node, and whether each only continues it: an `elif`, or a `with` in a `with` alone."""
    for field, value in ast.iter_fields(node):
        below = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, ast.AST)]
        is_only = len(below) == 1
        for each in below:
            is_elif = isinstance(node, ast.If) and isinstance(each, ast.If) and field == "orelse"
            is_chained = isinstance(node, ast.With) and isinstance(each, ast.With) and field == "body"
            yield each, is_only and (is_elif or is_chained)


def depth(node: ast.AST) -> int:
    """How many blocks stand within each other below a node, those of functions within it aside."""
    deepest = 0
    for child, continues in children(node):
        if not isinstance(child, SCOPES):
            deepest = max(deepest, depth(child) + (isinstance(child, BLOCKS) and not continues))
    return deepest


def functions(source: str) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            yield node


def test_no_function_of_the_main_path_is_deeper_than_three_levels() -> None:
    paths = [LIBRARY / name for name in MAIN_PATH]
    modules = [module for path in paths for module in ([path] if path.is_file() else path.rglob("*.py"))]
    assert len(modules) > 30
    found = {
        f"{module.relative_to(LIBRARY)}: {function.name}": depth(function)
        for module in modules
        for function in functions(module.read_text())
    }
    assert {name: levels for name, levels in found.items() if levels > DEEPEST} == {}


def test_a_deep_function_is_noticed_and_chains_count_once() -> None:
    deep = """
def deep():
    for a in b:
        with c:
            with d:
                try:
                    if a: pass
                except E: pass
"""
    chained = """
def chained():
    if a: pass
    elif b: pass
    elif c:
        def inner():
            while True: pass
"""
    assert [depth(function) for function in functions(deep)] == [4]
    assert [depth(function) for function in functions(chained)] == [1, 1]
