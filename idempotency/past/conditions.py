"""Which rows count: comparisons of a column with a value, which reaches Postgres as a parameter and never as SQL."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import Connection, DataError

from ..errors import IdempotencyError
from .table import Column, Table

# Longest first: `>=` is no `>`.
_OPERATORS = {"!=": "<>", ">=": ">=", "<=": "<=", "=": "=", ">": ">", "<": "<"}
_NULL = re.compile(r"(.+) is (not )?null", re.IGNORECASE)
_HOW = "COLUMN=VALUE, with = != < <= > or >=, or `COLUMN is null`, or `COLUMN is not null`"


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition: its SQL, in which `%(name)s` is the value, if it has one."""

    expression: str
    value: str | None = None


# A cast to these by their usual names keeps the first character or bit alone.
_WHOLE = {
    "character": "pg_catalog.bpchar",
    "character[]": "pg_catalog.bpchar[]",
    "bit": 'pg_catalog."bit"',
    "bit[]": 'pg_catalog."bit"[]',
}


def read_conditions(connection: Connection[Any], table: Table, given: Sequence[str]) -> list[Condition]:
    """Read conditions that all have to hold. Raises `IdempotencyError` for one that is none, and a value not of its column's type."""
    return [_read(connection, table, text, number) for number, text in enumerate(given)]


def _read(connection: Connection[Any], table: Table, text: str, number: int) -> Condition:
    if (null := _NULL.fullmatch(text.strip())) is not None:
        return Condition(f"{table.column(null[1], '--where').quoted} IS {'NOT ' if null[2] else ''}NULL")
    column, operator, value = _divided(table, text)
    if not column.is_builtin:
        raise IdempotencyError(
            f"--where: {column.name} is of type {column.type}, whose comparisons are not Postgres' own"
        )
    cast = _WHOLE.get(column.type, column.type).replace("%", "%%")
    try:  # before it runs over the table, and so that no error about a row can be taken for one about this
        connection.execute(f"SELECT %(value)s::{cast} IS NULL", {"value": value})
    except DataError:
        raise IdempotencyError(f"--where: the value for {column.name} is none of type {column.type}") from None
    return Condition(f"{column.quoted} {operator} %(where{number})s::{cast}", value)


def _divided(table: Table, text: str) -> tuple[Column, str, str]:
    """The column, the operator and the value. The longest name of a column that fits is meant."""
    for name in sorted(table.columns, key=len, reverse=True):
        rest = text.removeprefix(name).lstrip()
        for sign, operator in _OPERATORS.items():
            if text.startswith(name) and rest.startswith(sign):
                return table.columns[name], operator, rest[len(sign) :].strip()
    name, *value = re.split(r"\s*(?:!=|[<>]=?|=)", text, maxsplit=1)
    if not value:
        raise IdempotencyError(f"--where: must be {_HOW}")
    return table.column(name, "--where"), "", ""  # which raises
