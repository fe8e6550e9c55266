"""Imports go one way: the library knows no application, the application no test bench."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = {
    "idempotency": {"api", "tasks", "services", "sandbox", "demo", "drill", "tests", "celeryconfig"},
    "tasks": {"api", "services", "sandbox", "demo", "drill", "tests"},
    "api": {"services", "sandbox", "demo", "drill", "tests"},
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


# From the bottom up: each may import what is listed before it, and nothing else of the library. Those of one row are
# independent of each other.
LAYERS = (
    ("text", "environment", "hosts", "tls", "deadlines"),
    ("errors",),
    ("reasons",),
    ("extras",),
    ("observe",),
    ("wire",),
    ("objects",),
    ("setting_values",),
    ("cells",),
    ("settings", "queues", "providers", "framework", "sentinel"),
    ("store",),
    ("broker",),
    ("attempt",),
    ("stores",),
    ("issuer",),
    ("application", "identities", "waiting"),
    ("handle", "http", "streams"),
    ("worker",),
    ("events", "letters"),
    ("sagas", "webhooks"),
    ("relay",),
    ("upkeep",),
    ("checks",),
    ("installation", "operate", "past"),
    ("web",),
    ("cli",),
    ("testing",),
    ("contrib",),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
LIBRARY = ROOT / "idempotency"


def parts(module: Path) -> list[str]:
    """The packages that contain a module of the library, from the top."""
    return list(module.relative_to(LIBRARY).with_suffix("").parts)


def within(source: str, module: list[str]) -> Iterator[str]:
    """The packages and top-level modules of the library that a module of it imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level:
            here = module[: len(module) - node.level]
            target = [*here, *(node.module or "").split(".")] if node.module else here
            yield from [target[0]] if target else (name.name for name in node.names)


def arrows(source: str, module: list[str]) -> set[str]:
    """What a module imports that is not listed before it."""
    home = module[0]
    return {name for name in within(source, module) if name != home and RANK[name] >= RANK[home]}


def test_every_package_of_the_library_has_its_layer() -> None:
    found = {module.stem for module in LIBRARY.iterdir() if module.is_dir() or module.suffix == ".py"}
    assert found - {"__init__", "__pycache__"} == set(RANK)


def test_the_packages_of_the_library_import_one_way() -> None:
    wrong = {
        (str(module.relative_to(ROOT)), name)
        for module in LIBRARY.rglob("*.py")
        if module.name != "__init__.py" or module.parent != LIBRARY
        for name in arrows(module.read_text(), parts(module))
    }
    assert wrong == set()


def test_an_arrow_the_wrong_way_is_noticed_wherever_it_stands() -> None:
    source = "from ..errors import A\nfrom .records import b\ndef f():\n    from ..worker import task\n    from .. import cli\n"
    assert arrows(source, ["store", "outbox"]) == {"worker", "cli"}


def at_run_time(source: str) -> set[str]:
    """The top-level packages that a module imports when it runs, and not for its types alone."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
    return set(imported("\n".join(lines)))


def test_the_store_needs_neither_celery_nor_a_broker() -> None:
    modules = list((LIBRARY / "store").rglob("*.py"))
    assert modules
    broker = {"celery", "kombu", "amqp"}
    assert {module.name: found for module in modules if (found := at_run_time(module.read_text()) & broker)} == {}


def test_an_import_for_types_alone_is_none_at_run_time() -> None:
    source = "import os\nif TYPE_CHECKING:\n    from celery import Celery\ndef f():\n    from kombu import Queue\n"
    assert at_run_time(source) == {"os", "kombu"}
