"""Which columns name an operation: a closed language of columns and three functions of them, from which SQL is put together.

order_id            a column, by its exact name
lower(email)        its text in lower case
day(created_at)     the day of a time, in UTC if the column has a zone
payload->order_id   a field of a json or jsonb column; payload->order->id one below it
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import IdempotencyError
from .table import Column, Table

_FUNCTION = re.compile(r"(lower|day)\((.+)\)")


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a key: what it is called, its expression, and the fields that the expression takes as a parameter."""

    name: str
    expression: str
    path: tuple[str, ...] = ()


def read_key(table: Table, given: Sequence[str]) -> list[Part]:
    """The parts of a key. A text that is not a column's own name is divided at its commas.

    Raises `IdempotencyError` for a column that is not there or may not be read, one that has no such form, and a part given
    twice.
    """
    texts = [
        part for each in given for part in ([each] if each in table.columns else [p.strip() for p in each.split(",")])
    ]
    parts = [_read(table, each, number) for number, each in enumerate(texts)]
    if len({part.name for part in parts}) < len(parts):
        raise IdempotencyError("--key: a part is given twice")
    return parts


def _read(table: Table, text: str, number: int) -> Part:
    if text in table.columns:
        return Part(text, _comparable(table.columns[text]))
    if (called := _FUNCTION.fullmatch(text)) is not None:
        column = table.column(called[2].strip(), "--key")
        if called[1] == "lower":
            return Part(text, f"pg_catalog.lower({column.quoted}::text)")
        if not column.is_time:
            raise IdempotencyError(f"--key {text}: {column.name} is of type {column.type}, and has no day")
        return Part(text, f"{column.quoted}::date")
    name, *path = text.split("->")
    column = table.column(name, "--key")
    if not path:
        return Part(text, _comparable(column))
    if column.type not in ("json", "jsonb"):
        raise IdempotencyError(f"--key {text}: {column.name} is of type {column.type}, and has no fields")
    return Part(
        text, f"pg_catalog.{column.type}_extract_path_text({column.quoted}, VARIADIC %(path{number})s)", tuple(path)
    )


def _comparable(column: Column) -> str:
    """The column as Postgres can group by it. Raises `IdempotencyError` for a type whose values it cannot compare."""
    if column.type == "json":
        raise IdempotencyError(
            f"--key: {column.name} is of type json, which Postgres cannot compare; name a field: {column.name}->…"
        )
    return column.quoted
