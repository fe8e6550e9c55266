"""What no SQL statement of the library does, and where all of them are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[2] / "idempotency"
# Our own parameters are written as JSON by us; columns of type jsonb are parsed already.
PARAMETER = re.compile(r"%\(\w+\)s::jsonb")
# The function `as_jsonb`, which catches what is raised.
CAUGHT = "RETURN stored::jsonb;\nEXCEPTION WHEN OTHERS THEN"
PARSED = re.compile(r"::jsonb?\b|\bAS jsonb?\b")


STORE = LIBRARY / "store"
TABLES = sorted(
    {
        name
        for migration in (STORE / "migrations").rglob("*.py")
        for name in re.findall(r"CREATE (?:TABLE|VIEW) (?:IF NOT EXISTS )?idempotency\.(\w+)", migration.read_text())
    }
)
# A table's name may also be put in later.
NAMED = re.compile(rf"\bidempotency\.(?:{'|'.join(TABLES)}|\{{)")


def texts_about(word: str, modules: Iterable[Path]) -> list[tuple[str, str]]:
    """The texts of the modules that have this word in them, each with its module."""
    sources = [(str(module.relative_to(LIBRARY)), module.read_text()) for module in modules]
    return [(name, text) for name, source in sources if word in source for text in texts_in(source)]


@cache
def texts_in(source: str) -> list[str]:
    """The texts of a module, with `{}` for what is put into them; without its docstrings."""
    tree = ast.parse(source)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs | parts:
            found.append(node.value)
    return found


def parses_text(sql: str) -> bool:
    """Whether Postgres would parse a text as JSON: it raises for NUL, for one row, and so for all of a sweep."""
    return PARSED.search(PARAMETER.sub("", sql.replace(CAUGHT, ""))) is not None


@pytest.mark.parametrize("module", sorted(LIBRARY.rglob("*.py")), ids=lambda path: str(path.relative_to(LIBRARY)))
def test_no_text_is_parsed_as_json_in_sql(module: Path) -> None:
    nodes = ast.walk(ast.parse(module.read_text()))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert not [text for text in texts if parses_text(text)]


@pytest.mark.parametrize("sql", ["SELECT message::json ->> 'headers'", "SELECT cast(error AS jsonb) -> 'code'"])
def test_such_a_statement_would_be_noticed(sql: str) -> None:
    assert parses_text(sql)


def test_every_statement_about_our_tables_stands_in_the_store() -> None:
    assert {"records", "outbox", "dead_letters", "audit", "processes", "set_aside"} <= set(TABLES)
    outside = [module for module in LIBRARY.rglob("*.py") if STORE not in module.parents]
    assert len(outside) > 40
    assert not [found for found in texts_about("idempotency.", outside) if NAMED.search(found[1])]


@pytest.mark.parametrize(
    "source",
    ["q = 'DELETE FROM idempotency.outbox WHERE id = 1'", 'def f(t):\n    run(f"SELECT 1 FROM idempotency.{t}")'],
)
def test_a_statement_outside_the_store_would_be_noticed(source: str) -> None:
    assert any(NAMED.search(text) for text in texts_in(source))


def test_dead_letters_are_inserted_in_one_place() -> None:
    texts = texts_about("dead_letters", LIBRARY.rglob("*.py"))
    assert sum("INSERT INTO idempotency.dead_letters " in " ".join(text.split()) for _, text in texts) == 1


# What no statement's arguments fit exactly, because it takes any type or those given are converted: a function that the
# application has made in a schema of the path would fit better, and be run with the rights of a relay or a person.
INEXACT = re.compile(
    r"(?<![.\w])(?:concat|concat_ws|format|num_nulls|num_nonnulls|nextval|convert_to|power|hashtextextended|lag|array_agg"
    r"|array_remove|cardinality|to_jsonb|jsonb?_(?:agg|object_agg|build_\w+|path_\w+))\(|(?<![.\w])make_interval\(days\b"
    # of several arguments, Postgres makes its own function of each by itself
    r"|(?<![.\w])unnest\((?:%\(\w+\)s::\w+\[\]|[\w.]+)\)"
)
# With a path of its own.
OWN_PATH = ("roles.py",)


def test_statements_name_postgres_own_function_where_another_could_fit_better() -> None:
    modules = [module for module in STORE.glob("*.py") if module.name not in OWN_PATH]
    texts = [(module.name, text) for module in modules for text in texts_in(module.read_text())]
    assert sum("pg_catalog." in text for _, text in texts) > 20
    assert [(name, found.group()) for name, text in texts for found in INEXACT.finditer(text)] == []


@pytest.mark.parametrize(
    "sql", ["SELECT concat_ws(' ', a, b)", "SELECT now() - make_interval(days => 1)", "SELECT unnest(%(a)s::text[])"]
)
def test_one_without_its_schema_would_be_noticed(sql: str) -> None:
    assert INEXACT.search(sql)
