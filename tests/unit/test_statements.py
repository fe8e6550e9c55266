"""What the library's SQL never does, whatever the statement."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[2] / "idempotency"
# Our own parameters are written as JSON by us; columns of type jsonb are parsed already.
PARAMETER = re.compile(r"%\(\w+\)s::jsonb")
PARSED = re.compile(r"::jsonb?\b|\bAS jsonb?\b")


def parses_text(sql: str) -> bool:
    """Whether Postgres would parse a text as JSON: it raises for NUL, for one row, and so for all of a sweep."""
    return PARSED.search(PARAMETER.sub("", sql)) is not None


@pytest.mark.parametrize("module", sorted(LIBRARY.rglob("*.py")), ids=lambda path: str(path.relative_to(LIBRARY)))
def test_no_text_is_parsed_as_json_in_sql(module: Path) -> None:
    nodes = ast.walk(ast.parse(module.read_text()))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert not [text for text in texts if parses_text(text)]


@pytest.mark.parametrize("sql", ["SELECT message::json ->> 'headers'", "SELECT cast(error AS jsonb) -> 'code'"])
def test_such_a_statement_would_be_noticed(sql: str) -> None:
    assert parses_text(sql)
